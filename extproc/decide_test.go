package extproc

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
	"github.com/berth-sandbox/berth/routecache"
)

var podRoute = routecache.Route{Addr: netip.MustParseAddr("10.1.2.3"), DefaultPort: 8080}

// history records the calls of a decision in order.
type history struct {
	events []string
	answer func(ctx context.Context, id string) (routecache.Answer, error)
	holds  func() bool
	await  func(ctx context.Context) error
	began  []begun
	full   time.Time // until then Begin returns nil and wait
	wait   time.Duration
	*lastactive.Tracker
}

// begun has the arguments of one Begin.
type begun struct {
	to       netip.AddrPort
	http2    bool
	minBytes uint64
}

// unheld is a holder that holds no request.
func unheld(time.Duration) (func(), bool) { return nil, false }

func (h *history) Await(ctx context.Context, id string, _ routecache.Status) error {
	h.events = append(h.events, "await "+id)
	return h.await(ctx)
}

func (h *history) Lookup(ctx context.Context, id string) (routecache.Answer, error) {
	h.events = append(h.events, "lookup "+id)
	return h.answer(ctx, id)
}

func (h *history) Holds(id string, _ routecache.Route) bool {
	h.events = append(h.events, "holds "+id)
	return h.holds == nil || h.holds()
}
func (h *history) Forget(id string) {
	h.events = append(h.events, "forget "+id)
	h.Tracker.Forget(id)
}

func (h *history) Begin(id string, to netip.AddrPort, http2 bool, minBytes uint64) (*lastactive.Entry, time.Duration) {
	h.events = append(h.events, "begin "+id)
	h.began = append(h.began, begun{to, http2, minBytes})
	if time.Now().Before(h.full) {
		return nil, h.wait
	}
	return h.Tracker.Begin(id, to, http2, minBytes)
}

// unread counts the uses that have begun and not ended.
func (h *history) unread() int {
	n := 0
	for _, s := range h.Dump() {
		n += s.Unread
	}
	return n
}

// newTracker returns a tracker that does not look.
func newTracker() *lastactive.Tracker {
	tracker, err := lastactive.New(lastactive.Options{
		ConnectWindow: envoy.ConnectWindow, Now: func() time.Duration { return time.Hour },
		Look: func(context.Context) (look.Look, error) { return look.Look{}, errors.New("there is no Envoy") },
	})
	if err != nil {
		panic(err)
	}
	return tracker
}

func always(a routecache.Answer, err error) *history {
	return &history{answer: func(context.Context, string) (routecache.Answer, error) { return a, err }}
}

func (h *history) decider() *decider {
	h.Tracker = newTracker()
	return &decider{
		hosts: Hosts{Domain: domain}, podCIDRs: []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("fd00::/8")},
		lookupTimeout: time.Second, routes: h, activity: h, admissions: NewAdmissions(), park: func() (func(), bool) { return func() {}, true }, verdictWait: func(time.Duration) {},
	}
}

func routeTo(addr string, defaultPort uint16) routecache.Answer {
	return routecache.Answer{Status: routecache.Routable, Route: routecache.Route{Addr: netip.MustParseAddr(addr), DefaultPort: defaultPort}}
}

// opening returns the answer with a route that opens only these ports.
func opening(a routecache.Answer, ports ...uint16) routecache.Answer {
	a.Route.Ports = routecache.NewPorts(ports)
	return a
}

// Invariant: I2
func TestUseBeginsBeforeTheRouteIsChecked(t *testing.T) {
	for host, c := range map[string]struct {
		answer routecache.Answer
		dst    string
	}{
		"9000-abc.sandbox.example.com":  {routeTo("10.1.2.3", 8080), "10.1.2.3:9000"},
		"abc.sandbox.example.com":       {routeTo("10.1.2.3", 8080), "10.1.2.3:8080"},
		"9000-abc.sandbox.example.com.": {routeTo("fd00::7", 0), "[fd00::7]:9000"},
		"9001-abc.sandbox.example.com":  {opening(routeTo("10.1.2.3", 8080), 8080, 9001), "10.1.2.3:9001"},
		"abc.sandbox.example.com.":      {opening(routeTo("10.1.2.3", 8080), 8080, 9001), "10.1.2.3:8080"},
	} {
		h := always(c.answer, nil)
		d := h.decider()
		h.holds = func() bool {
			require.Equal(t, 1, d.admissions.Unread(), "a release would fit between the check and the answer")
			require.Equal(t, 1, h.unread(), "a leader that stops admissions and then asks must learn of this use")
			return true
		}
		a, refusal := d.decide(t.Context(), &request{authority: host, method: "GET"}, unheld)
		require.Nil(t, refusal)
		require.Equal(t, &admission{id: "abc", dst: netip.MustParseAddrPort(c.dst), epoch: a.epoch, use: a.use}, a)
		require.Equal(t, 1, h.unread())
		d.admissions.Done(a.epoch)
		require.Zero(t, d.admissions.Unread())
		require.Equal(t, []string{"lookup abc", "begin abc", "holds abc"}, h.events, "what is checked last must be the route")
	}
}

