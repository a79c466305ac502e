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
)

const (
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

// claimant is a caller that wants a sandbox.
type claimant struct {
	name string
	key  bool
	// timeout and wait are in seconds.
	timeout, wait int
	// patient: waits for one answer for as long as the connection lasts.
	patient bool
}

// claimAt makes one try to claim, at one replica.
func (g *ground) claimAt(ctx context.Context, replica string, c claimant, try int) history.Event {
	e := history.Event{Kind: history.Claim, Claim: c.name}
	if c.key {
		e.Key = "key-" + c.name
	} else {
		e.Claim = fmt.Sprintf("%s.%d", c.name, try)
	}
	body := fmt.Sprintf(`{"templateID":%q,"timeout":%d,"waitTimeout":%d,"metadata":{%q:%q}}`,
		poolName, c.timeout, c.wait, harness.ClaimField, e.Claim)
	return g.Call(ctx, replica, e, http.MethodPost, "/sandboxes", body)
}

// claim asks one replica after the other until it is answered, with a sandbox or
// that there is none. The answer's code is 0 if the scenario ended before.
func (g *ground) claim(random *rand.Rand, c claimant) history.Event {
	limit := patience + time.Duration(c.wait)*time.Second
	if c.patient {
		limit = time.Hour
	}
	return g.untilAnswered(random, limit, func(ctx context.Context, replica string, try int) history.Event {
		return g.claimAt(ctx, replica, c, try)
	})
}

func (g *ground) read(random *rand.Rand, id string) history.Event {
	return g.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) history.Event {
		return g.readAt(ctx, replica, id)
	})
}

func (g *ground) readAt(ctx context.Context, replica, id string) history.Event {
	return g.Call(ctx, replica, history.Event{Kind: history.Read, Sandbox: id}, http.MethodGet, "/sandboxes/"+id, "")
}

func (g *ground) release(random *rand.Rand, id string) history.Event {
	return g.untilAnswered(random, patience, func(ctx context.Context, replica string, _ int) history.Event {
		return g.Call(ctx, replica, history.Event{Kind: history.Release, Sandbox: id}, http.MethodDelete, "/sandboxes/"+id,
			"")
	})
}

// untilAnswered tries a call at random replicas, each for so long, until one says
// how it went.
func (g *ground) untilAnswered(random *rand.Rand, limit time.Duration,
	call func(ctx context.Context, replica string, try int) history.Event) history.Event {
	for try := 0; ; try++ {
		ctx, cancel := context.WithTimeout(g.ctx, limit)
		e := call(ctx, g.AnyAPI(random), try)
		cancel()
		switch e.Code {
		case 0, http.StatusServiceUnavailable, http.StatusTooManyRequests:
		default:
			return e
		}
		harness.Pause(g.ctx, pauseMost/5+harness.Within(random, pauseMost*4/5))
		if g.ctx.Err() != nil {
			return e
		}
	}
}

// life is what one caller does: it claims, looks at what it got, in many cases
// releases it, and uses its key again, before and after. answered is called when
// the claim was.
func (g *ground) life(name string, patient bool, answered func()) {
	random := g.Random(name)
	c := claimant{name: name, timeout: shortTimeout, wait: claimWait, patient: patient}
	if random.IntN(2) == 0 {
		c.key, c.timeout = true, longTimeout
	}
	got := g.claim(random, c)
	answered()
	if got.Code != http.StatusCreated {
		return // the judges say whether that is right
	}
	g.read(random, got.Sandbox)
	if c.key && random.IntN(2) == 0 {
		g.claim(random, c)
	}
	if random.IntN(2) == 0 {
		return
	}
	g.release(random, got.Sandbox)
	g.read(random, got.Sandbox)
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
