package core

import (
	"reflect"
	"slices"
)

// activityOnly reports whether what is to be recorded says nothing new but when the
// sandbox was active.
func activityOnly(s, durable Sandbox) bool {
	return !s.LastActive.IsZero() && s.Phase == Running && durable.Phase == Running && reflect.DeepEqual(s.Binding, durable.Binding)
}

// judgeSession: a router is told nothing before the next leader would know of it.
func (w *world) judgeSession(stream uint64) {
	for _, r := range w.routers {
		if r.stream == stream && !w.disk.sessions[r.id] {
			w.t.Fatalf("%s is spoken to, and that it is there is not durable", r.id)
		}
	}
}

func (w *world) answerClaim(token uint64) {
	c, waits := w.claims[token]
	if !waits || c.abandoned {
		w.t.Fatalf("claim %d answered, but waits=%v, %+v", token, waits, c)
	}
	delete(w.claims, token)
}

// judgeClaimed: what callers are given is durable, and has not been released.
func (w *world) judgeClaimed(s Sandbox) {
	if durable, ok := w.disk.sandboxes[s.ID]; !ok || durable.Phase == Released && !s.EndedAt.IsZero() {
		w.t.Fatalf("claim answered with %+v, durable is %+v", s, durable)
	}
	if s.Phase == Running && !w.ready[s.ID] && !w.inherited(s.ID) {
		w.t.Fatalf("%s is answered as running, and OnSandboxReady was not called", s.ID)
	}
	w.answered[s.ID] = true
}

func (w *world) inherited(id string) bool {
	return w.earlier[id]
}

// judgeRefused: nobody is refused for want of a pod while one is warm.
func (w *world) judgeRefused(e ClaimRefused) {
	if e.Why == PoolEmpty && e.Counts.Warm > 0 {
		w.t.Fatalf("claim %d refused with %+v", e.Token, e.Counts)
	}
}

// released reports whether the release of a sandbox is durable.
func (w *world) released(id string) bool { return w.disk.sandboxes[id].Phase == Released }

// judgeDelete: a pod that held a sandbox is deleted only when that was durably
// released and no router can have sent a request to it for a window; any other
// only when that is durable.
func (w *world) judgeDelete(e DeletePod) {
	p := w.pod(e.Pod)
	if len(p.bound) == 0 {
		if !p.discarded {
			w.t.Fatalf("pod %s is to be deleted before that is durable", p.Key.Name)
		}
		return
	}
	id := p.bound[0]
	if !w.released(id) {
		w.t.Fatalf("pod of %s deleted before its release is durable", id)
	}
	w.judgeFence(id)
	w.doomed[id] = true
}

// judgeAcknowledged: no router can route to it any more, and it is said once.
func (w *world) judgeAcknowledged(e Acknowledged) {
	if !w.fired[e.ID] || w.acknowledged[e.ID] || e.Took < 0 {
		w.t.Fatalf("%+v, released in this term=%v, acknowledged before=%v", e, w.fired[e.ID], w.acknowledged[e.ID])
	}
	w.acknowledged[e.ID] = true
	for _, r := range w.routers {
		if r.routable(e.ID) {
			w.t.Fatalf("%s counts as acknowledged while router %s can route to it", e.ID, r.id)
		}
	}
}

// judgeDiscards: a pool whose template is refused loses warm pods of an earlier
// template only as far as it has more of them than it asks for.
func (w *world) judgeDiscards() {
	for key := range w.core.retirements {
		q := w.core.pods[key]
		if w.judged[key] || q == nil {
			continue
		}
		w.judged[key] = true
		known, pool := q.pool, w.pool(q.pool.Key)
		if !known.known || !known.Refused || known.Deleting || !q.usable() || q.seen.Used || q.seen.Template == pool.told.Template {
			continue
		}
		if want := wanted(pool.told, inUse(known)); known.sum(podWarm) < want {
			w.t.Fatalf("pod %s of an earlier template deleted, %d are left, %d are asked for, and the present one is refused", key.Name, known.sum(podWarm), want)
		}
	}
}

// inUse counts the pods that hold a sandbox, or are being given one, as far as
// the core knows.
func inUse(p *pool) (n int) {
	for q := range p.pods {
		if q.phase == podClaiming || q.phase == podClaimed {
			n++
		}
	}
	return n
}

// wanted is how many pods are to be warm beside those in use.
func wanted(p Pool, inUse int) int {
	if p.MaxPods == 0 {
		return p.Warm
	}
	return max(0, min(p.Warm, p.MaxPods-inUse))
}

// judgeRoute: what routers are told was written, and is true as far as is known.
func (w *world) judgeRoute(s Sandbox) {
	p := w.pod(s.Pod)
	if !slices.Contains(p.bound, s.ID) {
		w.t.Fatalf("%s is said to be on pod %s, which holds %v", s.ID, s.Pod.Name, p.bound)
	}
	if q := w.core.pods[s.Pod]; q.seen.IP != s.IP {
		w.t.Fatalf("%s is said to be at %v, its pod is at %v", s.ID, s.IP, q.seen.IP)
	}
	if w.disk.sandboxes[s.ID].Phase == Starting {
		w.t.Fatalf("%s is told to routers and is starting", s.ID)
	}
}

func (w *world) judgeRelease(s Sandbox) {
	if w.fired[s.ID] {
		w.t.Fatalf("%s released twice", s.ID)
	}
	w.fired[s.ID] = true
	w.ended[s.ID] = s.Pod
	p := w.pod(s.Pod)
	ok := false
	switch s.Reason {
	case ReasonKilled:
		ok = w.asked[s.ID]
	case ReasonTimeout:
		ok = !s.EndAt.IsZero() && !s.EndAt.After(w.now.Wall)
	case ReasonIdle:
		ok = s.IdleTimeout > 0 // judgeIdle has judged it
	case ReasonMaxLifetime:
		ok = !s.LifetimeEnd.IsZero() && !s.LifetimeEnd.After(w.now.Wall)
	case ReasonStartup:
		ok = !s.StartBy.IsZero() && !s.StartBy.After(w.now.Wall) && !w.ready[s.ID]
	case ReasonAbandoned:
		ok = !w.answered[s.ID]
	case ReasonPodDeleted:
		ok = p.Deleting || !p.exists
	case ReasonPodGone:
		ok = !p.exists
	case ReasonPodFailed:
		ok = p.Finished
	case ReasonPodMoved:
		ok = p.moved
	case ReasonDeleted:
		ok = w.unwanted[s.ID]
	case ReasonStartFailed:
		ok = w.failed[s.ID]
	case ReasonRestart:
		pool := w.pool(p.pool())
		ok = p.Restarts > s.Restarts && (!pool.KeepOnRestart || pool.everDeleting)
	case ReasonAddressShared:
		ok = len(w.hadAddress[s.IP]) > 1
	case ReasonDuplicate:
		ok = w.tampered[s.ID]
	case ReasonPoolDeleted:
		ok = w.pool(p.pool()).everDeleting
	}
	if !ok {
		w.t.Fatalf("%s released for no good reason: %q", s.ID, s.Reason)
	}
}
