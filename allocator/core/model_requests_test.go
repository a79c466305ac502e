package core

import (
	"fmt"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/admission"
	"github.com/berth-sandbox/berth/lastactive"
	"github.com/berth-sandbox/berth/routecache"
)

// request was admitted: the router has sent its answer.
type request struct {
	id     string
	at     netip.Addr
	router *router
	epoch  *admission.Epoch // nil: Envoy has read the answer
	entry  *lastactive.Entry
	// admitted is when it was.
	admitted time.Duration
	// fresh is until when the router has been fresh without a break since.
	fresh time.Duration
	// until is when Envoy connects to the address at last, once it has read it: it may
	// have stood still in between, and it tries again.
	until time.Duration
}

func (q *request) String() string {
	return fmt.Sprintf("a request for %s that %s has admitted, to %v: unread %v, guarded until %v, sent until %v", q.id, q.router.id, q.at, unread(q), q.fresh, q.until)
}

// stall is how late Envoy may read an answer whose router is dead or not fresh any more.
const stall = envoy.StallBudget

func (w *world) anyRequest() {
	if r := pick(w, w.routers, func(r *router) bool { return !r.dead && !r.stopping && !r.frozen }); r != nil {
		id := w.anyID()
		if n := len(r.entries); n > 0 && w.draw(4) > 0 {
			id = r.entries[w.draw(n)].ID
		}
		w.request(r, id)
	}
}

// request is one that Envoy asks a router about. Messages may arrive at any moment
// between the look-up and the answer.
func (w *world) request(r *router, id string) {
	if r == nil || r.egress { // the end of what an egress router has admitted is part of its acknowledgement
		return
	}
	key := sandboxid.MustKey(id)
	answer, err := r.cache.Lookup(over, key)
	if err == nil && answer.Status == routecache.Asleep && answer.Wakeable {
		_, _ = r.cache.Wake(over, key) // it asks, and does not wait
	}
	if err != nil || answer.Status != routecache.Routable {
		return
	}
	meanwhile := func(longest time.Duration) {
		if len(r.in) > 0 && !r.deaf {
			for range w.draw(3) {
				w.toRouter(r)
			}
		}
		if w.draw(8) == 7 {
			w.sleep(longest)
		}
	}
	meanwhile(30 * time.Second)
	entry, _ := r.tracker.Begin(key, netip.AddrPortFrom(answer.Route.Addr, 80), false)
	if entry == nil {
		return // too many first requests
	}
	epoch := r.answers.Begin()
	meanwhile(30 * time.Second)
	holds := r.cache.Holds(key, answer.Route)
	if holds && r.held[id] { // I4
		w.t.Fatalf("%s admits a request for %s, and was asked whether that is idle", r.id, id)
	}
	if holds && w.now.Boot >= r.freshUntil {
		w.t.Fatalf("%s admits a request for %s at %v, it was fresh until %v", r.id, id, w.now.Boot, r.freshUntil)
	}
	meanwhile(stall)
	if !holds {
		r.answers.Done(epoch)
		entry.Cancel()
		return
	}
	w.log("  %s admits a request for %s", r.id, id)
	w.requests = append(w.requests, &request{id: id, at: answer.Route.Addr, router: r, epoch: epoch, entry: entry, admitted: w.now.Boot, fresh: r.freshUntil})
	if w.isKnown(r) {
		w.active(id, w.now.Boot)
	}
	// I2: what came in the last moment is only acknowledged when this answer is read.
	if r.over[id] {
		w.t.Fatalf("%s admits a request for %s, whose release it has acknowledged", r.id, id)
	}
	if p := w.podOf(id); p.agent.frozen && w.isKnown(r) { // P27
		w.t.Fatalf("%s admits a request for %s, which its agent has stopped", r.id, id)
	}
	// I1, I3
	if s, ok := w.disk.sandboxes[id]; !ok || w.holders[answer.Route.Addr] != id || s.IP != answer.Route.Addr && !w.tampered[id] {
		w.t.Fatalf("%s sends a request for %s to %v, which is given to %s; durable is %+v", r.id, id, answer.Route.Addr, w.holders[answer.Route.Addr], s)
	}
}

func unread(q *request) bool { return q.epoch != nil }

// readable reports whether Envoy can read the answer, and its router can notice.
func readable(q *request) bool { return unread(q) && !q.router.frozen }

// read lets Envoy read an answer. Nothing can stop the request from here on.
func (w *world) read(q *request) {
	if q == nil {
		return
	}
	q.until = min(w.now.Boot, w.guarded(q)) + window
	w.endAnswer(q)
	w.begins(q, w.now.Boot)
}

func (w *world) endAnswer(q *request) {
	e := q.epoch
	q.epoch = nil
	if !q.router.dead {
		q.entry.Read()
		q.router.answers.Done(e)
	}
}

// guarded is until when the fence waits for an answer, if its router does not come to
// acknowledge: until it can be known to be dead, or to have served nothing any more.
// Envoy has read it a stall later: that is assumed, see docs/design/fence.md.
func (w *world) guarded(q *request) time.Duration {
	if r := q.router; r.dead && !r.lockless {
		return min(r.diedAt, q.fresh)
	}
	return q.fresh
}

// pass lets time pass for requests.
func (w *world) pass(now time.Duration) {
	for _, q := range w.requests {
		if g := w.guarded(q); unread(q) && g+stall <= now {
			q.until = g + window
			w.endAnswer(q)
			w.begins(q, g+stall)
		}
	}
	w.requests = slices.DeleteFunc(w.requests, func(q *request) bool { return !unread(q) && q.until <= now })
}

// judgeHandOver: no address is given to a second sandbox while a request of the first
// may still be sent there.
func (w *world) judgeHandOver(s Sandbox) {
	w.used(w.now.Boot)
	for id, last := range w.lastUse {
		if other := w.disk.sandboxes[id]; id != s.ID && other.IP == s.IP && w.now.Boot < last+window {
			w.t.Fatalf("%s is given %v, %v after a router could send requests of %s there", s.ID, s.IP, w.now.Boot-last, id)
		}
	}
	for _, q := range w.requests {
		if q.at == s.IP && q.id != s.ID {
			w.t.Fatalf("%s is given %v, and %v may still be sent there", s.ID, s.IP, q)
		}
	}
	w.holders[s.IP] = s.ID
}

// judgeFence: no request for a sandbox can be sent to its pod any more.
func (w *world) judgeFence(id string) {
	for _, r := range w.routers {
		if r.routable(id) {
			w.t.Fatalf("pod of %s deleted while router %s can route to it", id, r.id)
		}
	}
	if last, ok := w.lastUse[id]; ok && w.now.Boot < last+window {
		w.t.Fatalf("pod of %s deleted %v after a router could route to it", id, w.now.Boot-last)
	}
	for _, q := range w.requests {
		if q.id == id {
			w.t.Fatalf("pod of %s deleted at %v while %v may be sent there", id, w.now.Boot, q)
		}
	}
}
