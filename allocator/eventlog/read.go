package eventlog

import (
	"slices"

	"go.uber.org/zap"
)

// Filter selects events.
type Filter struct {
	// Sandbox is an ID, "" for all sandboxes.
	Sandbox string
	// All: of every team. Otherwise Team's alone.
	All  bool
	Team string
	// Types are those to select, none for all.
	Types []Type
}

// matcher is a Filter with numbers for types.
type matcher struct {
	Filter
	kinds []uint8
}

func (f Filter) matcher() matcher {
	m := matcher{Filter: f}
	for _, t := range f.Types {
		m.kinds = append(m.kinds, kindOf(t))
	}
	return m
}

func (m *matcher) keeps(e entry) bool {
	return (m.All || m.Team == e.of.team) && (m.Sandbox == "" || m.Sandbox == e.of.id) && (len(m.kinds) == 0 || slices.Contains(m.kinds, e.kind))
}

// picked are the indices of selected events of one segment, in the order in which they were asked for.
type picked struct {
	*segment
	at []int
}

// Page is a part of the selected events.
type Page struct {
	Offset, Most int
	// Ascending: the oldest first.
	Ascending bool
}

// Read returns a page of events. The error is ErrLoading or ErrOff.
func (l *Log) Read(f Filter, p Page) ([]Event, error) {
	m := f.matcher()
	l.mu.Lock()
	if l.err != nil {
		defer l.mu.Unlock()
		return nil, l.err
	}
	var picks []picked
	most, skip := p.Most, p.Offset
	segments := slices.Clone(l.segments)
	if !p.Ascending {
		slices.Reverse(segments)
	}
	for _, s := range segments {
		pick := picked{segment: s}
		for i := range s.events {
			if !p.Ascending {
				i = len(s.events) - 1 - i
			}
			if most == 0 || !m.keeps(s.events[i]) {
				continue
			}
			if skip > 0 {
				skip--
				continue
			}
			pick.at = append(pick.at, i)
			most--
		}
		if len(pick.at) > 0 {
			picks = append(picks, pick)
		}
		if most == 0 {
			break
		}
	}
	l.mu.Unlock()
	return l.fetch(picks), nil
}

// fetch decodes events that were selected. Segments do not change, so it needs no lock.
func (l *Log) fetch(picks []picked) []Event {
	all := []Event{}
	for _, p := range picks {
		events, err := l.codec.decodeSome(p.data, p.first, p.at)
		if err != nil { // it could be decoded before
			l.o.Log.Error("events cannot be read and are left out", zap.String("segment", p.name()), zap.Error(err))
			continue
		}
		all = append(all, events...)
	}
	return all
}

// Batch is what follows a position.
type Batch struct {
	Events []Event
	// Next is the position behind the last event that was looked at.
	Next uint64
	// Lost is how many events between are not in the log any more, of whatever team and type. They end before First.
	Lost  uint64
	First uint64
	// Changed is closed when there are more events, if there were none.
	Changed <-chan struct{}
}

// After returns the selected events behind a position, in their order, and at most so many.
func (l *Log) After(position uint64, f Filter, most int) (b Batch, err error) {
	m := f.matcher()
	l.mu.Lock()
	if l.err != nil {
		defer l.mu.Unlock()
		return b, l.err
	}
	b.Next = position
	last := l.last()
	if position > last { // the log was begun anew
		b.Next, b.Lost = 0, 1
	}
	if n := len(l.segments); n > 0 {
		if b.First = l.segments[0].first; b.Next+1 < b.First {
			b.Lost += b.First - 1 - b.Next
			b.Next = b.First - 1
		}
	}
	if b.Next == last {
		if l.changed == nil {
			l.changed = make(chan struct{})
		}
		b.Changed = l.changed
		l.mu.Unlock()
		return b, nil
	}
	var picks []picked
	for _, s := range l.segments {
		if s.next() <= b.Next+1 {
			continue
		}
		pick := picked{segment: s}
		for i := range s.events {
			if number := s.first + uint64(i); number > b.Next && most > 0 {
				if b.Next = number; m.keeps(s.events[i]) {
					pick.at = append(pick.at, i)
					most--
				}
			}
		}
		if len(s.events) == 0 { // it cannot be read
			b.Next = s.next() - 1
		}
		if len(pick.at) > 0 {
			picks = append(picks, pick)
		}
		if most == 0 {
			break
		}
	}
	l.mu.Unlock()
	b.Events = l.fetch(picks)
	return b, nil
}

// Last returns the number of the newest event, 0 for none. The error is ErrLoading or ErrOff.
func (l *Log) Last() (uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last(), l.err
}

func (l *Log) last() uint64 {
	if n := len(l.segments); n > 0 {
		return l.segments[n-1].next() - 1
	}
	return 0
}
