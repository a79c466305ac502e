package core

import (
	"fmt"
	"net/netip"
	"runtime"
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
