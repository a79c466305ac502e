package core

import (
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/lastactive"
)

// What is in use, and how routers learn of it: requests that stay open, and the access
// logs of the Envoys. A log may be cut, a router may stand still while entries wait for
// it, two routers beside one Envoy follow each other. The trackers are the production
// code.

const (
	flush      = envoy.MinAccessLogFlush
	useStep    = 250 * time.Millisecond // routers tick, and Envoys report, as often
	idleLong   = 8 * time.Second
	idleShort  = 3 * time.Second // the window: there is no shorter one
	shortLived = 900 * time.Millisecond
)

var useWindow = envoy.ActivityWindow(flush)

// use is a request that has reached its pod.
type use struct {
	id, stream string
	envoy      int
	// began is when it was admitted, ends when it ends; 0: it is open until somebody
	// ends it.
	began, ends time.Duration
	nextEntry   time.Duration // when Envoy reports it next
	bytes       uint64
}

// simLog is the access log of one Envoy.
type simLog struct {
	log    *lastactive.Log
	router *router // whose log it is
	queue  []logged
}

// logged are entries on their way, and when they arrive.
type logged struct {
	at      time.Duration
	entries []lastactive.LogEntry
}

func (u *use) open(now time.Duration) bool { return u.ends == 0 || u.ends > now }

