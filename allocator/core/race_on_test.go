//go:build race

package core

// See race_off_test.go. There is less here: the core has one goroutine, and the race
// detector makes it slow.
const (
	repeats    = 2
	stepsLeast = 100_000
)
