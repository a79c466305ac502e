package guard_test

import (
	"fmt"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/guard"
)

// life is a leader with a core, a guard and a writer that is done at once. It counts the time of each of the first two.
type life struct {
	*testing.B
	core        *core.Core
	guard       *guard.Guard
	now         core.Instant
	ofCore      time.Duration
	ofGuard     time.Duration
	n, deleted  int
	outstanding []core.SendRelease
}

func (l *life) do(ev core.Event) {
	for events := []core.Event{ev}; len(events) > 0; events = events[1:] {
		began := time.Now()
		effects := l.core.Step(l.now, events[0])
		stepped := time.Now()
		_, violations := l.guard.Step(l.now.Boot, events[0], effects)
		l.ofGuard += time.Since(stepped)
		l.ofCore += stepped.Sub(began)
		if len(violations) > 0 {
			l.Fatal(violations)
		}
		for _, e := range effects {
			switch e := e.(type) {
			case core.Write:
				events = append(events, core.Written{}, core.WriterReady{})
			case core.SendRelease:
				l.outstanding = append(l.outstanding, e)
			case core.WriteObject:
				events = append(events, core.ObjectWritten{ID: e.Sandbox.ID, Revision: e.Sandbox.Revision})
			case core.DeletePod:
				l.deleted++
				events = append(events, core.PodGone{Key: e.Pod})
			}
		}
	}
}

func (l *life) claims() string {
	l.n++
	l.do(core.PodSeen{Pod: core.Pod{
		Key:  core.PodKey{Namespace: "ns", Name: fmt.Sprint("pool-", l.n), UID: fmt.Sprintf("0f6bd8a6-5c0c-4a5e-9d0a-%012d", l.n)},
		Pool: "pool", Node: "n1", IP: netip.AddrFrom4([4]byte{10, byte(l.n >> 16), byte(l.n >> 8), byte(l.n)}), Template: "t", Version: "1", Ready: true,
	}})
	l.do(core.Claim{Token: uint64(l.n), Pool: poolKey})
	return benchID(l.n)
}

func benchID(n int) string { return fmt.Sprintf("abcdefghij%010d", n) }

func newLife(b *testing.B) *life {
	l := &life{B: b, guard: guard.New(window), now: core.Instant{Boot: time.Hour, Wall: time.Unix(1, 0)}}
	var err error
	if l.core, err = core.New(core.Config{
		Term: 1, MaxStale: 1000 * time.Hour, ConnectWindow: window, Lease: time.Second, Linger: -1,
		NewID: func() string { return benchID(l.n) }, NewSuffix: func() string { return fmt.Sprint(l.n) },
	}, l.now); err != nil {
		b.Fatal(err)
	}
	if _, err := l.core.Recover(core.State{Nodes: []string{"n1"}}); err != nil {
		b.Fatal(err)
	}
	l.do(core.PoolSeen{Pool: core.Pool{Key: poolKey, Template: "t", Warm: 1, MaxPods: 1_000_000}})
	return l
}

// BenchmarkMemory: what the guard keeps of a sandbox, beside the strings that it shares with the core.
func BenchmarkMemory(b *testing.B) {
	const sandboxes = 100_000
	st := core.State{Objects: make([]core.Sandbox, sandboxes)}
	for i := range st.Objects {
		st.Objects[i] = sandboxOn(1)
		st.Objects[i].ID, st.Objects[i].Pod.UID = benchID(i), fmt.Sprint("uid-", i)
	}
	for b.Loop() {
		before := heap()
		g := guard.New(window)
		g.Recover(time.Hour, st)
		b.ReportMetric(float64(heap()-before)/sandboxes, "bytes/sandbox")
		runtime.KeepAlive(g)
	}
	runtime.KeepAlive(st)
}

func heap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// BenchmarkLife: what the core and the guard take for the life of a sandbox, from the observation of its pod to its end,
// and for a snapshot, beside 100,000 others and with ten routers.
func BenchmarkLife(b *testing.B) {
	const sandboxes, routers, together = 100_000, 10, 100
	l := newLife(b)
	for range sandboxes {
		l.claims()
	}
	l.ofCore, l.ofGuard = 0, 0
	for r := range uint64(routers) {
		l.do(core.SessionJoined{Session: fmt.Sprint("router-", r), Stream: r + 1})
		l.do(core.SessionAck{Session: fmt.Sprint("router-", r), Stream: r + 1, Sequence: 1})
	}
	coreSnapshots, guardSnapshots := l.ofCore, l.ofGuard
	l.ofCore, l.ofGuard = 0, 0
	lives := 0
	for b.Loop() {
		var ids []string
		for range together {
			ids = append(ids, l.claims())
		}
		for _, id := range ids {
			l.do(core.Release{Scope: core.Scope{All: true}, ID: id, Reason: fact.ReasonKilled})
		}
		for _, e := range l.outstanding {
			l.do(core.SessionAck{Session: fmt.Sprint("router-", e.Stream-1), Stream: e.Stream, Sequence: e.Sequence})
		}
		l.outstanding = l.outstanding[:0]
		l.now.Boot += window
		l.do(core.Tick{})
		lives += together
	}
	if live := l.core.View().CountLive(); live != sandboxes || l.deleted != lives {
		b.Fatalf("%d sandboxes live, %d pods were deleted in %d lives", live, l.deleted, lives)
	}
	b.ReportMetric(float64(coreSnapshots.Microseconds())/routers, "core_us/snapshot")
	b.ReportMetric(float64(guardSnapshots.Microseconds())/routers, "guard_us/snapshot")
	b.ReportMetric(float64(l.ofCore.Nanoseconds())/float64(lives), "core_ns/life")
	b.ReportMetric(float64(l.ofGuard.Nanoseconds())/float64(lives), "guard_ns/life")
	b.ReportMetric(100*l.ofGuard.Seconds()/l.ofCore.Seconds(), "guard_%")
}
