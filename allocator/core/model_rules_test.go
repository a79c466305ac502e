package core

import (
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
)

// What the claims of sandboxes let them reach. Each call sets rules of a higher number, so the number says how old they
// are.

// ruled counts the changes of rules that were answered with CallOK while an egress router had rules of that sandbox.
var ruled atomic.Int64

func (w *world) setNetwork() {
	token, id := w.token(), w.anyID()
	if r := pick(w, w.routers, func(r *router) bool { return len(r.rules) > 0 }); r != nil && w.draw(4) > 0 {
		known := slices.Sorted(maps.Keys(r.rules))
		id = known[w.draw(len(known))]
	}
	w.lastRules++
	w.kept[token] = keptCall{id: id, rules: w.lastRules}
	rules := EgressRules{Deny: []string{strconv.Itoa(w.lastRules)}}
	w.step(SetNetwork{Token: token, Scope: everyTeam, ID: id, Rules: rules})
}

// ageOf is the number of rules; those of the claim have 0.
func ageOf(rules EgressRules) int {
	if len(rules.Deny) == 0 {
		return 0
	}
	n, err := strconv.Atoi(rules.Deny[0])
	if err != nil {
		panic(err)
	}
	return n
}

// hasRules notes the rules that an egress router has of a sandbox from now on; without sandboxes it has none.
func (r *router) hasRules(all ...Sandbox) {
	for _, s := range all {
		if r.egress {
			r.rules[s.ID] = ageOf(s.Network)
		}
	}
}

// judgeRules judges a change of rules that is said to be in effect: it is durable, and from now on no egress router
// uses others from before. An earlier call may be answered after a later one.
func (w *world) judgeRules(call keptCall, e SandboxCallAnswered) {
	if e.Status != CallOK {
		return
	}
	if durable := ageOf(w.disk.sandboxes[call.id].Network); durable < call.rules {
		w.t.Fatalf("rules %d of %s are answered, durable are %d", call.rules, call.id, durable)
	}
	w.inEffect[call.id] = max(w.inEffect[call.id], call.rules)
	for _, r := range w.routers {
		if _, has := r.rules[call.id]; has {
			ruled.Add(1)
			break
		}
	}
	w.judgeRouterRules()
}

// judgeRouterRules judges what egress routers may use now.
func (w *world) judgeRouterRules() {
	for _, r := range w.routers {
		if r.dead || r.stopping || !r.fresh() {
			continue
		}
		for id, has := range r.rules {
			if least := w.inEffect[id]; has < least {
				w.t.Fatalf("%s uses rules %d of %s, though %d were said to be in effect", r.id, has, id, least)
			}
		}
	}
}
