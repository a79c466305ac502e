package core

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// enlist puts a sandbox into the list of live ones, delist takes it out.
func (c *Core) enlist(sb *sandbox) {
	if c.recovering { // recoverSandboxes sorts the list once
		c.live = append(c.live, sb)
		return
	}
	at, _ := slices.BinarySearchFunc(c.live, sb.mark(), byClaim)
	c.live = slices.Insert(c.live, at, sb)
}

func (c *Core) delist(sb *sandbox) {
	if at, found := slices.BinarySearchFunc(c.live, sb.mark(), byClaim); found {
		c.live = slices.Delete(c.live, at, at+1)
	}
}

// mark is the position of s in the list of live sandboxes. It does not change.
func (sb *sandbox) mark() Mark { return Mark{sb.ClaimedAt, sb.ID} }

// byClaim orders sandboxes by Mark, in microseconds. The journal and the objects keep microseconds,
// so the next leader has the same order.
func byClaim(sb *sandbox, m Mark) int {
	return cmp.Or(cmp.Compare(sb.ClaimedAt.UnixMicro(), m.ClaimedAt.UnixMicro()), strings.Compare(sb.ID, m.ID))
}

// sorted lists the sandboxes in the order in which they ended; those that have not ended come last.
func (c *Core) sorted() []*sandbox {
	all := make([]*sandbox, 0, len(c.sandboxes))
	for _, sb := range c.sandboxes {
		all = append(all, sb)
	}
	slices.SortFunc(all, func(a, b *sandbox) int {
		if a.EndedAt.IsZero() != b.EndedAt.IsZero() {
			if b.EndedAt.IsZero() {
				return -1
			}
			return 1
		}
		if order := a.EndedAt.Compare(b.EndedAt); order != 0 {
			return order
		}
		return strings.Compare(a.ID, b.ID)
	})
	return all
}

// Counts returns the pods of a pool by state.
func (c *Core) Counts(key PoolKey) (Counts, bool) {
	pool := c.pools[key]
	if pool == nil {
		return Counts{}, false
	}
	counts := pool.counts()
	counts.Stuck, counts.Trouble = pool.stuck(), pool.backOff.trouble
	return counts, true
}

// Sandbox returns the state of a sandbox, live or ended.
func (c *Core) Sandbox(id string) (Sandbox, bool) {
	sb := c.sandboxes[id]
	if sb == nil {
		return Sandbox{}, false
	}
	return sb.Sandbox, true
}

// PodKeys lists all known pods, in no order.
func (c *Core) PodKeys() []PodKey {
	keys := make([]PodKey, 0, len(c.pods))
	for key := range c.pods {
		keys = append(keys, key)
	}
	return keys
}

// UsableNodes lists the nodes whose pods can be handed out, in no order.
func (c *Core) UsableNodes() []string {
	var names []string
	for name, n := range c.nodes {
		if n.usable {
			names = append(names, name)
		}
	}
	return names
}

// ObjectsWritten lists the sandboxes whose objects show their latest revision, in no order.
func (c *Core) ObjectsWritten() []string {
	ids := make([]string, 0, len(c.sandboxes))
	for id, sb := range c.sandboxes {
		if !sb.objectRevision.Less(sb.Revision) && !sb.dropped {
			ids = append(ids, id)
		}
	}
	return ids
}

// Mark is a position in the list of live sandboxes: after a sandbox of this ID that was claimed
// then. The sandbox need not exist. The zero Mark is the beginning of the list.
type Mark struct {
	ClaimedAt time.Time
	ID        string
}

// Live returns the starting and running sandboxes after a mark, oldest first and at most so many,
// and whether there are more. Calls that continue with the mark of the last sandbox return every
// sandbox once that is live throughout.
func (c *Core) Live(after Mark, most int) (list []Sandbox, more bool) {
	at := 0
	if after != (Mark{}) {
		var found bool
		if at, found = slices.BinarySearchFunc(c.live, after, byClaim); found {
			at++
		}
	}
	for _, sb := range c.live[at:] {
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
func (c *Core) CountLive() (n int) {
	for _, sb := range c.live {
		if sb.live() {
			n++
		}
	}
	return n
}

func (sb *sandbox) live() bool { return sb.routable() || sb.Phase == Starting && !sb.lost }

// Running returns all sandboxes whose routes routers may receive, in no order.
func (c *Core) Running() []Sandbox {
	all := make([]Sandbox, 0, len(c.sandboxes))
	for _, sb := range c.sandboxes {
		if sb.routable() {
			all = append(all, sb.Sandbox)
		}
	}
	return all
}
