//go:build !race

package harness

// Race: the race detector is on.
const Race = false
