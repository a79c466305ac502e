package pods

import (
	"errors"
	"fmt"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/taint"
)

// Check returns the first contradiction between the tables. It is for tests.
func (t *Table) Check() error {
	var located []*taint.Pod[fact.PodKey]
	for key, g := range t.groups {
		if g.Key != key {
			return fmt.Errorf("pods: group %v is kept as %v", g.Key, key)
		}
		for class, of := range g.census {
			for p := range of {
				located = append(located, p.addr)
				if now := (Class{p.state, p.Outdated(), p.Stranded()}); p.class != class || now != class {
					return fmt.Errorf("pods: %s is counted as %+v, and is %+v", p.seen.Key.Name, class, now)
				}
				if err := t.check(p); p.group != g || err != nil {
					return fmt.Errorf("pods: %s of pool %v is kept by %v: %w", p.seen.Key.Name, p.group.Key, key, err)
				}
			}
		}
		if g.queue.Len() != g.Count(Warm) {
			return fmt.Errorf("pods: pool %v has %d warm pods, and %d in its queue", key, g.Count(Warm), g.queue.Len())
		}
		if err := g.queue.Check(); err != nil {
			return fmt.Errorf("pods: pool %v: %w", key, err)
		}
	}
	if len(located) != len(t.byKey) || len(t.lives) != len(t.byKey) {
		return fmt.Errorf("pods: there are %d pods and %d lives, counted are %d", len(t.byKey), len(t.lives), len(located))
	}
	return errors.Join(t.Notices.Check(), t.addresses.Check(located))
}

// CountNodes is how many nodes the table has, and how many it has lost a short while ago. It is for tests.
func (t *Table) CountNodes() (all, lost int) { return len(t.nodes.byName), len(t.nodes.lost) }

// CountRetirements is how many intents to delete a pod are on their way or kept. It is for tests.
func (t *Table) CountRetirements() int { return len(t.retirements) }

func (t *Table) check(p *Pod) error {
	key := p.seen.Key
	switch why, idle := p.Withheld(), p.Idle(); {
	case t.byKey[key] != p || t.lives[key.Whole()] != key || p.gone:
		return fmt.Errorf("its life is kept as %+v, gone: %v", t.lives[key.Whole()], p.gone)
	case p.away && p.node.usable:
		return fmt.Errorf("it is away from a node that is usable")
	case t.nodes.byName[p.seen.Node] != p.node || p.node.name != p.seen.Node:
		return fmt.Errorf("it is kept with node %q, it is on %q", p.node.name, p.seen.Node)
	case p.addr.IP() != p.seen.IP:
		return fmt.Errorf("it was seen at %v, kept is %v", p.seen.IP, p.addr.IP())
	case p.state == Pending && why&Tainted != 0 && !p.addr.AddressTainted():
		return fmt.Errorf("it is tainted at an address that is not, and is not deleted")
	case p.group.queue.Has(key) != (p.state == Warm):
		return fmt.Errorf("it is in the queue: %v, state %d", p.group.queue.Has(key), p.state)
	case p.state == Warm && (why != 0 || p.seen.Used):
		return fmt.Errorf("it is warm, and withheld for %b: %+v", why, p.seen)
	case p.state == Pending && why == 0:
		return fmt.Errorf("it is pending, and nothing withholds it: %+v", p.seen)
	case (idle || p.state == Claiming) && p.sandbox != "", p.state >= Bound && p.state <= Recycling && p.sandbox == "":
		return fmt.Errorf("it has sandbox %q in state %d", p.sandbox, p.state)
	case idle && t.retirements[key] != nil:
		return fmt.Errorf("it is to be deleted, and in state %d", p.state)
	}
	return nil
}
