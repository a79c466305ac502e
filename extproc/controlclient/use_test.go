package controlclient_test

import (
	"context"
	"errors"
	"fmt"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"math"
	"net/netip"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

var pod = netip.MustParseAddr("10.0.0.1")

// quiesce returns a question about sandboxes at the address of the pod.
func quiesce(number uint64, ids ...string) *controlv1.AllocatorMessage {
	q := &controlv1.Quiesce{Number: number}
	for _, id := range ids {
		q.Questions = append(q.Questions, &controlv1.Question{SandboxId: id})
	}
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: q}}
}

func resume(ids ...string) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: ids}}}
}

func probe(id string, port uint32) *controlv1.AllocatorMessage {
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Probe{Probe: &controlv1.Probe{SandboxId: id, PodIp: "::ffff:10.0.0.1", Port: port, Path: "/busy"}}}
}

func TestMinBytesOfARouteReachTheCache(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		r := route("one", "10.0.0.1")
		r.MinBytesPerMinute = math.MaxUint64
		w.joined(r)
		require.Equal(t, uint64(math.MaxUint64), w.cache.Dump()[0].Route.MinBytes)
	})
}

// Invariant: I4
func TestQuiescedFollowsTheEffectInTheCache(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.activity.ask = func(_ context.Context, questions []string) ([]lastactive.Activity, error) {
			require.Equal(t, []string{"used", "idle", "never"}, questions)
			return []lastactive.Activity{
				{ID: "used", Addr: pod, Open: 3, Kind: activity.Open},
				{ID: "idle", Age: 2*time.Second + 999*time.Microsecond, Kind: activity.Admission},
			}, nil
		}
		p := w.joined(route("used", "10.0.0.1"), route("idle", "10.0.0.2"), route("never", "10.0.0.3"))
		w.cache.events()
		p.send(0, quiesce(7, "used", "idle", "never"))
		q := p.next().GetQuiesced()
		require.EqualValues(t, 7, q.GetNumber())
		require.Empty(t, q.GetLookError())
		require.Len(t, q.GetActivities(), 2)
		used, idle := q.GetActivities()[0], q.GetActivities()[1]
		require.Equal(t, "used", used.GetSandboxId())
		require.Zero(t, used.GetAgeMillis())
		require.EqualValues(t, 3, used.GetOpenRequests())
		require.Equal(t, string(activity.Open), used.GetKind())
		require.Equal(t, "idle", idle.GetSandboxId())
		require.EqualValues(t, 2000, idle.GetAgeMillis())
		require.Equal(t, string(activity.Admission), idle.GetKind())
		require.Equal(t, []string{"quiesce used", "quiesce idle", "quiesce never", "ask"}, w.cache.events())
		for _, id := range []string{"used", "idle", "never"} {
			a, err := w.cache.Lookup(t.Context(), sandboxid.MustKey(id))
			require.NoError(t, err)
			require.Equal(t, routecache.Quiesced, a.Status)
		}
		p.send(0, resume("used", "never"))
		p.send(2, release("idle"))
		require.EqualValues(t, 2, p.ack())
		for id, want := range map[string]routecache.Status{"used": routecache.Routable, "never": routecache.Routable, "idle": routecache.Gone} {
			a, err := w.cache.Lookup(t.Context(), sandboxid.MustKey(id))
			require.NoError(t, err)
			require.Equal(t, want, a.Status, id)
		}
	})
}

// The release may be durable already. So only a message of a leader ends the quiesce, however
// long there is no leader.
// Invariant: I4
func TestQuiesceOutlastsTheLeader(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		var outage atomic.Bool
		w.serve("a", func(p *peer) error {
			if outage.Load() {
				return names("")(p)
			}
			return w.play(p)
		})
		status := func(id string) routecache.Status {
			a, err := w.cache.Lookup(context.Background(), sandboxid.MustKey(id))
			require.NoError(t, err)
			return a.Status
		}
		p := w.joined(route("released", "10.0.0.1"), route("used", "10.0.0.2"), route("other", "10.0.0.3"))
		p.send(0, quiesce(1, "released", "used"))
		require.NotNil(t, p.next().GetQuiesced())
		outage.Store(true)
		p.end <- nil
		for range 14 { // max-stale is 15 min
			time.Sleep(time.Minute)
			require.Equal(t, routecache.Quiesced, status("released"))
			require.Equal(t, routecache.Quiesced, status("used"))
			require.Equal(t, routecache.Routable, status("other"), "only what was asked about waits")
		}

		outage.Store(false)
		p = w.joined(route("used", "10.0.0.2"), route("other", "10.0.0.3"))
		require.Equal(t, routecache.Routable, status("used"))
		found := make(chan routecache.Status, 1)
		go func() { found <- status("released") }()
		require.Equal(t, "released", p.next().GetResolve().GetSandboxId())
		p.send(0, &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Resolved{Resolved: &controlv1.Resolved{
			SandboxId: "released", Answer: &controlv1.Resolved_Gone{Gone: &controlv1.Gone{}},
		}}})
		require.Equal(t, routecache.Gone, <-found)
	})
}

