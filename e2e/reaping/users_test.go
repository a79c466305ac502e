package reaping

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// near is how far from a deadline most requests are sent, at the most.
	near = 190 * time.Millisecond
	// lookEvery is how often routers look: what ends is in use until the next look begins.
	lookEvery = time.Second
	// answerMost is how long a client waits for an answer, beyond what it asks for.
	answerMost = 8 * time.Second
)

// users use sandboxes.
type users struct {
	*ground
	names atomic.Uint64 // of claims and requests
}

// user claims one sandbox after the other and uses it, until ctx ends.
func (u *users) user(ctx context.Context, name string) {
	random := u.Random(name)
	for ctx.Err() == nil {
		timeout := []time.Duration{5 * time.Second, 5 * time.Second, 5 * time.Second, 6 * time.Second,
			7 * time.Second}[random.IntN(5)]
		if id := u.claim(ctx, random, timeout); id != "" {
			u.play(ctx, random, id, timeout)
		} else {
			wait.Sleep(ctx, 100*time.Millisecond+harness.Within(random, 400*time.Millisecond))
		}
	}
}

// call calls the API of any allocator.
func (u *users) call(ctx context.Context, random *rand.Rand, e history.Event, path, body string) history.Event {
	ctx, cancel := context.WithTimeout(ctx, answerMost)
	defer cancel()
	return u.Call(ctx, u.AnyAPI(random), e, http.MethodPost, path, body)
}

// claim returns the sandbox, "" if there is none. If the answer is lost there may be a
// sandbox that is never used.
func (u *users) claim(ctx context.Context, random *rand.Rand, timeout time.Duration) string {
	name := fmt.Sprintf("claim-%d", u.names.Add(1))
	// A claim is not called off: it would be a release that is not for being idle.
	e := u.call(context.WithoutCancel(ctx), random, history.Event{Kind: history.Claim, Claim: name, IdleTimeout: timeout},
		"/sandboxes", fmt.Sprintf(`{"templateID":%q,"idleTimeout":%d,"waitTimeout":3}`, poolName, int(timeout/time.Second)))
	if e.Code != http.StatusCreated {
		return ""
	}
	return e.Sandbox
}

// play uses a sandbox until it is gone or was left alone.
func (u *users) play(ctx context.Context, random *rand.Rand, id string, timeout time.Duration) {
	last := bootclock.Now() // until then its last use counts
	until := func(moment time.Duration) bool {
		wait.Sleep(ctx, moment-bootclock.Now())
		return ctx.Err() == nil
	}
	for range 4 + random.IntN(9) {
		gone := false
		switch n := random.IntN(100); {
		case n < 60: // before the deadline
			if !until(last + timeout - harness.Within(random, near)) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 68: // well before it
			if !until(last + timeout - time.Second) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 76: // after it
			if !until(last + timeout + harness.Within(random, near)) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 80:
			if !until(last + timeout - harness.Within(random, time.Second)) {
				return
			}
			e := u.call(ctx, random, history.Event{Kind: history.KeepAlive, Sandbox: id}, "/v1/sandboxes/"+id+"/keepalive", "")
			if e.Code == http.StatusNoContent {
				last = e.Began
			}
		default:
			if !until(last + harness.Within(random, timeout-time.Second)) {
				return
			}
			what := []string{webSocket, sse, longPoll, upload}[random.IntN(4)]
			last, gone = u.send(ctx, random, id, what, timeout+harness.Within(random, 2*time.Second), random.IntN(8) == 0)
		}
		if gone {
			return
		}
	}
	if random.IntN(5) < 2 {
		return
	}
	// The moment of its release: up to a look after the idle timeout, but for a keep-alive. On a busy machine it comes
	// later.
	for n := range 5 {
		after := harness.Within(random, time.Duration(1+n)*(lookEvery+500*time.Millisecond))
		if !until(last + timeout + after) {
			return
		}
		var gone bool
		if last, gone = u.send(ctx, random, id, short, 0, false); gone {
			return
		}
	}
}

