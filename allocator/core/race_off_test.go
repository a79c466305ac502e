//go:build !race

package core

// repeats is how often the model test runs each of its worlds.
const repeats = 20
