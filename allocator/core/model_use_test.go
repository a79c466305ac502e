package core

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/lastactive/look"
)

// What is in use, and how routers learn of it: requests that are open at Envoys, and looks
// at these. An Envoy may answer late, as of a moment ago, or not at all; it may not show
// yet what it has begun; another process may take its place. Two routers beside one Envoy
// follow each other. The trackers are the production code.

const (
	useStep    = 250 * time.Millisecond
	idleLong   = 8 * time.Second
	idleShort  = window // there is no shorter one
	shortLived = 900 * time.Millisecond
	lookEvery  = time.Second
)

// use is a request that has reached its pod.
type use struct {
	id    string
	at    netip.AddrPort
	envoy int
	// pod is where it goes, or was about to go.
	pod *simPod
	// router has admitted it.
	router *router
	// began is when its answer was read, shows when looks show it, ends when it ends; 0: it
	// is open until endUse ends it.
	began, shows, ends time.Duration
}

func (u *use) open(now time.Duration) bool { return u.ends == 0 || u.ends > now }

// simEnvoy is one Envoy.
type simEnvoy struct {
	process int
	stopped bool // it does not answer looks
}

func (w *world) envoy(n int) *simEnvoy {
	if w.envoys[n] == nil {
		w.envoys[n] = &simEnvoy{}
	}
	return w.envoys[n]
}

