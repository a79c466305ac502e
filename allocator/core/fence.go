package core

import (
	"container/list"
	"time"
)

// fence is what must happen before a released sandbox's pod may be deleted.
type fence struct {
	// waiting has, of each session that is waited for, the sequence of the message
	// whose acknowledgement ends that, if it is connected.
	waiting map[*session]uint64
	told    int // how many sessions it waited for at first
	started time.Duration
	// clearedAt is when nobody was waited for any more; 0: not yet.
	clearedAt time.Duration
	done      bool
	elem      *list.Element // in Core.fences, until it is done
}

// eachFence calls f for every fence that is under way. f may end it.
func (c *Core) eachFence(f func(*sandbox)) {
	for e := c.fences.Front(); e != nil; {
		sb := e.Value.(*sandbox)
		e = e.Next()
		f(sb)
	}
}

// waiter is a caller of Release.
type waiter struct{ token uint64 }

// startFence tells all routers that a sandbox is gone and begins to wait for
// them.
func (c *Core) startFence(sb *sandbox) {
	if f := sb.fence; f != nil {
		// Its pod was gone and is there again, or was found at last. Nobody was told
		// of it since.
		if f.done {
			f.done, f.elem = false, c.fences.PushBack(sb)
		}
		c.advanceFence(sb)
		return
	}
	f := &fence{started: c.now.Boot, waiting: make(map[*session]uint64, len(c.sessions))}
	sb.fence, f.elem = f, c.fences.PushBack(sb)
	for _, s := range c.byID {
		if !s.durable {
			continue // it was told nothing
		}
		f.waiting[s] = 0
	}
	f.told = len(f.waiting)
	c.begun = append(c.begun, sb)
	c.answerReleases(sb)
	c.advanceFence(sb)
}

// sendReleases tells the routers which sandboxes this step has released: one message to each
// router, because hundreds may be released in one step.
func (c *Core) sendReleases() {
	for _, s := range c.connected() {
		var ids []string
		for _, sb := range c.begun {
			// A snapshot of this step does not have the sandbox: it stands for the release.
			if sequence, waits := sb.fence.waiting[s]; waits && sequence == 0 {
				sb.fence.waiting[s] = s.sequence + 1
				s.pending = append(s.pending, pending{s.sequence + 1, sb})
				ids = append(ids, sb.ID)
			}
		}
		if len(ids) > 0 {
			s.sequence++
			c.emit(SendRelease{Stream: s.stream, Sequence: s.sequence, IDs: ids})
		}
	}
	c.begun = nil
}

// cleared notes that s can not route to sb any more.
func (c *Core) cleared(sb *sandbox, s *session) {
	if sb.fence == nil {
		return
	}
	delete(sb.fence.waiting, s)
	c.answerReleases(sb)
	c.advanceFence(sb)
}

// answerReleases answers the callers of Release once all routers that are connected, or
// may come back in a moment, have acknowledged, or after Config.AckWait.
func (c *Core) answerReleases(sb *sandbox) {
	if len(sb.waiters) == 0 || sb.fence == nil {
		return
	}
	if c.now.Boot-sb.fence.started < c.cfg.AckWait {
		for s := range sb.fence.waiting {
			if s.stream != 0 || c.returns(s) > 0 {
				return
			}
		}
	}
	for _, w := range sb.waiters {
		c.emit(ReleaseAnswered{Token: w.token, Status: ReleaseOK, Outstanding: len(sb.fence.waiting)})
	}
	sb.waiters = nil
}

// advanceFence deletes the pod when nothing stands in the way any more.
func (c *Core) advanceFence(sb *sandbox) {
	f := sb.fence
	if f.done || len(f.waiting) > 0 {
		return
	}
	if f.clearedAt == 0 {
		f.clearedAt = c.now.Boot
		if f.told > 0 && sb.durableAt > 0 {
			c.emit(Acknowledged{ID: sb.ID, Took: c.now.Boot - sb.durableAt})
		}
	}
	if c.now.Boot < f.clearedAt+c.cfg.Window {
		return
	}
	f.done = true
	c.fences.Remove(f.elem)
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
