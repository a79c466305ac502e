package extproc

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/routecache"
)

// First requests to a port may have to wait until all threads of Envoy know the port. They take
// no place of requests that wait for a sandbox.
func TestRequestWaitsForRoomInEnvoysList(t *testing.T) {
	for name, c := range map[string]struct {
		lasts  time.Duration
		reason apierror.Reason
	}{
		"it comes in time": {lasts: 300 * time.Millisecond},
		"it never comes":   {lasts: time.Hour, reason: apierror.TooManyPorts},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := always(routeTo("10.1.2.3", 8080), nil)
				d := h.decider()
				began := time.Now()
				// One sandbox could keep all places for waiting requests.
				d.park = func(sandboxid.Key) (func(), bool) { return nil, false }
				h.wait, h.full = 200*time.Millisecond, time.Now().Add(c.lasts)
				a, refusal := d.decide(t.Context(), &request{authority: []byte("9000-abc." + domain), method: []byte("POST"), contentType: []byte("application/grpc")}, unheld)
				require.Less(t, time.Since(began), envoy.MessageTimeout)
				require.True(t, h.tried[0].http2)
				if c.reason != "" {
					require.Equal(t, c.reason, refusal.Reason)
					return
				}
				require.Nil(t, refusal)
				a.admission.Read()
				require.Zero(t, h.unread())
			})
		})
	}
}

// A claim may be answered before this router has found the leader that has answered it.
// Invariant: I8
func TestRequestIsHeldUntilTheRouterHasJoined(t *testing.T) {
	const fresh = 24 * time.Hour
	type world struct {
		*routecache.Cache
		connected bool
		asked     chan struct{}
	}
	for name, c := range map[string]struct {
		before func(w *world)
		// then happens after a second.
		then   func(w *world)
		full   bool            // no request may wait
		leaves bool            // the client leaves after a second
		reason apierror.Reason // "": admitted
		waited time.Duration
	}{
		"at the start": {
			before: func(*world) {},
			then: func(w *world) {
				w.Replace(map[string]routecache.Route{"abc": podRoute})
				w.Connected()
				w.SetFreshUntil(fresh)
			},
			waited: time.Second,
		},
		"after the leader has gone": {
			before: func(w *world) { w.SetFreshUntil(fresh); w.Connected(); w.Disconnected() },
			then:   func(w *world) { w.Replace(map[string]routecache.Route{"abc": podRoute}); w.Connected() },
			waited: time.Second,
		},
		"the next leader is asked": {
			before: func(w *world) { w.SetFreshUntil(fresh) },
			then: func(w *world) {
				w.Replace(nil)
				w.connected = true
				w.Connected()
				<-w.asked
				w.Put("abc", podRoute)
			},
			waited: time.Second,
		},
		"the leader goes while it is asked": {
			before: func(w *world) { w.SetFreshUntil(fresh); w.connected = true; w.Connected() },
			then: func(w *world) {
				w.Disconnected()
				w.Replace(map[string]routecache.Route{"abc": podRoute})
				w.Connected()
			},
			waited: time.Second + joinPause,
		},
		"the routes are stale": {
			before: func(w *world) { w.SetFreshUntil(1); w.Put("abc", podRoute); w.Connected() },
			then:   func(w *world) { w.SetFreshUntil(fresh) },
			waited: time.Second,
		},
		"a snapshot without a pong": {
			before: func(*world) {},
			then:   func(w *world) { w.Replace(map[string]routecache.Route{"abc": podRoute}); w.Connected() },
			reason: apierror.RouterNotReady, waited: MaxWait,
		},
		"it is not joined": {
			before: func(*world) {}, then: func(*world) {}, reason: apierror.RouterNotReady, waited: MaxWait,
		},
		"too many wait": {
			before: func(*world) {}, then: func(*world) {}, full: true, reason: apierror.RouterNotReady,
		},
		"the client leaves": {
			before: func(*world) {}, then: func(*world) {}, leaves: true, reason: apierror.RouterNotReady, waited: time.Second,
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				w := &world{asked: make(chan struct{}, 1)}
				var err error
				w.Cache, err = routecache.New(routecache.Options{
					Now: func() time.Duration { return time.Hour + time.Since(began) },
					Ask: func(string, bool) bool {
						if w.connected {
							w.asked <- struct{}{}
						}
						return w.connected
					},
				})
				require.NoError(t, err)
				h := &history{}
				d := h.decider()
				d.o.Routes, d.o.LookupTimeout = w.Cache, 2*time.Second
				parked := 0
				d.park = func(sandboxid.Key) (func(), bool) {
					if c.full {
						return nil, false
					}
					parked++
					return func() { parked-- }, true
				}
				ctx, leave := context.WithCancel(t.Context())
				defer leave()
				c.before(w)
				time.AfterFunc(time.Second, func() {
					c.then(w)
					if c.leaves {
						leave()
					}
				})
				a, refusal := d.decide(ctx, &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
				require.Equal(t, c.waited, time.Since(began))
				require.Zero(t, parked)
				if c.reason != "" {
					require.Equal(t, c.reason, refusal.Reason)
					require.Zero(t, a)
				} else {
					require.Nil(t, refusal)
					require.Equal(t, key("abc"), a.id)
					a.admission.Read()
				}
				time.Sleep(time.Second)
			})
		})
	}
}

func TestLookupEndsAfterTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &history{answer: func(ctx context.Context, _ string) (routecache.Answer, error) {
			<-ctx.Done()
			return routecache.Answer{}, context.Cause(ctx)
		}}
		began := time.Now()
		_, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
		require.Equal(t, apierror.RouterNotReady, refusal.Reason)
		require.Equal(t, time.Second, time.Since(began))

		gone, cancel := context.WithCancel(t.Context())
		cancel() // the client has left
		_, refusal = h.decider().decide(gone, &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
		require.Equal(t, apierror.RouterNotReady, refusal.Reason)
		require.Equal(t, time.Second, time.Since(began))
	})
}

func TestRequestIsHeldUntilTheSandboxRuns(t *testing.T) {
	starting := routecache.Answer{Status: routecache.Starting, Hold: 10 * time.Second}
	for name, c := range map[string]struct {
		then    []routecache.Answer // the answer after each wait
		after   time.Duration       // length of each wait
		reason  apierror.Reason     // "": admitted
		waited  time.Duration
		lookups int
	}{
		"runs":                   {[]routecache.Answer{routeTo("10.1.2.3", 8080)}, 3 * time.Second, "", 3 * time.Second, 2},
		"still starting at last": {[]routecache.Answer{starting, starting, starting}, 4 * time.Second, apierror.SandboxStarting, 10 * time.Second, 3},
		"has failed":             {[]routecache.Answer{{Status: routecache.Gone}}, time.Second, apierror.SandboxGone, time.Second, 2},
		"a new leader, and then": {[]routecache.Answer{starting, routeTo("10.1.2.3", 8080)}, 2 * time.Second, "", 4 * time.Second, 3},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				now := starting
				h := &history{answer: func(context.Context, string) (routecache.Answer, error) { return now, nil }}
				h.await = func(ctx context.Context) error {
					select {
					case <-time.After(c.after):
						now, c.then = c.then[0], c.then[1:]
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				asked, released := 0, 0
				began := time.Now()
				a, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, func(_ sandboxid.Key, d time.Duration) (func(), bool) {
					asked++
					require.Equal(t, 10*time.Second, d)
					return func() { released++ }, true
				})
				require.Equal(t, c.waited, time.Since(began))
				require.Equal(t, 1, asked, "Envoy can be asked for more time once only")
				require.Equal(t, 1, released)
				if c.reason == "" {
					require.Nil(t, refusal)
					require.Equal(t, key("abc"), a.id)
					require.True(t, a.held)
				} else {
					require.Zero(t, a)
					require.Equal(t, c.reason, refusal.Reason)
				}
				lookups := 0
				for _, e := range h.events {
					if e == "lookup abc" {
						lookups++
					}
				}
				require.Equal(t, c.lookups, lookups)
			})
		})
	}
}

func TestUnholdableRequestIsRefusedAtOnce(t *testing.T) {
	h := always(routecache.Answer{Status: routecache.Starting, Hold: time.Minute}, nil)
	a, refusal := h.decider().decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
	require.Zero(t, a)
	require.Equal(t, apierror.SandboxStarting, refusal.Reason)
	require.Positive(t, refusal.RetryAfter)
	require.Equal(t, []string{"lookup abc"}, h.events)
}

