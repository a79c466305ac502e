package lastactive

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/lastactive/look"
)

// A sandbox that was in use is never reported as idle at that time, up to the duration of a
// look. A silent sandbox is idle by the second good look. Requests are admitted, read, canceled
// and end at any moment, between looks and during them. Looks fail and are slow. Some requests
// come through another router.
func TestUseIsNeverReportedTooOld(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const longest = time.Second
		now := time.Hour
		pods := []netip.AddrPort{netip.MustParseAddrPort(podA), netip.MustParseAddrPort("[fd00::2]:80"), netip.MustParseAddrPort("[fd00::2]:81")}
		id := func(pod netip.AddrPort) string { return pod.Addr().String() }
		sandbox := func(pod netip.AddrPort) string { return strings.NewReplacer(".", "x", ":", "x").Replace(id(pod)) }
		type request struct {
			to     netip.AddrPort
			entry  *Entry
			open   bool // at Envoy
			unread bool
		}
		var requests []*request
		last := map[string]time.Duration{} // the newest use, by address
		used := func() {
			for _, r := range requests {
				if r.entry != nil && (r.open || r.unread) { // of other requests only looks count
					last[id(r.to)] = now
				}
			}
		}
		var tracker *Tracker
		act := func() {
			switch n := rapid.IntRange(0, 9).Draw(t, "act"); {
			case n < 2:
				to := rapid.SampledFrom(pods).Draw(t, "pod")
				e, _ := tracker.Begin(key(sandbox(to)), to, false)
				if e == nil {
					return
				}
				if n == 1 && rapid.Bool().Draw(t, "cancel") {
					e.Cancel()
					return
				}
				requests = append(requests, &request{to: to, entry: e, unread: true})
			case n < 5 && len(requests) > 0:
				if r := rapid.SampledFrom(requests).Draw(t, "read"); r.unread {
					used()
					r.unread, r.open = false, true
					r.entry.Read()
				}
			case n < 8 && len(requests) > 0:
				if r := rapid.SampledFrom(requests).Draw(t, "end"); !r.unread {
					used()
					r.open = false
				}
			case n == 8:
				requests = append(requests, &request{to: rapid.SampledFrom(pods).Draw(t, "of another router"), open: true})
			default:
				now += time.Duration(rapid.IntRange(1, 2000).Draw(t, "ms")) * time.Millisecond
			}
			used()
		}
		still := false
		acts := func(limit int) {
			if still {
				return
			}
			for range rapid.IntRange(0, limit).Draw(t, "acts") {
				act()
			}
		}
		var err error
		tracker, err = New(Options{
			Now: func() time.Duration { return now }, ConnectWindow: window,
			Look: func(context.Context) (look.Look, error) {
				began := now
				acts(3)
				l := look.Look{Hosts: map[look.Host]int{}}
				shown := map[string]time.Duration{}
				for _, r := range requests {
					if r.open {
						h := look.Host{AddrPort: r.to}
						l.Hosts[h]++
						shown[id(r.to)] = now
					}
				}
				acts(3)
				if now-began > longest || !still && rapid.IntRange(0, 3).Draw(t, "fails") == 0 {
					return look.Look{}, errors.New("failed")
				}
				for id, at := range shown {
					last[id] = max(last[id], at)
				}
				return l, nil
			},
		})
		require.NoError(t, err)
		for _, pod := range pods {
			tracker.Expect(sandbox(pod), pod.Addr(), 0)
		}
		check := func(when string) {
			t.Helper()
			reported := map[string]time.Duration{}
			for _, a := range tracker.Report(true).Activities {
				reported[a.Addr.String()] = now - a.Age
			}
			for id, at := range last {
				seen, ok := reported[id]
				if ok {
					require.GreaterOrEqual(t, seen, at-longest, "%s %s", id, when)
				}
			}
			for _, r := range requests { // a request of this router is never forgotten
				if r.entry != nil {
					require.Contains(t, reported, id(r.to), when)
				}
			}
		}
		for i := range rapid.IntRange(1, 40).Draw(t, "looks") {
			acts(6)
			check(fmt.Sprint("before look ", i))
			tracker.Look(t.Context())
			check(fmt.Sprint("after look ", i))
		}

		for _, r := range requests {
			if r.unread {
				r.unread = false
				r.entry.Read()
			}
			r.open = false
		}
		used()
		still = true
		var looked time.Duration
		for i := range 2 {
			now += time.Second
			tracker.Look(t.Context())
			if i == 0 {
				looked = time.Duration(tracker.lookBegan.Load())
			}
		}
		for _, a := range tracker.Report(true).Activities {
			require.GreaterOrEqual(t, a.Age, now-looked, a.Addr)
		}
	})
}
