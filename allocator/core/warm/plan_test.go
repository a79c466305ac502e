package warm_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/warm"
)

func TestPlanReachesWhatThePoolAsksFor(t *testing.T) {
	for name, c := range map[string]struct {
		spec   warm.Spec
		counts warm.Counts
		want   warm.Plan
	}{
		"nothing there": {warm.Spec{Warm: 3, Window: 9}, warm.Counts{}, warm.Plan{Create: 3}},
		"on its way": {
			warm.Spec{Warm: 3, Window: 9}, warm.Counts{Creating: 1, Pending: 1, Coming: 1, Warm: 1, Total: 2}, warm.Plan{},
		},
		"a creation failed":     {warm.Spec{Warm: 3, Window: 9, Retrying: true}, warm.Counts{}, warm.Plan{}},
		"pods ended early":      {warm.Spec{Warm: 3, Window: 9, Held: 2}, warm.Counts{}, warm.Plan{Create: 1}},
		"stranded":              {warm.Spec{Warm: 1, Window: 9}, warm.Counts{Pending: 1, Stranded: 1, Total: 1}, warm.Plan{Create: 1}},
		"the first one":         {warm.Spec{Warm: 3, Window: 1}, warm.Counts{}, warm.Plan{Create: 1}},
		"its answer is awaited": {warm.Spec{Warm: 3, Window: 1}, warm.Counts{Creating: 1}, warm.Plan{}},
		"as many start as may": {
			warm.Spec{Warm: 9, Window: 9, MaxSurge: 3}, warm.Counts{Creating: 1, Pending: 3, Coming: 1, Stranded: 2, Total: 4}, warm.Plan{Create: 1},
		},
		"paused": {
			warm.Spec{Warm: 3, Window: 9, Paused: true}, warm.Counts{Pending: 1, OutdatedPending: 1, Warm: 5, OutdatedWarm: 4, Total: 10}, warm.Plan{},
		},
		"paused, and the template is refused": {
			warm.Spec{Warm: 3, Window: 9, Paused: true, Refused: true}, warm.Counts{Warm: 2, OutdatedWarm: 4, Total: 6}, warm.Plan{OutdatedWarm: 1, Warm: 2},
		},
		"scaled to zero": {warm.Spec{Window: 9}, warm.Counts{Pending: 1, Coming: 1, Warm: 2, Total: 3}, warm.Plan{Coming: 1, Warm: 2}},
		"two may be missing in a rollout": {
			warm.Spec{Warm: 5, Window: 9, MaxUnavailable: 2}, warm.Counts{OutdatedWarm: 5, Total: 5}, warm.Plan{Create: 5, OutdatedWarm: 2},
		},
		"two are missing in a rollout": {
			warm.Spec{Warm: 5, Window: 9, MaxUnavailable: 2}, warm.Counts{Pending: 2, Coming: 2, Creating: 3, OutdatedWarm: 3, Total: 5}, warm.Plan{},
		},
		"enough are warm beside stranded ones": {
			warm.Spec{Warm: 2, Window: 9}, warm.Counts{Pending: 2, Stranded: 2, Warm: 2, Total: 4}, warm.Plan{Stranded: 2},
		},
		"no room":     {warm.Spec{Warm: 2, Window: 9, MaxPods: 3}, warm.Counts{InUse: 2, Total: 2}, warm.Plan{Create: 1}},
		"claims wait": {warm.Spec{Lacking: 2, Window: 9}, warm.Counts{}, warm.Plan{Create: 2}},
		"claims wait and no room": {
			warm.Spec{Warm: 1, Lacking: 4, MaxPods: 3, Window: 9}, warm.Counts{InUse: 1, Total: 1}, warm.Plan{Create: 2},
		},
		"claims have gone": {
			warm.Spec{Warm: 1, Spare: 2, Window: 9}, warm.Counts{Pending: 1, Coming: 1, Warm: 3, Total: 4}, warm.Plan{Coming: 1},
		},
		"spare pods are outdated": {
			warm.Spec{Warm: 1, Spare: 2, Window: 9}, warm.Counts{Warm: 1, OutdatedWarm: 2, Total: 3}, warm.Plan{OutdatedWarm: 2},
		},
		"a stranded pod in the way": {
			warm.Spec{Warm: 1, Window: 9, MaxPods: 1}, warm.Counts{Pending: 1, Stranded: 1, Total: 1}, warm.Plan{Stranded: 1},
		},
		"a stranded pod is being deleted": {
			warm.Spec{Warm: 1, Window: 9, MaxPods: 2}, warm.Counts{Pending: 1, Stranded: 1, Deleting: 1, Total: 2}, warm.Plan{},
		},
		"too many": {
			warm.Spec{Warm: 1, Window: 9}, warm.Counts{Pending: 1, Coming: 1, Warm: 2, Total: 3}, warm.Plan{Coming: 1, Warm: 1},
		},
		"too many are being created": {warm.Spec{Warm: 1, Window: 9}, warm.Counts{Creating: 3, Warm: 1, Total: 1}, warm.Plan{}},
		"the template has changed": {
			warm.Spec{Warm: 2, Window: 9}, warm.Counts{Pending: 1, OutdatedPending: 1, OutdatedWarm: 2, Total: 3},
			warm.Plan{Create: 2, OutdatedPending: true},
		},
		"a replacement is warm": {
			warm.Spec{Warm: 2, Window: 9}, warm.Counts{Pending: 1, Coming: 1, Warm: 1, OutdatedWarm: 2, Total: 4},
			warm.Plan{OutdatedWarm: 1},
		},
		"no room for a replacement": {
			warm.Spec{Warm: 2, Window: 9, MaxPods: 2}, warm.Counts{OutdatedWarm: 2, Total: 2}, warm.Plan{OutdatedWarm: 1},
		},
		"room for a replacement is being made": {
			warm.Spec{Warm: 2, Window: 9, MaxPods: 2}, warm.Counts{OutdatedWarm: 1, Deleting: 1, Total: 2}, warm.Plan{},
		},
		"the template is refused": {
			warm.Spec{Warm: 2, Window: 9, Refused: true}, warm.Counts{Pending: 1, Coming: 1, Warm: 2, OutdatedWarm: 3, Total: 6},
			warm.Plan{AllPending: true, OutdatedWarm: 1, Warm: 2},
		},
	} {
		t.Run(name, func(t *testing.T) {
			require.Equal(t, c.want, warm.PlanFor(c.spec, c.counts))
		})
	}
}

