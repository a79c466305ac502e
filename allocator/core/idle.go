package core

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/api/activity"
)

// The release of idle sandboxes: see package idle. Here its ledger is tied to streams, to the journal
// and to the Sandbox objects.
//
// A new leader assumes that a sandbox was in use until recoveryMargin and twice the longest expiry
// after the time that its object shows, but not later than the begin of the term.

const (
	// reapHold is how long a request may wait for a sandbox whose release is on its way
	// into the journal.
	reapHold = 5 * time.Second
	// persistLag is how much later than the newest use the object of a sandbox shows it: two turns
	// of persistActivity, if a write is under way in the first one, and the write.
	persistLag = 3 * idle.PersistEvery
	// recoveryMargin is how much later than its object shows a sandbox may have been in use. The
	// clocks of two allocators may each be off by ten minutes, in opposite directions. Objects
	// lag behind by persistLag, and by more while the API server is slow.
	recoveryMargin = 20*time.Minute + persistLag + 2*time.Minute
)

// markRunning notes that a sandbox runs. Routers may have its route from now on.
func (c *Core) markRunning(s *sandbox, usedAt time.Duration, kind activity.Kind) {
	c.idle.Add(idle.Sandbox{ID: s.ID, Timeout: s.IdleTimeout, MinBytes: s.MinBytes}, usedAt, kind, c.now.Boot)
	c.sandboxes.schedule(s)
}

// recoverActivity reads the activity of a running sandbox from its object. It may have been used
// later, through routers that never report to this leader.
func (c *Core) recoverActivity(s *sandbox) {
	last, kind := s.ClaimedAt, activity.Claim
	if s.LastActive.After(last) {
		last, kind = s.LastActive, activity.Record
	}
	c.markRunning(s, min(c.now.Boot, c.now.bootOf(last)+recoveryMargin+2*c.cfg.expiry(c.routers.longest)), kind)
}

// busyProbeOf is where the pod of a sandbox is probed. The pool may have got its probe after the
// claim. A sandbox without a lifetime is not probed then, because a pod that is always busy would
// keep it for ever.
func (t *poolTable) busyProbeOf(s *sandbox) (probe BusyProbe, ok bool) {
	if p := t.byKey[s.Pool]; p != nil && !s.LifetimeEnd.IsZero() {
		probe = p.BusyProbe
	}
	return probe, probe.Port != 0
}

// reapIdle asks about the sandboxes that are due. No round begins while the journal does not answer:
// requests are held until the verdict is durable.
func (c *Core) reapIdle() {
	c.decide(c.idle.Expire(c.now.Boot))
	if c.closing || c.outbox.Stalled(c.now.Boot) {
		return
	}
	probes, ask, verdict := c.idle.Ask(c.now.Boot, func(id string) bool {
		_, ok := c.pools.busyProbeOf(c.sandboxes.byID[id])
		return ok
	})
	for _, p := range probes {
		sb := c.sandboxes.byID[p.Sandbox]
		probe, _ := c.pools.busyProbeOf(sb)
		to := netip.AddrPortFrom(sb.IP, probe.Port)
		c.emit(SendProbe{
			Stream: c.routers.members.Get(p.Router).Stream, Number: p.Number, ID: p.Sandbox, To: to, Path: probe.Path,
		})
	}
	if len(ask.Sandboxes) > 0 {
		questions := make([]Question, len(ask.Sandboxes))
		for i, id := range ask.Sandboxes {
			s := c.sandboxes.byID[id]
			questions[i] = Question{ID: id, MinBytes: s.MinBytes}
		}
		for _, s := range c.routers.members.Reachable() {
			c.emit(SendQuiesce{Stream: s.Stream, Number: ask.Round, Questions: questions})
		}
	}
	c.decide(verdict)
}

// decide acts on the verdict of a round. From now on no router gets the route of a sandbox that is
// idle.
func (c *Core) decide(v idle.Verdict) {
	for _, id := range v.Idle {
		switch s := c.sandboxes.byID[id]; {
		case !c.cfg.DryRun:
			s.reaped = true
			c.startRelease(s, because(ReasonIdleTimeout))
		case s.Phase == Running:
			use, _ := c.idle.Use(id)
			c.emit(WouldReap{Sandbox: s.Sandbox, Idle: c.now.Boot - use.At})
		}
	}
	c.routers.resume(v)
}

// persistActivity writes the activity of the next sandboxes to their objects, unless it has hardly
// changed, or another change is on its way.
func (c *Core) persistActivity() {
	if c.pressure {
		return
	}
	for _, id := range c.idle.ToPersist(c.now.Boot) {
		s := c.sandboxes.byID[id]
		use, _ := c.idle.Use(id)
		active := c.now.Wall.Add(use.At - c.now.Boot).Truncate(time.Microsecond)
		if s.Phase != Running || s.pendingTimeouts > 0 || s.objectRevision.Less(s.Revision) ||
			active.Sub(s.LastActive) < time.Second {
			continue
		}
		s.LastActive = active
		s.Revision = c.outbox.Next()
		c.emit(WriteObject{Sandbox: s.Sandbox, Touch: true})
	}
}
