package core

import (
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// The fence of a released sandbox: see package fence. Here it is tied to pods, to streams, and
// to the callers of Release.

// startFence has all routers forget a released sandbox, and begins to wait for them.
func (c *Core) startFence(sb *sandboxes.Sandbox) {
	c.routers.changed = append(c.routers.changed, sb.ID)
	if _, _, ok := c.fences.Began(sb.ID); ok {
		// Its pod was gone and is there again, or was found at last. No router has learned of
		// it since.
		c.fences.Reopen(sb.ID)
		return
	}
	var routers []string
	for _, s := range c.routers.members.All() {
		if s.Durable && s.Has(sb.Agent) { // others have no route
			routers = append(routers, s.ID)
		}
	}
	c.fences.Begin(sb.ID, routers, c.Now.Boot)
}

// answerReleases answers the callers of Release once all routers that are connected, or may come
// back in a moment, have acknowledged, or after Config.AckWait.
func (c *Core) answerReleases(sb *sandboxes.Sandbox) {
	began, _, ok := c.fences.Began(sb.ID)
	if !sb.Waited() || !ok {
		return
	}
	if c.Now.Boot-began < c.cfg.AckWait {
		for id := range c.fences.Waiting(sb.ID) {
			if s := c.routers.members.Get(id); s.Stream != 0 || c.routers.members.Returns(s, c.Now.Boot) > 0 {
				return
			}
		}
	}
	for _, token := range sb.TakeWaiters() {
		c.Emit(ReleaseAnswered{Token: token, Status: CallOK, Outstanding: c.fences.CountWaiting(sb.ID)})
	}
}

// advanceFences goes on with the fences that may wait for less than before. It recycles or deletes the
// pod of a sandbox when its fence is complete.
func (c *Core) advanceFences() {
	changed := c.routers.changed
	c.routers.changed = nil
	for _, id := range changed {
		sb := c.sandboxes.Get(id)
		c.answerReleases(sb)
		cleared, complete := c.fences.Advance(id, c.Now.Boot)
		if _, routers, _ := c.fences.Began(id); cleared && routers > 0 && sb.DurableAt() > 0 {
			c.Emit(Acknowledged{ID: id, Took: c.Now.Boot - sb.DurableAt()})
		}
		if !complete {
			continue
		}
		c.pods.Fenced(id)
		if p := c.pods.Get(sb.Pod); p != nil && sb.HasPod() {
			c.pods.Finish(p, c.recycles(p, sb))
		}
		for _, d := range sb.Conflicts() {
			c.pods.AdvanceRetirement(d.Pod)
		}
		c.sandboxes.TryEnd(id)
	}
}

// recycles reports whether the pod of a released sandbox, whose fence is complete, begins another life. Only a pod
// that could go on to serve does, and only for a pool that keeps it.
func (c *Core) recycles(p *pods.Pod, sb *sandboxes.Sandbox) bool {
	pool := c.pools.Of(p.Group().Key)
	if !pool.Recycle || !pool.Known || pool.Deleting {
		return false
	}
	switch {
	case pool.Refused != "", !p.CanRecycle(), !sb.Fits(p):
		c.Emit(RecycleEnded{Outcome: NotFit})
		return false
	case !pool.Keeps():
		c.Emit(RecycleEnded{Outcome: NotNeeded})
		return false
	}
	return true
}
