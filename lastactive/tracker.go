// Package lastactive remembers, for each sandbox ID, when this router last knew
// traffic for it to be in progress.
//
// An entry belongs to the ID and not to a cached route: it stays when the route
// falls out of the LRU, and leaves when the sandbox is released. A Touch that
// comes after Forget brings an entry back, so who calls Touch must make sure
// afterwards that the sandbox has not been released meanwhile. The tracker is
// bounded; when it is full, the ID that has been silent longest goes first.
//
// All methods may be called concurrently. Times are wall-clock times of this
// machine, for people to read; they are not compared between machines.
package lastactive

import (
	"errors"
	"sort"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Options configure a Tracker.
type Options struct {
	// Size is the most IDs to remember, 1 or more. Default 200,000: twice the
	// route cache, so that an ID outlives its route's place there.
	Size int
	// Now is the clock. It is called with a lock held. Required.
	Now func() time.Time
}

// Tracker remembers when each ID was last active.
type Tracker struct {
	now func() time.Time

	mu      sync.Mutex
	last    *simplelru.LRU[string, time.Time] // ordered by activity, because Add moves to the young end
	evicted uint64
}

// New returns an empty Tracker.
func New(o Options) (*Tracker, error) {
	if o.Now == nil {
		return nil, errors.New("lastactive: Options.Now is required")
	}
	if o.Size < 0 {
		return nil, errors.New("lastactive: Options.Size must not be negative")
	}
	if o.Size == 0 {
		o.Size = 200_000
	}
	last, err := simplelru.NewLRU[string, time.Time](o.Size, nil)
	if err != nil {
		return nil, err
	}
	return &Tracker{now: o.Now, last: last}, nil
}

// Touch records that id is active now.
func (t *Tracker) Touch(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	// The clock is read under the lock, so that an entry never goes back in time
	// and the LRU's order is the order of the times.
	if t.last.Add(id, t.now()) {
		t.evicted++
	}
}

// TouchKnown records that id is active now if it is remembered. What is said
// about a sandbox after its release must not bring it back.
func (t *Tracker) TouchKnown(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.last.Contains(id) {
		t.last.Add(id, t.now())
	}
}

// Forget drops id: its sandbox has been released.
func (t *Tracker) Forget(id string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.last.Remove(id)
}

// Retain drops every ID for which keep returns false. keep is called with a lock
// held.
func (t *Tracker) Retain(keep func(id string) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, id := range t.last.Keys() {
		if !keep(id) {
			t.last.Remove(id)
		}
	}
}

// Activity is one ID and when it was last active.
type Activity struct {
	ID         string
	LastActive time.Time
}

// Dump lists the IDs for which keep returns true, sorted by ID. A nil keep
// keeps all. keep is called with a lock held.
func (t *Tracker) Dump(keep func(id string) bool) []Activity {
	t.mu.Lock()
	all := make([]Activity, 0, t.last.Len())
	for _, id := range t.last.Keys() {
		if keep != nil && !keep(id) {
			continue
		}
		if at, ok := t.last.Peek(id); ok {
			all = append(all, Activity{ID: id, LastActive: at})
		}
	}
	t.mu.Unlock()
	sort.Slice(all, func(i, j int) bool { return all[i].ID < all[j].ID })
	return all
}

// Len is the number of IDs remembered.
func (t *Tracker) Len() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.last.Len()
}

// Evicted is the number of IDs dropped because the tracker was full.
func (t *Tracker) Evicted() uint64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.evicted
}