// tracker makes a router's tracker.
func (w *world) tracker(r *router) *lastactive.Tracker {
	t, err := lastactive.New(lastactive.Options{
		Flush: flush, Window: useWindow, Now: func() time.Duration { return r.clock(w.now.Boot) }, Gone: r.cache.Gone,
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return t
}

// begins lets a request reach its pod: for a moment, for less than a second, or until
// somebody ends it.
func (w *world) begins(q *request, at time.Duration) {
	w.streams++
	u := &use{id: q.id, stream: strconv.Itoa(w.streams), envoy: q.router.envoy, began: q.admitted, bytes: 1}
	switch w.draw(4) {
	case 0, 1:
		u.ends = at
	case 2:
		u.ends = at + shortLived
	}
	// Entries from before it was admitted do not say for which sandbox it is.
	for u.nextEntry = u.began + flush; u.nextEntry <= at; u.nextEntry += flush {
	}
	if w.isKnown(q.router) {
		w.active(u.id, min(at, w.now.Boot))
		w.moved(u.id, min(at, w.now.Boot))
	}
	w.uses = append(w.uses, u)
}

// active notes that something was in progress, and moved that bytes have moved.
func (w *world) active(id string, at time.Duration) { w.activeAt[id] = max(w.activeAt[id], at) }
func (w *world) moved(id string, at time.Duration)  { w.movedAt[id] = append(w.movedAt[id], at) }

// runFor lets time pass in which everything goes on.
func (w *world) runFor(d time.Duration) {
	for d > 0 {
		step := min(d, useStep)
		d -= step
		w.sleep(step)
		for _, r := range w.routers {
			if !r.dead && !r.frozen {
				r.tracker.Tick()
			}
		}
		w.deliverLogs()
	}
}

// passUses notes what is in use until now, and lets Envoys write it down.
func (w *world) passUses() {
	now := w.now.Boot
	for _, u := range w.uses {
		until := now
		if u.ends != 0 {
			until = min(now, u.ends)
		}
		if w.seen(u.envoy) {
			w.active(u.id, until)
		}
		for ; u.nextEntry <= until && u.nextEntry != u.ends; u.nextEntry += flush {
			w.enter(u, u.nextEntry, false)
		}
		if !u.open(now) && u.ends-u.began >= time.Second {
			w.enter(u, u.ends, true)
		}
	}
	w.uses = slices.DeleteFunc(w.uses, func(u *use) bool { return !u.open(now) || w.podless(u.id) })
}

// podless reports whether there is nothing any more that a request for id could go to.
func (w *world) podless(id string) bool {
	p := w.podOf(id)
	return p == nil || !p.exists
}

// enter has an Envoy write an entry, to the router that took its log stream, or to the
// youngest one if there is no stream.
func (w *world) enter(u *use, at time.Duration, end bool) {
	l := w.logs[u.envoy]
	if l == nil {
		l = &simLog{}
		w.logs[u.envoy] = l
	}
	if l.log == nil {
		if l.router = w.logsTo(u.envoy); l.router == nil {
			return // lost
		}
		l.log = l.router.tracker.OpenLog(flush)
	}
	entry := lastactive.LogEntry{ID: u.id, Stream: u.stream, Bytes: u.bytes, End: end}
	l.queue = append(l.queue, logged{at + time.Duration(w.draw(2))*(time.Second-useStep), []lastactive.LogEntry{entry}})
}

// deliverLogs lets routers read what has arrived.
func (w *world) deliverLogs() {
	for _, n := range sorted(w.logs) {
		l := w.logs[n]
		for len(l.queue) > 0 && !l.router.frozen && l.queue[0].at <= w.now.Boot {
			l.log.Record(l.queue[0].entries)
			l.queue = l.queue[1:]
		}
	}
}

// cutLog ends an Envoy's log stream; what is on its way is lost.
func (w *world) cutLog(r *router, stopping bool) {
	for _, n := range sorted(w.logs) {
		if l := w.logs[n]; l.router == r {
			if !r.dead {
				if stopping {
					l.log.Stop()
				} else {
					l.log.Close()
				}
			}
			l.log, l.router, l.queue = nil, nil, nil
		}
	}
}

// ---- what happens

// moveBytes lets bytes move in a request that is open.
func (w *world) moveBytes() {
	if u := pick(w, w.uses, func(u *use) bool { return u.ends == 0 }); u != nil {
		u.bytes++
		if w.seen(u.envoy) {
			w.moved(u.id, w.now.Boot)
		}
	}
}

func (w *world) endUse() {
	if u := pick(w, w.uses, func(u *use) bool { return u.ends == 0 }); u != nil {
		u.ends = w.now.Boot
		w.passUses()
	}
}

// freeze stops a router's process: nothing comes to it, and it does nothing.
func (w *world) freeze(r *router) {
	if r != nil {
		r.frozen, r.deaf, r.mute = true, true, true
	}
}

func (w *world) thaw(r *router) {
	if r != nil {
		r.frozen, r.deaf, r.mute = false, false, false
	}
}

// reports has a router say what has moved.
func (w *world) reports(r *router, all bool) {
	if r == nil || r.stream == 0 {
		return
	}
	if list := r.tracker.Report(all); len(list) > 0 || all {
		r.out = append(r.out, Report{Session: r.id, Stream: r.stream, Activities: toActivities(list), Complete: all})
	}
}

func toActivities(list []lastactive.Activity) (all []Activity) {
	for _, a := range list {
		all = append(all, Activity{ID: a.ID, Age: a.Age.Truncate(time.Millisecond), Quiet: a.Quiet.Truncate(time.Millisecond), Open: a.Open, Settles: a.Settles})
	}
	return all
}

// routersWork lets everything be said that routers and the leader have to say to one
// another, in no time.
func (w *world) routersWork() {
	for range 200 {
		if !w.firstRouter() {
			return
		}
		w.check()
	}
}

// quiesce has a router hold the requests for sandboxes and answer.
func (w *world) quiesced(r *router, e SendQuiesce) {
	for _, id := range e.IDs {
		if !r.cache.Quiesce(id) {
			w.t.Fatalf("%s cannot hold requests for %s", r.id, id)
		}
		r.held[id] = true
	}
	list, doubt := r.tracker.Ask(e.IDs)
	r.out = append(r.out, Quiesced{Session: r.id, Stream: r.stream, Number: e.Number, Activities: toActivities(list), Doubt: doubt})
}

// keptCall is a KeepAlive, or, if it moves the end, a SetTimeout.
type keptCall struct {
	id  string
	end bool
}

func (w *world) keepAlive() {
	token := w.token()
	id := w.anyID()
	w.kept[token] = keptCall{id: id}
	w.step(KeepAlive{Token: token, ID: id})
}

func (w *world) setTimeout() {
	token := w.token()
	id := w.anyID()
	w.kept[token] = keptCall{id: id, end: true}
	w.step(SetTimeout{Token: token, ID: id, Lifetime: time.Duration(1+w.draw(4)) * 15 * time.Second})
}

// judgeKept: who is told that the end has moved finds it so under every leader.
func (w *world) judgeKept(e Kept) {
	call, waits := w.kept[e.Token]
	if !waits {
		w.t.Fatalf("call %d answered twice", e.Token)
	}
	delete(w.kept, e.Token)
	if e.Status != ReleaseOK {
		return
	}
	id := call.id
	w.active(id, w.now.Boot)
	w.moved(id, w.now.Boot)
	if durable := w.disk.sandboxes[id]; call.end && durable.Revision == e.Sandbox.Revision && !durable.EndAt.Equal(e.Sandbox.EndAt) || durable.Revision.Less(e.Sandbox.Revision) && e.Sandbox.LastActive.IsZero() {
		w.t.Fatalf("the end of %s is said to be %v, durable is %v", id, e.Sandbox.EndAt, durable.EndAt)
	}
}

// banned reports whether a router is not let in, because it did not answer.
func (w *world) banned(r *router) bool {
	s := w.core.sessions[r.id]
	return s != nil && s.cuts >= cutsMost
}

// ---- judgement

// verdicts counts them.
var verdicts atomic.Int64

// judgeVerdicts judges, before anything else happens, which sandboxes the leader has
// decided to release for being idle.
func (w *world) judgeVerdicts() {
	for _, id := range sorted(w.core.sandboxes) {
		if s := w.core.sandboxes[id]; s.reaping == decided && s.Phase == Releasing && w.judgedBy[id] != w.term {
			w.judgedBy[id] = w.term
			verdicts.Add(1)
			w.judgeIdle(s.Sandbox)
		}
	}
}

// judgeIdle (I4): a sandbox is released for being idle only if nothing was in progress
// within its idle timeout, as far as a router knows that the allocator knows. From here
// on no router that is connected admits a request for it: see request.
func (w *world) judgeIdle(s Sandbox) {
	now := w.now.Boot
	since := now - s.IdleTimeout
	if s.IdleTimeout <= 0 {
		w.t.Fatalf("%s is released for being idle, and it has no idle timeout", s.ID)
	}
	for _, q := range w.requests {
		if q.id == s.ID && unread(q) && w.isKnown(q.router) {
			w.t.Fatalf("%s is released for being idle, and %v", s.ID, q)
		}
	}
	if s.BytesOnly {
		// Bytes that moved within the last flush are shown one flush later.
		for _, at := range w.movedAt[s.ID] {
			if at > since && at <= now-flush-time.Second {
				w.t.Fatalf("%s is released for being idle %v after bytes have moved", s.ID, now-at)
			}
		}
		return
	}
	for _, u := range w.uses {
		if u.id == s.ID && w.seen(u.envoy) {
			w.t.Fatalf("%s is released for being idle, and stream %s at Envoy %d is open since %v", s.ID, u.stream, u.envoy, u.began)
		}
	}
	if at := w.activeAt[s.ID]; at > since {
		w.t.Fatalf("%s is released for being idle %v after it was active", s.ID, now-at)
	}
}

// isKnown reports whether the allocator knows a router.
func (w *world) isKnown(r *router) bool {
	s := w.core.sessions[r.id]
	return !r.dead && r.everJoined && s != nil && s.durable
}

// handedOver notes that the leader has heard the Goodbye of a router.
func (w *world) handedOver(session string) {
	for _, r := range w.routers {
		if r.id == session {
			w.untold[r.envoy] = w.now.Boot + w.core.expiry()
		}
	}
}

// seen reports whether a router that the allocator knows is told by an Envoy what is
// open, or was until a short while ago. If not, nobody can know of it.
func (w *world) seen(envoy int) bool {
	if w.now.Boot <= w.untold[envoy] {
		return true
	}
	if l := w.logs[envoy]; l != nil && l.log != nil {
		return w.isKnown(l.router)
	}
	r := w.logsTo(envoy)
	return r != nil && w.isKnown(r)
}

// logsTo is the router to which an Envoy opens its next log stream: the youngest.
func (w *world) logsTo(envoy int) (to *router) {
	for _, r := range w.routers {
		if r.envoy == envoy && !r.dead && !r.stopping && !r.frozen {
			to = r
		}
	}
	return to
}

// judgeReaped that whoever is silent was released in the end.
func (w *world) judgeReaped() {
	for id, s := range w.core.sandboxes {
		used := slices.ContainsFunc(w.uses, func(u *use) bool { return u.id == id })
		if s.Phase == Running && s.IdleTimeout > 0 && !used && !w.core.closing {
			for _, r := range w.routers {
				w.log("  %s, dead: %v, knows %+v, doubt %v", r.id, r.dead, r.tracker.Dump(nil), r.tracker.Doubt())
			}
			w.t.Fatalf("%s is silent since %v, and runs at %v: %+v", id, w.activeAt[id], w.now.Boot, s.activity)
		}
	}
}
