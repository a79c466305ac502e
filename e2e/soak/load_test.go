package soak

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	claimers = 10
	// sleepers claim sandboxes that they have sleep. Requests wake them.
	sleepers = 6
	// users send one request at a time, streams keep a WebSocket.
	users, streams = 150, 6
	// remembered is how long requests are sent to a sandbox that is gone. Another one has its
	// address by then.
	remembered = 40 * time.Second
	// requestHeader names a request. Pods record it.
	requestHeader = "X-Soak-Request"
)

// sandbox is one that requests are sent to.
type sandbox struct {
	id   string
	over time.Duration // when it was released, 0: not yet
}

// knows adds a sandbox that was answered.
func (g *ground) knows(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.named[id] {
		g.named[id] = true
		g.known = append(g.known, sandbox{id: id})
	}
}

// isOver notes that a sandbox was released, and forgets those that were long ago.
func (g *ground) isOver(id string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := bootclock.Now()
	kept := g.known[:0]
	for _, s := range g.known {
		if s.id == id {
			s.over = now
		}
		if s.over == 0 || now-s.over < remembered {
			kept = append(kept, s)
		}
	}
	g.known = kept
}

// choose returns a sandbox to send a request to: two times out of three one that is not
// released, else one that is.
func (g *ground) choose(random *rand.Rand) string {
	g.mu.Lock()
	defer g.mu.Unlock()
	over := random.IntN(3) == 0
	for range 8 {
		if len(g.known) == 0 {
			return ""
		}
		if s := g.known[random.IntN(len(g.known))]; (s.over != 0) == over {
			return s.id
		}
	}
	return ""
}

// call calls the API of any allocator.
func (g *ground) call(ctx context.Context, random *rand.Rand, e history.Event, method, path,
	body string) history.Event {
	ctx, cancel := context.WithTimeout(ctx, 6*time.Second)
	defer cancel()
	return g.Call(ctx, g.AnyAPI(random), e, method, path, body)
}

// claimOf is a claim of a sandbox that lives for timeout at the most.
func claimOf(name string, timeout time.Duration) history.Event {
	return history.Event{Kind: history.Claim, Claim: name, Key: name, Timeout: timeout}
}

func claimBody(timeout time.Duration) string {
	return fmt.Sprintf(`{"templateID":%q,"timeout":%d,"waitTimeout":3}`, poolName, int(timeout/time.Second))
}

// claimer claims one sandbox after the other, until ctx ends.
func (g *ground) claimer(ctx context.Context, name string) {
	random := g.Random(name)
	for n := 0; ctx.Err() == nil; n++ {
		timeout := time.Minute
		expires := random.IntN(6) == 0
		stays := 500*time.Millisecond + harness.Within(random, 5*time.Second)
		if expires {
			timeout = max(time.Second, stays.Truncate(time.Second))
		}
		e, body := claimOf(fmt.Sprintf("%s-%d", name, n), timeout), claimBody(timeout)
		got := g.call(ctx, random, e, http.MethodPost, "/sandboxes", body)
		for got.Code != http.StatusCreated && got.Code != http.StatusGone && ctx.Err() == nil {
			wait.Sleep(ctx, 50*time.Millisecond+harness.Within(random, 200*time.Millisecond))
			got = g.call(ctx, random, e, http.MethodPost, "/sandboxes", body)
		}
		if got.Code != http.StatusCreated {
			continue
		}
		g.knows(got.Sandbox)
		if expires {
			wait.Sleep(ctx, timeout)
			g.isOver(got.Sandbox)
			continue
		}
		wait.Sleep(ctx, stays)
		g.release(ctx, random, got.Sandbox)
	}
}

// sleeper claims one sandbox after the other, and has each fall asleep some times, until ctx ends.
func (g *ground) sleeper(ctx context.Context, name string) {
	random := g.Random(name)
	for n := 0; ctx.Err() == nil; n++ {
		e, body := claimOf(fmt.Sprintf("%s-%d", name, n), 5*time.Minute), claimBody(5*time.Minute)
		got := g.call(ctx, random, e, http.MethodPost, "/sandboxes", body)
		if got.Code != http.StatusCreated {
			wait.Sleep(ctx, 50*time.Millisecond+harness.Within(random, 200*time.Millisecond))
			continue
		}
		g.knows(got.Sandbox)
		for range 1 + random.IntN(3) {
			g.sleep(ctx, random, got.Sandbox)
			wait.Sleep(ctx, harness.Within(random, 3*time.Second))
		}
		g.release(ctx, random, got.Sandbox)
	}
}

// sleep has a sandbox fall asleep, or does without that: not all routers may be connected.
func (g *ground) sleep(ctx context.Context, random *rand.Rand, id string) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for ctx.Err() == nil {
		e := history.Event{Kind: history.Sleep, Sandbox: id}
		e = g.Call(ctx, g.AnyAPI(random), e, http.MethodPost, "/sandboxes/"+id+"/pause", "{}")
		if e.Code == http.StatusNoContent || e.Code == http.StatusNotFound || e.Code == http.StatusConflict {
			return
		}
		wait.Sleep(ctx, 100*time.Millisecond+harness.Within(random, time.Second))
	}
}