// kind is a kind of pods of the pool in the model of the plan.
type kind struct{ phase, outdated, stranded bool } // phase: it is warm

// planned is a pool that carries plans out.
type planned struct {
	spec                      warm.Spec
	idle                      map[kind]int
	creating, inUse, deleting int
}

func (p *planned) counts() warm.Counts {
	n := warm.Counts{Creating: p.creating, InUse: p.inUse, Deleting: p.deleting, Total: p.inUse + p.deleting}
	for k, many := range p.idle {
		n.Total += many
		switch {
		case k.phase && k.outdated:
			n.OutdatedWarm += many
			continue
		case k.phase:
			n.Warm += many
			continue
		case k.outdated:
			n.OutdatedPending += many
		case !k.stranded:
			n.Coming += many
		}
		n.Pending += many
		if k.stranded {
			n.Stranded += many
		}
	}
	return n
}

// take deletes pods of some kinds, at most so many.
func (p *planned) take(most int, kinds ...kind) {
	for _, k := range kinds {
		n := min(most, p.idle[k])
		p.idle[k] -= n
		p.deleting += n
		most -= n
	}
}

func (p *planned) carryOut(plan warm.Plan) {
	const all = 1 << 20
	pending, stranded := kind{}, kind{stranded: true}
	outdated, both := kind{outdated: true}, kind{outdated: true, stranded: true}
	p.take(plan.Stranded, stranded, both)
	if plan.OutdatedPending || plan.AllPending {
		p.take(all, outdated, both)
	}
	if plan.AllPending {
		p.take(all, pending, stranded)
	}
	p.take(plan.Coming, pending)
	p.take(plan.OutdatedWarm, kind{phase: true, outdated: true})
	p.take(plan.Warm, kind{phase: true})
	p.creating += plan.Create
}

