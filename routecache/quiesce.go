package routecache

import (
	"context"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// maxQuiesced bounds the IDs that are quiesced at one time.
const maxQuiesced = 10_000

// awaited is an ID that callers of Await wait for.
type awaited struct {
	changed chan struct{} // closed when the ID must be looked up again
	callers int
}

// Quiesce makes Lookup answer id with Quiesced, whatever else is or becomes known about
// it, until Resume, Release or Replace. After it has returned, no Lookup finds a route of
// id and Holds is false. It reports false, and does nothing, if 10,000 other IDs are
// quiesced.
func (c *Cache) Quiesce(id string) bool {
	key, ok := sandboxid.KeyOf(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !ok || c.tombstones.Contains(key) || c.isQuiesced(key) {
		return true
	}
	if len(c.quiesced) >= maxQuiesced {
		return false
	}
	c.quiesced[key] = struct{}{}
	c.wake(key) // a caller that awaits the start has its own limit for a quiesced sandbox
	return true
}

// Resume ends the effect of Quiesce.
func (c *Cache) Resume(id string) {
	key, ok := sandboxid.KeyOf(id)
	c.mu.Lock()
	defer c.mu.Unlock()
	if ok && c.isQuiesced(key) {
		delete(c.quiesced, key)
		c.wake(key)
	}
}

// isQuiesced reports whether id is quiesced. c.mu is held.
func (c *Cache) isQuiesced(id sandboxid.Key) bool {
	if len(c.quiesced) == 0 {
		return false
	}
	_, ok := c.quiesced[id]
	return ok
}

// Await waits until a Lookup of id may be answered with another status than answered,
// which is Starting, Asleep or Quiesced. It returns when the sandbox runs, is closed,
// asleep, quiesced, resumed or gone, or when Replace was called. It returns ctx's cause
// if ctx ends first. The caller then looks the ID up again, and may get the same status.
func (c *Cache) Await(ctx context.Context, id sandboxid.Key, answered Status) error {
	c.mu.Lock()
	if c.changedSince(id, answered) {
		c.mu.Unlock()
		return nil
	}
	w := c.awaited[id]
	if w == nil {
		w = &awaited{changed: make(chan struct{})}
		c.awaited[id] = w
	}
	w.callers++
	c.mu.Unlock()
	defer func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if w.callers--; w.callers == 0 && c.awaited[id] == w {
			delete(c.awaited, id)
		}
	}()
	select {
	case <-w.changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// changedSince reports whether id has another status than a Lookup has answered. c.mu is
// held.
func (c *Cache) changedSince(id sandboxid.Key, answered Status) bool {
	if c.tombstones.Contains(id) || c.isQuiesced(id) != (answered == Quiesced) {
		return true
	}
	n, ok := c.negative.Peek(id)
	return answered != Quiesced && (!ok || n.answer.Status != answered) // Put, Close and Replace have removed the entry
}

// wake lets callers of Await return that wait for id. c.mu is held.
func (c *Cache) wake(id sandboxid.Key) {
	if w := c.awaited[id]; w != nil {
		delete(c.awaited, id)
		close(w.changed)
	}
}
