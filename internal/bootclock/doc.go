// Package bootclock reads a monotonic clock that continues while the machine is suspended.
//
// Leases and fences need this clock. The monotonic clock of time.Since stops in a suspended
// machine while the rest of the cluster continues.
package bootclock
