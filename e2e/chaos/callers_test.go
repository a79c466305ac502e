package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
)

const (
	// callerField is the metadata field in which a claim says whose it is.
	callerField = "caller"
	// keyHeader makes a claim safe to repeat.
	keyHeader = "Idempotency-Key"
	// longTimeout sees the end of every test. shortTimeout does not: what is
	// claimed without a key, and not answered, has to be gone by then.
	longTimeout, shortTimeout = 3600, 10
	// patience is how long an impatient caller waits for one answer beside the wait
	// that it has asked for, in case a replica stands still.
	patience = time.Second
	// pauseMost is how long callers pause at the most before they ask again.
	pauseMost = 250 * time.Millisecond
	// claimWait is how long claims may wait for a pod, in seconds.
	claimWait = 2
)

// claimant is somebody who wants a sandbox.
type claimant struct {
	name string
	key  bool
	// timeout and wait are in seconds.
	timeout, wait int
	// patient: waits for one answer for as long as the connection lasts.
	patient bool
}

// ask sends one request to one replica.
func (g *ground) ask(replica, method, path, body, key string) (int, []byte, error) {
	return g.send(g.ctx, replica, method, path, body, key)
}

func (g *ground) send(ctx context.Context, replica, method, path, body, key string) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, replica+path, strings.NewReader(body))
	if err != nil {
		return 0, nil, err
	}
	if key != "" {
		r.Header.Set(keyHeader, key)
	}
	response, err := g.http.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(response.Body)
	if err != nil {
		return 0, nil, err // half an answer is none
	}
	return response.StatusCode, raw, nil
}

// call sends a request to one replica and writes it down.
func (g *ground) call(ctx context.Context, e event, method, path, body string) event {
	e.Began = g.tick()
	code, raw, err := g.send(ctx, e.Replica, method, path, body, e.Key)
	e.Code = code
	var s rest.Sandbox
	var refusal apierror.Error
	switch {
	case err != nil:
		e.Error = err.Error()
	case code == http.StatusOK || code == http.StatusCreated:
		if err := json.Unmarshal(raw, &s); err != nil {
			e.Code, e.Error = 0, err.Error()
			break
		}
		e.ID, e.Pod, e.For, e.EndAt = s.SandboxID, s.PodName, s.Metadata[callerField], s.EndAt
	case code >= http.StatusBadRequest:
		if err := json.Unmarshal(raw, &refusal); err != nil {
			e.Error = string(raw)
			break
		}
		e.Reason, e.Error = string(refusal.Reason), refusal.Message
		if refusal.SandboxID != "" {
			e.ID = refusal.SandboxID
		}
	}
	return g.add(e)
}

// claimAt makes one try to claim, at one replica.
func (g *ground) claimAt(ctx context.Context, replica string, c claimant, try int) event {
	e := event{Op: opClaim, Caller: c.name, Replica: replica}
	if c.key {
		e.Key = "key-" + c.name
	} else {
		e.Caller = fmt.Sprintf("%s.%d", c.name, try)
	}
	body := fmt.Sprintf(`{"templateID":%q,"timeout":%d,"waitTimeout":%d,"metadata":{%q:%q}}`, poolName, c.timeout, c.wait, callerField, e.Caller)
	return g.call(ctx, e, http.MethodPost, "/sandboxes", body)
}

// claim asks one replica after the other until it is answered, with a sandbox or
// that there is none. The answer's code is 0 if the scenario ended before.
func (g *ground) claim(random *rand.Rand, c claimant) event {
	limit := patience + time.Duration(c.wait)*time.Second
	if c.patient {
		limit = time.Hour
	}
	return g.untilAnswered(random, limit, func(ctx context.Context, replica string, try int) event {
		return g.claimAt(ctx, replica, c, try)
	})
}

func (g *ground) read(random *rand.Rand, id string) event {
	return g.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) event {
		return g.readAt(ctx, replica, id)
	})
}

func (g *ground) readAt(ctx context.Context, replica, id string) event {
	return g.call(ctx, event{Op: opRead, ID: id, Replica: replica}, http.MethodGet, "/sandboxes/"+id, "")
}

func (g *ground) release(random *rand.Rand, id string) event {
	return g.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) event {
		return g.call(ctx, event{Op: opRelease, ID: id, Replica: replica}, http.MethodDelete, "/sandboxes/"+id, "")
	})
}

// untilAnswered tries a call at random replicas, each for so long, until one says
// how it went.
func (g *ground) untilAnswered(random *rand.Rand, limit time.Duration, call func(ctx context.Context, replica string, try int) event) event {
	for try := 0; ; try++ {
		ctx, cancel := context.WithTimeout(g.ctx, limit)
		replica := g.berth.Allocators[random.IntN(len(g.berth.Allocators))].API
		e := call(ctx, replica, try)
		cancel()
		switch e.Code {
		case 0, http.StatusServiceUnavailable, http.StatusTooManyRequests:
		default:
			return e
		}
		pause := time.NewTimer(pauseMost/5 + time.Duration(random.Int64N(int64(pauseMost*4/5))))
		select {
		case <-g.ctx.Done():
			pause.Stop()
			return e
		case <-pause.C:
		}
	}
}

// life is what one caller does: it claims, looks at what it got, in many cases
// releases it, and uses its key again, before and after. answered is called when
// the claim was.
func (g *ground) life(name string, patient bool, answered func()) {
	random := g.random(name)
	c := claimant{name: name, timeout: shortTimeout, wait: claimWait, patient: patient}
	if random.IntN(2) == 0 {
		c.key, c.timeout = true, longTimeout
	}
	got := g.claim(random, c)
	answered()
	if got.Code != http.StatusCreated {
		return // the checker has an opinion
	}
	g.read(random, got.ID)
	if c.key && random.IntN(2) == 0 {
		g.claim(random, c)
	}
	if random.IntN(2) == 0 {
		return
	}
	g.release(random, got.ID)
	g.read(random, got.ID)
	if c.key && random.IntN(2) == 0 {
		g.claim(random, c)
	}
}

// burst is callers who all begin at one time.
type burst struct {
	g        *ground
	all      sync.WaitGroup
	answered chan struct{} // one for each claim that was answered
}

// burst begins the lives of n callers.
func (g *ground) burst(name string, n int) *burst {
	b := &burst{g: g, answered: make(chan struct{}, n)}
	for i := range n {
		b.all.Go(func() {
			g.life(fmt.Sprintf("%s-%d", name, i), i%4 == 0, func() { b.answered <- struct{}{} })
		})
	}
	return b
}

// after waits until n claims have been answered.
func (b *burst) after(n int) {
	b.g.Helper()
	for range n {
		select {
		case <-b.answered:
		case <-b.g.ctx.Done():
			b.g.Fatal("a burst of claims is not answered")
		}
	}
}

// end waits until all have done what they wanted.
func (b *burst) end() { b.all.Wait() }

// onceSent calls f and returns when the request that f makes with its context was
// sent; f goes on.
func onceSent(ctx context.Context, all *sync.WaitGroup, f func(context.Context)) {
	sent := make(chan struct{})
	var once sync.Once
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		WroteRequest: func(httptrace.WroteRequestInfo) { once.Do(func() { close(sent) }) },
	})
	all.Go(func() {
		f(ctx)
		once.Do(func() { close(sent) }) // it could not be sent
	})
	<-sent
}
