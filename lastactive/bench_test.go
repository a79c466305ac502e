package lastactive

import (
	"fmt"
	"testing"
	"time"
)

const active = 100_000

func benchTracker(b *testing.B, now *time.Duration) (*Tracker, []string) {
	b.Helper()
	t, err := New(Options{Flush: 5 * time.Second, Window: 7 * time.Second, Now: func() time.Duration { return *now }})
	if err != nil {
		b.Fatal(err)
	}
	ids := make([]string, active)
	for i := range ids {
		ids[i] = fmt.Sprintf("%020d", i*7919%active)
		t.Begin(ids[i], 5*time.Minute).Read()
	}
	return t, ids
}

// BenchmarkTouch is a touch of an entry that is at hand. Every 1,000th is the first
// since a tick.
func BenchmarkTouch(b *testing.B) {
	now := time.Hour
	t, ids := benchTracker(b, &now)
	e, _ := t.entries.Load(ids[0])
	t.Report(true)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if i%1000 == 0 {
			t.clock.coarse.Add(1)
		}
		e.touch()
	}
}

// BenchmarkBeginRead is a whole request, of one of 100,000 IDs, look-up included.
func BenchmarkBeginRead(b *testing.B) {
	now := time.Hour
	t, ids := benchTracker(b, &now)
	t.Report(true)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		t.Begin(ids[i%active], 5*time.Minute).Read()
	}
}

// BenchmarkReport is what reports cost in a second if 100,000 IDs with an idle timeout
// of five minutes are in use all the time.
func BenchmarkReport(b *testing.B) {
	now := time.Hour
	t, ids := benchTracker(b, &now)
	t.Report(true)
	var spent, passed time.Duration
	reported := 0
	for b.Loop() {
		// 150 s, so that each ID is reported twice; the first ones are due all at once,
		// and the second ones as well.
		for range 150 {
			for range 20 {
				now += 50 * time.Millisecond
				t.Tick()
			}
			for _, id := range ids {
				t.Begin(id, 5*time.Minute).Read()
			}
			began := time.Now()
			reported += len(t.Report(false))
			spent += time.Since(began)
			passed += time.Second
		}
	}
	if reported < 2*active*int(passed/(151*time.Second)) {
		b.Fatalf("%d IDs were reported in %v", reported, passed)
	}
	b.ReportMetric(float64(reported)/passed.Seconds(), "reported/s")
	b.ReportMetric(100*spent.Seconds()/passed.Seconds(), "%core")
}
