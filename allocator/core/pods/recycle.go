package pods

import (
	"fmt"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/step"
)

// ProofWithin bounds how long the end of a life may take after RecyclePod, and how long the next one may be without
// proof. Restarts take seconds.
const ProofWithin = 2 * time.Minute

// unproven is a life that is to end, or that began with a restart.
type unproven struct {
	pod   *Pod
	since time.Duration // boot clock
	ends  bool          // the life is to end; else its proof is awaited
}

// CanRecycle reports whether a pod whose sandbox is fenced could serve another one after a restart of its containers.
func (p *Pod) CanRecycle() bool {
	return p.seen.Recyclable && p.Withheld() == 0 && !p.Outdated() && p.group.table.retirements[p.seen.Key] == nil
}

// Finish ends a life whose sandbox is fenced. again: the pod begins another one, else it is deleted.
func (t *Table) Finish(p *Pod, again bool) {
	switch {
	case again:
		t.enter(p, Recycling)
		t.unproven = append(t.unproven, unproven{p, t.Now.Boot, true})
		t.Emit(step.RecyclePod{Pod: p.seen.Key, Pool: p.group.Key})
	case !p.seen.Deleting:
		t.enter(p, Going)
		t.Emit(step.DeletePod{Pod: p.seen.Key})
	default:
		t.enter(p, Going)
	}
}

// awaitProof begins the wait for the proof of a life, and ends it.
func (t *Table) awaitProof(p *Pod) {
	switch {
	case p.state == Recycling && p.seen.Deleting: // its deletion takes the place of the recycling
		t.enter(p, Going)
		t.Emit(step.RecycleEnded{Outcome: step.NotFit})
	case p.seen.Recycling && p.proof == notAwaited:
		p.proof = awaited
		t.unproven = append(t.unproven, unproven{p, t.Now.Boot, false})
	case p.proof == awaited && !p.seen.Recycling:
		p.proof = proven
		t.Emit(step.RecycleEnded{Outcome: step.Recycled})
	}
	if p.seen.Recycling && p.seen.Reason != "" && !p.seen.Deleting && !t.recovering {
		t.retireLife(p, "it could not be cleaned for the next sandbox")
	}
}

// retireUnproven ends the lives that have not ended, or whose proof has not come, in time.
func (t *Table) retireUnproven() {
	for len(t.unproven) > 0 && t.Now.Boot-t.unproven[0].since >= ProofWithin {
		p, ends := t.unproven[0].pod, t.unproven[0].ends
		t.unproven = t.unproven[1:]
		switch {
		case p.gone:
		case ends && p.state == Recycling:
			t.enter(p, Going)
			t.Emit(step.RecycleEnded{Outcome: step.NotProven}) // the log has the errors of the writes
			t.Emit(step.DeletePod{Pod: p.seen.Key})
		case !ends && p.seen.Recycling:
			t.retireLife(p, fmt.Sprintf("its node did not report the restart of all containers within %v", ProofWithin))
		}
	}
}

// retireLife retires a life that is not proven. That of a tainted pod ends when its address is free.
func (t *Table) retireLife(p *Pod, why string) {
	if p.state != Pending || p.addr.Tainted() {
		return
	}
	if p.seen.Why != "" {
		why += ": " + p.seen.Why
	}
	t.Notify(Failed{Pod: p, Reason: step.PodNeverReady, Why: why})
	t.Emit(step.RecycleEnded{Outcome: step.NotProven})
	t.Retire(p)
}

// Tick acts on what is due.
func (t *Table) Tick() {
	t.nodes.forgetLost(t.Now.Boot)
	t.retireUnproven()
}
