package controlclient_test

import (
	"context"
	"errors"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"maps"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/activity"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/extproc/controlclient"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
)

// These tests use the production tracker with a scripted Envoy.

// idleWindow is the tracker's ConnectWindow.
const idleWindow = 5 * time.Second

// envoy is the scripted Envoy.
type envoy struct {
	mu    sync.Mutex
	hosts map[look.Host]int
	takes time.Duration // how long an answer takes; it shows the state at the question
	fails error
	began []time.Time // the looks
}

func (e *envoy) look(ctx context.Context) (look.Look, error) {
	e.mu.Lock()
	e.began = append(e.began, time.Now())
	hosts, takes, fails := maps.Clone(e.hosts), e.takes, e.fails
	e.mu.Unlock()
	select {
	case <-time.After(takes):
	case <-ctx.Done():
		return look.Look{}, ctx.Err()
	}
	return look.Look{Gateway: "envoy-1", Hosts: hosts}, fails
}

// is changes what the following looks show.
func (e *envoy) is(change func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	change()
}

// looks counts the looks that have begun.
func (e *envoy) looks() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.began)
}

// at is an address in the range of pods.
func at(i byte) netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, i}), 8080)
}

// trace runs f with a tracker whose Envoy has no open requests, and with a stream on which the
// first look has been reported. Pings are answered.
func trace(t *testing.T, f func(w *world, tracker *lastactive.Tracker, e *envoy, p *peer)) {
	t.Helper()
	var tracker *lastactive.Tracker
	e := &envoy{hosts: map[look.Host]int{}}
	runWith(t, []string{"a"}, func(w *world) controlclient.Uses {
		w.began = time.Now().Add(-time.Hour) // a boot clock is never 0
		var err error
		tracker, err = lastactive.New(lastactive.Options{Now: w.now, ConnectWindow: idleWindow, Look: e.look})
		require.NoError(t, err)
		return tracker
	}, func(w *world) {
		ctx, cancel := context.WithCancel(context.Background())
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			tracker.Run(ctx)
		}()
		defer func() {
			w.giveUp() // a look may be under way
			cancel()
			<-ended
		}()
		synctest.Wait()
		w.serve("a", nil)
		f(w, tracker, e, w.joined())
	})
}

// pause lets time pass while pings are answered.
func (p *peer) pause(d time.Duration) {
	p.w.t.Helper()
	for until := time.Now().Add(d); time.Now().Before(until); {
		p.pong(p.ping())
	}
}

func use(t *testing.T, tracker *lastactive.Tracker, id string, i byte) *lastactive.Entry {
	t.Helper()
	tracker.Expect(id, at(i).Addr(), 0)
	u, _ := tracker.Begin(sandboxid.MustKey(id), at(i), false)
	require.NotNil(t, u)
	return u
}

func ask(number uint64, sandboxes map[string]byte) *controlv1.AllocatorMessage {
	q := &controlv1.Quiesce{Number: number}
	for id := range sandboxes {
		q.Questions = append(q.Questions, &controlv1.Question{SandboxId: id})
	}
	return &controlv1.AllocatorMessage{Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: q}}
}

// byID returns the activities by sandbox ID.
func byID(activities []*controlv1.Activity) map[string]*controlv1.Activity {
	all := map[string]*controlv1.Activity{}
	for _, a := range activities {
		all[a.GetSandboxId()] = a
	}
	return all
}

// Envoy may be paused before it reads an answer. Verdicts on other sandboxes do not wait for it.
func TestUnreadAnswerKeepsOnlyItsSandboxInUse(t *testing.T) {
	trace(t, func(w *world, tracker *lastactive.Tracker, _ *envoy, p *peer) {
		unread := use(t, tracker, "unread", 1)
		defer unread.Read()
		use(t, tracker, "idle", 2).Read()
		tracker.Expect("never", at(3).Addr(), 0)
		p.pause(idleWindow + 10*time.Second)
		began := w.now()
		p.send(0, ask(1, map[string]byte{"unread": 1, "idle": 2, "never": 3}))
		q := p.next().GetQuiesced()
		require.Less(t, w.now()-began, 300*time.Millisecond)
		require.Empty(t, q.GetLookError())
		activities := byID(q.GetActivities())
		require.Zero(t, activities["unread"].GetAgeMillis())
		require.Equal(t, string(activity.Admission), activities["unread"].GetKind())
		require.Greater(t, activities["idle"].GetAgeMillis(), uint64(8000))
		require.NotContains(t, activities, "never")
	})
}

