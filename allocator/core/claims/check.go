package claims

import (
	"errors"
	"fmt"
	"iter"
	"maps"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

// Check returns the first contradiction between the tables. It is for tests.
func (t *Table) Check() error {
	all := slices.Collect(maps.Values(t.lines))
	for key := range t.lines {
		if t.pools.Find(key) == nil {
			return fmt.Errorf("claims: pool %v is not known, and has a line", key)
		}
	}
	for key, cl := range t.filling {
		if !cl.Waits() || len(cl.Request.pods) == 0 || len(cl.Request.pods) >= cl.Request.count || cl.Request.pool.Key != key {
			return fmt.Errorf("claims: pool %v fills a batch that does not wait: %+v", key, cl.Request)
		}
	}
	for pool := range t.pools.All() {
		for p := range pool.In(pods.All...) {
			if cl := t.taken[p.Key()]; (cl != nil) != (p.State() == pods.Claiming) {
				return fmt.Errorf("claims: pod %s is taken: %v, in state %d", p.Key().Name, cl != nil, p.State())
			}
		}
		if n := t.Waiting(pool.Key); n > 0 && (pool.CountWarm() > 0 || t.closing) {
			return fmt.Errorf("claims: %d callers wait while %d pods of %v are warm, closing: %v", n, pool.CountWarm(), pool.Key, t.closing)
		}
	}
	for key, cl := range t.taken {
		p := t.pods.Get(key)
		if req := &cl.Request; p == nil && !req.handed() || p != nil && (!slices.Contains(req.pods, p) || cl.Waits() && t.filling[req.pool.Key] != cl ||
			!req.handed() && (p.Withheld() != 0 || p.Seen().Used)) {
			return fmt.Errorf("claims: pod %s is taken by a claim that does not have it: %+v", key.Name, cl)
		}
	}
	for sb := range t.sandboxes.All() {
		if k := t.Of(KeyOf(&sb.Binding)); k != nil && k.Grant == sb.Grant() && t.Keeps(sb.ID) != sb.Over() && (sb.Batch == "" || t.Keeps(sb.ID)) {
			return fmt.Errorf("claims: the key of %s is kept: %v, in phase %d", sb.ID, t.Keeps(sb.ID), sb.Phase)
		}
	}
	if t.outbox.Empty() {
		var bound []*Claim
		for _, cl := range t.configuring {
			if !slices.Contains(bound, cl) {
				bound = append(bound, cl)
			}
		}
		if err := t.CheckAsked(all, bound); err != nil {
			return err
		}
	}
	for grant := range t.needs {
		if t.sandboxes.Batch(grant) == nil {
			return fmt.Errorf("claims: batch %s must start, and is not on record", grant)
		}
	}
	if len(t.decided) > 0 {
		return fmt.Errorf("claims: the callers of %v are not answered", t.decided)
	}
	return errors.Join(t.Ledger.Check(all), t.limits.Check(t.Now.Boot))
}

// Configuring has the sandboxes whose agents are being configured. It is for tests.
func (t *Table) Configuring() iter.Seq[string] { return maps.Keys(t.configuring) }

// Bound has the facts of the claims that have pods. It is for tests.
func (t *Table) Bound() (facts []*fact.Pending) {
	for _, cl := range t.taken {
		facts = append(facts, cl.Request.facts...)
	}
	return facts
}
