package pods

import (
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// retirement is the intent to delete a pod. It is final.
type retirement struct {
	revision fact.Revision
	durable  bool
	after    string // the sandbox whose fence must be complete before; empty: none
	asked    bool   // for its deletion
}

// Retire takes an idle pod out of use for good. The pod is deleted when the intent is durable. Otherwise the next
// leader could hand out a pod whose deletion is on its way.
func (t *Table) Retire(p *Pod) {
	t.enter(p, Going)
	if !p.seen.Deleting {
		t.commit(&fact.RetirementFact{Pod: p.seen.Key}, false)
	}
}

// RetireConflict takes a pod out of use for good that a conflicting record names for a sandbox, at these addresses.
// It is deleted when the intent is durable and the fence of the sandbox is complete. The intent is the only record of
// the pod: the record of the sandbox names one pod and one address from now on.
func (t *Table) RetireConflict(key fact.PodKey, sandbox string, at []netip.Addr) {
	t.commit(&fact.RetirementFact{Pod: key, After: sandbox, At: at}, true)
}

func (t *Table) commit(f *fact.RetirementFact, urgent bool) {
	pending := t.outbox.Commit(t.Now.Boot, f, urgent, func(fact.Revision, time.Duration) {
		t.retirements[f.Pod].durable = true
		t.AdvanceRetirement(f.Pod)
	})
	t.retirements[f.Pod] = &retirement{revision: pending.Revision(), after: f.After}
}

// RecoverRetirement restores an intent of an earlier term.
func (t *Table) RecoverRetirement(key fact.PodKey, revision fact.Revision) {
	t.retirements[key] = &retirement{revision: revision, durable: true}
}

// RetireOrphans retires the orphans. The caller waits until no router of an earlier term can have a route to them.
func (t *Table) RetireOrphans() {
	for _, p := range t.orphans {
		if !p.gone {
			t.Retire(p)
		}
	}
	t.orphans = nil
}

// retired reports whether the intent to delete a pod is durable.
func (t *Table) retired(key fact.PodKey) bool {
	d := t.retirements[key]
	return d != nil && d.durable
}

// Recover begins the recovery. Recovered ends it, when all pods that exist were seen.
func (t *Table) Recover() { t.recovering = true }

// Recovered drops the intents of an earlier term whose pods are gone.
func (t *Table) Recovered() {
	t.recovering = false
	var gone []fact.PodKey
	for key := range t.retirements {
		if t.byKey[key] == nil {
			gone = append(gone, key)
		}
	}
	slices.SortFunc(gone, fact.ComparePods)
	for _, key := range gone {
		t.AdvanceRetirement(key)
	}
}

// Due reports whether a pod is to be deleted: its intent is durable, and no fence protects it.
func (t *Table) Due(key fact.PodKey) bool {
	d := t.retirements[key]
	return d != nil && d.durable && (d.after == "" || !t.addresses.Routed(d.after))
}

// AdvanceRetirement deletes a retired pod when its intent is durable and no fence protects it, or drops the intent
// when the pod is gone.
func (t *Table) AdvanceRetirement(key fact.PodKey) {
	p, d := t.byKey[key], t.retirements[key]
	switch {
	case !t.Due(key):
	case p == nil:
		delete(t.retirements, key)
		t.Emit(step.Settle{Thing: key, Revision: d.revision})
	case !p.seen.Deleting && !d.asked && p.sandbox == "": // the pod of a sandbox goes with its fence
		d.asked = true
		t.Emit(step.DeletePod{Pod: key})
		t.unblock(t.addresses.Retired(p.addr))
	}
}
