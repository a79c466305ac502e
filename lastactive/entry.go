package lastactive

import (
	"maps"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive/look"
)

const (
	// maxPorts bounds the ports of one sandbox that Envoy lists.
	maxPorts = 64
	// maxFirst bounds the first requests to all new ports of one sandbox between two good looks. Envoy
	// may list an entry for each request to a port that the thread of the request does not know
	// yet. A look takes about 10 us for each entry.
	maxFirst = 512
	// minFirst is how many first requests each new port has in any case.
	minFirst = 8
	// maxEntries bounds the entries of all sandboxes, so that looks stay below the 0.7 s above which
	// the leader asks no question. Once Envoy lists half as many, a new port has one first request
	// at a time, so it makes one entry, and each sandbox has its share of the other half in ports.
	maxEntries = 40_000
	// leastPorts is the least share of a sandbox. More than maxEntries / 2 / leastPorts sandboxes
	// can have more than maxEntries together.
	leastPorts = 4
	// firstRequestTime is how long threads of Envoy may not know a port after its first request.
	firstRequestTime = 200 * time.Millisecond
	// lookUpAgain is the pause before a request of a sandbox without a route is tried again.
	lookUpAgain = time.Millisecond
)

// Entry is one sandbox. Each Begin is ended by exactly one call of Read or Cancel.
type Entry struct {
	t        *Tracker
	addr     netip.Addr
	minBytes uint64

	// full is when the bucket of Options.Rate is full, since Tracker.started.
	full atomic.Int64
	// crowded: the newest good look has shown Options.MaxOpen requests or more.
	crowded atomic.Bool

	unread   atomic.Int64 // answers that Envoy may not have read
	lastRead atomic.Int64 // Tracker.lookBegan at the newest Read; negative: no Read yet

	mu       sync.Mutex
	newPorts map[look.Host]newPort // requested since the newest good look, which does not list them

	// Guarded by Tracker.mu:
	inUse bool // at the newest good look
	// showsBy: looks that begin from then on show what was admitted until now, while it is open.
	showsBy time.Duration
	// lastUsed is the end of the newest good look at which it was in use or had just ceased
	// to be in use; 0: no such look.
	lastUsed time.Duration
	kind     activity.Kind
}

// newPort is a port since its first request.
type newPort struct {
	at    time.Duration
	first int // requests until firstRequestTime later
}

// Read records that Envoy has read the answer that admitted the request, or has given up
// the request.
func (e *Entry) Read() {
	e.noteRead() // before the counter, see use
	e.unread.Add(-1)
}

// Cancel records that the request was not admitted.
func (e *Entry) Cancel() {
	e.unread.Add(-1)
	e.giveBack()
}

// take takes from the bucket what one request costs. If the bucket has too little, it takes nothing, and wait is the time
// until it has enough.
func (e *Entry) take() (wait time.Duration) {
	limit := e.t.o.Rate
	if limit.Every() == 0 {
		return 0
	}
	// This clock stands still while the machine is suspended, and costs less than Options.Now.
	now := time.Since(e.t.started)
	for {
		full := e.full.Load()
		after, wait := limit.Take(time.Duration(full), now)
		if wait > 0 || e.full.CompareAndSwap(full, int64(after)) {
			return wait
		}
	}
}

// giveBack returns what take has taken.
func (e *Entry) giveBack() { e.full.Add(-int64(e.t.o.Rate.Every())) }

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
// wait. If wait is 0, it must not be sent until Envoy lists fewer ports.
func (e *Entry) room(port look.Host) (wait time.Duration, ok bool) {
	shown := e.t.shown.Load()
	if _, listed := shown.hosts[port]; listed {
		return 0, true // the request creates no new entry
	}
	now := e.t.o.Now()
	e.mu.Lock()
	defer e.mu.Unlock()
	// A port that was requested before this look is listed in it, or closed again.
	maps.DeleteFunc(e.newPorts, func(_ look.Host, p newPort) bool { return p.at < shown.began })
	p, requested := e.newPorts[port]
	ports, most, least := maxPorts, maxFirst, minFirst
	if shown.entries+int(e.t.first.Load()-shown.first) >= maxEntries/2 {
		ports = min(maxPorts, max(leastPorts, maxEntries/2/max(1, e.t.entries.Size())))
		most, least = 1, 1
	}
	switch {
	case !requested && shown.addrs[e.addr].ports+len(e.newPorts) >= ports:
		return 0, false
	case !requested:
		p.at = now
	case now-p.at >= firstRequestTime:
		return 0, true // all threads know the port
	case p.first >= least && e.first() >= most:
		return firstRequestTime - (now - p.at), false
	}
	p.first++
	e.t.first.Add(1)
	e.newPorts[port] = p
	return 0, true
}

// first is how many first requests the new ports have had. e.mu is held.
func (e *Entry) first() (n int) {
	for _, p := range e.newPorts {
		n += p.first
	}
	return n
}
