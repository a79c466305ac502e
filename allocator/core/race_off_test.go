//go:build !race

package core

const (
	// repeats is how often the model test runs each of its worlds, stepsLeast how many
	// steps that makes at least, together. What only one history in some thousands shows,
	// a run of this may miss; make test-long makes 60 times as many histories.
	repeats    = 1
	stepsLeast = 130_000
)
