package core

import (
	"cmp"
	"fmt"
	"time"
)

const (
	// The replacements of pods that end early wait for so long, first and at most.
	firstEndPause = time.Second
	maxEndPause   = time.Minute
	// stableAfter: a pod that was warm for so long has not ended early.
	stableAfter = 10 * time.Second
)

// backOff delays the replacement of idle pods that end early: before they were warm, or by
// themselves within stableAfter of that. Otherwise a template whose program ends at once would
// create pods as fast as nodes can start them. Pods that were claimed, and pods that end later,
// are replaced at once. The end of a sandbox's pod never counts as early.
//
// The pause doubles with each round in which pods end early. It is reset when no pod has ended
// early for stableAfter since one became warm, and when the template changes.
type backOff struct {
	held    int           // pods that ended early, and are not replaced yet
	pause   time.Duration // 0: none has ended early
	retryAt time.Duration // boot clock; 0: nothing is held
	warmAt  time.Duration // boot clock: when the first pod since the last early end became warm; 0: none has
	trouble Trouble
}

// Trouble says why a pool delays the creation of pods, in text for people. The zero value means
// that it does not.
type Trouble struct {
	// Pod is the last one that ended early, Reason one of PodReasons, Why what is known of its end.
	Pod, Reason, Why string
	// Retry is when the replacement is created, in whole seconds; zero: it was.
	Retry time.Time
}

// Why an idle pod ended that was deleted.
const (
	deletedEarly = "it was deleted before it was ready"
	deletedWarm  = "it was deleted, and not by its pool"
)

// ends returns why an idle pod ends that is seen to.
func (p *pod) ends() (reason, why string) {
	switch {
	case p.seen.Finished:
		return cmp.Or(p.seen.Reason, PodFailed), cmp.Or(p.seen.Why, "its containers have ended")
	case p.seen.NoExecute && (p.seen.Ready || p.node.usable): // as for a sandbox: see removed
		return PodEvicted, p.seen.Why
	case p.seen.Reason == PodEvicted || p.seen.Reason == PodPreempted || p.seen.Reason == PodNodeLost:
		return p.seen.Reason, p.seen.Why
	case p.warmAt != 0:
		return PodDeleted, deletedWarm
	}
	return PodDeleted, deletedEarly
}

// failed acts on an idle pod that is seen to end. A pod that was warm for stableAfter, or was deleted after
// it was warm, has not ended early.
func (c *Core) failed(p *pod) {
	reason, why := p.ends()
	if p.warmAt == 0 || p.seen.Finished && c.now.Boot-p.warmAt < stableAfter {
		p.endedEarly(c.now, reason, why)
	}
	c.recordFailure(p, reason, why)
}

// recordFailure notes why the pool replaces an idle pod.
func (c *Core) recordFailure(p *pod, reason, why string) {
	if !p.pool.known || p.pool.Deleting {
		return
	}
	p.pool.failed = PodFailure{Pod: p.seen.Key.Name, Reason: reason, Why: why, At: c.now.Wall.Truncate(time.Second)}
	c.emit(IdlePodFailed{Pod: p.seen.Key, Pool: p.pool.Key, Failure: p.pool.failed})
}

// lateCheckEvery is how often pods that do not become ready are looked for.
const lateCheckEvery = time.Second

// replaceLate replaces the pods of a pool that were not ready in time, each after the pause of a pod that ends
// early. A pod that no node has is left to the scheduler: another one would wait like it.
func (c *Core) replaceLate(pool *pool) {
	if c.recovering || !pool.known || pool.Deleting || pool.Paused || pool.ReadyWithin == 0 || c.now.Boot < pool.lateCheckAt ||
		pool.pods.count(podPending) == 0 {
		return
	}
	pool.lateCheckAt = c.now.Boot + lateCheckEvery
	for _, p := range pool.pods.sorted(podPending) {
		if p.unreadySince == 0 || c.now.Boot-p.unreadySince < pool.ReadyWithin || p.stranded() || p.quarantined ||
			p.seen.Recycling { // see retireUnproven: this is no fault of the template
			continue
		}
		reason, why := cmp.Or(p.seen.Reason, PodNeverReady), fmt.Sprintf("it was not ready within %v", pool.ReadyWithin)
		if p.seen.Why != "" {
			why += ": " + p.seen.Why
		}
		p.endedEarly(c.now, reason, why)
		c.recordFailure(p, reason, why)
		c.retire(p)
	}
}

// endedEarly notes that an idle pod has ended early. Pods that end during one pause count once. A
// stranded pod does not count: its replacement was created when it was stranded.
func (p *pod) endedEarly(now Instant, reason, why string) {
	b := &p.pool.backOff
	if p.outdated || p.stranded() || !p.pool.known || p.pool.Deleting {
		return
	}
	b.held++
	b.warmAt = 0
	p.pool.surge = min(p.pool.surge, firstSurge)
	if b.retryAt == 0 {
		b.pause = min(max(2*b.pause, firstEndPause), maxEndPause)
		b.retryAt = now.Boot + b.pause
		b.trouble.Retry = now.Wall.Add(b.pause).Truncate(time.Second)
	}
	b.trouble.Pod, b.trouble.Reason, b.trouble.Why = p.seen.Key.Name, reason, why
}

// becameWarm notes when a pod was warm for the first time.
func (p *pod) becameWarm(now time.Duration) {
	if p.warmAt != 0 {
		return
	}
	p.warmAt = now
	if p.askedAt != 0 {
		p.pool.started(now-p.askedAt, now)
	}
	if b := &p.pool.backOff; b.pause != 0 && b.warmAt == 0 {
		b.warmAt = now
	}
}

// retry ends the pauses of a pool whose time is over.
func (pool *pool) retry(now time.Duration) {
	if pool.retryAt != 0 && now >= pool.retryAt {
		pool.retryAt = 0
		pool.touch()
	}
	b := &pool.backOff
	switch {
	case b.warmAt != 0 && now-b.warmAt >= stableAfter:
		*b = backOff{}
	case b.retryAt != 0 && now >= b.retryAt:
		b.held, b.retryAt, b.trouble.Retry = 0, 0, time.Time{}
	default:
		return
	}
	pool.touch()
}

// stuck returns the most frequent reason for which pods are not ready. The scan of the pool's pods is
// acceptable once a second, and is left out while all are ready.
func (pool *pool) stuck() (most Stuck) {
	if pool.pods.count(podPending) == 0 {
		return most
	}
	byReason := map[string]Stuck{}
	for _, p := range pool.pods.sorted(podPending) {
		s := byReason[p.seen.Reason]
		if s.Pods == 0 {
			s = Stuck{Reason: p.seen.Reason, Pod: p.seen.Key.Name, Why: p.seen.Why}
		}
		s.Pods++
		byReason[s.Reason] = s
	}
	for _, s := range byReason {
		if s.Reason != "" && (s.Pods > most.Pods || s.Pods == most.Pods && s.Reason < most.Reason) {
			most = s
		}
	}
	return most
}
