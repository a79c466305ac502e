package harness

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// Run is one run of a test, with its seed and its history.
type Run struct {
	testing.TB
	// Seed is that of all that is random.
	Seed    uint64
	History *history.Log

	kept bool // the evidence of a failed test

	mu       sync.Mutex
	failures []string // what failed the test, for repeatFailures
}

// Error fails the test, and keeps why for repeatFailures.
func (r *Run) Error(args ...any) {
	r.Helper()
	r.failed(fmt.Sprint(args...))
	r.TB.Error(args...)
}

// Errorf is Error with a format.
func (r *Run) Errorf(format string, args ...any) {
	r.Helper()
	r.failed(fmt.Sprintf(format, args...))
	r.TB.Errorf(format, args...)
}

// Fatalf is Errorf, and ends the test.
func (r *Run) Fatalf(format string, args ...any) {
	r.Helper()
	r.failed(fmt.Sprintf(format, args...))
	r.TB.Fatalf(format, args...)
}

func (r *Run) failed(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, why)
}

// repeatFailures prints why the test failed once more. The logs of all programs stand between
// the failures and the end of the output, and CI shows the end alone.
func (r *Run) repeatFailures() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.failures) > 0 {
		r.Logf("the test failed, because:\n%s", strings.Join(r.failures, "\n"))
	}
}

// NewRun begins a run: it draws a seed if s.Seed is 0, prints it, and begins a history in
// a file. Without a file name the history is kept only if the test fails.
func NewRun(t testing.TB, s history.Settings, file string) *Run {
	t.Helper()
	if s.Seed == 0 {
		s.Seed = uint64(time.Now().UnixNano())
	}
	if s.Suite != "" {
		t.Logf("seed %d", s.Seed)
	}
	if file == "" {
		file = filepath.Join(t.TempDir(), "history.jsonl")
	}
	log, err := history.Create(file, history.Event{
		Kind: history.Run, Began: bootclock.Now(), Wall: time.Now().Round(0), Settings: &s,
	})
	require.NoError(t, err)
	r := &Run{TB: t, Seed: s.Seed, History: log}
	t.Cleanup(func() {
		if err := log.Close(); err != nil {
			t.Errorf("close the history: %v", err)
		}
		if s.Suite != "" {
			r.keep(nil)
		}
		r.repeatFailures()
	})
	return r
}

// Random returns numbers that are the same for the same seed and name.
func (r *Run) Random(name string) *rand.Rand { return Random(r.Seed, name) }

// Did records what was done to a process, just now.
func (r *Run) Did(process, what string) {
	now := bootclock.Now()
	r.History.Add(history.Event{Kind: history.Fault, What: what, Process: process, Began: now, Ended: now})
}

// mostViolations bounds how many violations a test prints.
const mostViolations = 30

// Judge judges the history as it is in its file, and fails the test for each violation.
func (r *Run) Judge() *history.History {
	r.Helper()
	require.NoError(r, r.History.Flush())
	h, err := history.Open(r.History.Name())
	require.NoError(r, err)
	all, err := h.Violations()
	require.NoError(r, err)
	for i, v := range all {
		if i == mostViolations {
			r.Errorf("and %d more", len(all)-i)
			break
		}
		r.Error(v)
	}
	r.Logf("seed %d, %d violations:\n%v", r.Seed, len(all), history.Count(h))
	return h
}
