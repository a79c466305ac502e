// Package wait sleeps in a way that a context can interrupt.
package wait
