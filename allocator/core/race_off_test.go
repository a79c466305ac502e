//go:build !race

package core

const (
	// repeats is how often the model test runs each of its worlds, stepsLeast how many
	// steps that makes at least, together.
	repeats    = 15
	stepsLeast = 1_000_000
)
