package core

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
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
			Term: 1, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second, Linger: -1,
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
			do(PoolSeen{Pool{Key: PoolKey{Namespace: "ns", Name: fmt.Sprintf("pool-%d", i)}, Warm: 100, MaxPods: 100, Template: "t"}})
		}
		empty := heap()
		for i := range pods {
			do(PodSeen{Pod{
				Key: PodKey{Namespace: "ns", Name: fmt.Sprintf("pool-%d-%06d", i%100, i), UID: strings.Clone("0f6bd8a6-5c0c-4a5e-9d0a-") + fmt.Sprintf("%012d", i)}, Pool: fmt.Sprintf("pool-%d", i%100),
				Node: "n1", IP: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), Template: "t", Version: fmt.Sprint(i), Ready: true,
			}})
		}
		warm := heap()
		for i := range claims {
			do(Claim{Token: uint64(i), Pool: PoolKey{Namespace: "ns", Name: fmt.Sprintf("pool-%d", i%100)}, Lifetime: time.Hour})
		}
		used := heap()
		b.ReportMetric((warm-empty)/pods, "bytes/pod")
		b.ReportMetric((used-warm)/claims, "bytes/sandbox")
		if p := c.View().List(Query{Selection: sandboxes.Everything(), Live: true, Most: claims}); len(p.List) != claims || p.More {
			b.Fatalf("%d live", len(p.List))
		}
		runtime.KeepAlive(c)
	}
}

// benchSim is a core whose writes are done at once.
type benchSim struct {
	core *Core
	now  Instant
	n    int
}

func newBenchSim(b *testing.B) *benchSim {
	s := &benchSim{now: start}
	ids := 0
	var err error
	if s.core, err = New(Config{
		Term: 1, MaxStale: time.Minute, ConnectWindow: time.Second, Lease: time.Second, Linger: -1,
		NewID:     func() string { ids++; return fmt.Sprintf("abcdefghij%010d", ids) },
		NewSuffix: func() string { ids++; return fmt.Sprint(ids) },
	}, start); err != nil {
		b.Fatal(err)
	}
	if _, err := s.core.Recover(State{Nodes: []string{"n1"}}); err != nil {
		b.Fatal(err)
	}
	s.do(PoolSeen{Pool{Key: PoolKey{Namespace: "ns", Name: "pool"}, Warm: 1, MaxPods: 1_000_000, Template: "t"}})
	return s
}

func (s *benchSim) do(ev Event) []Effect {
	all := s.core.Step(s.now, ev)
	for effects := all; len(of[Write](effects)) > 0; {
		effects = append(s.core.Step(s.now, Written{}), s.core.Step(s.now, WriterReady{})...)
		all = append(all, effects...)
	}
	return all
}

// BenchmarkActivity: what 100,000 sandboxes with an idle timeout of five minutes, used
// all the time through ten routers, cost the core. A router reports an ID every 75 s.
// reports_% and ticks_% are shares of one core: of the first with the decoding of the
// messages, of the second with the deadlines and the writes of last-active. writes_/s/id
// is how often one sandbox is written for its activity, asked how many were asked about.
func BenchmarkActivity(b *testing.B) {
	const sandboxes, routers, every, seconds = 100_000, 10, 75, 300
	s := newIdleBench(b, sandboxes, routers, 5*time.Minute)
	var raw [every][routers][]byte
	for second := range every {
		for r := range routers {
			var m controlv1.Report
			for i := second; i < sandboxes; i += every {
				if i%routers == r {
					m.Activities = append(m.Activities, &controlv1.Activity{SandboxId: benchID(i), AgeMillis: 1})
				}
			}
			var err error
			if raw[second][r], err = proto.Marshal(&m); err != nil {
				b.Fatal(err)
			}
		}
	}
	for b.Loop() {
		var reports, ticks time.Duration
		writes, asked := 0, 0
		for second := range seconds {
			began := time.Now()
			for r := range routers {
				var m controlv1.Report
				if err := proto.Unmarshal(raw[second%every][r], &m); err != nil {
					b.Fatal(err)
				}
				ev := Report{Stream: uint64(r + 1)}
				for _, a := range m.Activities {
					ev.Activities = append(ev.Activities, Activity{ID: a.GetSandboxId(), Age: time.Duration(a.GetAgeMillis()) * time.Millisecond})
				}
				s.do(ev)
			}
			reports += time.Since(began)
			began = time.Now()
			for range 20 {
				s.now.Boot += 50 * time.Millisecond
				s.now.Wall = s.now.Wall.Add(50 * time.Millisecond)
				effects := s.do(Tick{})
				writes += len(of[WriteObject](effects))
				asked += len(of[SendQuiesce](effects))
			}
			ticks += time.Since(began)
			s.pings(routers)
		}
		b.ReportMetric(100*reports.Seconds()/seconds, "reports_%")
		b.ReportMetric(100*ticks.Seconds()/seconds, "ticks_%")
		b.ReportMetric(float64(writes)/seconds/sandboxes, "writes_/s/id")
		b.ReportMetric(float64(asked), "asked")
		if n := len(s.core.View().Running()); n != sandboxes || s.core.routers.members.Get("router0").Stream != 1 {
			b.Fatalf("%d are left", n)
		}
	}
}

