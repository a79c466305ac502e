package core

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// Sleep. The agents of pods obey orders as package agent/freeze says: none that is older than the newest one, and a
// repeated one as before. A freeze that is not kept ends by itself. Orders of a deposed leader may arrive at any moment.

// selfThaw is after how long an agent continues the processes that it was not told to keep.
const selfThaw = 30 * time.Second

// simAgent is the agent of a pod, as far as it freezes.
type simAgent struct {
	frozen, kept bool
	since        time.Duration
	order        Revision // the newest that it has obeyed
}

// sleeps counts the sandboxes that have fallen asleep, wakes those that were woken, archives the archives, stops those
// of sandboxes that are stopped, revivals the sandboxes that have run in another pod, and evictions those that were
// stopped while their pod was being deleted.
var sleeps, wakes, archives, stops, revivals, evictions atomic.Int64

// orderAgent carries out a Freeze or a Thaw. It reports whether the outcome is known.
func (w *world) orderAgent(j *job, s Sandbox, luck int) bool {
	p := w.pod(s.Pod)
	freeze, isFreeze := j.effect.(Freeze)
	arrives := luck != lost && p.exists && p.configured == s.ID
	superseded := arrives && s.Revision.Less(p.agent.order)
	fails := luck == refused && w.draw(2) == 0 || luck != lost && p.exists && p.configured != s.ID // an agent that has started again
	fails = fails || isFreeze && p.told
	if arrives && !superseded {
		p.agent.order = s.Revision
		switch frozen := isFreeze && !fails; {
		case frozen && !p.agent.frozen:
			w.judgeFrozen(s)
			p.agent = simAgent{true, freeze.Keep, w.now.Boot, s.Revision}
		case frozen:
			p.agent.kept = p.agent.kept || freeze.Keep
		default:
			p.agent = simAgent{order: s.Revision}
		}
	}
	switch certain := luck <= landsReportedLate || fails; {
	case !p.exists || w.released(s.ID): // the shell stops
	case !fails && (!certain || !arrives):
		return false
	case isFreeze:
		j.report = []Event{Frozen{ID: s.ID, Revision: s.Revision, OK: !superseded && !fails, Why: "no"}}
	default:
		w.unthawed[s.ID] = w.unthawed[s.ID] || superseded || fails
		j.report = []Event{Thawed{ID: s.ID, Revision: s.Revision, OK: !superseded && !fails, Why: "no"}}
	}
	return true
}

// writeArchive has the agent of a sandbox write an archive, which it does only while it has stopped the processes.
func (w *world) writeArchive(j *job, e WriteArchive, luck int) {
	p := w.pod(e.Sandbox.Pod)
	ok := luck <= landsReportedLate && p.exists && p.configured == e.Sandbox.ID && p.agent.frozen
	if w.archived[e.Token] = ok; ok {
		w.judgeFrozen(e.Sandbox)
		archives.Add(1)
	}
	written := ArchiveWritten{ID: e.Sandbox.ID, Token: e.Token, Order: e.Sandbox.Revision}
	if !ok {
		written.Err = errStoreFull
	}
	if e.Token == 0 {
		w.unarchived[e.Sandbox.ID] = !ok
	}
	if e.Token == 0 && ok {
		written.Archive = fmt.Sprintf("%s/%d", e.Sandbox.ID, stops.Add(1))
		w.stops[written.Archive] = e.Sandbox.ID
	}
	j.report = []Event{written}
}

// judgeStopped: nothing can reach the pod of a sandbox that is stopped, and its files are there.
func (w *world) judgeStopped(s Sandbox) {
	w.judgeFrozen(s)
	if w.stops[s.Archive] != s.ID {
		w.t.Fatalf("%s is stopped, and its archive %q does not exist", s.ID, s.Archive)
	}
	if p := w.pod(s.Pod); p.Deleting && p.agent.frozen {
		evictions.Add(1)
	}
}

