package core

import (
	"reflect"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// settle lets everything work and expects rest: nothing endless, nothing left
// over, everybody answered.
func (w *world) settle() {
	w.log("- settle")
	w.prompt = true
	for name := range w.nodes {
		if !w.nodes[name] {
			w.nodes[name] = true
			w.nodeWatch = append(w.nodeWatch, NodeSeen{Name: name, Usable: true})
		}
	}
	for _, p := range w.pools {
		if p.exists && (p.Paused || p.Deleting && p.KeepSandboxes) {
			p.Paused, p.KeepSandboxes = false, false
			p.everReleasing = p.everReleasing || p.Deleting
			p.watch = append(p.watch, PoolSeen{p.Pool})
		}
	}
	for _, p := range w.pods {
		if p.exists {
			w.write(p, func(*Pod) {}) // whatever was refused is looked at again
		}
	}
	evicted := map[string]bool{}
	for i := range 30 {
		if 0 < i && i < 20 && w.draw(2) == 0 { // most sandboxes that fall asleep do so here
			evicted[w.evictSleeper()] = true
		}
		w.quiesce()
		for _, r := range w.routers {
			if connected(r) {
				w.ping(r)
			}
		}
		w.advance(10 * time.Second)
		w.check()
	}
	w.quiesce()
	for _, id := range sorted(evicted) {
		if s := w.disk.sandboxes[id]; s.Reason == fact.ReasonPodDeleted {
			w.t.Fatalf("%s was asleep and may be stopped, and has ended with its pod: %+v", id, s)
		}
	}
	w.checkAnswered()
	w.checkAsleep()
	w.checkPodsSettled()
	w.checkRecordsSettled()
}

// checkAnswered: no caller waits any more, and no fence.
func (w *world) checkAnswered() {
	t := w.t
	for token, c := range w.claims {
		if !c.abandoned {
			t.Fatalf("claim %d was never answered", token)
		}
	}
	if len(w.releases) > 0 {
		t.Fatalf("releases never answered: %v", w.releases)
	}
	if len(w.kept) > 0 {
		t.Fatalf("calls never answered: %v", w.kept)
	}
	w.judgeReaped()
	for _, r := range w.routers {
		for id := range r.held {
			if sb := w.core.sandboxes.Get(id); connected(r) && r.joined && sb != nil && sb.Sleeps() {
				t.Fatalf("%s holds requests for %s, which sleeps", r.id, id)
			}
		}
	}
	for sb := range w.core.sandboxes.All() {
		if !sb.HasPod() {
			continue
		}
		if p := w.pod(sb.Pod); sb.Lives() && p.agent.frozen != (sb.Phase == Asleep) {
			t.Fatalf("%s is in phase %d, its agent: %+v", sb.ID, sb.Phase, p.agent)
		} else if sb.Lives() && p.Lowered != (sb.Phase == Asleep) {
			t.Fatalf("%s is in phase %d, its pod's CPU request is lowered: %t", sb.ID, sb.Phase, p.Lowered)
		}
	}
	if len(w.declared) > 0 {
		t.Fatalf("declarations never answered: %v", w.declared)
	}
	if w.core.fences.Len() > 0 {
		t.Fatalf("%d fences never completed", w.core.fences.Len())
	}
}

// checkPodsSettled: every pool has what it asks for, and no other pods exist.
func (w *world) checkPodsSettled() {
	t := w.t
	used := map[PoolKey]int{}
	warm := map[PoolKey]int{}
	for _, p := range w.pods {
		switch {
		case !p.exists:
			continue
		case p.Finished || p.Deleting || p.discarded || len(p.bound) == 0 && p.Used:
			t.Fatalf("pod %s was left over: %+v", p.Key.Name, p.Pod)
		case len(p.bound) > 0:
			id := p.bound[0]
			used[p.pool()]++
			if s := w.core.sandboxes.Get(id); s == nil || s.Phase != Running && s.Phase != Asleep || s.Pod != p.Key {
				t.Fatalf("pod %s is left with %s: %+v", p.Key.Name, id, s)
			}
			if r, ok := w.records[id]; !ok || r.Phase != Running && r.Phase != Asleep {
				t.Fatalf("%s runs, its record says %+v", id, r)
			}
		default:
			warm[p.pool()]++
			switch pool := w.pool(p.pool()); {
			case pool.Refused == "" && p.Template != pool.Template:
				t.Fatalf("pod %s is of an older template", p.Key.Name)
			case pool.Refused == "" && p.Metadata != pool.Metadata:
				t.Fatalf("pod %s has labels %q, the template %q", p.Key.Name, p.Metadata, pool.Metadata)
			case pool.Refused != "" && p.Template == pool.Template:
				t.Fatalf("pod %s is of a template that is refused", p.Key.Name)
			}
		}
	}
	for _, p := range w.pools {
		switch known := w.core.pools.Find(p.Key); {
		case p.Deleting && (p.exists || known != nil):
			t.Fatalf("pool %s is being deleted and still there, known: %v", p.Key.Name, known != nil)
		case p.Deleting:
			continue
		}
		want := wanted(p.Pool, used[p.Key])
		if p.Refused != "" {
			want = min(want, warm[p.Key]) // none are made
		}
		counts, _ := w.core.View().Counts(p.Key)
		// A pod may have been deleted a moment ago. The templates of the pods were checked above.
		counts.Target, counts.Wanted, counts.Outdated, counts.Start, counts.Full, counts.Trouble, counts.Failed = 0, 0, 0, 0, false, Trouble{}, PodFailure{}
		if warm[p.Key] != want || counts != (Counts{Warm: want, Claimed: used[p.Key]}) {
			t.Fatalf("pool %s: %d warm pods, expected %d; counts %+v", p.Key.Name, warm[p.Key], want, counts)
		}
	}
}

func (w *world) checkRecordsSettled() {
	t := w.t
	for id, r := range w.records {
		if w.core.sandboxes.Get(id) == nil {
			continue // written late by a deposed leader: the next one will find it
		}
		if p := w.podOf(id); r.Phase == Running && (p == nil || !p.exists) {
			t.Fatalf("%s has no pod, its record says that it runs", id)
		}
	}
	for _, id := range sorted(w.ended) {
		r, ok := w.records[id]
		if w.unwanted[id] {
			continue
		}
		if !ok || r.Phase != Ended {
			t.Fatalf("%s has ended, its record says %+v", id, r)
		}
	}
}

// catchUp lets everything be done that is under way, and makes all routers
// fresh.
func (w *world) catchUp() {
	w.quiesce()
	for _, r := range w.routers {
		if connected(r) {
			w.ping(r)
		}
	}
	w.quiesce()
}

// quiesce does all that can be done without time passing. What was broken works
// again.
func (w *world) quiesce() {
	for _, r := range w.routers {
		r.deaf, r.mute, r.frozen = false, false, false
	}
	for _, e := range w.envoys {
		e.stopped = false
	}
	w.rest()
}

// held is what does not go on by itself.
type held struct {
	journal, writes, watch, removals bool
	envoys                           map[int]bool
}

// rest does all that can be done without time passing, but for what is held back.
func (w *world) rest() {
	readable := func(q *request) bool { return readable(q) && !w.held.envoys[q.router.envoy] }
	for range 2000 {
		switch {
		case w.clusterWorks():
		case len(w.strays) > 0:
			ev := w.strays[0]
			w.strays = w.strays[1:]
			w.step(ev)
		case slices.ContainsFunc(w.requests, readable):
			w.read(w.requests[slices.IndexFunc(w.requests, readable)])
		case w.firstRouter():
		default:
			w.audit()
			if len(w.jobs) == 0 || w.held.writes {
				return
			}
		}
		w.check()
	}
	w.t.Fatal("no end: something is done over and over")
}

// clusterWorks does one thing that is due in the cluster or the journal, and reports
// whether there was one.
func (w *world) clusterWorks() bool {
	switch {
	case w.tellShown(): // not far behind: pods of a template that the core does not know yet are replaced over and over
	case len(w.nodeWatch) > 0:
		w.watchNodes()
	case !w.held.journal && (w.leader.pending != nil || w.leader.paced):
		w.journal(w.leader, 0)
	case len(w.jobs) > 0 && !w.held.writes:
		w.run(w.jobs[0], lands)
	case len(w.recordWatch) > 0:
		w.watchRecords()
	case !w.held.watch && w.first(func(p *simPod) bool { return len(p.watch) > 0 }, w.watch):
	case !w.held.removals && w.first(func(p *simPod) bool { return p.exists && p.Deleting }, w.remove):
	case w.first(func(p *simPod) bool { return p.exists && !p.Ready && !p.Finished }, w.becomesReady):
	case w.firstPool():
	default:
		return false
	}
	return true
}

func (w *world) first(fits func(*simPod) bool, do func(*simPod)) bool {
	i := slices.IndexFunc(w.pods, fits)
	if i < 0 {
		return false
	}
	do(w.pods[i])
	return true
}

// tellShown tells the core of a pool that the shell has seen already.
func (w *world) tellShown() bool {
	for _, p := range w.pools {
		if !reflect.DeepEqual(p.shown, p.sent) && len(p.watch) > 0 {
			w.watchPool(p)
			return true
		}
	}
	return false
}

func (w *world) firstPool() bool {
	for _, p := range w.pools {
		if len(p.watch) > 0 {
			w.watchPool(p)
			return true
		}
	}
	return false
}

// moment is how far time, the leaders and the journal have come. A router that was refused pauses before it tries
// again.
type moment struct {
	at      time.Duration
	leader  *process
	written int
}

func (w *world) moment() moment { return moment{w.now.Boot, w.leader, w.writes} }

func (w *world) firstRouter() bool {
	for _, r := range w.routers {
		switch {
		case r.dead || r.frozen:
			continue
		case (r.stream == 0 || r.cut) && !r.away && r.refused != w.moment():
			w.join(r)
		case r.stream == 0 || r.cut:
			continue
		case r.stopping && r.answers.Unread() == 0:
			w.stopRouter(r)
		case len(r.out) > 0 && !r.mute:
			w.fromRouter(r)
		case len(r.in) > 0 && !r.deaf:
			w.toRouter(r)
		case r.acked < r.applied:
			w.ack(r)
		case r.asking != nil:
			if r.asking.looks > 0 && !w.prompt {
				w.sleep(101 * time.Millisecond)
			}
			w.looks(r)
		default:
			continue
		}
		return true
	}
	return false
}