// Invariant: P1
func TestRefusalsNameReasonAndNoDestination(t *testing.T) {
	const host = "8080-abc.sandbox.example.com"
	for name, c := range map[string]struct {
		request request
		answer  routecache.Answer
		err     error
		code    int
		reason  apierror.Reason
		id      string
		retry   bool
		asks    bool
	}{
		"connect":            {request: request{method: "CONNECT", authority: host}, code: 405, reason: apierror.MethodRefused},
		"no host":            {request: request{method: "GET"}, code: 400, reason: apierror.BadHost},
		"two hosts":          {request: request{method: "GET", authority: host + "," + host}, code: 400, reason: apierror.BadHost},
		"foreign domain":     {request: request{method: "GET", authority: "8080-abc.example.org"}, code: 400, reason: apierror.BadHost},
		"bare domain":        {request: request{method: "GET", authority: domain}, code: 400, reason: apierror.BadTarget},
		"port 0":             {request: request{method: "GET", authority: "0-abc." + domain}, code: 400, reason: apierror.BadPort},
		"gone":               {answer: routecache.Answer{Status: routecache.Gone}, code: 410, reason: apierror.SandboxGone, id: "abc", asks: true},
		"starting":           {answer: routecache.Answer{Status: routecache.Starting}, code: 503, reason: apierror.SandboxStarting, id: "abc", retry: true, asks: true},
		"unknown":            {answer: routecache.Answer{Status: routecache.Unknown}, code: 404, reason: apierror.SandboxNotFound, id: "abc", asks: true},
		"not fresh":          {err: routecache.ErrNotFresh, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"disconnected":       {err: routecache.ErrDisconnected, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"too many questions": {err: routecache.ErrTooManyQuestions, code: 503, reason: apierror.RouterNotReady, id: "abc", retry: true, asks: true},
		"address of another": {answer: routeTo("10.2.0.1", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"loopback":           {answer: routeTo("127.0.0.1", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"zoned address":      {answer: routeTo("fd00::1%eth0", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"mapped address":     {answer: routeTo("::ffff:10.1.2.3", 80), code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"no address":         {answer: routecache.Answer{Status: routecache.Routable}, code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true},
		"private port":       {answer: opening(routeTo("10.1.2.3", 80), 80, 9000), code: 403, reason: apierror.PortPrivate, id: "abc", asks: true},
		"private default port": {
			request: request{method: "GET", authority: "abc." + domain}, answer: opening(routeTo("10.1.2.3", 80), 9000),
			code: 403, reason: apierror.PortPrivate, id: "abc", asks: true,
		},
		"private port of no address": {answer: opening(routeTo("10.2.0.1", 80), 80), code: 403, reason: apierror.PortPrivate, id: "abc", asks: true},
		"no default port, some ports open": {
			request: request{method: "GET", authority: "abc." + domain}, answer: opening(routeTo("10.1.2.3", 0), 80),
			code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true,
		},
		"no default port": {
			request: request{method: "GET", authority: "abc." + domain}, answer: routeTo("10.1.2.3", 0),
			code: 503, reason: apierror.NoRoute, id: "abc", retry: true, asks: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			if c.request.method == "" {
				c.request = request{method: "GET", authority: host}
			}
			h := always(c.answer, c.err)
			a, refusal := h.decider().decide(t.Context(), &c.request, unheld)
			require.Nil(t, a)
			require.Equal(t, c.code, refusal.Code)
			require.Equal(t, c.reason, refusal.Reason)
			require.Equal(t, c.id, refusal.SandboxID)
			require.NotEmpty(t, refusal.Message)
			require.Equal(t, c.retry, refusal.RetryAfter > 0)
			require.Equal(t, c.asks, slices.Contains(h.events, "lookup abc"))
			require.NotContains(t, h.events, "begin abc", "a refused request is no activity")
			for _, e := range h.events {
				require.NotContains(t, e, "holds", "the decision was made on what a refused route said")
			}
			reply := refused(refusal, program)
			require.NotContains(t, reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields(), "dst")
			require.NotContains(t, reply.GetDynamicMetadata().GetFields()["berth"].GetStructValue().GetFields(), "id")
			require.EqualValues(t, c.code, reply.GetImmediateResponse().GetStatus().GetCode())
		})
	}
}

func TestPrivatePortRefusalNamesOpenPorts(t *testing.T) {
	const begin = "port 22 of this sandbox is not open to the outside; its pool opens "
	for want, open := range map[string][]uint16{
		"8080":                              {8080},
		"8080, 49983":                       {49983, 8080},
		"80, 443, 8080":                     {80, 443, 8080},
		"1, 2, 3, 4, 5, 6, 7, 8":            {1, 2, 3, 4, 5, 6, 7, 8},
		"1, 2, 3, 4, 5, 6, 7, 8 and 1 more": {1, 2, 3, 4, 5, 6, 7, 8, 9},
		"1, 2, 3, 4, 5, 6, 7, 8 and 3 more": {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11},
	} {
		h := always(opening(routeTo("10.1.2.3", 8080), open...), nil)
		_, refusal := h.decider().decide(t.Context(), &request{authority: "22-abc." + domain, method: "GET"}, unheld)
		require.Equal(t, begin+want, refusal.Message)
		reply := refused(refusal, grpcClient).GetImmediateResponse()
		require.EqualValues(t, codes.PermissionDenied, reply.GetGrpcStatus().GetStatus())
	}
}

// A port that is closed after the lookup of a request is closed for that request too.
func TestPortClosedDuringDecisionIsRefused(t *testing.T) {
	answers := []routecache.Answer{routeTo("10.1.2.3", 8080), opening(routeTo("10.1.2.3", 8080), 8080)}
	h := &history{holds: func() bool { return false }}
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	_, refusal := h.decider().decide(t.Context(), &request{authority: "22-abc." + domain, method: "GET"}, unheld)
	require.Equal(t, apierror.PortPrivate, refusal.Reason)
}

func TestRepeatedHeadersAreAllRead(t *testing.T) {
	r := readHeaders(headersOf(":authority", domain, ":method", "GET", ":path", "/x?y", "x-request-id", "r",
		"e2b-sandbox-id", "abc", "e2b-sandbox-port", "8080", "x-sandbox-id", "a", "x-sandbox-id", "b", "x-sandbox-port", "1", "x-sandbox-port", "",
		"accept", "text/html", "accept", "*/*", "sec-fetch-mode", "navigate", "content-type", "a/b",
		"host", "8080-abc."+domain, "x-forwarded-host", "8080-abc."+domain, "x-envoy-original-dst-host", "10.1.2.3:80").GetRequestHeaders())
	require.Equal(t, request{
		authority: domain, method: "GET", path: "/x?y", requestID: "r",
		e2bID: []string{"abc"}, e2bPort: []string{"8080"}, id: []string{"a", "b"}, port: []string{"1", ""},
		accept: "text/html,*/*,", fetchMode: "navigate", contentType: "a/b",
	}, r)
}

// First requests to a port may have to wait until all threads of Envoy know the port.
func TestRequestWaitsForRoomInEnvoysList(t *testing.T) {
	for name, c := range map[string]struct {
		lasts  time.Duration
		full   bool
		reason apierror.Reason
	}{
		"it comes in time": {lasts: 300 * time.Millisecond},
		"too many wait":    {lasts: 300 * time.Millisecond, full: true, reason: apierror.TooManyPorts},
		"it never comes":   {lasts: time.Hour, reason: apierror.TooManyPorts},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := always(routeTo("10.1.2.3", 8080), nil)
				d := h.decider()
				parked, began := 0, time.Now()
				d.park = func() (func(), bool) {
					parked++
					return func() { parked-- }, !c.full
				}
				h.wait, h.full = 200*time.Millisecond, time.Now().Add(c.lasts)
				a, refusal := d.decide(t.Context(), &request{authority: "9000-abc." + domain, method: "POST", contentType: "application/grpc"}, unheld)
				require.Less(t, time.Since(began), envoy.MessageTimeout)
				require.True(t, h.began[0].http2)
				if c.reason != "" {
					require.Equal(t, c.reason, refusal.Reason)
					return
				}
				require.Nil(t, refusal)
				require.Zero(t, parked)
				a.use.Read()
				require.Zero(t, h.unread())
			})
		})
	}
}

// Envoy's list of open requests grows with the requested ports of a sandbox.
func TestTooManyPortsOfASandboxAreRefused(t *testing.T) {
	answer := routeTo("10.1.2.3", 8080)
	answer.Route.MinBytes = 1024
	h := always(answer, nil)
	d := h.decider()
	h.full = time.Now().Add(time.Hour)
	_, refusal := d.decide(t.Context(), &request{authority: "9000-abc." + domain, method: "GET"}, unheld)
	require.Equal(t, apierror.TooManyPorts, refusal.Reason)
	require.Equal(t, 429, refusal.Code)
	require.Equal(t, 1, refusal.RetryAfter)
	require.Equal(t, "abc", refusal.SandboxID)
	require.Zero(t, d.admissions.Unread())
	require.Equal(t, []string{"lookup abc", "begin abc"}, h.events)
	require.Equal(t, []begun{{netip.MustParseAddrPort("10.1.2.3:9000"), false, 1024}}, h.began)
}

// A request that was looked up before a release must not restore the forgotten activity.
func TestReleaseDuringDecisionLeavesNoActivity(t *testing.T) {
	answers := []routecache.Answer{{Status: routecache.Routable, Route: podRoute}, {Status: routecache.Gone}}
	h := &history{holds: func() bool { return false }}
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	_, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
	require.Equal(t, apierror.SandboxGone, refusal.Reason)
	require.Equal(t, []string{"lookup abc", "begin abc", "holds abc", "lookup abc", "forget abc"}, h.events)
	require.Zero(t, h.Len())
}

func TestEvictedRouteIsLookedUpAgain(t *testing.T) {
	moved := routeTo("10.1.9.9", 80)
	answers := []routecache.Answer{{Status: routecache.Routable, Route: podRoute}, moved}
	holds := []bool{false, true}
	h := &history{}
	h.holds = func() bool { held := holds[0]; holds = holds[1:]; return held }
	h.answer = func(context.Context, string) (routecache.Answer, error) {
		a := answers[0]
		answers = answers[1:]
		return a, nil
	}
	a, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
	require.Nil(t, refusal)
	require.Equal(t, netip.MustParseAddrPort("10.1.9.9:8080"), a.dst)
	require.NotContains(t, h.events, "forget abc", "the activity of a sandbox that lives was lost")
	require.Equal(t, 1, h.unread(), "the first attempt was not admitted")
}

func TestLookupEndsAfterTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &history{answer: func(ctx context.Context, _ string) (routecache.Answer, error) {
			<-ctx.Done()
			return routecache.Answer{}, context.Cause(ctx)
		}}
		began := time.Now()
		_, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
		require.Equal(t, apierror.RouterNotReady, refusal.Reason)
		require.Equal(t, time.Second, time.Since(began))

		gone, cancel := context.WithCancel(t.Context())
		cancel() // the client has left
		_, refusal = h.decider().decide(gone, &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
		require.Equal(t, apierror.RouterNotReady, refusal.Reason)
		require.Equal(t, time.Second, time.Since(began))
	})
}

// Every error of the cache gives the client the same answer: try again.
func TestInternalErrorsAreNotShownToClients(t *testing.T) {
	h := always(routecache.Answer{}, errors.New("secret"))
	_, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
	require.NotContains(t, string(refusal.JSON()), "secret")
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
				a, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, func(d time.Duration) (func(), bool) {
					asked++
					require.Equal(t, 10*time.Second, d)
					return func() { released++ }, true
				})
				require.Equal(t, c.waited, time.Since(began))
				require.Equal(t, 1, asked, "Envoy can be asked for more time once only")
				require.Equal(t, 1, released)
				if c.reason == "" {
					require.Nil(t, refusal)
					require.Equal(t, "abc", a.id)
				} else {
					require.Nil(t, a)
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
	a, refusal := h.decider().decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
	require.Nil(t, a)
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
				d.park = func() (func(), bool) {
					if c.full {
						return nil, false
					}
					parked++
					return func() { parked-- }, true
				}
				a, refusal := d.decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, func(time.Duration) (func(), bool) { return func() {}, true })
				require.Equal(t, c.waited, time.Since(began))
				require.Zero(t, parked)
				if c.reason == "" {
					require.Nil(t, refusal)
					require.Equal(t, "abc", a.id)
					require.Equal(t, 1, h.unread())
					return
				}
				require.Nil(t, a)
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
				d.lookupTimeout = MaxWait
				began := time.Now()
				_, refusal := d.decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
				require.LessOrEqual(t, time.Since(began), MaxWait, name)
				require.Less(t, time.Since(began), envoy.MessageTimeout)
				if refusal != nil {
					require.Equal(t, 503, refusal.Code)
				}
			}
			h := slowly(took, starting, starting, starting, starting, starting, starting, starting, starting, starting, quiesced)
			d := h.decider()
			d.lookupTimeout = MaxWait
			var held time.Time
			_, refusal := d.decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, func(time.Duration) (func(), bool) {
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

func TestQuiesceBetweenLookupAndAnswerCancelsTheUse(t *testing.T) {
	h := always(routeTo("10.1.2.3", 8080), nil)
	d := h.decider()
	holds := []bool{false, true}
	h.holds = func() bool {
		held := holds[0]
		holds = holds[1:]
		return held
	}
	a, refusal := d.decide(t.Context(), &request{authority: "8080-abc." + domain, method: "GET"}, unheld)
	require.Nil(t, refusal)
	require.Equal(t, 1, h.unread(), "the first use was cancelled")
	a.use.Read()
	require.Zero(t, h.unread())
}