// Whatever a pool looks like, one plan is enough, stays within its bounds, and takes no pod that
// is wanted. When pods come and go as they should, the pool has what it asks for.
func TestPlanIsCarriedOutOnceAndConverges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		few := func(name string) int { return rapid.IntRange(0, 4).Draw(t, name) }
		p := &planned{
			spec: warm.Spec{
				Warm: few("warm"), Held: rapid.IntRange(0, 1).Draw(t, "held"),
				Lacking: few("lacking"), Spare: few("spare"),
				MaxSurge: few("surge"), MaxUnavailable: few("unavailable"), Window: 1 + few("window"),
				Retrying: rapid.Bool().Draw(t, "retrying"), Paused: rapid.Bool().Draw(t, "paused"), Refused: rapid.Bool().Draw(t, "refused"),
			},
			idle: map[kind]int{}, creating: few("creating"), inUse: few("in use"), deleting: few("deleting"),
		}
		if rapid.Bool().Draw(t, "bounded") {
			p.spec.MaxPods = p.spec.Warm + few("more")
		}
		for _, phase := range []bool{false, true} {
			for _, outdated := range []bool{false, true} {
				p.idle[kind{phase, outdated, false}] = few("idle")
			}
		}
		p.idle[kind{stranded: true}], p.idle[kind{outdated: true, stranded: true}] = few("stranded"), few("stranded")

		for range 100 {
			before := p.counts()
			plan := warm.PlanFor(p.spec, before)
			p.carryOut(plan)
			after := p.counts()
			if again := warm.PlanFor(p.spec, after); again != (warm.Plan{}) {
				t.Fatalf("%+v is followed by %+v: %+v, %+v", plan, again, p.spec, before)
			}
			wanted := p.spec.Wanted(p.inUse)
			warmBefore, warmAfter := before.Warm+before.OutdatedWarm, after.Warm+after.OutdatedWarm
			switch {
			case p.spec.Paused && !p.spec.Refused && plan != (warm.Plan{}):
				t.Fatalf("%+v of a pool that is paused", plan)
			case plan.Create > 0 && (after.Creating > p.spec.Window || p.spec.MaxSurge > 0 && after.Creating+after.Coming > p.spec.MaxSurge):
				t.Fatalf("%+v creates too many at once: %+v, %+v", plan, p.spec, before)
			case plan.Create > 0 && (p.spec.Refused || p.spec.Retrying):
				t.Fatalf("%+v creates pods: %+v", plan, p.spec)
			case plan.Create > 0 && p.spec.MaxPods > 0 && after.Total+after.Creating > p.spec.MaxPods:
				t.Fatalf("%+v creates too many: %+v, %+v", plan, p.spec, before)
			case !p.spec.Refused && after.Warm < min(before.Warm, wanted):
				t.Fatalf("%+v deletes pods that are wanted: %+v, %+v", plan, p.spec, before)
			case !p.spec.Refused && warmAfter < min(warmBefore, wanted)-max(1, p.spec.MaxUnavailable):
				t.Fatalf("%+v deletes too many outdated pods: %+v, %+v", plan, p.spec, before)
			}
			// Deletions end, pods are created and become warm.
			p.deleting = 0
			p.idle[kind{phase: true}] += p.idle[kind{}]
			p.idle[kind{}], p.creating = p.creating, 0
			p.spec.Held, p.spec.Retrying, p.spec.Paused = 0, false, false
		}
		least, most := p.spec, p.spec
		least.Warm += p.spec.Lacking
		most.Warm += p.spec.Lacking + p.spec.Spare
		n := p.counts()
		between := least.Wanted(p.inUse) <= n.Warm && n.Warm <= most.Wanted(p.inUse)
		if !p.spec.Refused && (!between || n.OutdatedWarm > 0) {
			t.Fatalf("it ends with %+v, %+v", n, p.spec)
		}
	})
}
