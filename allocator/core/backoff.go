package core

import "time"

const (
	// The replacements of pods that end early wait for so long, first and at most.
	endFirst = time.Second
	endMost  = time.Minute
	// stableAfter: a pod that was warm for so long has not ended early.
	stableAfter = 10 * time.Second
)

// backOff holds up the replacements of a pool's idle pods that end early: before they
// were ever warm, or, by themselves, within stableAfter of that. A template whose
// program ends at once would otherwise have pods made as fast as nodes can start
// them. Everything else goes on: pods that were claimed are replaced at once, and so
// are single pods that end later. The end of a sandbox's pod does not count, however
// soon it comes: a claim has come before each.
//
// The pause doubles with each round in which pods end early. It is forgotten when no
// pod has ended early for stableAfter since one became warm, and with another template.
type backOff struct {
	held    int           // pods that ended early, and are not replaced yet
	pause   time.Duration // 0: none has ended early
	retryAt time.Duration // boot clock; 0: nothing is held
	warmAt  time.Duration // boot clock: when the first pod since the last early end became warm; 0: none has
	trouble Trouble
}

// Trouble is why a pool makes its pods more slowly, for people. The zero value is: it
// does not.
type Trouble struct {
	// Pod is the last one that ended early, Why what is known of its end.
	Pod, Why string
	// Retry is when the next pod is made in its place, in whole seconds; zero: it has been.
	Retry time.Time
}

// endedEarly notes that an idle pod has ended too soon. Pods that end side by side
// count once. A stranded pod does not count: its replacement was made when it was
// stranded, and a held one would be missing from the pool.
func (c *Core) endedEarly(q *pod, why string) {
	p, b := q.pool, &q.pool.backOff
	if c.recovering || q.outdated || q.stranded() || !p.known || p.Deleting {
		return
	}
	b.held++
	b.warmAt = 0
	if b.retryAt == 0 {
		b.pause = min(max(2*b.pause, endFirst), endMost)
		b.retryAt = c.now.Boot + b.pause
		b.trouble.Retry = c.now.Wall.Add(b.pause).Truncate(time.Second)
	}
	b.trouble.Pod, b.trouble.Why = q.seen.Key.Name, why
}

// becameWarm notes when a pod was warm for the first time.
func (c *Core) becameWarm(q *pod) {
	if q.warmAt != 0 {
		return
	}
	q.warmAt = c.now.Boot
	if b := &q.pool.backOff; b.pause != 0 && b.warmAt == 0 {
		b.warmAt = c.now.Boot
	}
}

// early reports whether an idle pod that has ended by itself was too short-lived.
func (c *Core) early(q *pod) bool { return q.warmAt == 0 || c.now.Boot-q.warmAt < stableAfter }

// retry has held pods replaced whose time has come.
func (c *Core) retry(p *pool) {
	b := &p.backOff
	switch {
	case b.warmAt != 0 && c.now.Boot-b.warmAt >= stableAfter:
		*b = backOff{}
	case b.retryAt != 0 && c.now.Boot >= b.retryAt:
		b.held, b.retryAt, b.trouble.Retry = 0, 0, time.Time{}
	default:
		return
	}
	p.touch()
}

// stuck says which of the pool's pods is not ready, and why, for people; "" if no pod
// says so.
func (p *pool) stuck() string {
	if p.sum(podPending) == 0 {
		return ""
	}
	for _, q := range p.sorted(podPending) {
		if q.seen.Why != "" {
			return "pod " + q.seen.Key.Name + " is not ready: " + q.seen.Why
		}
	}
	return ""
}
