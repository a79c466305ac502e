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
	counts.Stuck, counts.Trouble, counts.Failed = pool.stuck(), pool.backOff.trouble, pool.failed
	spec := pool.spec()
	counts.Target, counts.Wanted = spec.Warm, spec.Wanted(pool.warmCounts().InUse)
	counts.Lacking, counts.Spare, counts.Start = spec.Lacking, spec.Spare, pool.demand.Start()
	for p := range pool.pods.in(podDeleting) {
		if p.sandbox == nil && !p.outdated {
			counts.Retiring++
		}
	}
	if counts.Full = pool.MaxPods > 0 && pool.pods.total()+len(pool.creating) >= pool.MaxPods; counts.Full {
		counts.Fenced, counts.FencedBy = v.fenced(pool)
	}
	if left := v.Quarantine(); left > 0 {
		counts.Quarantine = v.c.now.Wall.Add(left + time.Minute).Truncate(time.Minute)
	}
	return counts, true
}

// fenced counts the pods of a pool whose fences wait for a router that is not connected, and returns such a router.
func (v View) fenced(pool *pool) (n int, router string) {
	for p := range pool.pods.in(podReleased) {
		away := ""
		if p.sandbox != nil {
			for id := range v.c.fences.Waiting(p.sandbox.ID) {
				if s := v.c.routers.members.Get(id); s != nil && s.Stream == 0 && (away == "" || id < away) {
					away = id
				}
			}
		}
		if away != "" {
			n++
			if router == "" || away < router {
				router = away
			}
		}
	}
	return n, router
}

// PoolOf returns the pool of a pod, zero if the pod is not known.
func (v View) PoolOf(key PodKey) PoolKey {
	if p := v.c.pods[key]; p != nil {
		return p.pool.Key
	}
	return PoolKey{}
}

// AllCounts returns the pods of all pools by state, without what Counts adds.
func (v View) AllCounts() map[PoolKey]Counts {
	all := make(map[PoolKey]Counts, len(v.c.pools.byKey))
	for key, pool := range v.c.pools.byKey {
		all[key] = pool.counts()
	}
	return all
}

// Sandbox returns the state of a sandbox, live or ended.
func (v View) Sandbox(id string) (Sandbox, bool) {
	sb := v.c.sandboxes.byID[id]
	if sb == nil {
		return Sandbox{}, false
	}
	return sb.Sandbox, true
}

// TeamUse is what a team has of its limits.
type TeamUse struct{ Sandboxes, Waiting int }

// NamedTeams returns what the teams have whose limits are set by name.
func (v View) NamedTeams() map[string]TeamUse {
	all := map[string]TeamUse{}
	for team := range v.c.claims.limits.Settings().Teams {
		r := v.c.claims.request(&v.c.pools, team)
		all[team] = TeamUse{Sandboxes: r.Used, Waiting: r.Waiting}
	}
	return all
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

// Mark is a position in a list of sandboxes: after a sandbox of this ID that was claimed then. The
// sandbox need not exist. The zero Mark is the beginning of the list in either order.
type Mark struct {
	ClaimedAt time.Time
	ID        string
}

// Order is an order of a list of sandboxes, by the time of the claim.
type Order bool

// The orders.
const (
	OldestFirst Order = false
	NewestFirst Order = true
)

// Query is a page of a list of sandboxes.
type Query struct {
	Selection
	// Live selects the starting and running sandboxes, Gone those that are released or ended and
	// not forgotten yet.
	Live, Gone bool
	After      Mark
	Order      Order
	// Since selects what was claimed then or later, to a microsecond. Optional.
	Since time.Time
	// Keep selects further. Optional.
	Keep func(*Sandbox) bool
	// Most bounds the page. Scan bounds how many sandboxes are passed over for it; 0: no bound.
	Most, Scan int
}

// Page is a part of a list of sandboxes.
type Page struct {
	List []Sandbox
	// More: there may be more after Next; with Query.Most in List, there are.
	More bool
	Next Mark
}

// List returns a page. Pages that begin at Next of the page before have every sandbox once that the query
// selects throughout. List passes over no sandbox outside of the selection, Since and After.
func (v View) List(q Query) (page Page) {
	var live, gone []*sandbox
	if q.Live {
		live = v.c.sandboxes.live.after(q.Selection, q.Since, q.After, q.Order)
	}
	if q.Gone {
		gone = v.c.sandboxes.gone.after(q.Selection, q.Since, q.After, q.Order)
	}
	for passed := 1; ; passed++ {
		sb := next(&live, &gone, q.Order)
		if sb == nil {
			return page
		}
		selected := sb.Phase != Releasing && (q.Keep == nil || q.Keep(&sb.Sandbox))
		if page.More = selected && len(page.List) == q.Most; page.More {
			return page
		}
		page.Next = sb.mark()
		if selected {
			page.List = append(page.List, sb.Sandbox)
		}
		if page.More = passed == q.Scan; page.More {
			return page
		}
	}
}

// next takes the sandbox that comes first out of two lists in the order of byClaim, nil if both are empty.
func next(a, b *[]*sandbox, order Order) (sb *sandbox) {
	end := func(list []*sandbox) *sandbox {
		if order == NewestFirst {
			return list[len(list)-1]
		}
		return list[0]
	}
	from := a
	switch {
	case len(*a)+len(*b) == 0:
		return nil
	case len(*a) == 0:
		from = b
	case len(*b) > 0:
		if later := byMark(end(*a).mark(), end(*b).mark()) > 0; later != bool(order) {
			from = b
		}
	}
	if sb = end(*from); order == NewestFirst {
		*from = (*from)[:len(*from)-1]
	} else {
		*from = (*from)[1:]
	}
	return sb
}

// CountLive is how many sandboxes start or run.
func (v View) CountLive() (n int) {
	for _, sb := range v.c.sandboxes.live.of(everything()) {
		if sb.live() {
			n++
		}
	}
	return n
}

// Running returns all sandboxes whose routes routers may receive, in no order.
func (v View) Running() []Sandbox { return v.c.sandboxes.routable() }
