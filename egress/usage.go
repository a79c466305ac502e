package egress

import (
	"cmp"
	"slices"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/egress/policy"
)

// maxRecent bounds the destinations of one sandbox that are kept, those that were admitted and those that were refused
// each by itself, so that refusals hide nothing that leaves.
const maxRecent = 32

// Counts are what the router knows of the requests of one sandbox, since it knows this pod of it.
type Counts struct {
	Admitted, Refused uint64
	// Open are in progress.
	Open int
	// Sent and Received are the bytes that have passed to origins and from them, headers and TLS with them. They are
	// lower bounds, and lag by up to envoy.EgressCountsAge.
	Sent, Received uint64
	// Destinations are the latest ones, at most 32 that were admitted and 32 that were refused. The latest are first.
	Destinations []Destination
}

// Destination is a destination of a sandbox, and what became of the requests to it.
type Destination struct {
	policy.Dest
	// Reason is that of the refusals. It is empty for requests that were admitted.
	Reason apierror.Reason
	Count  uint64
	// Age is the time since the newest of them.
	Age time.Duration
}

// Counts returns the numbers of a sandbox, and false if it is not known.
func (s *Server) Counts(id string) (Counts, bool) {
	s.table.mu.Lock()
	defer s.table.mu.Unlock()
	e := s.table.all[id]
	if e == nil {
		return Counts{}, false
	}
	counts := e.counts
	counts.Open = e.open
	counts.Destinations = slices.Concat(e.recent.admitted.list(), e.recent.refused.list())
	slices.SortStableFunc(counts.Destinations, func(a, b Destination) int { return cmp.Compare(a.Age, b.Age) })
	return counts, true
}

// recent are the latest destinations of a sandbox. The lock of the table guards them.
type recent struct{ admitted, refused places }

// note counts a request to a destination. No reason: it was admitted.
func (r *recent) note(dest policy.Dest, reason apierror.Reason) {
	if reason == "" {
		r.admitted.note(place{dest, reason})
	} else {
		r.refused.note(place{dest, reason})
	}
}

type place struct {
	dest   policy.Dest
	reason apierror.Reason
}

// visits are the requests to one place.
type visits struct {
	count uint64
	last  time.Time
}

// places are the latest maxRecent of them. The zero value is empty.
type places struct {
	latest *simplelru.LRU[place, *visits]
}

func (p *places) note(at place) {
	if p.latest == nil {
		p.latest, _ = simplelru.NewLRU[place, *visits](maxRecent, nil) // fails for a wrong size only
	}
	v, ok := p.latest.Get(at)
	if !ok {
		v = &visits{}
		p.latest.Add(at, v)
	}
	v.count++
	v.last = time.Now()
}

func (p *places) list() (all []Destination) {
	if p.latest == nil {
		return nil
	}
	for _, at := range p.latest.Keys() {
		v, _ := p.latest.Peek(at)
		all = append(all, Destination{Dest: at.dest, Reason: at.reason, Count: v.count, Age: time.Since(v.last)})
	}
	return all
}
