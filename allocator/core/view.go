package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/pools"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// View reads a Core. It shows the state after the last Step.
type View struct{ c *Core }

// View returns a view of c.
func (c *Core) View() View { return View{c} }

// Quarantine is how long no pod is handed out yet, because routers may serve routes of an earlier
// journal. 0: pods are handed out.
func (v View) Quarantine() time.Duration { return v.c.routers.members.Quarantine(v.c.Now.Boot) }

// Counts returns the pods of a pool by state.
func (v View) Counts(key PoolKey) (Counts, bool) {
	pool := v.c.pools.Find(key)
	if pool == nil {
		return Counts{}, false
	}
	counts := pool.Status()
	counts.Waiting = v.c.claims.Waiting(key)
	if counts.Full {
		counts.Fenced, counts.FencedBy = v.fenced(pool)
	}
	if left := v.Quarantine(); left > 0 {
		counts.Quarantine = v.c.Now.Wall.Add(left + time.Minute).Truncate(time.Minute)
	}
	return counts, true
}

// fenced counts the pods of a pool whose fences wait for a router that is not connected, and returns such a router.
func (v View) fenced(pool *pools.Pool) (n int, router string) {
	for p := range pool.In(pods.Released) {
		away := ""
		for id := range v.c.fences.Waiting(p.Sandbox()) {
			if s := v.c.routers.members.Get(id); s != nil && s.Stream == 0 && (away == "" || id < away) {
				away = id
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
	if p := v.c.pods.Get(key); p != nil {
		return p.Group().Key
	}
	return PoolKey{}
}

// AllCounts returns the Counts of all pools.
func (v View) AllCounts() map[PoolKey]Counts {
	all := make(map[PoolKey]Counts, v.c.pools.Len())
	for pool := range v.c.pools.All() {
		all[pool.Key], _ = v.Counts(pool.Key)
	}
	return all
}

// Sandbox returns the state of a sandbox, live or ended.
func (v View) Sandbox(id string) (Sandbox, bool) {
	sb := v.c.sandboxes.Get(id)
	if sb == nil {
		return Sandbox{}, false
	}
	return sb.Sandbox, true
}

// NamedTeams returns what the teams have whose limits are set by name.
func (v View) NamedTeams() map[string]TeamUse { return v.c.claims.NamedTeams() }

// Teams returns what the first of these teams and of all others that are known have of their limits, by name, and the
// number of the omitted ones.
func (v View) Teams(also []string, most int) ([]TeamStatus, int) { return v.c.claims.Teams(also, most) }

// PodKeys lists all known pods, in no order.
func (v View) PodKeys() []PodKey { return v.c.pods.Keys() }

// UsableNodes lists the nodes whose pods can be handed out, in no order.
func (v View) UsableNodes() []string { return v.c.pods.Nodes() }

// ObjectsWritten lists the sandboxes whose objects show their latest revision, in no order.
func (v View) ObjectsWritten() []string {
	ids := make([]string, 0, v.c.sandboxes.Len())
	for sb := range v.c.sandboxes.All() {
		if sb.Shown() {
			ids = append(ids, sb.ID)
		}
	}
	return ids
}

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
	var live, gone []*sandboxes.Sandbox
	if q.Live {
		live = v.c.sandboxes.Live().After(q.Selection, q.Since, q.After, q.Order)
	}
	if q.Gone {
		gone = v.c.sandboxes.Gone().After(q.Selection, q.Since, q.After, q.Order)
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
		page.Next = sb.Mark()
		if selected {
			page.List = append(page.List, sb.Sandbox)
		}
		if page.More = passed == q.Scan; page.More {
			return page
		}
	}
}

// next takes the sandbox that comes first out of two lists in the order of byClaim, nil if both are empty.
func next(a, b *[]*sandboxes.Sandbox, order Order) (sb *sandboxes.Sandbox) {
	end := func(list []*sandboxes.Sandbox) *sandboxes.Sandbox {
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
		if later := end(*a).Mark().Compare(end(*b).Mark()) > 0; later != bool(order) {
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

// CountLive is how many sandboxes start, run or sleep.
func (v View) CountLive() int { return v.count((*sandboxes.Sandbox).Listed) }

func (v View) count(which func(*sandboxes.Sandbox) bool) (n int) {
	for _, sb := range v.c.sandboxes.Live().Of(sandboxes.Everything()) {
		if which(sb) {
			n++
		}
	}
	return n
}

// Load is how much there is to do.
type Load struct {
	// Live sandboxes start, run or sleep. Asleep are those of them that sleep, or are on the way to that or back.
	Live, Asleep int
	// Deferred are the live sandboxes that are awake and whose node has no room for the CPU that their pod requests.
	Deferred int
	// Fences are not complete. OldestFence is the time since the first of them began.
	Fences      int
	OldestFence time.Duration
	// Facts wait for the write to the journal that is under way.
	Facts int
}

// Load returns the load.
func (v View) Load() Load {
	l := Load{Live: v.CountLive(), Asleep: v.count((*sandboxes.Sandbox).Sleeps), Deferred: v.count(v.deferred), Fences: v.c.fences.Len(), Facts: v.c.outbox.Len()}
	for id := range v.c.fences.UnderWay() {
		began, _, _ := v.c.fences.Began(id)
		l.OldestFence = v.c.Now.Boot - began
		break
	}
	return l
}

func (v View) deferred(sb *sandboxes.Sandbox) bool {
	p := v.c.pods.Get(sb.Pod)
	return p != nil && p.Seen().Deferred && sb.HasPod() && sb.Phase != fact.Asleep
}

// Running returns all sandboxes whose routes routers may receive, in no order.
func (v View) Running() []Sandbox { return v.c.sandboxes.Routable() }