// send sends one request through any gateway. It returns until when that counts as use, and whether
// the sandbox is gone. With abandoned the client does not wait for the end.
func (u *users) send(ctx context.Context, random *rand.Rand, id, what string, hold time.Duration,
	abandoned bool) (until time.Duration, gone bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hold+answerMost)
	defer cancel()
	g := u.Gateways[random.IntN(len(u.Gateways))]
	e := history.Event{Kind: history.Request, Sandbox: id, Gateway: g.Name, What: what,
		Request: fmt.Sprint(u.names.Add(1))}
	waits := hold + answerMost
	if abandoned {
		e.What, waits = history.Abandoned, hold-harness.Within(random, hold/4)
	}
	ctx, giveUp := context.WithTimeout(ctx, waits)
	defer giveUp()
	var who string
	if what == webSocket {
		e.Began = bootclock.Now()
		who = u.socket(ctx, g, &e, hold)
		e.Ended = bootclock.Now()
	} else {
		who = u.exchange(ctx, g, &e, what, hold)
	}
	if e.Reason == "" && e.Error == "" {
		if n, err := fmt.Sscan(who, &e.Address, &e.Answered); n != 2 || err != nil {
			u.Errorf("request %s: no pod names itself: %.200q", e.Request, who)
		}
	}
	u.History.Add(e)
	return max(e.Ended, e.Began+envoy.ConnectWindow), e.Code == http.StatusGone && e.Reason != ""
}

// url asks a pod to keep a request for so long.
func (u *users) url(g *harness.Gateway, what string, hold time.Duration) string {
	return fmt.Sprintf("http://%v/%s?hold=%v", g.Addr, what, hold)
}

func (u *users) exchange(ctx context.Context, g *harness.Gateway, e *history.Event, what string,
	hold time.Duration) (who string) {
	// A body that cannot be had again: net/http must not send a request twice by itself.
	method, body := http.MethodGet, io.NopCloser(http.NoBody)
	if what == upload {
		method, body = http.MethodPost, &slowBody{ctx: ctx, hold: hold}
	}
	r, err := http.NewRequestWithContext(ctx, method, u.url(g, what, hold), body)
	if err != nil {
		u.Errorf("request: %v", err)
		return ""
	}
	r.Host = e.Sandbox + "." + u.Stack.Domain
	r.Header.Set(requestHeader, e.Request)
	return string(harness.Send(e, g.Client, r))
}

// slowBody is one byte at once and another one at the end.
type slowBody struct {
	ctx  context.Context
	hold time.Duration
	sent int
}

func (b *slowBody) Read(p []byte) (int, error) {
	switch b.sent++; b.sent {
	case 1:
	case 2:
		wait.Sleep(b.ctx, b.hold)
		if err := b.ctx.Err(); err != nil {
			return 0, err
		}
	default:
		return 0, io.EOF
	}
	p[0] = 'x'
	return 1, nil
}

func (*slowBody) Close() error { return nil }

// socket keeps a silent WebSocket until the pod closes it.
func (u *users) socket(ctx context.Context, g *harness.Gateway, e *history.Event, hold time.Duration) (who string) {
	c, response, err := websocket.Dial(ctx, u.url(g, webSocket, hold), &websocket.DialOptions{
		HTTPClient: g.Streams, Host: e.Sandbox + "." + u.Stack.Domain, HTTPHeader: http.Header{requestHeader: {e.Request}},
	})
	harness.Answered(e, response)
	if err != nil {
		if e.Reason == "" {
			e.Error = err.Error()
		}
		return ""
	}
	defer func() { _ = c.CloseNow() }()
	_, raw, err := c.Read(ctx)
	if err == nil {
		_, _, err = c.Read(ctx)
		if websocket.CloseStatus(err) == websocket.StatusNormalClosure {
			err = nil
		}
	}
	if err != nil {
		e.Error = err.Error()
	}
	return string(raw)
}
