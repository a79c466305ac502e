package claims

import (
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

// excess says which limit of its team refuses a new claim of a pool. Otherwise it takes what the claim costs, if take is
// set. Pods that earlier claims of the team have left count for it, but for those that this claim may take: so a team
// that asks for many pods and goes away gets no more pods than one that stays.
func (t *Table) excess(pool *pools.Pool, team string, sandboxes int, waits, take bool) teams.Excess {
	if t.limits.Settings().Of(team) == (teams.Limits{}) {
		return teams.Excess{}
	}
	r := t.usage(team)
	r.Sandboxes, r.Waits = sandboxes, waits
	for p := range t.pools.All() {
		r.Used += t.leftBy(p, team)
	}
	r.Used -= min(sandboxes, t.leftBy(pool, team))
	if !take {
		return t.limits.Excess(r, t.Now.Boot)
	}
	return t.limits.Admit(r, t.Now.Boot)
}

// leftBy is how many of the idle pods beyond what a pool asks for were created for claims of a team that have ended
// without a sandbox a short while ago.
func (t *Table) leftBy(pool *pools.Pool, team string) int {
	left := t.left[share{pool.Key, team}].pods
	if left == 0 {
		return 0
	}
	return min(left, pool.Surplus())
}

// usage counts from the tables what a team has.
func (t *Table) usage(team string) teams.Request {
	r := teams.Request{Team: team, Used: len(t.sandboxes.Live().Of(step.Selection{Scope: step.Scope{Team: team}})) + t.Asked(team) - t.revivalsOf(team)}
	for _, line := range t.lines {
		r.Waiting += line.CallersOf(team)
	}
	return r
}