func TestQuiescedSandboxHoldsRequestsUntilVerdict(t *testing.T) {
	quiesced := routecache.Answer{Status: routecache.Quiesced}
	starting := routecache.Answer{Status: routecache.Starting, Hold: 10 * time.Second}
	running := routeTo("10.1.2.3", 8080)
	for name, c := range map[string]struct {
		found  []routecache.Answer // in turn, a second apart
		full   bool
		reason apierror.Reason // "": admitted
		waited time.Duration
	}{
		"resumed":                {found: []routecache.Answer{quiesced, running}, waited: time.Second},
		"released":               {found: []routecache.Answer{quiesced, {Status: routecache.Gone}}, reason: apierror.SandboxGone, waited: time.Second},
		"no verdict":             {found: []routecache.Answer{quiesced, quiesced, quiesced, quiesced}, reason: apierror.SandboxQuiesced, waited: 2 * time.Second},
		"too many wait":          {found: []routecache.Answer{quiesced, running}, full: true, reason: apierror.SandboxQuiesced},
		"it was starting before": {found: []routecache.Answer{starting, starting, starting, quiesced, running}, waited: 4 * time.Second},
		"starting in between":    {found: []routecache.Answer{quiesced, starting, starting, quiesced, quiesced}, reason: apierror.SandboxQuiesced, waited: 4 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				h := &history{answer: func(context.Context, string) (routecache.Answer, error) {
					return c.found[min(int(time.Since(began)/time.Second), len(c.found)-1)], nil
				}}
				h.await = func(ctx context.Context) error {
					select {
					case <-time.After(time.Second):
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				}
				d := h.decider()
				parked := 0
				d.park = func(sandboxid.Key) (func(), bool) {
					if c.full {
						return nil, false
					}
					parked++
					return func() { parked-- }, true
				}
				a, refusal := d.decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, func(sandboxid.Key, time.Duration) (func(), bool) { return func() {}, true })
				require.Equal(t, c.waited, time.Since(began))
				require.Zero(t, parked)
				if c.reason == "" {
					require.Nil(t, refusal)
					require.Equal(t, key("abc"), a.id)
					require.Equal(t, 1, h.unread())
					return
				}
				require.Zero(t, a)
				require.Equal(t, c.reason, refusal.Reason)
				require.Zero(t, h.unread())
				if c.reason == apierror.SandboxQuiesced {
					require.Equal(t, 503, refusal.Code)
					require.Equal(t, 1, refusal.RetryAfter)
				}
			})
		})
	}
}

// The sum of all waits must stay below Envoy's own timeout.
func TestWaitsFitEnvoysTimeout(t *testing.T) {
	slowly := func(took time.Duration, a ...routecache.Answer) *history {
		began := time.Now()
		h := &history{answer: func(ctx context.Context, _ string) (routecache.Answer, error) {
			select {
			case <-time.After(took):
				return a[min(int(time.Since(began)/time.Second), len(a)-1)], nil
			case <-ctx.Done():
				return routecache.Answer{}, ctx.Err()
			}
		}}
		h.await = func(ctx context.Context) error {
			select {
			case <-time.After(took):
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		return h
	}
	quiesced, starting := routecache.Answer{Status: routecache.Quiesced}, routecache.Answer{Status: routecache.Starting, Hold: 10 * time.Second}
	for took := 100 * time.Millisecond; took < 5*time.Second; took += 100 * time.Millisecond {
		synctest.Test(t, func(t *testing.T) {
			for name, h := range map[string]*history{
				"quiesced":            slowly(took, quiesced),
				"and then found":      slowly(took, quiesced, quiesced, quiesced, quiesced, routeTo("10.1.2.3", 80)),
				"one after the other": {answer: slowly(took, routeTo("10.1.2.3", 80)).answer, holds: func() bool { return false }},
			} {
				d := h.decider()
				d.o.LookupTimeout = MaxWait
				began := time.Now()
				_, refusal := d.decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, unheld)
				require.LessOrEqual(t, time.Since(began), MaxWait, name)
				require.Less(t, time.Since(began), envoy.MessageTimeout)
				if refusal != nil {
					require.Equal(t, 503, refusal.Code)
				}
			}
			h := slowly(took, starting, starting, starting, starting, starting, starting, starting, starting, starting, quiesced)
			d := h.decider()
			d.o.LookupTimeout = MaxWait
			var held time.Time
			_, refusal := d.decide(t.Context(), &request{authority: []byte("8080-abc." + domain), method: []byte("GET")}, func(sandboxid.Key, time.Duration) (func(), bool) {
				held = time.Now()
				return func() {}, true
			})
			require.NotNil(t, refusal)
			if !held.IsZero() {
				require.Less(t, time.Since(held), starting.Hold+envoy.MessageTimeout)
			}
		})
	}
}
