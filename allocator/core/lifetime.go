package core

import (
	"container/heap"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// bootOf converts a time of the wall clock to the boot clock.
func (c *Core) bootOf(t time.Time) time.Duration { return c.now.Boot + t.Sub(c.now.Wall) }

// times converts the end times of a sandbox to the boot clock.
func (c *Core) times(s *sandbox) {
	s.nextEnd = s.EndAt
	for _, m := range []struct {
		at   time.Time
		boot *time.Duration
	}{{s.EndAt, &s.endAt}, {s.LifetimeEnd, &s.lifetimeEnd}, {s.StartBy, &s.startBy}} {
		if *m.boot = 0; !m.at.IsZero() {
			*m.boot = max(1, c.bootOf(m.at))
		}
	}
}

// ends returns when a sandbox is released whether it is in use or not, and the reason. An empty
// reason means that no such end is set.
func (s *sandbox) ends() (at time.Duration, reason string) {
	earlier := func(than time.Duration, why string) {
		if than != 0 && (reason == "" || than < at) {
			at, reason = than, why
		}
	}
	if s.pendingTimeouts == 0 { // else timeoutSet schedules it again
		earlier(s.endAt, ReasonTimeout)
	}
	earlier(s.lifetimeEnd, ReasonMaxLifetime)
	if s.Phase == Starting && !s.readying {
		earlier(s.startBy, ReasonStartup)
	}
	return at, reason
}

// schedule puts the sandbox into the deadline heap for the earliest moment at which it may be due.
func (c *Core) schedule(s *sandbox) {
	if s.Phase != Starting && s.Phase != Running {
		return
	}
	at, reason := s.ends()
	if idle, ok := c.idleAt(s); ok && s.reaping == notDue {
		if idle = max(idle, s.notBefore); reason == "" || idle < at {
			at, reason = idle, ReasonIdle
		}
	}
	switch {
	case reason == "":
	case !s.queued:
		s.dueAt = at
		heap.Push(&c.deadlines, s)
	case at < s.dueAt:
		s.dueAt = at
		heap.Fix(&c.deadlines, s.index)
	}
}

// keepAlive counts a call as activity.
func (c *Core) keepAlive(ev KeepAlive) {
	if s := c.callUse(ev.Token, ev.ID); s != nil {
		c.emit(SandboxCallAnswered{Token: ev.Token, Status: CallOK, Sandbox: s.Sandbox})
	}
}

// callUse returns the live sandbox of a call and notes the call as activity. If there is none it
// answers the call and returns nil.
func (c *Core) callUse(token uint64, id string) *sandbox {
	s := c.sandboxes[id]
	switch {
	case s == nil:
		c.emit(SandboxCallAnswered{Token: token, Status: CallUnknown})
		return nil
	case s.Phase != Starting && s.Phase != Running:
		c.emit(SandboxCallAnswered{Token: token, Status: CallGone, Sandbox: s.Sandbox})
		return nil
	}
	c.note(s, c.now.Boot, activity.Keepalive)
	return s
}

// setTimeout moves the end of a sandbox. The new end counts when it is durable.
func (c *Core) setTimeout(ev SetTimeout) {
	s := c.callUse(ev.Token, ev.ID)
	if s == nil {
		return
	}
	s.pendingTimeouts++
	s.nextEnd = c.now.Wall.Add(ev.Lifetime)
	next := s.next()
	c.commit(Fact{Sandbox: &next}, true, func(f Fact, _ time.Duration) { c.timeoutSet(s, ev.Token, f) })
}

// next returns the state that the next fact of a sandbox starts from: its state, with the changes
// that are on their way into the journal.
func (s *sandbox) next() Sandbox {
	next := s.Sandbox
	next.EndAt = s.nextEnd
	if s.readying {
		next.Phase = Running
	}
	return next
}

// timeoutSet acts on a committed change of an end.
func (c *Core) timeoutSet(s *sandbox, token uint64, f Fact) {
	s.pendingTimeouts--
	s.EndAt, s.Revision = f.Sandbox.EndAt, f.Revision
	s.endAt = max(1, c.bootOf(s.EndAt))
	c.note(s, c.now.Boot, activity.Keepalive)
	answer := SandboxCallAnswered{Token: token, Status: CallOK, Sandbox: s.Sandbox}
	if s.Phase != Starting && s.Phase != Running {
		answer.Status = CallGone
	}
	c.schedule(s)
	shown := s.Sandbox
	shown.Phase = f.Sandbox.Phase // not Releasing: the sandbox may never have run
	c.emit(WriteObject{Sandbox: shown})
	c.emit(answer)
}

// deadlineHeap orders sandboxes by dueAt.
type deadlineHeap []*sandbox

func (h deadlineHeap) Len() int           { return len(h) }
func (h deadlineHeap) Less(i, j int) bool { return h[i].dueAt < h[j].dueAt }
func (h deadlineHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].index, h[j].index = i, j
}

func (h *deadlineHeap) Push(x any) {
	s := x.(*sandbox)
	s.index, s.queued = len(*h), true
	*h = append(*h, s)
}

func (h *deadlineHeap) Pop() any {
	old := *h
	s := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	s.queued = false
	return s
}
