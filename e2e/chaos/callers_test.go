package chaos

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptrace"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// longTimeout ends after every test. shortTimeout ends before, because a sandbox that was
	// claimed without a key and not answered must be gone at the end.
	longTimeout, shortTimeout = 3600, 10
	// patience is how much longer than its claim may wait an impatient caller waits for an
	// answer. A paused replica does not answer.
	patience = time.Second
	// pauseMost is the longest pause of a caller before it asks again.
	pauseMost = 250 * time.Millisecond
	// claimWait is how long claims may wait for a pod, in seconds.
	claimWait = 2
)

// claimant is a caller that wants a sandbox.
type claimant struct {
	name string
	key  bool
	// timeout and wait are in seconds.
	timeout, wait int
	// patient callers wait for an answer as long as the connection lasts.
	patient bool
}

// claimAt makes one try to claim, at one replica.
func (p *pool) claimAt(ctx context.Context, replica string, c claimant, try int) history.Event {
	e := history.Event{Kind: history.Claim, Claim: c.name}
	if c.key {
		e.Key = "key-" + c.name
	} else {
		e.Claim = fmt.Sprintf("%s.%d", c.name, try)
	}
	body := fmt.Sprintf(`{"templateID":%q,"timeout":%d,"waitTimeout":%d,"metadata":{%q:%q}}`,
		p.name, c.timeout, c.wait, harness.ClaimField, e.Claim)
	return p.Call(ctx, replica, e, http.MethodPost, "/sandboxes", body)
}

// claim asks one replica after the other until one answers with a sandbox or that there is none.
// The answer's code is 0 if the scenarios ended before.
func (p *pool) claim(random *rand.Rand, c claimant) history.Event {
	limit := patience + time.Duration(c.wait)*time.Second
	if c.patient {
		limit = time.Hour
	}
	return p.untilAnswered(random, limit, func(ctx context.Context, replica string, try int) history.Event {
		return p.claimAt(ctx, replica, c, try)
	})
}

func (p *pool) read(random *rand.Rand, id string) history.Event {
	return p.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) history.Event {
		return p.readAt(ctx, replica, id)
	})
}

func (p *pool) readAt(ctx context.Context, replica, id string) history.Event {
	return p.Call(ctx, replica, history.Event{Kind: history.Read, Sandbox: id}, http.MethodGet, "/sandboxes/"+id, "")
}

func (p *pool) release(random *rand.Rand, id string) history.Event {
	return p.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) history.Event {
		return p.Call(ctx, replica, history.Event{Kind: history.Release, Sandbox: id}, http.MethodDelete, "/sandboxes/"+id,
			"")
	})
}

// untilAnswered tries a call at random replicas until one answers it. Each gets so much time.
func (p *pool) untilAnswered(random *rand.Rand, limit time.Duration,
	call func(ctx context.Context, replica string, try int) history.Event) history.Event {
	for try := 0; ; try++ {
		ctx, cancel := context.WithTimeout(p.ctx, limit)
		e := call(ctx, p.AnyAPI(random), try)
		cancel()
		switch e.Code {
		case 0, http.StatusServiceUnavailable, http.StatusTooManyRequests:
		default:
			return e
		}
		wait.Sleep(p.ctx, pauseMost/5+harness.Within(random, pauseMost*4/5))
		if p.ctx.Err() != nil {
			return e
		}
	}
}

// life is one caller. It claims a sandbox, reads it, releases it in many cases, and repeats its
// key before and after that. answered is called when the claim is answered.
func (p *pool) life(name string, patient bool, answered func()) {
	random := p.Random(name)
	c := claimant{name: name, timeout: shortTimeout, wait: claimWait, patient: patient}
	if random.IntN(2) == 0 {
		c.key, c.timeout = true, longTimeout
	}
	got := p.claim(random, c)
	answered()
	if got.Code != http.StatusCreated {
		return // the judges say whether that is right
	}
	p.read(random, got.Sandbox)
	if c.key && random.IntN(2) == 0 {
		p.claim(random, c)
	}
	if random.IntN(2) == 0 {
		return
	}
	p.release(random, got.Sandbox)
	p.read(random, got.Sandbox)
	if c.key && random.IntN(2) == 0 {
		p.claim(random, c)
	}
}

// burst is a group of callers that begin at one time.
type burst struct {
	pool     *pool
	all      sync.WaitGroup
	answered chan struct{} // one for each claim that was answered
}

// burst begins the lives of n callers.
func (p *pool) burst(name string, n int) *burst {
	b := &burst{pool: p, answered: make(chan struct{}, n)}
	for i := range n {
		b.all.Go(func() {
			p.life(fmt.Sprintf("%s-%d", name, i), i%4 == 0, func() { b.answered <- struct{}{} })
		})
	}
	return b
}

// after waits until n claims have been answered.
func (b *burst) after(n int) {
	b.pool.Helper()
	for range n {
		select {
		case <-b.answered:
		case <-b.pool.ctx.Done():
			b.pool.Fatal("a burst of claims is not answered")
		}
	}
}

// end waits for all callers.
func (b *burst) end() { b.all.Wait() }

// onceSent starts f and returns when f has sent the request that it makes with its context.
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