func TestQuiescedNamesTheLookError(t *testing.T) {
	for name, c := range map[string]struct {
		ask  func(context.Context, []string) ([]lastactive.Activity, error)
		says string
		most time.Duration
	}{
		"the look fails": {func(context.Context, []string) ([]lastactive.Activity, error) {
			return []lastactive.Activity{{ID: "one", Age: time.Hour}}, errors.New("Envoy answers 503" + strings.Repeat(".", 300))
		}, "Envoy answers 503" + strings.Repeat(".", 256-len("Envoy answers 503")), 0},
		"there is none in time": {func(ctx context.Context, _ []string) ([]lastactive.Activity, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, context.DeadlineExceeded.Error(), 1600 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				w.activity.ask = c.ask
				p := w.joined(route("one", "10.0.0.1"))
				began := w.now()
				p.send(0, quiesce(1, "one"))
				q := p.next().GetQuiesced()
				require.EqualValues(t, 1, q.GetNumber())
				require.Equal(t, c.says, q.GetLookError())
				require.Empty(t, q.GetActivities(), "no verdict may rest on it")
				require.Equal(t, c.most, w.now()-began)
				a, err := w.cache.Lookup(t.Context(), sandboxid.MustKey("one"))
				require.NoError(t, err)
				require.Equal(t, routecache.Quiesced, a.Status, "only the leader ends the quiesce")
			})
		})
	}
}

// Messages must take effect while Envoy is slow to answer.
func TestLookDoesNotBlockTheStream(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		looking, let := make(chan uint64, 10), make(chan struct{})
		w.activity.ask = func(ctx context.Context, questions []string) ([]lastactive.Activity, error) {
			looking <- uint64(len(questions))
			select {
			case <-let:
			case <-ctx.Done():
			}
			return nil, nil
		}
		p := w.joined(route("one", "10.0.0.1"), route("two", "10.0.0.2"))
		p.send(0, quiesce(1, "one"))
		<-looking
		p.send(2, release("two"))
		require.EqualValues(t, 2, p.ack())
		// One question waits for the running look, and a newer one replaces it.
		p.send(0, quiesce(2, "one", "three"))
		p.send(0, quiesce(3, "one", "three", "four"))
		p.send(0, resume("one"))
		synctest.Wait()
		require.Empty(t, looking, "two at a time")
		a, err := w.cache.Lookup(t.Context(), sandboxid.MustKey("four"))
		require.NoError(t, err)
		require.Equal(t, routecache.Quiesced, a.Status, "it takes effect at once")
		close(let)
		require.EqualValues(t, 1, p.next().GetQuiesced().GetNumber())
		require.EqualValues(t, 3, p.next().GetQuiesced().GetNumber())
		require.EqualValues(t, 3, <-looking)
		require.Empty(t, looking)
	})
}

func TestQuiesceWithoutRoomIsNotAnswered(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		for i := range 10_000 {
			w.cache.Cache.Quiesce(fmt.Sprint(i))
		}
		p.send(0, quiesce(1, "one"))
		synctest.Wait()
		w.cache.Resume("1")
		p.send(0, quiesce(2, "2"))
		require.EqualValues(t, 2, p.next().GetQuiesced().GetNumber())
	})
}

func TestFullReportFollowsASnapshotInParts(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.activity.all = lastactive.Report{Gateway: "envoy-1"}
		p := w.joined()
		r := p.report()
		require.Empty(t, r.GetActivities())
		require.Equal(t, "envoy-1", r.GetGateway())
		for i := range 5001 {
			w.activity.all.Activities = append(w.activity.all.Activities, lastactive.Activity{ID: fmt.Sprint("s", i)})
		}
		p.end <- nil
		p = w.joined()
		r = p.report()
		require.Len(t, r.GetActivities(), 5000)
		require.Empty(t, r.GetGateway(), "what is open at that Envoy is not all said yet")
		r = p.report()
		require.Len(t, r.GetActivities(), 1)
		require.Equal(t, "envoy-1", r.GetGateway())
	})
}

