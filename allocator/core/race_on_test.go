//go:build race

package core

// repeats is small here: the core has one goroutine, and the race detector makes
// it eight times as slow.
const repeats = 2
