package core

import (
	"cmp"
	"maps"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/api/activity"
)

// FenceStatus says what the release of a sandbox waits for.
type FenceStatus struct {
	Sandbox Sandbox
	// Waiting are sessions, by ID and at most maxAwaited. Others is how many more the fence
	// waits for.
	Waiting []Awaited
	Others  int
	// Window is what is left of the connect window; 0 while the fence waits for sessions.
	Window time.Duration
}

// Awaited is a session that a fence waits for.
type Awaited struct {
	SessionStatus
	// Needed is the sequence of the message whose acknowledgement ends the wait, 0 if
	// the session is not connected.
	Needed uint64
}

// SessionStatus is what operators see of a session.
type SessionStatus struct {
	ID string
	// From is the address it joined from last; empty: not known.
	From      string
	Connected bool
	// Egress: it is that of an egress router.
	Egress bool
	// Heard: this leader has heard it, the last time Silence ago.
	Heard   bool
	Silence time.Duration
	// Sent and Acked are the sequences of the last message on its stream and of the last one that
	// it has acknowledged; 0 if it is not connected.
	Sent, Acked uint64
	// Expires is after how long it expires if it is not heard again.
	Expires time.Duration
	// Fences is how many fences wait for it. Only Sessions says so.
	Fences int
}

// ActivityStatus is the known use of a live sandbox, and what happens next without further
// activity. Times count from the last Step.
type ActivityStatus struct {
	Sandbox Sandbox
	// Age is the time since the last known activity, Kind its kind. Why says for Unknown what is
	// not known, and otherwise why the first of Awaits cannot answer.
	Age  time.Duration
	Kind activity.Kind
	Why  string
	// Router is the session that has reported it, "" if none has.
	Router string
	// Open is how many requests that router said are open.
	Open int
	// Next is the reason of its next release; empty: none is due. In is the time until then.
	Next string
	In   time.Duration
	// Asks are the sessions, by ID, maxAwaited at most, that have to answer before it is
	// released for being idle.
	Asks []string
	// Awaits are sessions, by ID and maxAwaited at most, that keep it from being released for
	// being idle: see idle.Question.
	Awaits []string
}

// maxAwaited bounds the sessions that a FenceStatus lists.
const maxAwaited = 20

// Fences lists the sandboxes whose fence is not complete, in the order in which the
// fences began, at most so many, and says how many more there are. Times count from
// the last Step.
func (v View) Fences(most int) (list []FenceStatus, others int) {
	for id := range v.c.fences.UnderWay() {
		if len(list) == most {
			break
		}
		list = append(list, v.fenceOf(v.c.sandboxes.Get(id)))
	}
	return list, v.c.fences.Len() - len(list)
}

func (v View) fenceOf(sb *sandboxes.Sandbox) FenceStatus {
	st := FenceStatus{Sandbox: sb.Sandbox, Window: v.c.fences.WindowLeft(sb.ID, v.c.Now.Boot)}
	waiting := maps.Collect(v.c.fences.Waiting(sb.ID))
	for _, s := range v.c.routers.members.All() {
		if len(st.Waiting) == min(maxAwaited, len(waiting)) {
			break
		}
		needed, waits := waiting[s.ID]
		if !waits {
			continue
		}
		a := Awaited{SessionStatus: v.statusOf(s)}
		if a.Connected {
			a.Needed = needed
		}
		st.Waiting = append(st.Waiting, a)
	}
	st.Others = len(waiting) - len(st.Waiting)
	return st
}

// Sessions lists the sessions that have not ended, by ID and at most so many, and says how many
// more there are. Times count from the last Step.
func (v View) Sessions(most int) (list []SessionStatus, others int) {
	all := v.c.routers.members.All()
	fences := v.c.fences.CountByRouter()
	for _, s := range all[:min(most, len(all))] {
		st := v.statusOf(s)
		st.Fences = fences[s.ID]
		list = append(list, st)
	}
	return list, len(all) - len(list)
}

func (v View) statusOf(s *member.Session) SessionStatus {
	st := SessionStatus{
		ID: s.ID, From: s.From, Connected: s.Stream != 0, Egress: s.Egress, Heard: s.HeardAt != 0,
		Expires: max(0, v.c.routers.members.ExpiresAt(s)-v.c.Now.Boot),
	}
	if st.Heard {
		st.Silence = v.c.Now.Boot - s.HeardAt
	}
	if st.Connected && s.Durable {
		st.Sent, st.Acked = s.Sequence, s.Acked
	}
	return st
}

// Activity returns the activity of a live sandbox, or false if there is none within the scope.
func (v View) Activity(id string, scope Scope) (ActivityStatus, bool) {
	if s := v.c.sandboxes.Seen(id, scope); s != nil && s.Listed() {
		return v.activityOf(s), true
	}
	return ActivityStatus{}, false
}

// Activities is a part of the list of the activity of live sandboxes, the oldest first.
type Activities struct {
	List []ActivityStatus
	// Others is how many more were kept.
	Others int
	// Next is the mark of the next part. Done: there is none.
	Next Mark
	Done bool
}

// Activities passes over at most scan live sandboxes of a selection that follow a mark. It lists
// those for which keep returns true, at most so many.
func (v View) Activities(sel Selection, after Mark, keep func(*Sandbox) bool, most, scan int) (part Activities) {
	for _, s := range v.c.sandboxes.Live().After(sel, time.Time{}, after, OldestFirst) {
		if scan--; scan < 0 {
			return part
		}
		part.Next = s.Mark()
		switch {
		case !s.Listed() || !keep(&s.Sandbox):
		case len(part.List) == most:
			part.Others++
		default:
			part.List = append(part.List, v.activityOf(s))
		}
	}
	part.Done = true
	return part
}

func (v View) activityOf(s *sandboxes.Sandbox) ActivityStatus {
	st := ActivityStatus{Sandbox: s.Sandbox, Age: max(0, v.c.Now.Wall.Sub(s.ClaimedAt)), Kind: activity.Claim}
	if use, ok := v.c.idle.Use(s.ID); ok { // else it is starting
		st.Age, st.Kind, st.Router, st.Open = v.c.Now.Boot-use.At, use.Kind, use.Router, use.Open
	}
	switch {
	case st.Kind != activity.Unknown:
	case st.Router != "":
		st.Why = "the router cannot tell yet"
	default:
		st.Why = "a router has ended, and it is not known how long a request that it had admitted went on"
	}
	end, reason := s.Ends()
	if q, ok := v.c.idle.Question(s.ID, maxAwaited); ok && s.Phase == Running {
		if reason == "" || q.At < end {
			end, reason = q.At, fact.ReasonIdleTimeout
		}
		st.Asks, st.Awaits, st.Why = q.Asks, q.Awaits, cmp.Or(st.Why, q.Why)
	}
	if reason != "" {
		st.Next, st.In = reason, max(0, end-v.c.Now.Boot)
	}
	return st
}