func (g *ground) release(ctx context.Context, random *rand.Rand, id string) {
	e := history.Event{Kind: history.Release, Sandbox: id}
	for ctx.Err() == nil {
		got := g.call(ctx, random, e, http.MethodDelete, "/sandboxes/"+id, "")
		if got.Code == http.StatusNoContent || got.Code == http.StatusNotFound {
			break
		}
		wait.Sleep(ctx, 50*time.Millisecond+harness.Within(random, 200*time.Millisecond))
	}
	g.isOver(id)
}

// load sends requests.
type load struct {
	*ground
	limiter *rate.Limiter
	names   atomic.Uint64
}

// start lets claimers, users and streams work until ctx ends.
func (l *load) start(ctx context.Context, all *sync.WaitGroup) {
	for i := range claimers {
		all.Go(func() { l.claimer(ctx, fmt.Sprintf("claimer-%d", i)) })
	}
	for i := range sleepers {
		all.Go(func() { l.sleeper(ctx, fmt.Sprintf("sleeper-%d", i)) })
	}
	for i := range stoppers {
		all.Go(func() { l.stopper(ctx, i) })
	}
	for i := range users {
		all.Go(func() {
			random := l.Random(fmt.Sprintf("user-%d", i))
			for l.limiter.Wait(ctx) == nil {
				if id := l.choose(random); id != "" {
					l.use(ctx, random, id)
				}
			}
		})
	}
	for i := range streams {
		all.Go(func() {
			random := l.Random(fmt.Sprintf("stream-%d", i))
			for ctx.Err() == nil {
				if id := l.choose(random); id != "" {
					l.stream(ctx, random, id)
				}
				wait.Sleep(ctx, harness.Within(random, time.Second))
			}
		})
	}
}

// begin makes the event of a request, and the host that it is for.
func (l *load) begin(random *rand.Rand, id, what string) (e history.Event, g *harness.Gateway, host string) {
	g = l.Gateways[random.IntN(len(l.Gateways))]
	host = id + "." + l.Stack.Domain
	if ports := stack.DemoPorts(); random.IntN(2) == 0 {
		host = fmt.Sprintf("%d-%s", ports[random.IntN(len(ports))], host)
	}
	return history.Event{Kind: history.Request, What: what, Sandbox: id, Gateway: g.Name,
		Request: strconv.FormatUint(l.names.Add(1), 10)}, g, host
}

// use sends one request.
func (l *load) use(ctx context.Context, random *rand.Rand, id string) {
	// Some callers do not wait for long.
	ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond+harness.Within(random, 7*time.Second))
	defer cancel()
	method, path, what := http.MethodGet, "/", "get"
	// A body that cannot be had again: net/http must not send a request twice by itself.
	body := io.NopCloser(http.NoBody)
	switch n := random.IntN(100); {
	case n < 25:
		method, what, body = http.MethodPost, "post", io.NopCloser(bytes.NewReader(make([]byte, 1+random.IntN(8<<10))))
	case n < 35:
		method, what = http.MethodPost, "http2"
	case n < 40:
		what, path = "slow", fmt.Sprintf("/sleep?ms=%d", random.IntN(1500))
	}
	e, g, host := l.begin(random, id, what)
	r, err := http.NewRequestWithContext(ctx, method, "http://"+g.Addr.String()+path, body)
	if err != nil {
		l.Errorf("request: %v", err)
		return
	}
	if what == "http2" {
		r.Header.Set("Content-Type", "application/grpc")
	}
	l.send(e, g, r, host)
}

// send sends a request, records it with its answer, and returns that.
func (l *load) send(e history.Event, g *harness.Gateway, r *http.Request, host string) history.Event {
	r.Host = host
	r.Header.Set(requestHeader, e.Request)
	raw := harness.Send(&e, g.Client, r)
	if e.Code != 0 && e.Reason == "" && e.Error == "" && e.What != "slow" {
		var who struct {
			PodUID string `json:"podUID"`
		}
		if err := json.Unmarshal(raw, &who); err != nil || who.PodUID == "" {
			e.Error = fmt.Sprintf("no pod names itself: %.200s", raw)
		}
		e.PodUID = who.PodUID
	}
	return l.History.Add(e)
}

// stream keeps a WebSocket for some seconds.
func (l *load) stream(ctx context.Context, random *rand.Rand, id string) {
	ctx, cancel := context.WithTimeout(ctx, time.Second+harness.Within(random, 15*time.Second))
	defer cancel()
	e, g, host := l.begin(random, id, "websocket")
	e.Began = bootclock.Now()
	defer func() {
		e.Ended = bootclock.Now()
		l.History.Add(e)
	}()
	c, response, err := websocket.Dial(ctx, "ws://"+g.Addr.String()+"/ws", &websocket.DialOptions{
		HTTPClient: g.Streams, Host: host, HTTPHeader: http.Header{requestHeader: {e.Request}},
	})
	harness.Answered(&e, response)
	if err != nil {
		e.Error = err.Error()
		return
	}
	defer func() { _ = c.CloseNow() }()
	for ctx.Err() == nil {
		if err := c.Write(ctx, websocket.MessageText, []byte(e.Request)); err != nil {
			return
		}
		if _, message, err := c.Read(ctx); err != nil {
			return
		} else if string(message) != e.Request {
			l.Errorf("the WebSocket of request %s answers %q", e.Request, message)
		}
		wait.Sleep(ctx, harness.Within(random, 500*time.Millisecond))
	}
}
