package core

import (
	"cmp"
	"reflect"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

// activityOnly reports whether what is to be recorded says nothing new but when the
// sandbox was active.
func activityOnly(s, durable Sandbox) bool {
	return !s.LastActive.IsZero() && s.Phase == Running && durable.Phase == Running && reflect.DeepEqual(s.Binding, durable.Binding)
}

// judgeSession: a router is sent nothing before its session is durable.
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
	if durable, ok := w.disk.sandboxes[s.ID]; !ok || durable.Phase == Released && !s.ReleasedAt.IsZero() {
		w.t.Fatalf("claim answered with %+v, durable is %+v", s, durable)
	}
	if s.Phase == Running && !w.ready[s.ID] && !w.inherited(s.ID) {
		w.t.Fatalf("%s is answered as running, and OnSandboxReady was not called", s.ID)
	}
	w.judgeConfigured(s)
	w.answered[s.ID] = true
}

// judgeConfigured: before callers or routers learn of a sandbox, its agent is configured for it.
func (w *world) judgeConfigured(s Sandbox) {
	p, q := w.pod(s.Pod), w.core.pods.Get(s.Pod)
	seen := q == nil || q.Seen().Restarts == p.Restarts || p.forgot != s.ID // else the core does not know of the restart
	if known := w.core.sandboxes.Get(s.ID); known != nil && known.Phase >= Releasing && p.forgot == s.ID {
		seen = false // the restart is why; the step that made the release durable may have sent the route before
	}
	if s.Phase != Stopped && p.configured == s.ID && p.restored != s.Archive && w.disk.sandboxes[s.ID].Archive == s.Archive {
		w.t.Fatalf("%s is used with the files of %q, and its pod has those of %q", s.ID, s.Archive, p.restored)
	}
	if s.Agent.Port != 0 && p.configured != s.ID && seen {
		w.t.Fatalf("%s is used, and the agent of its pod %s is configured for %q", s.ID, p.Key.Name, p.configured)
	}
}

func (w *world) inherited(id string) bool {
	return w.earlier[id]
}

// judgeRefused: no claim is refused for want of a pod while one is warm.
func (w *world) judgeRefused(e ClaimRefused) {
	if asks := w.claims[e.Token].asks; e.Why == PoolEmpty && e.Counts.Warm >= max(1, cmp.Or(asks.AtLeast, asks.Count)) {
		w.t.Fatalf("claim %d refused with %+v", e.Token, e.Counts)
	}
}

// judgeBatch: a batch is answered with sandboxes that one claim got in one write, at least as many as
// it asked for. A claim that is repeated with its key may find fewer.
func (w *world) judgeBatch(e BatchClaimed) {
	asks, all := w.claims[e.Token].asks, append([]string{}, e.Ended...)
	for _, s := range e.Sandboxes {
		all = append(all, s.ID)
		w.judgeClaimed(s)
	}
	if len(e.Sandboxes) == 0 {
		w.t.Fatalf("batch claim %d is answered with %+v", e.Token, e)
	}
	id := e.Sandboxes[0].Batch
	members := w.batches[id]
	ended := 0 // for another reason than that the batch was not granted
	for _, s := range members {
		if r := w.disk.sandboxes[s.ID].Reason; asks.Binding.IdempotencyKey != "" && w.released(s.ID) && (r != fact.ReasonConfigurationFailed && r != fact.ReasonBatchIncomplete || w.pod(s.Pod).forgot == s.ID) {
			ended++
		}
	}
	if !w.complete[id] && len(e.Sandboxes)+ended < cmp.Or(asks.AtLeast, asks.Count) || len(all) > asks.Count {
		w.t.Fatalf("batch claim %+v is answered with %+v", asks, e)
	}
	w.complete[id] = true
	slices.Sort(all)
	for i, member := range all {
		if i > 0 && all[i-1] == member || !slices.ContainsFunc(members, func(s Sandbox) bool { return s.ID == member }) {
			w.t.Fatalf("batch claim %d is answered with %+v, batch %s has %+v", e.Token, e, id, members)
		}
	}
	for _, s := range e.Sandboxes {
		if s.Batch != id {
			w.t.Fatalf("batch claim %d is answered with %+v", e.Token, e)
		}
	}
}

// judgeLanded: no batch grows after the write that began it.
func (w *world) judgeLanded(before map[string][]Sandbox) {
	for id, members := range before {
		if len(w.batches[id]) != len(members) {
			w.t.Fatalf("batch %s is durable as %+v, and had %+v in an earlier write", id, w.batches[id], members)
		}
	}
}

