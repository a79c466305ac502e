package core

import "time"

// FenceStatus says what the release of a sandbox waits for.
type FenceStatus struct {
	Sandbox Sandbox
	// Waiting are sessions, by ID, at most awaitedMost; Others is how many more there
	// are. When nobody is waited for, what is left is the window.
	Waiting []Awaited
	Others  int
	// Window is what is left of it, 0 while sessions are waited for.
	Window time.Duration
}

// Awaited is a session that a fence waits for.
type Awaited struct {
	SessionStatus
	// Needed is the sequence of the message whose acknowledgement ends the wait, 0 if
	// the session is not connected.
	Needed uint64
}

// SessionStatus is what is known of a router.
type SessionStatus struct {
	ID string
	// From is where it joined from last, "" if that is not known.
	From      string
	Connected bool
	// Heard: this leader has heard it, the last time Silence ago.
	Heard   bool
	Silence time.Duration
	// Sent and Acked are the sequences of the last message on its stream, and of the
	// last one that it has acknowledged; 0 if it is not connected.
	Sent, Acked uint64
	// Expires is after how long it will have gone stale if it is not heard again.
	Expires time.Duration
	// Fences is how many fences wait for it. Only Sessions says so.
	Fences int
}

// ActivityStatus is what is known of the use of a live sandbox, and what happens next
// if nothing more is heard of it. Times count from the last Step.
type ActivityStatus struct {
	Sandbox Sandbox
	// Age is the time since the last activity that is known of, and Source where that is
	// known from.
	Age    time.Duration
	Source ActivitySource
	// Router is the session that has told, for Reported and Asked.
	Router string
	// Open is how many streams that router said are open.
	Open int
	// Next is the reason for which it is released next, "" for none, and In the time until
	// then; 0: it is due.
	Next string
	In   time.Duration
	// Awaits are sessions, by ID, awaitedMost at most, without whose word it is not
	// released for being idle: they are not connected, or have not reported yet.
	Awaits []string
}

// ActivitySource is how an activity is known.
type ActivitySource int

// The sources of what is known of an activity.
const (
	Began    ActivitySource = iota // it was claimed, or began to run
	OnRecord                       // an earlier leader has written it on the Sandbox object
	Called                         // a KeepAlive or a SetTimeout
	Reported                       // a router, of itself
	Asked                          // a router, which was asked whether it is idle
	Doubted                        // a router ended, and nobody knows what was in use through it
)

// awaitedMost bounds the sessions that a FenceStatus lists.
const awaitedMost = 20

// Fences lists the sandboxes whose fence is not complete, in the order in which the
// fences began, at most so many, and says how many more there are. Times count from
// the last Step.
func (c *Core) Fences(most int) (list []FenceStatus, others int) {
	for e := c.fences.Front(); e != nil && len(list) < most; e = e.Next() {
		sb := e.Value.(*sandbox)
		st := FenceStatus{Sandbox: sb.Sandbox}
		for _, s := range c.byID {
			if len(st.Waiting) == min(awaitedMost, len(sb.fence.waiting)) {
				break
			}
			needed, waits := sb.fence.waiting[s]
			if !waits {
				continue
			}
			a := Awaited{SessionStatus: c.statusOf(s)}
			if a.Connected {
				a.Needed = needed
			}
			st.Waiting = append(st.Waiting, a)
		}
		st.Others = len(sb.fence.waiting) - len(st.Waiting)
		if len(sb.fence.waiting) == 0 {
			st.Window = max(0, sb.fence.clearedAt+c.cfg.Window-c.now.Boot)
		}
		list = append(list, st)
	}
	return list, c.fences.Len() - len(list)
}

// Sessions lists the routers that are, or may be, there, by ID, at most so many, and
// says how many more there are. Times count from the last Step.
func (c *Core) Sessions(most int) (list []SessionStatus, others int) {
	all := c.byID
	awaited := make(map[*session]int, len(all))
	c.eachFence(func(sb *sandbox) {
		for s := range sb.fence.waiting {
			awaited[s]++
		}
	})
	for _, s := range all[:min(most, len(all))] {
		st := c.statusOf(s)
		st.Fences = awaited[s]
		list = append(list, st)
	}
	return list, len(all) - len(list)
}

func (c *Core) statusOf(s *session) SessionStatus {
	st := SessionStatus{ID: s.id, From: s.from, Connected: s.stream != 0, Heard: s.heardAt != 0, Expires: max(0, s.lastPing+c.expiryOf(s)-c.now.Boot)}
	if st.Heard {
		st.Silence = c.now.Boot - s.heardAt
	}
	if st.Connected && s.durable {
		st.Sent, st.Acked = s.sequence, s.acked
	}
	return st
}