// A look that began before the question may show a state from before the request was admitted.
func TestQuiescedRestsOnLooksAfterTheQuestion(t *testing.T) {
	trace(t, func(_ *world, tracker *lastactive.Tracker, e *envoy, p *peer) {
		e.is(func() { e.takes = 20 * time.Millisecond })
		p.pause(3 * time.Second)
		for n := e.looks(); e.looks() == n; { // until a look begins
			time.Sleep(time.Millisecond)
		}
		use(t, tracker, "open", 1).Read()
		e.is(func() { e.hosts[look.Host{AddrPort: at(1)}] = 2 })
		asked := time.Now()
		p.send(0, ask(1, map[string]byte{"open": 1}))
		q := p.next().GetQuiesced()
		require.Empty(t, q.GetLookError())
		open := byID(q.GetActivities())["open"]
		require.Zero(t, open.GetAgeMillis())
		require.EqualValues(t, 2, open.GetOpenRequests())
		e.is(func() {
			after := e.began[len(e.began)-2:]
			require.True(t, after[0].After(asked), "it had begun before")
			require.Greater(t, after[1].Sub(after[0]), 120*time.Millisecond, "the second look must begin 100 ms after the first was answered")
		})
	})
}

func TestLookErrorIsReportedUntilALookSucceeds(t *testing.T) {
	trace(t, func(w *world, tracker *lastactive.Tracker, e *envoy, p *peer) {
		use(t, tracker, "idle", 1).Read()
		p.pause(idleWindow + 10*time.Second)
		p.reports = nil
		e.is(func() { e.fails = errors.New("Envoy does not answer") })
		r := p.report()
		for r.GetLookError() == "" {
			r = p.report()
		}
		require.Equal(t, "Envoy does not answer", r.GetLookError())
		require.Empty(t, r.GetGateway())
		began := w.now()
		p.send(0, ask(1, map[string]byte{"idle": 1}))
		q := p.next().GetQuiesced()
		require.Equal(t, "Envoy does not answer", q.GetLookError())
		require.Empty(t, q.GetActivities())
		require.LessOrEqual(t, w.now()-began, 1600*time.Millisecond)

		p.reports = nil
		e.is(func() { e.fails = nil })
		for r.GetLookError() != "" {
			r = p.report()
		}
		require.Equal(t, "envoy-1", r.GetGateway())
		p.send(0, ask(2, map[string]byte{"idle": 1}))
		q = p.next().GetQuiesced()
		require.Empty(t, q.GetLookError())
		require.Greater(t, byID(q.GetActivities())["idle"].GetAgeMillis(), uint64(8000), "what was known before counts again")
	})
}

// Hanging looks delay the answer by less time than requests are held.
func TestQuiescedIsInTimeWhileALookHangs(t *testing.T) {
	trace(t, func(w *world, _ *lastactive.Tracker, e *envoy, p *peer) {
		e.is(func() { e.takes = 2 * time.Second })
		p.pause(2 * time.Second)
		began := w.now()
		p.send(0, ask(1, map[string]byte{"idle": 1}))
		require.NotEmpty(t, p.next().GetQuiesced().GetLookError())
		require.Equal(t, 1600*time.Millisecond, w.now()-began)
	})
}

func TestFinalReportRestsOnALookAfterTheStop(t *testing.T) {
	for name, fails := range map[string]error{"it succeeds": nil, "it fails": errors.New("Envoy does not answer")} {
		t.Run(name, func(t *testing.T) {
			trace(t, func(_ *world, tracker *lastactive.Tracker, e *envoy, p *peer) {
				use(t, tracker, "ended", 1).Read()
				use(t, tracker, "open", 2).Read()
				e.is(func() { e.hosts[look.Host{AddrPort: at(2)}] = 1 })
				p.pause(2*idleWindow + 5*time.Second)
				use(t, tracker, "justread", 3).Read() // Envoy may be about to connect
				e.is(func() { e.fails = fails })
				p.reports = nil
				p.w.stop()
				goodbye := p.next().GetGoodbye()
				require.NotNil(t, goodbye)
				require.Equal(t, fails == nil, goodbye.GetLooked())
				last := p.reports[len(p.reports)-1]
				require.Equal(t, fails == nil, last.GetGateway() != "")
				require.Equal(t, fails != nil, last.GetLookError() != "")
				activities := byID(last.GetActivities())
				require.Zero(t, activities["open"].GetAgeMillis())
				require.Contains(t, activities, "open")
				require.Zero(t, activities["justread"].GetAgeMillis())
				require.Contains(t, activities, "justread")
				if a, ok := activities["ended"]; ok {
					require.NotZero(t, a.GetAgeMillis())
				}
				p.end <- nil
			})
		})
	}
}
