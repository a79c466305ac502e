package core

import (
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
)

// BenchmarkMemory: what the core keeps of a pod, and more of one that holds a
// sandbox.
func BenchmarkMemory(b *testing.B) {
	const pods, claims = 10_000, 5_000
	heap := func() float64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for range b.N {
		n := 0
		c, err := New(Config{
			Term: 1, MaxStale: time.Minute, Window: time.Second, Linger: -1,
			NewID:     func() string { n++; return fmt.Sprintf("abcdefghij%010d", n) },
			NewSuffix: func() string { n++; return fmt.Sprint(n) },
		}, start)
		if err != nil {
			b.Fatal(err)
		}
		do := func(ev Event) {
			for effects := c.Step(start, ev); len(of[Write](effects)) > 0; {
				effects = append(c.Step(start, Written{}), c.Step(start, WriterReady{})...)
			}
		}
		if _, err := c.Recover(State{Nodes: []string{"n1"}}); err != nil {
			b.Fatal(err)
		}
		for i := range 100 {
			do(PoolSeen{Pool{Key: PoolKey{"ns", fmt.Sprintf("pool-%d", i)}, Warm: 100, MaxPods: 100, Template: "t"}})
		}
		empty := heap()
		for i := range pods {
			do(PodSeen{Pod{
				Key: PodKey{"ns", fmt.Sprintf("pool-%d-%06d", i%100, i), strings.Clone("0f6bd8a6-5c0c-4a5e-9d0a-") + fmt.Sprintf("%012d", i)}, Pool: fmt.Sprintf("pool-%d", i%100),
				Node: "n1", IP: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Template: "t", Version: fmt.Sprint(i), Ready: true,
			}})
		}
		warm := heap()
		for i := range claims {
			do(Claim{Token: uint64(i), Pool: PoolKey{"ns", fmt.Sprintf("pool-%d", i%100)}, Lifetime: time.Hour})
		}
		used := heap()
		b.ReportMetric((warm-empty)/pods, "bytes/pod")
		b.ReportMetric((used-warm)/claims, "bytes/sandbox")
		if len(c.Live()) != claims {
			b.Fatalf("%d live", len(c.Live()))
		}
		runtime.KeepAlive(c)
	}
}

// BenchmarkReleases: what the core takes for 301 releases at once and ten routers, from
// the end of the write to the last acknowledgement.
func BenchmarkReleases(b *testing.B) {
	const releases, routers = 301, 10
	s := newBenchSim(b)
	for i := range uint64(routers) {
		s.do(SessionJoined{Session: fmt.Sprint("router", i), Stream: i + 1})
		s.do(SessionAck{Session: fmt.Sprint("router", i), Stream: i + 1, Sequence: 1})
	}
	var written, acknowledged []time.Duration
	for b.Loop() {
		var ids []string
		for i := range releases {
			s.n++
			s.do(PodSeen{Pod{
				Key: PodKey{"ns", fmt.Sprint("pod-", s.n), fmt.Sprint("uid-", s.n)}, Pool: "pool", Node: "n1",
				IP: netip.AddrFrom4([4]byte{10, byte(s.n >> 16), byte(s.n >> 8), byte(s.n)}), Template: "t", Version: "1", Ready: true,
			}})
			for _, e := range of[Claimed](s.do(Claim{Token: uint64(s.n), Pool: PoolKey{"ns", "pool"}, Lifetime: time.Hour})) {
				ids = append(ids, e.Sandbox.ID)
			}
			if len(ids) != i+1 {
				b.Fatal("no claim")
			}
		}
		s.slow = true
		s.do(SessionJoined{Session: fmt.Sprint("late", s.n), Stream: uint64(1000 + s.n)}) // the write that they wait for
		s.do(SessionGoodbye{Session: fmt.Sprint("late", s.n)})
		for _, id := range ids {
			s.do(Release{Token: 1, ID: id, Reason: ReasonKilled})
		}
		s.core.Step(s.now, Written{})
		s.core.Step(s.now, WriterReady{})
		began := time.Now()
		effects := s.core.Step(s.now, Written{})
		written = append(written, time.Since(began))
		if n := len(of[SendRelease](effects)); n != routers {
			b.Fatalf("%d messages", n)
		}
		began = time.Now()
		var last []Effect
		for _, e := range of[SendRelease](effects) {
			last = s.core.Step(s.now, SessionAck{Stream: e.Stream, Sequence: e.Sequence})
		}
		acknowledged = append(acknowledged, time.Since(began))
		if n := len(of[Acknowledged](last)); n != releases {
			b.Fatalf("%d acknowledged", n)
		}
		s.slow = false
		s.do(WriterReady{})
		s.now.Boot += time.Minute - time.Second
		for i := range uint64(routers) {
			s.do(SessionPing{Session: fmt.Sprint("router", i), Stream: i + 1, Nonce: 1})
		}
		s.do(Tick{})
	}
	slices.Sort(written)
	slices.Sort(acknowledged)
	b.ReportMetric(float64(written[len(written)/2].Microseconds()), "written_us")
	b.ReportMetric(float64(acknowledged[len(acknowledged)/2].Microseconds()), "acks_us")
}

// benchSim is a core whose writes are done at once, unless it is slow.
type benchSim struct {
	core *Core
	now  Instant
	n    int
	slow bool
}

func newBenchSim(b *testing.B) *benchSim {
	s := &benchSim{now: start}
	ids := 0
	var err error
	if s.core, err = New(Config{
		Term: 1, MaxStale: time.Minute, Window: time.Second, Lease: time.Second, Linger: -1,
		NewID:     func() string { ids++; return fmt.Sprintf("abcdefghij%010d", ids) },
		NewSuffix: func() string { ids++; return fmt.Sprint(ids) },
	}, start); err != nil {
		b.Fatal(err)
	}
	if _, err := s.core.Recover(State{Nodes: []string{"n1"}}); err != nil {
		b.Fatal(err)
	}
	s.do(PoolSeen{Pool{Key: PoolKey{"ns", "pool"}, Warm: 1, MaxPods: 1_000_000, Template: "t"}})
	return s
}

func (s *benchSim) do(ev Event) []Effect {
	all := s.core.Step(s.now, ev)
	for effects := all; !s.slow && len(of[Write](effects)) > 0; {
		effects = append(s.core.Step(s.now, Written{}), s.core.Step(s.now, WriterReady{})...)
		all = append(all, effects...)
	}
	return all
}
