package snapshots

import "time"

// SetBounds shortens the times of a store. A zero leaves a time as it is.
func (s *Store) SetBounds(call, idle, archive time.Duration) {
	for to, value := range map[*time.Duration]time.Duration{&s.bounds.call: call, &s.bounds.idle: idle, &s.bounds.archive: archive} {
		if value != 0 {
			*to = value
		}
	}
}

// SetSweepAge sets the age of an archive that Sweep may delete.
func (s *Store) SetSweepAge(age time.Duration) { s.bounds.sweep = age }

// SetNow gives a store another clock.
func (s *Store) SetNow(now func() time.Time) { s.now = now }
