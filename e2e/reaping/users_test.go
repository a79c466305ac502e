package reaping

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/reaping/history"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
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
	names atomic.Uint64 // of requests
}

// user claims one sandbox after the other and uses it, until ctx ends.
func (u *users) user(ctx context.Context, name string) {
	random := u.random(name)
	for ctx.Err() == nil {
		timeout := []time.Duration{5 * time.Second, 5 * time.Second, 5 * time.Second, 6 * time.Second, 7 * time.Second}[random.IntN(5)]
		if id := u.claim(ctx, random, timeout); id != "" {
			u.play(ctx, random, id, timeout)
		} else {
			chance.Pause(ctx, 100*time.Millisecond+chance.Within(random, 400*time.Millisecond))
		}
	}
}

// call asks any allocator. response is nil without an answer.
func (u *users) call(ctx context.Context, random *rand.Rand, path, body string) (code int, raw []byte) {
	ctx, cancel := context.WithTimeout(ctx, answerMost)
	defer cancel()
	api := u.berth.Allocators[random.IntN(len(u.berth.Allocators))].API
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, api+path, strings.NewReader(body))
	if err != nil {
		u.Errorf("request: %v", err)
		return 0, nil
	}
	response, err := u.http.Do(r)
	if err != nil {
		return 0, nil
	}
	defer response.Body.Close()
	if raw, err = io.ReadAll(response.Body); err != nil {
		return 0, nil // half an answer is none
	}
	return response.StatusCode, raw
}

// claim returns the sandbox, "" if there is none. If the answer is lost there may be one
// that nobody knows of.
func (u *users) claim(ctx context.Context, random *rand.Rand, timeout time.Duration) string {
	began := bootclock.Now()
	// A claim is not called off: it would be a release that is not for being idle.
	code, raw := u.call(context.WithoutCancel(ctx), random, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"idleTimeout":%d,"waitTimeout":3}`, poolName, int(timeout/time.Second)))
	if code != http.StatusCreated {
		return ""
	}
	var s rest.Sandbox
	if err := json.Unmarshal(raw, &s); err != nil {
		u.Errorf("claim: %v", err)
		return ""
	}
	u.log.add(history.Event{Kind: history.Claim, Began: began, Ended: bootclock.Now(), Sandbox: s.SandboxID, IdleTimeout: timeout})
	return s.SandboxID
}

// play uses a sandbox until it is gone or was left alone.
func (u *users) play(ctx context.Context, random *rand.Rand, id string, timeout time.Duration) {
	last := bootclock.Now() // the end of its last use
	until := func(moment time.Duration) bool {
		chance.Pause(ctx, moment-bootclock.Now())
		return ctx.Err() == nil
	}
	for range 4 + random.IntN(9) {
		gone := false
		switch n := random.IntN(100); {
		case n < 60: // before the deadline
			if !until(last + timeout - chance.Within(random, near)) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 68: // well before it
			if !until(last + timeout - time.Second) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 76: // after it
			if !until(last + timeout + chance.Within(random, near)) {
				return
			}
			last, gone = u.send(ctx, random, id, short, 0, false)
		case n < 80:
			if !until(last + timeout - chance.Within(random, time.Second)) {
				return
			}
			began := bootclock.Now()
			code, _ := u.call(ctx, random, "/v1/sandboxes/"+id+"/keepalive", "")
			u.log.add(history.Event{Kind: history.KeepAlive, Began: began, Ended: bootclock.Now(), Sandbox: id, Code: code})
			if code == http.StatusNoContent {
				last = began
			}
		default:
			if !until(last + chance.Within(random, timeout-time.Second)) {
				return
			}
			what := []string{webSocket, sse, longPoll, upload}[random.IntN(4)]
			last, gone = u.send(ctx, random, id, what, timeout+chance.Within(random, 2*time.Second), random.IntN(8) == 0)
		}
		if gone {
			return
		}
	}
	if random.IntN(5) < 2 {
		return
	}
	// The moment of its release: up to a look after the idle timeout, but for a keep-alive.
	for range 5 {
		after := chance.Within(random, lookEvery+500*time.Millisecond)
		if !until(last + timeout + after) {
			return
		}
		var gone bool
		if last, gone = u.send(ctx, random, id, short, 0, false); gone {
			return
		}
	}
}

// send sends one request through any gateway. It returns when that ended, and whether
// the sandbox is gone. With abandoned the client does not wait for the end.
func (u *users) send(ctx context.Context, random *rand.Rand, id, what string, hold time.Duration, abandoned bool) (ended time.Duration, gone bool) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), hold+answerMost)
	defer cancel()
	g := u.gateways[random.IntN(len(u.gateways))]
	e := history.Event{Kind: history.Request, Sandbox: id, Gateway: g.name, What: what, Request: u.names.Add(1)}
	waits := hold + answerMost
	if abandoned {
		e.What, waits = history.Abandoned, hold-chance.Within(random, hold/4)
	}
	ctx, giveUp := context.WithTimeout(ctx, waits)
	defer giveUp()
	e.Began = bootclock.Now()
	var who string
	if what == webSocket {
		who = u.socket(ctx, g, &e, hold)
	} else {
		who = u.exchange(ctx, g, &e, what, hold)
	}
	e.Ended = bootclock.Now()
	if e.Reason == "" && e.Error == "" {
		if n, err := fmt.Sscan(who, &e.Address, &e.Answered); n != 2 || err != nil {
			u.Errorf("request %d: no pod says that it is one: %.200q", e.Request, who)
		}
	}
	u.log.add(e)
	return e.Ended, e.Code == http.StatusGone && e.Reason != ""
}

// url asks a pod to keep a request for so long.
func (u *users) url(g *gateway, what string, hold time.Duration) string {
	return fmt.Sprintf("http://%v/%s?hold=%v", g.Addr, what, hold)
}

func (u *users) exchange(ctx context.Context, g *gateway, e *history.Event, what string, hold time.Duration) (who string) {
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
	r.Host = e.Sandbox + "." + u.berth.Domain
	r.Header.Set(requestHeader, fmt.Sprint(e.Request))
	response, err := g.client.Do(r)
	if err != nil {
		e.Error = err.Error()
		return ""
	}
	defer response.Body.Close()
	e.Code, e.Reason = response.StatusCode, response.Header.Get(envoy.ReasonHeader)
	raw, err := io.ReadAll(io.LimitReader(response.Body, 64<<10))
	if err != nil {
		e.Error = err.Error()
	}
	return string(raw)
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
		chance.Pause(b.ctx, b.hold)
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
func (u *users) socket(ctx context.Context, g *gateway, e *history.Event, hold time.Duration) (who string) {
	c, response, err := websocket.Dial(ctx, u.url(g, webSocket, hold), &websocket.DialOptions{
		HTTPClient: g.streams, Host: e.Sandbox + "." + u.berth.Domain, HTTPHeader: http.Header{requestHeader: {fmt.Sprint(e.Request)}},
	})
	if response != nil {
		e.Code, e.Reason = response.StatusCode, response.Header.Get(envoy.ReasonHeader)
	}
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
