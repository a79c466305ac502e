package lastactive

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/lastactive/look"
)

const (
	// lookEvery is the pause after a look. It is lookShare times as long as the newest good
	// look took, if that is more: looks cost less than 1 % of a core. Beyond lookRarely it
	// does not grow, or one look on a busy machine would be the last for minutes.
	lookEvery  = time.Second
	lookShare  = 100
	lookRarely = 15 * time.Second
	// askPause is the pause between the looks of a question: in the back-off of a retry, up
	// to 100 ms, Envoy counts a request nowhere.
	askPause = 101 * time.Millisecond
)

// shown is what a good look has shown.
type shown struct {
	began time.Duration
	addrs map[netip.Addr]listing
}

// listing is what Envoy has listed of an address.
type listing struct {
	open, entries int
	ports         []listed
}

// listed is a port. Envoy lists it apart for HTTP/2.
type listed struct {
	port  uint16
	http2 bool
}

// Run looks until ctx ends.
func (t *Tracker) Run(ctx context.Context) {
	for ctx.Err() == nil {
		_ = t.Look(ctx) // Report has the error
		t.mu.Lock()
		pause := min(max(lookEvery, lookShare*t.newest.Took), lookRarely)
		t.mu.Unlock()
		sleep(ctx, pause)
	}
}

func sleep(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// Look looks once. One look is taken at a time. An error says why this one has failed.
func (t *Tracker) Look(ctx context.Context) error {
	select {
	case t.looking <- struct{}{}:
		defer func() { <-t.looking }()
	case <-ctx.Done():
		return errors.New("no look in time")
	}
	began := max(t.o.Now(), time.Duration(t.looked.Load())+1)
	t.looked.Store(int64(began)) // before Envoy is asked: what is read from now on is not proven by its answer
	l, err := t.o.Look(ctx)
	var moved connections
	if err == nil && t.metering.Load() {
		moved = t.connections()
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if ctx.Err() != nil && err != nil {
		return err // the caller has no more time, which says nothing of Envoy
	}
	if err == nil {
		t.judge(began, l.Hosts, moved)
		t.newest = Report{Gateway: l.Gateway, Ended: l.Hosts == nil, Began: began, Took: min(t.o.Now()-began, look.Most)} // it may span a suspend
	} else {
		t.newest = Report{Blind: err.Error(), Took: t.newest.Took}
	}
	select {
	case t.lookEnded <- struct{}{}:
	default:
	}
	return err
}

// judge takes in a good look. t.mu is held.
func (t *Tracker) judge(began time.Duration, hosts map[look.Host]look.Counts, moved connections) {
	now := &shown{began, map[netip.Addr]listing{}}
	for h, n := range hosts {
		l := now.addrs[h.Addr()]
		now.addrs[h.Addr()] = listing{l.open + n.Open, l.entries + n.Entries, append(l.ports, listed{h.Port(), h.HTTP2})}
	}
	known := map[netip.Addr]bool{}
	for _, e := range t.entries.All() {
		known[e.addr] = known[e.addr] || e.id != ""
	}
	for addr, l := range now.addrs {
		if l.open > 0 && !known[addr] {
			t.entry(addr.String(), "", addr, 0)
		}
	}
	before, ended := t.shown.Load(), t.o.Now()
	for key, e := range t.entries.All() {
		l := now.addrs[e.addr]
		if e.id == "" && known[e.addr] {
			l = listing{} // it is that of an entry with an ID
		}
		unread, touched := e.use()
		used, kind := unread || touched >= before.began, e.kind
		if used {
			kind = activity.Admission
		}
		shows := l.open > 0
		switch {
		case !shows:
		case e.minBytes == 0:
			kind = activity.Open
		case moved.err != nil || len(moved.to[e.addr]) == 0: // it is nothing of this kernel's
			kind = activity.Unknown
		default:
			if shows = moved.enough(t.buckets, e, began); shows {
				kind = activity.Bytes
			}
		}
		if shows || used || e.inUse || l.open > 0 && e.until == 0 {
			e.until, e.kind = ended, kind
		}
		e.inUse = shows || unread || touched >= began
		if e.id == "" && !e.inUse && e.until < t.reported {
			t.entries.Delete(key)
		}
	}
	t.ended, t.buckets = ended, moved.buckets
	t.shown.Store(now)
}
