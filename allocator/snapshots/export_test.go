package snapshots

import (
	"cmp"
	"time"
)

// SetBounds shortens the times of a store. A zero leaves a time as it is.
func (s *Store) SetBounds(call, idle, archive time.Duration) {
	s.bounds.call = cmp.Or(call, s.bounds.call)
	s.bounds.idle = cmp.Or(idle, s.bounds.idle)
	s.bounds.archive = cmp.Or(archive, s.bounds.archive)
}

// SetSweepAge sets the age of an archive that Sweep may delete.
func (s *Store) SetSweepAge(age time.Duration) { s.bounds.sweep = age }

// SetNow gives a store another clock.
func (s *Store) SetNow(now func() time.Time) { s.now = now }
