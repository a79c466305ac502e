package core

import (
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
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

// busyProbeOf is where the pod of a sandbox is probed. The pool may have got its probe after the
// claim. A sandbox without a lifetime is not probed then, because a pod that is always busy would
// keep it for ever.
func (c *Core) busyProbeOf(s *sandboxes.Sandbox) (probe BusyProbe, ok bool) {
	if p := c.pools.Find(s.Pool); p != nil && !s.LifetimeEnd.IsZero() {
		probe = p.BusyProbe
	}
	return probe, probe.Port != 0
}

// reapIdle asks about the sandboxes that are due. No round begins while the journal does not answer:
// requests are held until the verdict is durable.
func (c *Core) reapIdle() {
	c.decide(c.idle.Expire(c.Now.Boot))
	if c.claims.Closing() || c.outbox.Stalled(c.Now.Boot) {
		return
	}
	probes, ask, verdict := c.idle.Ask(c.Now.Boot, func(id string) bool {
		_, ok := c.busyProbeOf(c.sandboxes.Get(id))
		return ok
	})
	for _, p := range probes {
		sb := c.sandboxes.Get(p.Sandbox)
		probe, _ := c.busyProbeOf(sb)
		to := netip.AddrPortFrom(sb.IP, probe.Port)
		c.Emit(SendProbe{
			Stream: c.routers.members.Get(p.Router).Stream, Number: p.Number, ID: p.Sandbox, To: to, Path: probe.Path,
		})
	}
	if len(ask.Sandboxes) > 0 {
		questions := make([]Question, len(ask.Sandboxes))
		for i, id := range ask.Sandboxes {
			s := c.sandboxes.Get(id)
			questions[i] = Question{ID: id, MinBytes: s.MinBytes}
		}
		for _, s := range c.routers.members.Reachable() {
			if s.Egress {
				continue
			}
			c.Emit(SendQuiesce{Stream: s.Stream, Number: ask.Round, Questions: questions})
		}
	}
	c.decide(verdict)
}

// decide acts on the verdict of a round: a sandbox that is idle falls asleep or is released. From now on no router gets
// its route.
func (c *Core) decide(v idle.Verdict) {
	for _, id := range v.Idle {
		switch s := c.sandboxes.Get(id); {
		case !c.cfg.DryRun && s.Sleep.WhenIdle && c.sandboxes.CanSleep(s) && c.cannotClose(s) != "": // an egress router is away
			c.idle.Postpone(id, c.Now.Boot)
			v.Resume = append(v.Resume, id)
		case !c.cfg.DryRun && s.Sleep.WhenIdle && c.sandboxes.CanSleep(s):
			c.sandboxes.Close(s, sandboxes.WhenIdle, 0)
		case !c.cfg.DryRun:
			c.sandboxes.EndDue(s, sandboxes.Idle, c.idle.IdleAt(id), fact.Because(fact.ReasonIdleTimeout))
		case s.Phase == Running:
			use, _ := c.idle.Use(id)
			c.Emit(WouldReap{Sandbox: s.Sandbox, Idle: c.Now.Boot - use.At})
		}
	}
	c.routers.resume(v)
}

// persistActivity writes the activity of the next sandboxes to their objects.
func (c *Core) persistActivity() {
	if c.claims.UnderPressure() {
		return
	}
	for _, id := range c.idle.ToPersist(c.Now.Boot) {
		use, _ := c.idle.Use(id)
		c.sandboxes.Touch(id, c.Now.Wall.Add(use.At-c.Now.Boot).Truncate(time.Microsecond))
	}
}
