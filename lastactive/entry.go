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
	// maxPorts bounds the ports of one sandbox that Envoy lists.
	maxPorts = 64
	// maxEntries bounds what Envoy lists of one sandbox: the entries that the newest good
	// look has shown plus the first requests since that look. A first request goes to a port
	// that not every thread of Envoy knows, so it can create an entry.
	maxEntries = 512
	// firstRequestTime is how long requests to a new port count as first requests.
	firstRequestTime = 200 * time.Millisecond
)

// Entry is one sandbox. Each Begin is ended by exactly one call of Read or Cancel.
type Entry struct {
	t        *Tracker
	id       string
	addr     netip.Addr
	minBytes uint64

	unread   atomic.Int64 // answers that Envoy may not have read
	lastRead atomic.Int64 // Tracker.lookBegan at the newest Read; negative: no Read yet

	mu            sync.Mutex
	look          *openHosts                   // the counts below began with this look
	ports         map[listedPort]time.Duration // ports that look does not list -> time of the first request
	firstRequests int

	// Guarded by Tracker.mu:
	inUse bool // at the newest good look
	// lastUsed is the end of the newest good look at which it was in use or had just ceased
	// to be in use; 0: no such look.
	lastUsed time.Duration
	kind     activity.Kind
}

// Read records that Envoy has read the answer that admitted the request, or has given up
// the request.
func (e *Entry) Read() {
	e.noteRead() // before the counter, see use
	e.unread.Add(-1)
}

// Cancel records that the request was not admitted.
func (e *Entry) Cancel() { e.unread.Add(-1) }

func (e *Entry) noteRead() {
	began := e.t.lookBegan.Load()
	for {
		// A late store must not replace a newer one.
		if before := e.lastRead.Load(); before >= began || e.lastRead.CompareAndSwap(before, began) {
			return
		}
	}
}

// use returns whether an answer is unread, and the begin of the newest look at the time of
// the newest Read.
func (e *Entry) use() (unread bool, lastRead time.Duration) {
	// The order matters: Read stores lastRead before it decrements unread.
	unread = e.unread.Load() > 0
	return unread, time.Duration(e.lastRead.Load())
}

// room reports whether a request may be sent to this port now. If not, it may be sent after
// wait. If wait is 0, it must not be sent until Envoy lists fewer entries.
func (e *Entry) room(port listedPort) (wait time.Duration, ok bool) {
	look := e.t.openHosts.Load()
	l := look.addrs[e.addr]
	if slices.Contains(l.ports, port) {
		return 0, true // the request creates no new entry
	}
	now := e.t.o.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.look != look {
		e.look, e.firstRequests = look, 0
		// A port that was requested before this look is listed in it, or closed again.
		maps.DeleteFunc(e.ports, func(_ listedPort, at time.Duration) bool { return at < look.began })
	}
	at, requested := e.ports[port]
	switch full := l.entries+e.firstRequests >= maxEntries; {
	case requested && now-at >= firstRequestTime:
		return 0, true
	case requested && full:
		return firstRequestTime - (now - at), false
	case full || !requested && len(l.ports)+len(e.ports) >= maxPorts:
		return 0, false
	}
	if e.firstRequests++; !requested {
		e.ports[port] = now
	}
	return 0, true
}
