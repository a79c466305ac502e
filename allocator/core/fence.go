package core

// The fence of a released sandbox: see package fence. Here it is tied to pods, to streams, and
// to the callers of Release.

// waiter is a caller of Release.
type waiter struct{ token uint64 }

// eachFence calls f for every fence that is under way. f may end it.
func (c *Core) eachFence(f func(*sandbox)) {
	for id := range c.fences.UnderWay() {
		f(c.sandboxes[id])
	}
}

// startFence has all routers forget a released sandbox, and begins to wait for them.
func (c *Core) startFence(sb *sandbox) {
	if _, _, ok := c.fences.Began(sb.ID); ok {
		// Its pod was gone and is there again, or was found at last. No router has learned of
		// it since.
		c.fences.Reopen(sb.ID)
		c.advanceFence(sb)
		return
	}
	var routers []string
	for _, s := range c.byID {
		if s.durable { // others have no route
			routers = append(routers, s.id)
		}
	}
	c.fences.Begin(sb.ID, routers, c.now.Boot)
	c.begun = append(c.begun, sb)
	c.answerReleases(sb)
	c.advanceFence(sb)
}

// sendReleases sends the routers the releases of this step: one message to each router, because
// hundreds may be released in one step.
func (c *Core) sendReleases() {
	if len(c.begun) == 0 {
		return
	}
	for _, s := range c.connected() {
		var ids []string
		for _, sb := range c.begun {
			// Else a snapshot of this step stands for the release.
			if c.fences.Unsent(sb.ID, s.id) {
				ids = append(ids, sb.ID)
			}
		}
		if len(ids) > 0 {
			s.sequence++
			c.fences.Sent(s.id, s.sequence, ids)
			c.emit(SendRelease{Stream: s.stream, Sequence: s.sequence, IDs: ids})
		}
	}
	c.begun = nil
}

// cleared goes on with a fence that waits for one router less.
func (c *Core) cleared(sb *sandbox) {
	c.answerReleases(sb)
	c.advanceFence(sb)
}

// answerReleases answers the callers of Release once all routers that are connected, or may come
// back in a moment, have acknowledged, or after Config.AckWait.
func (c *Core) answerReleases(sb *sandbox) {
	began, _, ok := c.fences.Began(sb.ID)
	if len(sb.waiters) == 0 || !ok {
		return
	}
	if c.now.Boot-began < c.cfg.AckWait {
		for id := range c.fences.Waiting(sb.ID) {
			if s := c.sessions[id]; s.stream != 0 || c.returns(s) > 0 {
				return
			}
		}
	}
	for _, w := range sb.waiters {
		c.emit(ReleaseAnswered{Token: w.token, Status: ReleaseOK, Outstanding: c.fences.CountWaiting(sb.ID)})
	}
	sb.waiters = nil
}

// advanceFence deletes the pod when its fence is complete.
func (c *Core) advanceFence(sb *sandbox) {
	cleared, complete := c.fences.Advance(sb.ID, c.now.Boot)
	if _, routers, _ := c.fences.Began(sb.ID); cleared && routers > 0 && sb.durableAt > 0 {
		c.emit(Acknowledged{ID: sb.ID, Took: c.now.Boot - sb.durableAt})
	}
	if !complete {
		return
	}
	c.cover(sb)
	if q := c.pods[sb.Pod]; q != nil {
		c.enter(q, podDeleting)
		if !q.seen.Deleting {
			c.emit(DeletePod{Pod: q.seen.Key})
		}
	}
	for _, d := range sb.doubles {
		c.advanceDiscard(d.pod)
	}
	c.tryEnd(sb)
}
