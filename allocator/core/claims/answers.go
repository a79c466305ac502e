package claims

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/lines"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/allocator/core/step"
)

// Answer answers the callers of grants, as far as its sandboxes have started. It releases those of a
// batch that has failed.
func (t *Table) Answer(grants ...string) {
	by := t.Now.Boot
	if t.closing {
		by = lines.All
	}
	for _, grant := range grants {
		for _, sb := range t.answer(grant, by) {
			t.sandboxes.End(sb, sandboxes.Serving, fact.Because(fact.ReasonBatchIncomplete))
		}
	}
}

// answer answers the callers of a grant when its sandboxes have started or were released. A caller
// whose wait is over by a time is answered with sandboxes that are still starting. It returns the
// sandboxes of a batch that has failed; they must be released.
func (t *Table) answer(grant string, by time.Duration) (failed []*sandboxes.Sandbox) {
	if batch := t.sandboxes.Batch(grant); batch != nil {
		return t.answerBatch(grant, batch, by)
	}
	switch sb := t.sandboxes.Get(grant); sb.Phase {
	case fact.Running, fact.Starting, fact.FallingAsleep, fact.Asleep, fact.Waking, fact.Stopped:
		if sb.Asking() {
			t.refuseGrant(grant, by, step.ClaimRefused{Why: step.NotConfigured, Sandbox: sb.Sandbox})
			return nil
		}
		if sb.Phase != fact.Starting {
			by = lines.All
		}
		for _, x := range t.Ledger.Answer(grant, by) {
			t.Emit(step.Claimed{Token: x.Token, Sandbox: sb.Sandbox})
		}
	case fact.Releasing:
	case fact.Released, fact.Ended:
		why := step.StartFailed
		switch {
		case sb.Reason == fact.ReasonConfigurationFailed:
			why = step.NotConfigured
		case sb.Ran():
			why = step.KeyEnded
		}
		t.refuseGrant(grant, lines.All, step.ClaimRefused{Why: why, Sandbox: sb.Sandbox})
	}
	return nil
}

// refuseGrant answers the callers of a grant whose wait is over by a time.
func (t *Table) refuseGrant(grant string, by time.Duration, e step.ClaimRefused) {
	for _, x := range t.Ledger.Answer(grant, by) {
		e.Token = x.Token
		t.Emit(e)
	}
}

// sandboxesOf returns the sandboxes that are starting or running, how many are starting and being
// released, and one that was released.
func sandboxesOf(batch []*sandboxes.Sandbox) (live []*sandboxes.Sandbox, starting, releasing int, gone *sandboxes.Sandbox) {
	for _, sb := range batch {
		switch sb.Phase {
		case fact.Starting:
			starting++
			live = append(live, sb)
		case fact.Running, fact.FallingAsleep, fact.Asleep, fact.Waking, fact.Stopped:
			live = append(live, sb)
		case fact.Releasing:
			releasing++
		case fact.Released, fact.Ended:
			gone = sb
		}
	}
	return live, starting, releasing, gone
}

// asking returns a sandbox whose agent has not answered whether it is configured; nil: there is none.
func asking(batch []*sandboxes.Sandbox) *sandboxes.Sandbox {
	if i := slices.IndexFunc(batch, (*sandboxes.Sandbox).Asking); i >= 0 {
		return batch[i]
	}
	return nil
}

// answerBatch is answer for a batch. All callers get the same sandboxes, those that are live. A batch
// fails if fewer sandboxes start than its claim needs.
func (t *Table) answerBatch(grant string, batch []*sandboxes.Sandbox, by time.Duration) (failed []*sandboxes.Sandbox) {
	live, starting, releasing, gone := sandboxesOf(batch)
	switch {
	case gone != nil && len(live) < t.needs[grant]:
		delete(t.needs, grant)
		t.refuseGrant(grant, lines.All, step.ClaimRefused{Why: step.StartFailed, Sandbox: gone.Sandbox})
		return live
	case releasing > 0:
		return nil
	case len(live) == 0:
		why := step.NotConfigured
		if slices.ContainsFunc(batch, func(sb *sandboxes.Sandbox) bool { return sb.Keyed() }) {
			why = step.KeyEnded
		}
		t.refuseGrant(grant, lines.All, step.ClaimRefused{Why: why, Sandbox: gone.Sandbox})
		return nil
	case asking(batch) != nil:
		t.refuseGrant(grant, by, step.ClaimRefused{Why: step.NotConfigured, Sandbox: asking(batch).Sandbox})
		return nil
	case starting == 0:
		by = lines.All
		delete(t.needs, grant)
	}
	for _, x := range t.Ledger.Answer(grant, by) {
		e := step.BatchClaimed{Token: x.Token}
		for _, sb := range batch {
			if sb.Listed() {
				e.Sandboxes = append(e.Sandboxes, sb.Sandbox)
			} else {
				e.Ended = append(e.Ended, sb.ID)
			}
		}
		t.Emit(e)
		delete(t.needs, grant)
	}
	return nil
}
