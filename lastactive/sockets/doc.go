// Package sockets asks the kernel how many bytes have moved over TCP connections
// (sock_diag(7)).
//
// It sees the connections of the process's own network namespace only, and needs no
// privilege for them. Counts of a connection never decrease. A kernel that does not answer
// is an error, never an empty list.
package sockets
