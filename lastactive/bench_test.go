package lastactive

import (
	"context"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/lastactive/look"
)

const active = 10_000

// benchTracker remembers 200,000 sandboxes, of which the first 10,000 are active.
func benchTracker(b *testing.B) (*Tracker, []string, []netip.AddrPort) {
	b.Helper()
	now := time.Hour
	hosts := map[look.Host]int{}
	t, err := New(Options{
		Now: func() time.Duration { now += time.Millisecond; return now }, ConnectWindow: window,
		Look: func(context.Context) (look.Look, error) { return look.Look{Hosts: hosts}, nil },
	})
	require.NoError(b, err)
	const all = 200_000
	ids, pods := make([]string, all), make([]netip.AddrPort, all)
	for i := range all {
		pods[i] = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 8080)
		ids[i] = fmt.Sprintf("%020d", i)
		t.Expect(ids[i], pods[i].Addr(), 0)
		e, _ := t.Begin(key(ids[i]), pods[i], false)
		e.Read()
	}
	for range 2 {
		t.Look(b.Context())
		for i := range active {
			hosts[look.Host{AddrPort: pods[i]}] = 1
		}
	}
	t.Report(true)
	return t, ids, pods
}

// BenchmarkTouch is a touch of an entry that is at hand. Every 1,000th is the first since
// a look began.
func BenchmarkTouch(b *testing.B) {
	t, ids, _ := benchTracker(b)
	e, _ := t.entries.Load(key(ids[0]))
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		if i%1000 == 0 {
			t.lookBegan.Add(1)
		}
		e.noteRead()
	}
}

// BenchmarkBeginRead is a whole request, of one of 10,000 sandboxes, look-up included.
func BenchmarkBeginRead(b *testing.B) {
	t, ids, pods := benchTracker(b)
	b.ReportAllocs()
	b.ResetTimer()
	for i := range b.N {
		at := i * 7919 % active
		e, _ := t.Begin(key(ids[at]), pods[at], false)
		e.Read()
	}
}

// BenchmarkLook is what a look costs beside the Reader, and the report that follows it.
func BenchmarkLook(b *testing.B) {
	t, _, _ := benchTracker(b)
	b.ReportAllocs()
	for b.Loop() {
		t.Look(b.Context())
		if n := len(t.Report(false).Activities); n != active {
			b.Fatal(n)
		}
	}
}