// The first look may be slow. The report has the remembered activities nevertheless.
func TestReportBeforeTheFirstLookNamesAnError(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.activity.all = lastactive.Report{LookError: "no look yet", Activities: []lastactive.Activity{{ID: "one", Kind: activity.Unknown}}}
		p := w.joined(route("one", "10.0.0.1"))
		r := p.report()
		require.Equal(t, "no look yet", r.GetLookError())
		require.Equal(t, "one", r.GetActivities()[0].GetSandboxId())
		require.Equal(t, string(activity.Unknown), r.GetActivities()[0].GetKind())
		require.Empty(t, r.GetGateway())
		w.activity.look(lastactive.Report{Gateway: "envoy-1", Began: w.now()})
		r = p.report()
		require.Empty(t, r.GetLookError())
		require.Equal(t, "envoy-1", r.GetGateway())
	})
}

func TestEveryLookIsReported(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.activity.look(lastactive.Report{Gateway: "envoy-1", Activities: []lastactive.Activity{{ID: "early"}}})
		p := w.joined(route("one", "10.0.0.1"))
		require.NotNil(t, p.report())
		require.Equal(t, "early", p.report().GetActivities()[0].GetSandboxId())
		time.Sleep(time.Second)
		began := w.now()
		time.Sleep(5*time.Millisecond + time.Microsecond)
		w.activity.look(lastactive.Report{Gateway: "envoy-1", Began: began, Took: 3*time.Millisecond + 1, Activities: []lastactive.Activity{
			{ID: "one", Kind: activity.Bytes}, {ID: "two", Addr: pod, Open: 1, Kind: activity.Open},
		}})
		r := p.report()
		require.EqualValues(t, 4, r.GetTookMillis())
		require.Len(t, r.GetActivities(), 2)
		require.Equal(t, string(activity.Bytes), r.GetActivities()[0].GetKind())
		require.EqualValues(t, 1, r.GetActivities()[1].GetOpenRequests())
		w.activity.look(lastactive.Report{Gateway: "envoy-1", Began: w.now()})
		r = p.report()
		require.Empty(t, r.GetActivities())
		require.Equal(t, "envoy-1", r.GetGateway(), "also a look that shows nothing is one")
		w.activity.look(lastactive.Report{LookError: "Envoy does not answer"})
		r = p.report()
		require.Equal(t, "Envoy does not answer", r.GetLookError())
		require.Zero(t, r.GetNonce())
	})
}

// 0 means that the use may continue without this router.
func TestJustEndedUseIsNotReportedAsOpen(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		require.NotNil(t, p.report())
		w.activity.look(lastactive.Report{Activities: []lastactive.Activity{{ID: "ended", Age: 1}, {ID: "inuse"}, {ID: "before", Age: 2*time.Millisecond - 1}}})
		activities := p.report().GetActivities()
		require.EqualValues(t, 1, activities[0].GetAgeMillis())
		require.Zero(t, activities[1].GetAgeMillis())
		require.EqualValues(t, 1, activities[2].GetAgeMillis())
	})
}

func TestReportNamesNewestPongBeforeItsLook(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined() // with a pong
		require.NotNil(t, p.report())
		nonceOf := func(began time.Duration) uint64 {
			w.activity.look(lastactive.Report{Gateway: "envoy-1", Began: began})
			return p.report().GetNonce()
		}
		first := w.now()
		second := p.ping()
		time.Sleep(100 * time.Millisecond) // a slow leader
		received := w.now()
		p.pong(second)
		p.pong(second + 1000) // without a ping
		synctest.Wait()
		require.Zero(t, nonceOf(first), "it came while the look had begun already")
		require.EqualValues(t, 1, nonceOf(first+1))
		require.EqualValues(t, 1, nonceOf(received), "the look had begun before the pong, or when it came")
		require.Equal(t, second, nonceOf(received+1))
		for range 100 { // the kept pongs are bounded
			p.pong(p.ping())
		}
		synctest.Wait()
		require.Zero(t, nonceOf(received+1))
		newest := w.now()
		time.Sleep(time.Millisecond)
		require.EqualValues(t, second+100, nonceOf(newest+1))

		p.end <- nil
		p = w.joined() // pongs of another stream do not count
		require.NotNil(t, p.report())
		require.Zero(t, nonceOf(w.now()))
	})
}

