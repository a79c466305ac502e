package pools

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// The replacements of pods that end early wait for so long, first and at most.
const (
	FirstEndPause = time.Second
	MaxEndPause   = time.Minute
)

// backOff delays the replacement of idle pods that end early: before they were warm, or by
// themselves within pods.StableAfter of that. Otherwise a template whose program ends at once would
// create pods as fast as nodes can start them. Pods that were claimed, and pods that end later,
// are replaced at once. The end of a sandbox's pod never counts as early.
//
// The pause doubles with each round in which pods end early. It is reset when no pod has ended
// early for pods.StableAfter since one became warm, and when the template changes.
type backOff struct {
	held    int           // pods that ended early, and are not replaced yet
	pause   time.Duration // 0: none has ended early
	retryAt time.Duration // boot clock; 0: nothing is held
	warmAt  time.Duration // boot clock: when the first pod since the last early end became warm; 0: none has
	trouble step.Trouble
}

// MaxFailures bounds the failures that a pool remembers.
const MaxFailures = 5

// PodFailed acts on an idle pod that is replaced.
func (t *Table) PodFailed(f pods.Failed) {
	pool := t.Of(f.Pod.Group().Key)
	if f.Early {
		pool.endedEarly(t.Now, f.Pod, f.Reason, f.Why)
	}
	t.recordFailure(pool, f.Pod, f.Reason, f.Why)
}

// recordFailure notes why the pool replaces an idle pod.
func (t *Table) recordFailure(pool *Pool, p *pods.Pod, reason, why string) {
	if !pool.Known || pool.Deleting {
		return
	}
	f := step.PodFailure{Pod: p.Key().Name, Reason: reason, Why: why, At: t.Now.Wall.Truncate(time.Second)}
	pool.failures = slices.Insert(pool.failures[:min(len(pool.failures), MaxFailures-1)], 0, f)
	t.Emit(step.IdlePodFailed{Pod: p.Key(), Pool: pool.Key, Failure: f})
}

// Failures are the latest idle pods that have failed since this leader began, the latest first.
func (pool *Pool) Failures() []step.PodFailure { return slices.Clone(pool.failures) }

// LateCheckEvery is how often pods that do not become ready are looked for.
const LateCheckEvery = time.Second

// replaceLate replaces the pods of a pool that were not ready in time, each after the pause of a pod that ends
// early. A pod that no node has is left to the scheduler: another one would wait like it.
func (t *Table) replaceLate(pool *Pool) {
	if !pool.Known || pool.Deleting || pool.Paused || pool.ReadyWithin == 0 || t.Now.Boot < pool.lateCheckAt || pool.Count(pods.Pending) == 0 {
		return
	}
	pool.lateCheckAt = t.Now.Boot + LateCheckEvery
	for _, p := range pool.Sorted(pods.Pending) {
		since := p.UnreadySince()
		if since == 0 || t.Now.Boot-since < pool.ReadyWithin || p.Stranded() ||
			p.Withheld()&(pods.Quarantined|pods.NotProven) != 0 { // the latter is no fault of the template
			continue
		}
		seen := p.Seen()
		reason, why := cmp.Or(seen.Reason, step.PodNeverReady), fmt.Sprintf("it was not ready within %v", pool.ReadyWithin)
		if seen.Why != "" {
			why += ": " + seen.Why
		}
		if !p.Outdated() {
			pool.endedEarly(t.Now, p, reason, why)
		}
		t.recordFailure(pool, p, reason, why)
		t.pods.Retire(p)
	}
}

// endedEarly notes that an idle pod has ended early. Pods that end during one pause count once.
func (pool *Pool) endedEarly(now step.Instant, p *pods.Pod, reason, why string) {
	if !pool.Known || pool.Deleting {
		return
	}
	b := &pool.backOff
	b.held++
	b.warmAt = 0
	pool.surge = min(pool.surge, FirstSurge)
	if b.retryAt == 0 {
		b.pause = min(max(2*b.pause, FirstEndPause), MaxEndPause)
		b.retryAt = now.Boot + b.pause
		b.trouble.Retry = now.Wall.Add(b.pause).Truncate(time.Second)
	}
	b.trouble.Pod, b.trouble.Reason, b.trouble.Why = p.Key().Name, reason, why
}

// PodWarmed acts on a pod that became warm for the first time.
func (t *Table) PodWarmed(p *pods.Pod) {
	pool, now := t.Of(p.Group().Key), t.Now.Boot
	if asked := p.AskedAt(); asked != 0 {
		pool.started(now-asked, now)
	}
	if b := &pool.backOff; b.pause != 0 && b.warmAt == 0 {
		b.warmAt = now
	}
}

// retry ends the pauses of a pool whose time is over.
func (pool *Pool) retry(now time.Duration) {
	if pool.retryAt != 0 && now >= pool.retryAt {
		pool.retryAt = 0
		pool.Touch()
	}
	b := &pool.backOff
	switch {
	case b.warmAt != 0 && now-b.warmAt >= pods.StableAfter:
		*b = backOff{}
	case b.retryAt != 0 && now >= b.retryAt:
		b.held, b.retryAt, b.trouble.Retry = 0, 0, time.Time{}
	default:
		return
	}
	pool.Touch()
}

// stuck returns the most frequent reason for which pods are not ready. The scan of the pool's pods is
// acceptable once a second, and is left out while all are ready.
func (pool *Pool) stuck() (most step.Stuck) {
	if pool.Count(pods.Pending) == 0 {
		return most
	}
	byReason := map[string]step.Stuck{}
	for _, p := range pool.Sorted(pods.Pending) {
		seen := p.Seen()
		s := byReason[seen.Reason]
		if s.Pods == 0 {
			s = step.Stuck{Reason: seen.Reason, Pod: p.Key().Name, Why: seen.Why}
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