// judgeQuota: a team never has more sandboxes on record that were not released than it may.
func (w *world) judgeQuota(team string) {
	live, most := 0, limitsOfModel.Of(team).MaxSandboxes
	for id, s := range w.disk.sandboxes {
		if s.Team == team && s.Phase != Released && !w.forgotten[id] {
			live++
		}
	}
	if most > 0 && live > most {
		w.t.Fatalf("team %s has %d sandboxes, at most %d are allowed", team, live, most)
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
	if w.left(p) && !w.released(id) {
		return // judgeStopped has judged it
	}
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
	for _, key := range w.core.pods.Keys() {
		q := w.core.pods.Get(key)
		if w.judged[key] || q.State() != pods.Going || q.Sandbox() != "" {
			continue
		}
		w.judged[key] = true
		known, pool := q.Group(), w.pool(q.Group().Key)
		if !known.Known || known.Refused == "" || known.Deleting || q.Withheld() != 0 || q.Seen().Used || q.Seen().Template == pool.sent.Template {
			continue
		}
		if want := wanted(pool.sent, known.Count(pods.Claiming, pods.Bound, pods.Claimed)); known.Count(pods.Warm) < want {
			w.t.Fatalf("pod %s of an earlier template deleted, %d are left, %d are asked for, and the present one is refused", key.Name, known.Count(pods.Warm), want)
		}
	}
}

// wanted is how many pods are to be warm beside those in use.
func wanted(p Pool, inUse int) int {
	if p.MaxPods == 0 {
		return p.Warm
	}
	return max(0, min(p.Warm, p.MaxPods-inUse))
}

// judgeRoute: a route that routers are sent is durable, and its pod serves the sandbox.
func (w *world) judgeRoute(s Sandbox) {
	p := w.pod(s.Pod)
	if !slices.Contains(p.bound, s.ID) {
		w.t.Fatalf("%s is said to be on pod %s, which holds %v", s.ID, s.Pod.Name, p.bound)
	}
	w.judgeConfigured(s)
	w.judgeServable(s)
	if q := w.core.pods.Get(s.Pod).Seen(); q.IP != s.IP {
		w.t.Fatalf("%s is said to be at %v, its pod is at %v", s.ID, s.IP, q.IP)
	}
	if w.disk.sandboxes[s.ID].Phase == Starting {
		w.t.Fatalf("%s is sent to routers and is starting", s.ID)
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
	case fact.ReasonKilled:
		ok = w.asked[s.ID]
	case fact.ReasonEndTime:
		ok = !s.EndAt.IsZero() && !s.EndAt.After(w.now.Wall)
	case fact.ReasonIdleTimeout:
		ok = s.IdleTimeout > 0 // judgeIdle has judged it
	case fact.ReasonMaxLifetime:
		ok = !s.LifetimeEnd.IsZero() && !s.LifetimeEnd.After(w.now.Wall)
	case fact.ReasonStartupTimeout:
		ok = !s.StartBy.IsZero() && !s.StartBy.After(w.now.Wall) && !w.ready[s.ID]
	case fact.ReasonCanceled:
		ok = !w.answered[s.ID]
	case fact.ReasonBatchIncomplete:
		ok = s.Batch == "" && !w.answered[s.ID] || slices.ContainsFunc(w.batches[s.Batch], func(other Sandbox) bool {
			return w.released(other.ID) && !w.ready[other.ID] && !w.answered[s.ID] || w.pod(other.Pod).forgot == other.ID
		})
	case fact.ReasonPodDeleted:
		ok = p.Deleting || !p.exists
	case fact.ReasonFailed:
		ok = p.Finished
	case fact.ReasonPodMoved:
		ok = p.moved
	case fact.ReasonObjectDeleted:
		ok = w.unwanted[s.ID]
	case fact.ReasonWakeFailed:
		ok = w.unthawed[s.ID]
	case fact.ReasonStartFailed:
		ok = w.failed[s.ID]
	case fact.ReasonConfigurationFailed:
		ok = !w.answered[s.ID] || p.forgot == s.ID
	case fact.ReasonUnexpectedRestart:
		pool := w.pool(p.pool())
		ok = p.Restarts > s.Restarts && (!pool.KeepOnRestart || pool.everDeleting || s.Agent.Port != 0)
	case fact.ReasonAddressShared:
		ok = len(w.hadAddress[s.IP]) > 1
	case fact.ReasonDuplicate:
		ok = w.tampered[s.ID]
	case fact.ReasonPoolDeleted:
		ok = w.pool(p.pool()).everReleasing
	}
	if !ok {
		w.t.Fatalf("%s released for no good reason: %q", s.ID, s.Reason)
	}
}

// judge acts on answers, and what is journaled and counted.
func (w *world) judge(e Effect) {
	t := w.t
	switch e := e.(type) {
	case Write:
		w.leader.commit(e.Facts)
	case IdlePodFailed:
		if p := w.pod(e.Pod); len(p.bound) > 0 && p.exists {
			t.Fatalf("pod %s holds %v and is said to have failed idle: %+v", e.Pod.Name, p.bound, e.Failure)
		}
	case RecycleEnded:
		if e.Outcome == Recycled {
			w.recycled++
		}
		if w.recycled > w.lives {
			t.Fatalf("%d lives are said to be proven, of %d", w.recycled, w.lives)
		}
	case Settle:
		w.settleFact(w.leader, e)
	case Repaired:
		if p := w.pod(e.Pod); !p.marked && len(w.tampered) == 0 && !w.left(p) {
			t.Fatalf("pod %s repaired: %s", e.Pod.Name, e.What)
		}
	case SandboxCreated:
		if w.disk.sandboxes[e.Sandbox.ID].ID == "" || w.ready[e.Sandbox.ID] {
			t.Fatalf("%s is said to be created, ready: %v; durable is %+v", e.Sandbox.ID, w.ready[e.Sandbox.ID], w.disk.sandboxes[e.Sandbox.ID])
		}
	case SandboxReady:
		if w.ready[e.Sandbox.ID] || w.disk.sandboxes[e.Sandbox.ID].Phase != Running {
			t.Fatalf("%s is said to be ready, before: %v; durable is %+v", e.Sandbox.ID, w.ready[e.Sandbox.ID], w.disk.sandboxes[e.Sandbox.ID])
		}
		w.ready[e.Sandbox.ID] = true
	case Claimed:
		w.answerClaim(e.Token)
		w.judgeClaimed(e.Sandbox)
		w.given[e.Token] = e.Sandbox.ID
	case BatchClaimed:
		w.judgeBatch(e)
		w.answerClaim(e.Token)
	case ClaimRefused:
		w.judgeRefused(e)
		w.answerClaim(e.Token)
	case ReleaseAnswered:
		id, waits := w.releases[e.Token]
		if !waits {
			t.Fatalf("release %d answered twice", e.Token)
		}
		delete(w.releases, e.Token)
		if e.Status == CallOK && !w.released(id) {
			t.Fatalf("release of %s answered before it was durable", id)
		}
	case DeadDeclared:
		if _, waits := w.declared[e.Token]; !waits {
			t.Fatalf("declaration %d answered twice", e.Token)
		}
		delete(w.declared, e.Token)
	case SessionDeclaredDead:
		if w.disk.sessions[e.Session] {
			t.Fatalf("%s is waited for no more, and that it was declared dead is not durable", e.Session)
		}
	case SandboxCallAnswered:
		w.judgeKept(e)
	case SandboxAsleep:
		if durable := w.disk.sandboxes[e.Sandbox.ID]; durable.Phase != Asleep {
			t.Fatalf("%s is said to be asleep, durable is phase %d", e.Sandbox.ID, durable.Phase)
		}
		sleeps.Add(1)
	case SandboxStopped:
		if durable := w.disk.sandboxes[e.Sandbox.ID]; durable.Phase != Stopped {
			t.Fatalf("%s is said to be stopped, durable is phase %d", e.Sandbox.ID, durable.Phase)
		}
	case SandboxAwake:
		wakes.Add(1)
		if e.Sandbox.Incarnation > 0 {
			revivals.Add(1)
		}
	case WouldReap:
		t.Fatalf("a dry run: %+v", e)
	case SandboxReleased:
		w.judgeRelease(e.Sandbox)
	case Acknowledged:
		w.judgeAcknowledged(e)
	case ClaimGranted, ClaimCanceled: // for metrics
	default:
		t.Fatalf("unknown effect %T", e)
	}
}

// judgeJob judges effects that the shell carries out.
func (w *world) judgeJob(e Effect) {
	t := w.t
	switch e := e.(type) {
	case Configure:
		if v, ok := e.Values.(*valuesOfModel); ok {
			if v.tried++; v.tried > claims.MaxFailures*v.count {
				t.Fatalf("%d agents are configured for a claim of %d sandboxes", v.tried, v.count)
			}
		}
		if s := e.Sandbox; s.Archive != "" && !e.Ask && w.stops[s.Archive] != s.ID && !w.released(s.ID) {
			t.Fatalf("%s is to have the files of %s, and they are deleted", s.ID, s.Archive)
		}
	case WriteArchive:
		if durable := w.disk.sandboxes[e.Sandbox.ID].Phase; durable != FallingAsleep && durable != Asleep && !w.released(e.Sandbox.ID) {
			t.Fatalf("%s is to be archived, and durable is phase %d", e.Sandbox.ID, durable)
		}
	case Thaw:
		if q := w.core.pods.Get(e.Sandbox.Pod); q != nil && q.Seen().Deleting && !w.released(e.Sandbox.ID) {
			t.Fatalf("%s wakes in pod %s, which is being deleted", e.Sandbox.ID, e.Sandbox.Pod.Name)
		}
	case CreatePod:
		if p := w.pool(e.Pool); p.sent.Refused != "" {
			t.Fatalf("pod %s is to be made from a template that is refused", e.Name)
		}
	case DeletePod:
		w.judgeDelete(e)
	case RecyclePod:
		if p := w.pod(e.Pod); len(p.bound) == 0 {
			t.Fatalf("pod %s is to be recycled, and held no sandbox", p.Key.Name)
		}
		w.judgeDelete(DeletePod{Pod: e.Pod})
	case PoolDrained:
		for _, p := range w.pods {
			if p.exists && len(p.bound) > 0 && p.pool() == e.Key {
				t.Fatalf("pool %s is said to be drained, but pod %s holds a sandbox", e.Key.Name, p.Key.Name)
			}
		}
	case DeleteObject:
		if r, ok := w.records[e.ID]; ok && r.Phase != Ended && r.Revision.Term == w.term {
			t.Fatalf("record of %s to be forgotten while it says %+v", e.ID, r)
		}
		delete(w.ended, e.ID)
		w.forgotten[e.ID] = true
		// No observation lags behind for as long as records are kept.
		if p := w.podOf(e.ID); p != nil && !p.exists {
			p.watch = nil
		}
	}
}

func (w *world) judgeWrite(e WriteObject) {
	if durable, ok := w.disk.sandboxes[e.Sandbox.ID]; !ok || e.Sandbox.Phase != Ended && durable.Revision.Less(e.Sandbox.Revision) && durable.Phase != Released && !activityOnly(e.Sandbox, durable) {
		w.t.Fatalf("%s is to be recorded as %+v, durable is %+v", e.Sandbox.ID, e.Sandbox, durable)
	}
}

// deliver judges and sends the messages to routers.
func (w *world) deliver(e Effect) {
	t := w.t
	switch e := e.(type) {
	case SendQuiesce:
		w.judgeSession(e.Stream)
		w.send(e.Stream, e)
	case SendResume:
		w.judgeSession(e.Stream)
		w.send(e.Stream, e)
	case CloseStream:
		for _, r := range w.routers {
			if r.stream == e.Stream {
				r.cut, r.out = true, nil
				if !r.joined {
					r.refused = w.moment()
				}
			}
		}
	case SendSnapshot:
		w.judgeSession(e.Stream)
		for _, s := range e.Routes {
			w.judgeRoute(s)
		}
		w.send(e.Stream, e)
	case SendRoute:
		w.judgeRoute(e.Sandbox)
		w.send(e.Stream, e)
	case SendClose:
		w.judgeSession(e.Stream)
		w.send(e.Stream, e)
	case SendRelease:
		for _, id := range e.IDs {
			if !w.released(id) {
				t.Fatalf("routers are sent the release of %s before that is durable", id)
			}
		}
		w.send(e.Stream, e)
	case SendResolved:
		if e.Sandbox != nil {
			w.judgeRoute(*e.Sandbox)
		}
		if e.Gone && !w.released(e.ID) {
			t.Fatalf("a router that asks is answered that %s is gone before that is durable", e.ID)
		}
		w.send(e.Stream, e)
	case SendPong:
		w.judgeSession(e.Stream)
		w.send(e.Stream, e)
	}
}
