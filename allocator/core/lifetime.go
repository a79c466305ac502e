package core

import (
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

// maxDeadlines bounds the deadlines that one tick looks at: after a change of leaders all may have
// come at once.
const maxDeadlines = 10_000

// bootOf converts a time of the wall clock to the boot clock.
func (now Instant) bootOf(t time.Time) time.Duration { return now.Boot + t.Sub(now.Wall) }

// setTimes converts the end times of a sandbox to the boot clock.
func (s *sandbox) setTimes(now Instant) {
	s.nextEnd = s.EndAt
	for _, m := range []struct {
		at   time.Time
		boot *time.Duration
	}{{s.EndAt, &s.endAt}, {s.LifetimeEnd, &s.lifetimeEnd}, {s.StartBy, &s.startBy}} {
		if *m.boot = 0; !m.at.IsZero() {
			*m.boot = max(1, now.bootOf(m.at))
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
		earlier(s.endAt, ReasonEndTime)
	}
	earlier(s.lifetimeEnd, ReasonMaxLifetime)
	if s.Phase == Starting && !s.readying {
		earlier(s.startBy, ReasonStartup)
	}
	return at, reason
}

// expireEnds releases the sandboxes whose end has come.
func (c *Core) expireEnds() {
	for _, id := range c.sandboxes.deadlines.Due(c.now.Boot, maxDeadlines) {
		s := c.sandboxes.byID[id]
		if at, reason := s.ends(); reason != "" && at <= c.now.Boot {
			c.startRelease(s, because(reason))
		} else {
			c.sandboxes.schedule(s)
		}
	}
}

// keepAlive counts a call as activity.
func (c *Core) keepAlive(ev KeepAlive) {
	if s := c.callUse(ev.Token, ev.Scope, ev.ID); s != nil {
		c.emit(SandboxCallAnswered{Token: ev.Token, Status: CallOK, Sandbox: s.Sandbox})
	}
}

// callUse returns the live sandbox of a call and notes the call as activity. If there is none it
// answers the call and returns nil.
func (c *Core) callUse(token uint64, scope Scope, id string) *sandbox {
	s := c.sandboxes.seen(id, scope)
	switch {
	case s == nil:
		c.emit(SandboxCallAnswered{Token: token, Status: CallUnknown})
		return nil
	case s.Phase != Starting && s.Phase != Running:
		c.emit(SandboxCallAnswered{Token: token, Status: CallGone, Sandbox: s.Sandbox})
		return nil
	}
	c.idle.Note(s.ID, activity.Keepalive, c.now.Boot)
	return s
}

// setTimeout moves the end of a sandbox. The new end counts when it is durable.
func (c *Core) setTimeout(ev SetTimeout) {
	s := c.callUse(ev.Token, ev.Scope, ev.ID)
	if s == nil {
		return
	}
	end := c.now.Wall.Add(ev.Lifetime)
	if ev.Extend && (s.nextEnd.IsZero() || s.nextEnd.After(end)) {
		if end = s.nextEnd; s.pendingTimeouts == 0 { // it is durable
			c.emit(SandboxCallAnswered{Token: ev.Token, Status: CallOK, Sandbox: s.Sandbox})
			return
		}
	}
	s.pendingTimeouts++
	s.nextEnd = end
	next := &SandboxFact{Sandbox: s.next(), Ungranted: s.ungranted}
	c.outbox.Commit(c.now.Boot, next, true, func(Revision, time.Duration) { c.timeoutSet(s, ev.Token, next) })
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
func (c *Core) timeoutSet(s *sandbox, token uint64, f *SandboxFact) {
	s.pendingTimeouts--
	s.EndAt, s.Revision = f.EndAt, f.Revision
	s.endAt = max(1, c.now.bootOf(s.EndAt))
	c.idle.Note(s.ID, activity.Keepalive, c.now.Boot)
	answer := SandboxCallAnswered{Token: token, Status: CallOK, Sandbox: s.Sandbox}
	if s.Phase != Starting && s.Phase != Running {
		answer.Status = CallGone
	}
	c.sandboxes.schedule(s)
	shown := s.Sandbox
	shown.Phase, shown.StartedAt = f.Phase, f.StartedAt // not Releasing: the sandbox may never have run
	if s.ungranted == 0 {
		c.emit(WriteObject{Sandbox: shown})
	}
	c.emit(answer)
}