// checkAsleep (P34): no more sandboxes of a pool are asleep than may be, unless their stops have failed.
func (w *world) checkAsleep() {
	for _, p := range w.pools {
		asleep := 0
		for sb := range w.core.sandboxes.All() {
			if sb.Pool == p.Key && sb.Phase == Asleep && !w.unarchived[sb.ID] {
				asleep++
			}
		}
		if p.MaxAsleep > 0 && asleep > p.MaxAsleep && p.exists && !p.Deleting && p.Refused == "" {
			w.t.Fatalf("pool %s: %d are asleep, at most %d may be", p.Key.Name, asleep, p.MaxAsleep)
		}
	}
}

// judgeDropped: no archive is deleted that the record of a sandbox names.
func (w *world) judgeDropped(e DropArchive) {
	if durable := w.disk.sandboxes[e.Sandbox.ID]; durable.Archive == e.Sandbox.Archive && durable.Phase != Released {
		w.t.Fatalf("archive %q is deleted, durable is %+v", e.Sandbox.Archive, durable)
	}
}

// left reports whether the sandbox of a pod is stopped, or has another pod since.
func (w *world) left(p *simPod) bool {
	if len(p.bound) == 0 {
		return false
	}
	s := w.disk.sandboxes[p.bound[0]]
	return s.Phase == Stopped || s.Pod != p.Key
}

// agentsThaw lets the agents continue what they were not told to keep.
func (w *world) agentsThaw() {
	for _, p := range w.pods {
		if p.agent.frozen && !p.agent.kept && w.now.Boot >= p.agent.since+selfThaw {
			p.agent.frozen = false
		}
	}
}

// judgeFrozen (P27): when the processes of a sandbox are stopped, no router can send a request to it, and nothing that
// was admitted can connect any more.
func (w *world) judgeFrozen(s Sandbox) {
	if w.released(s.ID) { // an order that comes late; the fence of the release waits for those requests
		return
	}
	for _, r := range w.routers {
		if r.routable(s.ID) {
			w.t.Fatalf("%s is frozen while router %s can route to it", s.ID, r.id)
		}
	}
	for _, q := range w.requests {
		if q.id == s.ID && (unread(q) || q.until > w.now.Boot) && w.isKnown(q.router) {
			w.t.Fatalf("%s is frozen at %v while %v may be sent there", s.ID, w.now.Boot, q)
		}
	}
}

// judgeServable (P27): the processes of a sandbox whose route is sent run, and no record says otherwise.
func (w *world) judgeServable(s Sandbox) {
	if p := w.pod(s.Pod); p.agent.frozen && !w.released(s.ID) {
		w.t.Fatalf("the route of %s is sent, and its agent has stopped it", s.ID)
	}
	if durable := w.disk.sandboxes[s.ID].Phase; durable == FallingAsleep || durable == Asleep || durable == Stopped {
		w.t.Fatalf("the route of %s is sent, and durable is phase %d", s.ID, durable)
	}
}

func (w *world) sleepCall() {
	token, id := w.token(), w.anyID()
	w.kept[token], w.slept[id] = keptCall{id: id, sleeps: true}, token
	w.step(Sleep{Token: token, Scope: everyTeam, ID: id})
}

func (w *world) stopCall() {
	token, id := w.token(), w.anyID()
	if ids := w.sleepers(); len(ids) > 0 && w.draw(2) == 0 {
		id = ids[w.draw(len(ids))]
	}
	w.kept[token], w.slept[id] = keptCall{id: id, sleeps: true, stops: true}, token
	w.step(Sleep{Token: token, Scope: everyTeam, ID: id, Stop: true})
}

func (w *world) wakeCall() {
	token, id := w.token(), w.anyID()
	if ids := w.sleepers(); len(ids) > 0 && w.draw(4) > 0 { // most are awake
		id = ids[w.draw(len(ids))]
	}
	w.kept[token] = keptCall{id: id, end: true}
	w.step(SetTimeout{Token: token, Scope: everyTeam, ID: id, Lifetime: time.Duration(1+w.draw(4)) * 15 * time.Second, Extend: true, Wake: true})
}

