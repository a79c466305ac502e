//go:build race

package archive_test

// raced: the test's program has the race detector, which multiplies its memory.
const raced = true
