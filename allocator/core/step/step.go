// Package step has the vocabulary of a step of the core: what is observed, what is to be done about it, and the time. It
// decides nothing. All rooms of the core use it.
package step

// Current has what all rooms of the core share while they act on one event: the time, and the effects so far.
type Current struct {
	Now Instant
	out []Effect
}

// Emit adds an effect. It is not changed afterwards.
func (s *Current) Emit(e Effect) { s.out = append(s.out, e) }

// Take returns the effects since the last call, in their order.
func (s *Current) Take() []Effect {
	out := s.out
	s.out = nil
	return out
}