// evictSleeper deletes the pod of a sandbox that is asleep, as others than the core do it. It returns the ID of the
// sandbox if that may be stopped.
func (w *world) evictSleeper() (id string) {
	asleep := func(p *simPod) bool {
		return p.exists && !p.Deleting && len(p.bound) > 0 && !w.left(p) && w.disk.sandboxes[p.bound[0]].Phase == Asleep
	}
	p := pick(w, w.pods, asleep)
	if p != nil && w.disk.sandboxes[p.bound[0]].Sleep.StopAfter > 0 {
		id = p.bound[0]
	}
	w.write(p, func(p *Pod) { p.Deleting = true })
	return id
}

// tellAgent has the agent of a pod that is being deleted continue the processes.
func (w *world) tellAgent() {
	if p := pick(w, w.pods, func(p *simPod) bool { return p.exists && p.Deleting && p.agent.frozen }); p != nil {
		p.told, p.agent.frozen = true, false
	}
}

func (w *world) archiveCall() {
	token, id := w.token(), w.anyID()
	if ids := w.sleepers(); len(ids) > 0 && w.draw(2) == 0 {
		id = ids[w.draw(len(ids))]
	}
	w.kept[token] = keptCall{id: id, archives: true}
	w.step(Archive{Token: token, Scope: everyTeam, ID: id})
}

// requestForSleeper is a request that a router lets wait for a sandbox that is asleep.
func (w *world) requestForSleeper() {
	r := pick(w, w.routers, func(r *router) bool { return connected(r) && r.joined })
	if ids := w.sleepers(); r != nil && len(ids) > 0 {
		r.out = append(r.out, Resolve{Session: r.id, Stream: r.stream, ID: ids[w.draw(len(ids))], Wake: w.draw(4) > 0})
	}
}

// sleepers are the sandboxes that sleep, for the leader.
func (w *world) sleepers() (ids []string) {
	for sb := range w.core.sandboxes.All() {
		if sb.Sleeps() {
			ids = append(ids, sb.ID)
		}
	}
	slices.Sort(ids)
	return ids
}

// judgeSleepCall: what a caller hears of a sleep or a wake is durable.
func (w *world) judgeSleepCall(call keptCall, e SandboxCallAnswered) {
	durable := w.disk.sandboxes[call.id].Phase
	switch {
	case call.archives && e.Status == CallOK && !w.archived[e.Token]:
		w.t.Fatalf("the files of %s are said to be archived, and are not", call.id)
	case call.archives: // asleep or not
	case call.stops && e.Status == CallOK && w.disk.sandboxes[call.id].Archive == "":
		w.t.Fatalf("%s is said to be stopped, durable is phase %d without an archive", call.id, durable)
	case call.stops && e.Status == CallOK:
	case call.sleeps && e.Status == CallOK && durable != Stopped && durable != Asleep && durable != Waking && durable != Released:
		w.t.Fatalf("%s is said to be asleep, durable is phase %d", call.id, durable)
	case !call.sleeps && e.Status == CallOK && w.slept[call.id] > e.Token: // was called before this answer, and may come after it
	case !call.sleeps && e.Status == CallOK && (durable == FallingAsleep || durable == Asleep || durable == Stopped):
		w.t.Fatalf("%s is said to run, durable is phase %d", call.id, durable)
	case e.Status == CallRefused && w.podOf(call.id).AgentPort != 0 && e.Why == "":
		w.t.Fatalf("%s does not sleep, and no reason is said", call.id)
	}
}

// judgeClosings judges, before anything else happens, which sandboxes are closed because a verdict has found them idle.
func (w *world) judgeClosings() {
	for _, sb := range w.core.sandboxes.ByEnd() {
		why, closing := sb.Closing()
		idle := closing && why == sandboxes.WhenIdle
		if idle && !w.closing[sb.ID] {
			verdicts.Add(1)
			w.judgeIdle(sb.Sandbox)
		}
		if w.closing[sb.ID] && !idle && sb.Sleeps() && !sb.Agent.Egress {
			// Routers could send requests until they held them for the verdict. It has shown that they did not.
			delete(w.lastUse, sb.ID)
		}
		w.closing[sb.ID] = idle
	}
}