// BenchmarkDeadlines: 100,000 sandboxes with an idle timeout of an hour, of which
// the only news is that they are in use, once in 45 minutes: what their
// deadlines cost, as a share of one core, and how long the longest step took.
func BenchmarkDeadlines(b *testing.B) {
	const count, hours = 100_000, 3
	s := newIdleBench(b, count, 1, time.Hour)
	for b.Loop() {
		var ticks, longest time.Duration
		for second := range hours * 3600 {
			for i := second % 2700 * count / 2700; i < (second%2700+1)*count/2700; i++ {
				s.core.idle.Note(benchID(i), activity.Open, s.now.Boot)
			}
			for range 20 {
				s.now.Boot += 50 * time.Millisecond
				s.now.Wall = s.now.Wall.Add(50 * time.Millisecond)
				began := time.Now()
				s.do(Tick{})
				took := time.Since(began)
				ticks += took
				longest = max(longest, took)
			}
			s.pings(1)
		}
		b.ReportMetric(100*ticks.Seconds()/(hours*3600), "ticks_%")
		b.ReportMetric(float64(longest.Microseconds()), "longest_us")
		if n := len(s.core.sandboxes.Live().Of(sandboxes.Everything())); n != count {
			b.Fatalf("%d are left", n)
		}
	}
}

func benchID(i int) string { return fmt.Sprintf("abcdefghij%010d", i) }

// newIdleBench has sandboxes of an earlier term, and routers that have reported.
func newIdleBench(b *testing.B, sandboxes, routers int, idleTimeout time.Duration) *benchSim {
	s := newBenchSim(b)
	var st State
	for i := range sandboxes {
		key := PodKey{Namespace: "ns", Name: fmt.Sprint("pod-", i), UID: fmt.Sprint("uid-", i)}
		ip := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
		st.Pods = append(st.Pods, Pod{Key: key, Pool: "pool", Node: "n1", IP: ip, Template: "t", Version: "1", Ready: true, Used: true})
		st.Objects = append(st.Objects, Sandbox{
			Binding: Binding{ID: benchID(i), ClaimedAt: start.Wall, IdleTimeout: idleTimeout}, Pool: PoolKey{Namespace: "ns", Name: "pool"}, Pod: key, IP: ip, Phase: Running, Revision: Revision{Term: 1, Counter: uint64(i) + 1},
		})
	}
	var err error
	if s.core, err = New(s.core.cfg, s.now); err != nil {
		b.Fatal(err)
	}
	st.Nodes = []string{"n1"}
	st.Pools = []Pool{{Key: PoolKey{Namespace: "ns", Name: "pool"}, Template: "t"}}
	effects, err := s.core.Recover(st)
	if err != nil || len(of[Write](effects)) > 0 {
		b.Fatal(err, of[Write](effects))
	}
	for r := range routers {
		s.do(SessionJoined{Session: fmt.Sprint("router", r), Stream: uint64(r + 1)})
		s.do(Report{Stream: uint64(r + 1), Gateway: "e"})
	}
	return s
}

func (s *benchSim) pings(routers int) {
	for r := range routers {
		s.do(SessionPing{Session: fmt.Sprint("router", r), Stream: uint64(r + 1), Nonce: 1})
	}
}

// BenchmarkSettle: a warm pod is claimed and goes, and its replacement becomes ready, in pools of different sizes. The
// cost must not grow with the pool.
func BenchmarkSettle(b *testing.B) {
	for _, pods := range []int{50, 500, 5000} {
		b.Run(fmt.Sprint(pods), func(b *testing.B) {
			s := newBenchSim(b)
			pool := PoolKey{Namespace: "ns", Name: "pool"}
			s.do(PoolSeen{Pool{Key: pool, Warm: pods, MaxPods: 1_000_000, Template: "t"}})
			ready := func() {
				s.n++
				s.do(PodSeen{Pod{
					Key: PodKey{Namespace: "ns", Name: fmt.Sprint("pod-", s.n), UID: fmt.Sprint("uid-", s.n)}, Pool: "pool", Node: "n1",
					IP: netip.AddrFrom4([4]byte{10, byte(s.n >> 16), byte(s.n >> 8), byte(s.n)}), Template: "t", Ready: true,
				}})
			}
			for range pods {
				ready()
			}
			for b.Loop() {
				claimed := of[Claimed](s.do(Claim{Token: 1, Pool: pool, Lifetime: time.Hour}))[0]
				s.do(PodGone{claimed.Sandbox.Pod})
				ready()
			}
		})
	}
}
