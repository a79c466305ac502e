package idle

import (
	"fmt"
	"slices"
	"strings"
)

// Check returns the first contradiction between the tables. It is for tests.
func (l *Ledger) Check() error {
	if err := l.due.Check(); err != nil {
		return err
	}
	if !slices.IsSortedFunc(l.routers, func(a, b *router) int { return strings.Compare(a.id, b.id) }) {
		return fmt.Errorf("idle: the routers are not in order")
	}
	for _, r := range l.routers {
		if l.asked != nil && r.connected && r.blind == notReported {
			return fmt.Errorf("idle: %s was not asked, and round %d is under way", r.id, l.round)
		}
	}
	scheduled, turns := 0, 0
	for id, s := range l.sandboxes {
		at, ok := l.due.At(id)
		if ok {
			scheduled++
		}
		if s.Timeout > 0 {
			turns++
		}
		switch {
		case s.ID != id || s.routeSeq == 0 || s.routeSeq > l.lastRouteSeq:
			return fmt.Errorf("idle: %s is kept as %s, with the number %d of %d", s.ID, id, s.routeSeq, l.lastRouteSeq)
		case ok && (s.Timeout == 0 || slices.Contains(l.asked, s) || at > max(l.idleAt(s), s.notBefore)):
			return fmt.Errorf("idle: %s is looked at, at %v", id, at)
		}
	}
	if scheduled != l.due.Len() || turns != l.turns.Len() {
		return fmt.Errorf("idle: %d of %d deadlines and %d of %d turns are of a sandbox",
			scheduled, l.due.Len(), turns, l.turns.Len())
	}
	return nil
}