// tracker makes a router's tracker.
func (w *world) tracker(r *router) *lastactive.Tracker {
	t, err := lastactive.New(lastactive.Options{
		ConnectWindow: window, Now: func() time.Duration { return r.clock(w.now.Boot) },
		Look: func(context.Context) (look.Look, error) { return w.look(r) },
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return t
}

// look is what look.Reader does, with an Envoy that may be slow.
func (w *world) look(r *router) (look.Look, error) {
	if !w.prompt && w.draw(8) == 7 {
		w.sleep(time.Duration(w.draw(20)) * 100 * time.Millisecond)
	}
	e := w.envoy(r.envoy)
	if e.stopped {
		return look.Look{}, errors.New("the look timed out")
	}
	if at := e.process; r.looksAt != at {
		first := r.looksAt < 0
		r.looksAt = at
		if !first {
			return look.Look{}, errors.New("another Envoy process")
		}
	}
	hosts := map[look.Host]int{}
	for _, u := range w.uses {
		if u.envoy == r.envoy && u.open(w.now.Boot) && u.shows <= w.now.Boot {
			h := look.Host{AddrPort: u.at}
			hosts[h]++
		}
	}
	if !w.prompt && w.draw(8) == 7 { // what it says was so a moment ago
		w.sleep(time.Duration(w.draw(10)) * 100 * time.Millisecond)
	}
	return look.Look{Gateway: fmt.Sprintf("gateway %d", r.envoy), Hosts: hosts}, nil
}

// looks has a router look once, and say what it has seen.
func (w *world) looks(r *router) {
	if r == nil || r.dead || r.frozen || r.egress {
		return
	}
	r.lookedAt = w.now.Boot
	nonce := r.ponged
	stream := r.stream
	r.tracker.Look(context.Background())
	if r.stream != stream {
		return
	}
	if a := r.asking; a != nil {
		blind := r.tracker.LookError()
		if a.looks++; a.looks == 2 || blind != "" {
			r.asking = nil
			answer := Quiesced{Stream: r.stream, Number: a.number, Blind: blind}
			if blind == "" {
				answer.Activities = toActivities(r.tracker.Answer(a.ids))
			}
			r.out = append(r.out, answer)
		}
	}
	w.reports(r, false, nonce)
}

// reports has a router say what it knows.
func (w *world) reports(r *router, all bool, nonce uint64) {
	if r.stream == 0 || !r.joined || r.egress {
		return
	}
	r.out = append(r.out, w.toReport(r, r.tracker.Report(all), nonce, all))
}

func (w *world) toReport(r *router, report lastactive.Report, nonce uint64, complete bool) Report {
	ev := Report{Stream: r.stream, Activities: toActivities(report.Activities), Blind: report.LookError, Gateway: report.Gateway, Took: report.Took}
	if ev.Gateway != "" {
		if !complete { // else that look may have been in another session
			ev.Nonce = nonce
		}
	}
	return ev
}

func toActivities(list []lastactive.Activity) (all []Activity) {
	for _, a := range list {
		all = append(all, Activity{ID: a.ID, Age: a.Age.Truncate(time.Millisecond), Open: a.Open, Kind: activity.Open})
	}
	slices.SortFunc(all, func(a, b Activity) int { return strings.Compare(a.ID, b.ID) }) // the tracker has no order
	return all
}

// question is one that a router has to answer.
type question struct {
	number uint64
	ids    []string
	looks  int // that have ended since
}

// quiesced has a router hold the requests for sandboxes, and look.
func (w *world) quiesced(r *router, e SendQuiesce) {
	if r.egress {
		w.t.Fatalf("%s is an egress router, and is asked about %v", r.id, ids(e))
	}
	r.asking = &question{number: e.Number, ids: ids(e)}
	for _, id := range r.asking.ids {
		if !r.cache.Quiesce(id) {
			w.t.Fatalf("%s cannot hold requests for %s", r.id, id)
		}
		r.held[id] = true
	}
}

// begins lets a request reach its pod: for a moment, for less than a second, or until
// endUse ends it. Its Envoy may show it as late as it may connect.
func (w *world) begins(q *request, at time.Duration) {
	u := &use{id: q.id, pod: w.podOf(q.id), at: netip.AddrPortFrom(q.at, 80), envoy: q.router.envoy, router: q.router, began: at, shows: at}
	switch w.draw(4) {
	case 0, 1:
		u.ends = at
	case 2:
		u.ends = at + shortLived
	}
	if w.draw(3) == 2 {
		u.shows = max(at, q.until-time.Millisecond)
	}
	if w.seen(u.envoy) && w.showsOpen(u) {
		w.active(u.id, min(at, w.now.Boot))
	}
	w.uses = append(w.uses, u)
}

// active notes that something was in progress.
func (w *world) active(id string, at time.Duration) { w.activeAt[id] = max(w.activeAt[id], at) }

// runFor lets time pass in which everything goes on.
func (w *world) runFor(d time.Duration) {
	for end := w.now.Boot + d; w.now.Boot < end; {
		w.sleep(min(end-w.now.Boot, useStep))
		for _, r := range slices.Clone(w.routers) {
			if w.now.Boot-r.lookedAt >= lookEvery {
				w.looks(r)
			}
		}
	}
}

// passUses notes what is in use until now.
func (w *world) passUses() {
	now := w.now.Boot
	for _, u := range w.uses {
		until := now
		if u.ends != 0 {
			until = min(now, u.ends)
		}
		// What ends before a look can show it, a router only knows from its admission.
		if w.seen(u.envoy) && u.shows <= until && w.showsOpen(u) {
			w.active(u.id, until)
		}
	}
	w.uses = slices.DeleteFunc(w.uses, func(u *use) bool { return !u.open(now) || w.podless(u) })
}

// showsOpen reports whether a router knows of a use. When the one that has admitted it must have gone stale,
// what it has left open counts only as far as another router has seen it.
func (w *world) showsOpen(u *use) bool {
	return w.now.Boot < u.router.heardAt+w.stale(u.router) || slices.ContainsFunc(w.routers, func(r *router) bool {
		return r.envoy == u.envoy && w.isKnown(r) && r.lookedAt >= u.shows && u.open(r.lookedAt)
	})
}

// stale is after how long without being heard the routes of a router must be stale for the leader.
func (w *world) stale(r *router) time.Duration { return max(r.maxStale, w.core.cfg.MaxStale) }

// podless reports whether a use has nothing any more that it could go to. A sandbox that was stopped since has another pod.
func (w *world) podless(u *use) bool {
	p := w.podOf(u.id)
	return p == nil || !p.exists || u.pod == nil || !u.pod.exists
}

// ---- what happens

func (w *world) endUse() {
	if u := pick(w, w.uses, func(u *use) bool { return u.ends == 0 }); u != nil {
		u.ends = w.now.Boot
		w.passUses()
	}
}

// replaceEnvoy ends an Envoy, and all that it holds open, and starts another one.
func (w *world) replaceEnvoy(n int) {
	w.passUses()
	w.uses = slices.DeleteFunc(w.uses, func(u *use) bool { return u.envoy == n })
	for _, q := range w.requests {
		if q.router.envoy == n && unread(q) && !q.router.frozen {
			q.until = w.now.Boot
			w.endAnswer(q)
		}
	}
	e := w.envoy(n)
	e.process, e.stopped = e.process+1, false
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

// routersWork lets everything be said that routers and the leader have to say to one
// another, in no time but that of looks.
func (w *world) routersWork() {
	for range 400 {
		if !w.firstRouter() {
			return
		}
		w.check()
	}
}

// keptCall is a KeepAlive or, if it moves the end, a SetTimeout, or one of those that its fields name.
type keptCall struct {
	id                           string
	end, sleeps, archives, stops bool
	rules                        int // that a SetNetwork sets; 0: it is another call
}

func (w *world) keepAlive() {
	token := w.token()
	id := w.anyID()
	w.kept[token] = keptCall{id: id}
	w.step(KeepAlive{Scope: everyTeam, Token: token, ID: id})
}

func (w *world) setTimeout() {
	token := w.token()
	id := w.anyID()
	w.kept[token] = keptCall{id: id, end: true}
	w.step(SetTimeout{Scope: everyTeam, Token: token, ID: id, Lifetime: time.Duration(1+w.draw(4)) * 15 * time.Second, Extend: w.draw(2) == 0})
}

// judgeKept: an end that was confirmed to a caller holds under every leader.
func (w *world) judgeKept(e SandboxCallAnswered) {
	call, waits := w.kept[e.Token]
	if !waits {
		w.t.Fatalf("call %d answered twice", e.Token)
	}
	delete(w.kept, e.Token)
	if call.rules > 0 {
		w.judgeRules(call, e)
		return
	}
	w.judgeSleepCall(call, e)
	if e.Status != CallOK || call.sleeps || call.archives {
		return
	}
	id := call.id
	w.active(id, w.now.Boot)
	if durable := w.disk.sandboxes[id]; call.end && durable.Revision == e.Sandbox.Revision && !durable.EndAt.Equal(e.Sandbox.EndAt) || durable.Revision.Less(e.Sandbox.Revision) && e.Sandbox.LastActive.IsZero() {
		w.t.Fatalf("the end of %s is said to be %v, durable is %v", id, e.Sandbox.EndAt, durable.EndAt)
	}
}

// ---- judgement

// verdicts counts them.
var verdicts atomic.Int64

// judgeVerdicts judges, before anything else happens, which sandboxes the leader has
// decided to release for being idle.
func (w *world) judgeVerdicts() {
	for _, s := range w.core.sandboxes.ByEnd() {
		if id := s.ID; s.FoundIdle() && s.Phase == Releasing && w.judgedBy[id] != w.term {
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
	for _, u := range w.uses {
		if u.id == s.ID && w.seen(u.envoy) {
			w.t.Fatalf("%s is released for being idle, and a request at Envoy %d is open since %v", s.ID, u.envoy, u.began)
		}
	}
	if at := w.activeAt[s.ID]; at > since {
		w.t.Fatalf("%s is released for being idle %v after it was active", s.ID, now-at)
	}
}

// isKnown reports whether the allocator knows a router.
func (w *world) isKnown(r *router) bool {
	s := w.core.routers.members.Get(r.id)
	return !r.dead && r.everJoined && s != nil && s.Durable
}

// heard notes that a leader has heard a router.
func (w *world) heard(session string) {
	for _, r := range w.routers {
		if r.id == session {
			r.heardAt = w.now.Boot
		}
	}
}

// seen reports whether what is open at an Envoy counts: a router beside it can tell, or one
// that has ended was heard no longer than max-stale ago.
func (w *world) seen(envoy int) bool {
	return slices.ContainsFunc(w.routers, func(r *router) bool {
		return r.envoy == envoy && r.everJoined && (w.isKnown(r) || r.dead && w.now.Boot < r.heardAt+w.stale(r))
	})
}

// judgeReaped demands that every silent sandbox was released in the end.
func (w *world) judgeReaped() {
	for s := range w.core.sandboxes.All() {
		id := s.ID
		used := slices.ContainsFunc(w.uses, func(u *use) bool { return u.id == id })
		if s.Phase == Running && s.IdleTimeout > 0 && !used && !w.core.claims.Closing() {
			for _, r := range w.routers {
				w.log("  %s, dead: %v, knows %+v, blind %q", r.id, r.dead, r.tracker.Dump(), r.tracker.LookError())
			}
			use, _ := w.core.idle.Use(id)
			w.t.Fatalf("%s is silent since %v, and runs at %v: %+v", id, w.activeAt[id], w.now.Boot, use)
		}
	}
}
