//go:build !race

package programs

// Race: the race detector is on.
const Race = false
