package core

// The fence of a released sandbox: see package fence. Here it is tied to pods, to streams, and
// to the callers of Release.

// startFence has all routers forget a released sandbox, and begins to wait for them.
func (c *Core) startFence(sb *sandbox) {
	c.routers.changed = append(c.routers.changed, sb.ID)
	if _, _, ok := c.fences.Began(sb.ID); ok {
		// Its pod was gone and is there again, or was found at last. No router has learned of
		// it since.
		c.fences.Reopen(sb.ID)
		return
	}
	var routers []string
	for _, s := range c.routers.members.All() {
		if s.Durable { // others have no route
			routers = append(routers, s.ID)
		}
	}
	c.fences.Begin(sb.ID, routers, c.now.Boot)
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
			if s := c.routers.members.Get(id); s.Stream != 0 || c.routers.members.Returns(s, c.now.Boot) > 0 {
				return
			}
		}
	}
	for _, token := range sb.waiters {
		c.emit(ReleaseAnswered{Token: token, Status: CallOK, Outstanding: c.fences.CountWaiting(sb.ID)})
	}
	sb.waiters = nil
}

// advanceFences goes on with the fences that may wait for less than before. It recycles or deletes the
// pod of a sandbox when its fence is complete.
func (c *Core) advanceFences() {
	sandboxes := c.routers.changed
	c.routers.changed = nil
	retired := func(key PodKey) bool {
		r := c.retirements[key]
		return r != nil && r.durable
	}
	for _, id := range sandboxes {
		sb := c.sandboxes.byID[id]
		c.answerReleases(sb)
		cleared, complete := c.fences.Advance(id, c.now.Boot)
		if _, routers, _ := c.fences.Began(id); cleared && routers > 0 && sb.durableAt > 0 {
			c.emit(Acknowledged{ID: id, Took: c.now.Boot - sb.durableAt})
		}
		if !complete {
			continue
		}
		c.reconsider(c.taints.Fenced(id, retired))
		if p := c.pods[sb.Pod]; p != nil {
			recycles := c.recycles(p, sb)
			p.enter(podDeleting, c.now.Boot)
			switch {
			case recycles:
				c.recycle(p)
			case !p.seen.Deleting:
				c.emit(DeletePod{Pod: p.seen.Key})
			}
		}
		for _, d := range sb.conflicts {
			c.advanceRetirement(d.pod)
		}
		c.tryEnd(sb)
	}
}
