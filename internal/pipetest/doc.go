// Package pipetest has in-memory connections for tests of servers in a testing/synctest
// bubble. A connection is a net.Pipe: it has no buffer, and its deadlines use the clock of the
// bubble in which it was made.
package pipetest
