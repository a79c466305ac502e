package core

import "time"

// View reads a Core. It shows the state after the last Step.
type View struct{ c *Core }

// View returns a view of c.
func (c *Core) View() View { return View{c} }

// Quarantine is how long no pod is handed out yet, because routers may serve routes of an earlier
// journal. 0: pods are handed out.
func (v View) Quarantine() time.Duration { return v.c.routers.members.Quarantine(v.c.now.Boot) }

// Counts returns the pods of a pool by state.
func (v View) Counts(key PoolKey) (Counts, bool) {
	pool := v.c.pools.byKey[key]
	if pool == nil {
		return Counts{}, false
	}
	counts := pool.counts()
	counts.Stuck, counts.Trouble = pool.stuck(), pool.backOff.trouble
	return counts, true
}

// Sandbox returns the state of a sandbox, live or ended.
func (v View) Sandbox(id string) (Sandbox, bool) {
	sb := v.c.sandboxes.byID[id]
	if sb == nil {
		return Sandbox{}, false
	}
	return sb.Sandbox, true
}

// PodKeys lists all known pods, in no order.
func (v View) PodKeys() []PodKey {
	keys := make([]PodKey, 0, len(v.c.pods))
	for key := range v.c.pods {
		keys = append(keys, key)
	}
	return keys
}

// UsableNodes lists the nodes whose pods can be handed out, in no order.
func (v View) UsableNodes() []string {
	var names []string
	for name, n := range v.c.nodes {
		if n.usable {
			names = append(names, name)
		}
	}
	return names
}

// ObjectsWritten lists the sandboxes whose objects show their latest revision, in no order.
func (v View) ObjectsWritten() []string {
	ids := make([]string, 0, len(v.c.sandboxes.byID))
	for id, sb := range v.c.sandboxes.byID {
		if !sb.objectRevision.Less(sb.Revision) && !sb.dropped {
			ids = append(ids, id)
		}
	}
	return ids
}

// Mark is a position in the list of live sandboxes: after a sandbox of this ID that was claimed
// then. The sandbox need not exist. The zero Mark is the beginning of the list in either order.
type Mark struct {
	ClaimedAt time.Time
	ID        string
}

// Order is an order of the list of live sandboxes, by the time of the claim.
type Order bool

// The orders.
const (
	OldestFirst Order = false
	NewestFirst Order = true
)

// Live returns the starting and running sandboxes of a selection that follow a mark, at most so many,
// and whether there are more. Calls that continue with the mark of the last sandbox return every
// sandbox once that is live throughout. It passes over no sandbox outside of the selection.
func (v View) Live(sel Selection, after Mark, order Order, most int) (list []Sandbox, more bool) {
	for sb := range v.c.sandboxes.page(sel, after, order) {
		if !sb.live() {
			continue
		}
		if len(list) == most {
			return list, true
		}
		list = append(list, sb.Sandbox)
	}
	return list, false
}

// CountLive is how many Live would return.
func (v View) CountLive() (n int) {
	for _, sb := range v.c.sandboxes.of(everything()) {
		if sb.live() {
			n++
		}
	}
	return n
}

// Running returns all sandboxes whose routes routers may receive, in no order.
func (v View) Running() []Sandbox { return v.c.sandboxes.routable() }
