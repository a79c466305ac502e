package core

import "time"

// Watcher is a guard of the effects. Package guard imports this one, so the external part of the tests, which is linked
// into the same program, provides it.
type Watcher interface {
	Recover(now time.Duration, st State)
	// Check returns what is wrong with the effects of a step, one text for each violation.
	Check(now time.Duration, ev Event, effects []Effect) []string
}

// NewWatcher is set by guard_test.go.
var NewWatcher func(window time.Duration) Watcher

// guarded has the guard check the effects of a step of a leader, current or deposed: it must find nothing wrong with
// them.
func (p *process) guarded(ev Event, effects []Effect) []Effect {
	for _, what := range p.guard.Check(p.w.now.Boot, ev, effects) {
		p.w.t.Fatalf("guard: %s", what)
	}
	return effects
}