func TestGoodbyeFollowsAFinalLook(t *testing.T) {
	for name, c := range map[string]struct {
		lookError string
		looked    bool
	}{"it succeeds": {"", true}, "it fails": {"Envoy does not answer", false}} {
		t.Run(name, func(t *testing.T) {
			run(t, []string{"a"}, func(w *world) {
				w.serve("a", nil)
				p := w.joined(route("one", "10.0.0.1"))
				require.NotNil(t, p.report())
				w.activity.all = lastactive.Report{Activities: []lastactive.Activity{{ID: "was reported"}}}
				w.activity.last = func(context.Context) lastactive.Report {
					r := lastactive.Report{Activities: []lastactive.Activity{{ID: "one"}}, LookError: c.lookError}
					if c.looked {
						r.Gateway = "envoy-1"
					}
					return r
				}
				w.stop()
				r := p.any().GetReport()
				require.Equal(t, c.lookError, r.GetLookError())
				require.Equal(t, c.looked, r.GetGateway() != "")
				require.Len(t, r.GetActivities(), 1)
				require.Equal(t, "one", r.GetActivities()[0].GetSandboxId())
				goodbye := p.any().GetGoodbye()
				require.NotNil(t, goodbye)
				require.Equal(t, c.looked, goodbye.GetLooked())
				p.end <- nil
			})
		})
	}
}

// A new leader does not know earlier activity.
func TestGoodbyeWithoutEarlierReportHasEverything(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		w.joined(route("one", "10.0.0.1")).end <- nil
		p, _, _ := w.accept()
		w.activity.last = func(context.Context) lastactive.Report {
			return lastactive.Report{Gateway: "envoy-1", Activities: []lastactive.Activity{{ID: "open"}, {ID: "ended", Age: time.Minute}}}
		}
		w.stop()
		r := p.any().GetReport()
		require.Equal(t, "envoy-1", r.GetGateway())
		require.Len(t, r.GetActivities(), 2)
		require.True(t, p.any().GetGoodbye().GetLooked())
		p.end <- nil
	})
}

// An Envoy that does not answer must not prevent Goodbye.
func TestSlowFinalLookIsGivenUp(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined(route("one", "10.0.0.1"))
		w.activity.last = func(ctx context.Context) lastactive.Report {
			<-ctx.Done()
			return lastactive.Report{LookError: "no look in time"}
		}
		began := w.now()
		w.stop()
		require.False(t, p.next().GetGoodbye().GetLooked())
		require.Equal(t, time.Second, w.now()-began)
		time.Sleep(900 * time.Millisecond) // some time remains for the leader
		p.end <- nil
		require.NoError(t, <-w.ended)
		w.ended <- nil
	})
}

func TestProbeAnswersWithThePodsState(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		w.probe = func(_ context.Context, addr netip.AddrPort, path string) bool {
			require.Equal(t, pod, addr.Addr())
			require.Equal(t, "/busy", path)
			return addr.Port() == 80
		}
		for _, port := range []uint32{0, 65536 + 80} { // not a valid port
			p.send(0, probe("none", port))
		}
		for port, want := range map[uint32]bool{80: true, 81: false} {
			p.send(0, probe(fmt.Sprint(port), port))
			probed := p.next().GetProbed()
			require.NotNil(t, probed)
			require.Equal(t, fmt.Sprint(port), probed.GetSandboxId())
			require.Equal(t, want, probed.GetBusy(), port)
		}
	})
}

// Unresponsive pods cost a bounded number of connections and delay nothing else.
func TestProbesAreBounded(t *testing.T) {
	run(t, []string{"a"}, func(w *world) {
		w.serve("a", nil)
		p := w.joined()
		var running, most, asked atomic.Int64
		w.probe = func(ctx context.Context, _ netip.AddrPort, _ string) bool {
			asked.Add(1)
			most.Store(max(most.Load(), running.Add(1)))
			defer running.Add(-1)
			select {
			case <-time.After(300 * time.Millisecond):
			case <-ctx.Done():
			}
			return true
		}
		began := w.now()
		for i := range 1100 {
			p.send(0, probe(fmt.Sprint(i), 80))
		}
		p.send(2, release("one"))
		require.NotNil(t, p.next().GetAck())
		require.Equal(t, began, w.now(), "a probe held up the stream")
		for range 1000 {
			require.True(t, p.next().GetProbed().GetBusy())
		}
		require.EqualValues(t, 1000, most.Load())
		require.EqualValues(t, 1000, asked.Load())

		p.send(0, probe("later", 80))
		p.end <- nil // running probes end with the stream
		w.joined()
		require.Zero(t, running.Load())
	})
}
