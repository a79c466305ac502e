package pods

import (
	"iter"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/warm"
)

// Group has the pods of a pool. It exists from the first observation of the pool or of one of its pods until Drop.
type Group struct {
	step.Pool // what the pool asked for last
	// Known: the pool's object exists.
	Known bool

	table   *Table
	touched bool // it is in Table.touched
	queue   *warm.Queue[fact.PodKey]
	census  map[Class]map[*Pod]struct{}
	unready *Pod // of the latest observation with a reason why a pod is not ready; nil: none
}

// Class is what the pods of a group are counted by. All counts are taken from it, so nothing has to look at all pods.
type Class struct {
	State    State
	Outdated bool // made from an older template
	Stranded bool // idle, and the pool creates another pod for it
}

// Group returns the pods of a pool. It creates the group of a pool whose object was not seen, because the pods of such
// a pool must be kept.
func (t *Table) Group(key fact.PoolKey) *Group {
	if t.groups[key] == nil {
		t.groups[key] = &Group{
			Pool: step.Pool{Key: key}, table: t, queue: warm.NewQueue[fact.PodKey](), census: map[Class]map[*Pod]struct{}{},
		}
	}
	return t.groups[key]
}

// Find returns the pods of a pool; nil: neither the pool nor a pod of it is known.
func (t *Table) Find(key fact.PoolKey) *Group { return t.groups[key] }

// Drop forgets a group without pods.
func (t *Table) Drop(key fact.PoolKey) { delete(t.groups, key) }

// Touch has the group returned by Touched, because something has changed on which the plan of the pool depends: its
// object, its pods, the claims that wait, or the time.
func (g *Group) Touch() {
	if !g.touched {
		g.touched = true
		g.table.touched = append(g.table.touched, g)
	}
}

// Touched returns the groups that were touched since it was called last, by namespace and name. Untouch ends that.
func (t *Table) Touched() []*Group {
	groups := t.touched
	t.touched = nil
	slices.SortFunc(groups, func(a, b *Group) int { return fact.ComparePools(a.Key, b.Key) })
	return groups
}

// Untouch says that the plan of the pool follows what has touched the group until now.
func (g *Group) Untouch() { g.touched = false }

// Observe notes what a pool asks for now. Idle pods get the labels and annotations of the template.
func (t *Table) Observe(spec step.Pool) *Group {
	g := t.Group(spec.Key)
	changed, otherRoutes := g.Template != spec.Template, g.DefaultPort != spec.DefaultPort || !slices.Equal(g.Ports, spec.Ports) || !g.Egress.Equal(spec.Egress)
	syncs := changed || g.Metadata != spec.Metadata || g.Refused != spec.Refused
	g.Pool, g.Known = spec, true
	if changed {
		for _, p := range g.Sorted(All...) {
			t.recount(p)
		}
		for _, p := range g.Sorted(Pending, Warm) {
			t.consider(p)
		}
	}
	if otherRoutes {
		for _, p := range g.Sorted(Bound, Claimed) {
			t.Notify(Disturbed{p})
		}
	}
	if syncs {
		t.Sync(g)
	}
	g.Touch()
	return g
}

// Gone notes that the object of a pool does not exist any more.
func (g *Group) Gone() {
	g.Known, g.Deleting = false, true
	g.Touch()
}

// Sync has the idle pods of a group get the labels and annotations of the template.
func (t *Table) Sync(g *Group) {
	for _, p := range g.Sorted(Pending, Warm) {
		t.sync(p)
	}
}

// Next returns the warm pod that is handed out next; nil: none is warm.
func (g *Group) Next() *Pod {
	key, ok := g.queue.Next()
	if !ok {
		return nil
	}
	return g.table.byKey[key]
}

// CountWarm is how many pods are warm.
func (g *Group) CountWarm() int { return g.queue.Len() }

// ByAge has the warm pods, the oldest first.
func (g *Group) ByAge() iter.Seq[*Pod] {
	return func(yield func(*Pod) bool) {
		for key := range g.queue.ByAge() {
			if !yield(g.table.byKey[key]) {
				return
			}
		}
	}
}

// LastUnready is the pod that was last seen with a reason why it is not ready, if it still is; else nil.
func (g *Group) LastUnready() *Pod {
	if p := g.unready; p != nil && p.state == Pending && p.seen.Reason != "" {
		return p
	}
	return nil
}

// Classes returns how many pods of each class there are.
func (g *Group) Classes() iter.Seq2[Class, int] {
	return func(yield func(Class, int) bool) {
		for class, of := range g.census {
			if !yield(class, len(of)) {
				return
			}
		}
	}
}

// Total is how many pods there are.
func (g *Group) Total() (n int) {
	for _, of := range g.census {
		n += len(of)
	}
	return n
}

// Count is how many pods are in some states.
func (g *Group) Count(states ...State) (n int) {
	for class, of := range g.census {
		if slices.Contains(states, class.State) {
			n += len(of)
		}
	}
	return n
}

// In has the pods in some states, in no order.
func (g *Group) In(states ...State) iter.Seq[*Pod] {
	return func(yield func(*Pod) bool) {
		for class, of := range g.census {
			if !slices.Contains(states, class.State) {
				continue
			}
			for p := range of {
				if !yield(p) {
					return
				}
			}
		}
	}
}

// Sorted lists the pods in some states by UID, so that the same events choose the same pods.
func (g *Group) Sorted(states ...State) []*Pod { return slices.SortedFunc(g.In(states...), byKey) }

// All are all states.
var All = []State{Pending, Warm, Claiming, Bound, Claimed, Released, Recycling, Going}

// recount counts a pod by the class that it has now.
func (t *Table) recount(p *Pod) {
	t.uncount(p)
	p.class = Class{p.state, p.Outdated(), p.Stranded()}
	if p.group.census[p.class] == nil {
		p.group.census[p.class] = map[*Pod]struct{}{}
	}
	p.group.census[p.class][p] = struct{}{}
	p.group.Touch()
}

func (t *Table) uncount(p *Pod) {
	of := p.group.census[p.class]
	if delete(of, p); len(of) == 0 {
		delete(p.group.census, p.class)
	}
}
