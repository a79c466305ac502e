// Package step has the vocabulary of a step of the core: what is observed, what is to be done about it, and the time. It
// decides nothing. All rooms of the core use it.
package step

import "fmt"

// Current has what all rooms of the core share while they act on one event: the time, and the effects so far.
type Current struct {
	Now Instant
	out []Effect
}

// Notices are what a room cannot decide, in the order in which it happened. N is an interface.
type Notices[N any] struct{ list []N }

// Notify adds a notice. Only the room does so.
func (s *Notices[N]) Notify(n N) { s.list = append(s.list, n) }

// Next takes the next notice; nil: there is none.
func (s *Notices[N]) Next() (n N) {
	if len(s.list) == 0 {
		return n
	}
	n, s.list = s.list[0], s.list[1:]
	if len(s.list) == 0 {
		s.list = nil // what it named can be collected
	}
	return n
}

// Check fails if a notice was not taken. It is for tests.
func (s *Notices[N]) Check() error {
	if len(s.list) > 0 {
		return fmt.Errorf("step: notices are not taken: %+v", s.list)
	}
	return nil
}

// Emit adds an effect. It is not changed afterwards.
func (s *Current) Emit(e Effect) { s.out = append(s.out, e) }

// Take returns the effects since the last call, in their order.
func (s *Current) Take() []Effect {
	out := s.out
	s.out = nil
	return out
}
