package lastactive

import (
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
)

const (
	// portsMost bounds the ports of a sandbox that Envoy lists.
	portsMost = 64
	// entriesMost bounds what Envoy lists of one sandbox: the entries that the newest good
	// look has shown, and the first requests since then. A first request goes to a port
	// that not all threads of Envoy know: each can make an entry of its own.
	entriesMost = 512
	// newFor is for how long requests to a port are first requests.
	newFor = 200 * time.Millisecond
)

// Entry is one sandbox. Its methods end what Begin has begun, once each.
type Entry struct {
	t        *Tracker
	id       string
	addr     netip.Addr
	minBytes uint64

	unread  atomic.Int64 // answers that Envoy may not have read
	touched atomic.Int64 // Tracker.looked at the newest Read; below 0: there was none

	mu     sync.Mutex
	look   *shown                   // the counts below began with it
	ports  map[listed]time.Duration // that it does not list, and when they were asked for first
	firsts int                      // first requests

	// Under Tracker.mu:
	inUse bool          // at the newest good look
	until time.Duration // the end of the newest good look that found it in use, or in use no more; 0: there was none
	kind  activity.Kind
}

// Read says that Envoy has read the answer that admitted the request, or has given the
// request up.
func (e *Entry) Read() {
	e.touch() // first: see use
	e.unread.Add(-1)
}

// Cancel says that the request has not been admitted.
func (e *Entry) Cancel() { e.unread.Add(-1) }

func (e *Entry) touch() {
	looked := e.t.looked.Load()
	for {
		// A store that comes late must not take back a later one.
		if before := e.touched.Load(); before >= looked || e.touched.CompareAndSwap(before, looked) {
			return
		}
	}
}

// use says whether an answer is unread, and which look was the newest when one was read.
func (e *Entry) use() (unread bool, touched time.Duration) {
	unread = e.unread.Load() > 0 // before touched: Read touches before it counts down
	return unread, time.Duration(e.touched.Load())
}

// room reports whether Envoy may be sent to this port now. If not, it may be after wait; 0:
// not before it lists less.
func (e *Entry) room(port listed) (wait time.Duration, ok bool) {
	look := e.t.shown.Load()
	l := look.addrs[e.addr]
	if slices.Contains(l.ports, port) {
		return 0, true // no other entry comes of it
	}
	now := e.t.o.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.look != look {
		e.look, e.firsts = look, 0
		// What was asked for before the look is among its ports, or has gone.
		maps.DeleteFunc(e.ports, func(_ listed, at time.Duration) bool { return at < look.began })
	}
	at, asked := e.ports[port]
	switch full := l.entries+e.firsts >= entriesMost; {
	case asked && now-at >= newFor:
		return 0, true
	case asked && full:
		return newFor - (now - at), false
	case full || !asked && len(l.ports)+len(e.ports) >= portsMost:
		return 0, false
	}
	if e.firsts++; !asked {
		e.ports[port] = now
	}
	return 0, true
}
