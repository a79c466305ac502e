package core

import (
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// desk has the claims and the limits of the teams, and answers the callers.
type desk struct {
	*step
	*claims.Ledger[claimState]
	sandboxes *sandboxTable
	limits    *teams.Ledger
}

// admit says which limit of its team refuses a new claim of a pool. Otherwise it takes what the claim costs, if take is
// set. Pods that earlier claims of the team have left count for it, but for those that this claim may take: so a team
// that asks for many pods and goes away gets no more pods than one that stays.
func (d *desk) admit(pools *poolTable, pool *pool, team string, sandboxes int, waits, take bool) teams.Excess {
	if d.limits.Settings().Of(team) == (teams.Limits{}) {
		return teams.Excess{}
	}
	r := d.request(pools, team)
	r.Sandboxes, r.Waits = sandboxes, waits
	for _, p := range pools.byKey {
		r.Used += p.leftBy(team)
	}
	r.Used -= min(sandboxes, pool.leftBy(team))
	if !take {
		return d.limits.Excess(r, d.now.Boot)
	}
	return d.limits.Admit(r, d.now.Boot)
}

// request counts from the tables what a team has.
func (d *desk) request(pools *poolTable, team string) teams.Request {
	r := teams.Request{Team: team, Used: len(d.sandboxes.live.of(Selection{Scope: Scope{Team: team}})) + d.Asked(team)}
	for _, pool := range pools.byKey {
		r.Waiting += pool.line.CallersOf(team)
	}
	return r
}

// answer answers the callers of a grant when its sandboxes have started or were released. A caller
// whose wait is over by a time is answered with sandboxes that are still starting. It returns the
// sandboxes of a batch that has failed; they must be released.
func (d *desk) answer(grant string, by time.Duration) (failed []*sandbox) {
	if b := d.sandboxes.batches[grant]; b != nil {
		return d.answerBatch(grant, b, by)
	}
	switch sb := d.sandboxes.byID[grant]; sb.Phase {
	case Running, Starting:
		if sb.asking {
			d.refuse(grant, by, ClaimRefused{Why: NotConfigured, Sandbox: sb.Sandbox})
			return nil
		}
		if sb.Phase == Running {
			by = claims.All
		}
		for _, x := range d.Answer(grant, by) {
			d.emit(Claimed{Token: x.Token, Sandbox: sb.Sandbox})
		}
	case Releasing:
	case Released, Ended:
		why := StartFailed
		switch {
		case sb.Reason == ReasonConfigurationFailed:
			why = NotConfigured
		case sb.ran:
			why = KeyEnded
		}
		d.refuse(grant, claims.All, ClaimRefused{Why: why, Sandbox: sb.Sandbox})
	}
	return nil
}

// refuse answers the callers of a grant whose wait is over by a time.
func (d *desk) refuse(grant string, by time.Duration, e ClaimRefused) {
	for _, x := range d.Answer(grant, by) {
		e.Token = x.Token
		d.emit(e)
	}
}

// batch has the sandboxes that one claim got together.
type batch struct {
	members []*sandbox
	// atLeast is how many must start for the claim to succeed. 0: it has succeeded or failed, or is
	// of an earlier term.
	atLeast int
}

// sandboxesOf returns the sandboxes that are starting or running, how many are starting and being
// released, and one that was released.
func (b *batch) sandboxesOf() (live []*sandbox, starting, releasing int, gone *sandbox) {
	for _, sb := range b.members {
		switch sb.Phase {
		case Starting:
			starting++
			live = append(live, sb)
		case Running:
			live = append(live, sb)
		case Releasing:
			releasing++
		case Released, Ended:
			gone = sb
		}
	}
	return live, starting, releasing, gone
}

// asking returns a sandbox whose agent has not answered whether it is configured; nil: there is none.
func (b *batch) asking() *sandbox {
	for _, sb := range b.members {
		if sb.asking && sb.Phase < Releasing {
			return sb
		}
	}
	return nil
}

// answerBatch is answer for a batch. All callers get the same sandboxes, those that are live. A batch
// fails if fewer than atLeast sandboxes start.
func (d *desk) answerBatch(grant string, b *batch, by time.Duration) (failed []*sandbox) {
	live, starting, releasing, gone := b.sandboxesOf()
	switch {
	case gone != nil && len(live) < b.atLeast:
		b.atLeast = 0
		d.refuse(grant, claims.All, ClaimRefused{Why: StartFailed, Sandbox: gone.Sandbox})
		return live
	case releasing > 0:
		return nil
	case len(live) == 0:
		why := NotConfigured
		if slices.ContainsFunc(b.members, func(sb *sandbox) bool { return sb.IdempotencyKey != "" }) {
			why = KeyEnded
		}
		d.refuse(grant, claims.All, ClaimRefused{Why: why, Sandbox: gone.Sandbox})
		return nil
	case b.asking() != nil:
		d.refuse(grant, by, ClaimRefused{Why: NotConfigured, Sandbox: b.asking().Sandbox})
		return nil
	case starting == 0:
		by, b.atLeast = claims.All, 0
	}
	for _, x := range d.Answer(grant, by) {
		e := BatchClaimed{Token: x.Token}
		for _, sb := range b.members {
			if sb.live() {
				e.Sandboxes = append(e.Sandboxes, sb.Sandbox)
			} else {
				e.Ended = append(e.Ended, sb.ID)
			}
		}
		d.emit(e)
		b.atLeast = 0
	}
	return nil
}
