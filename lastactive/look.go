package lastactive

import (
	"context"
	"errors"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/api/activity"
	"github.com/berth-sandbox/berth/internal/wait"
	"github.com/berth-sandbox/berth/lastactive/look"
)

const (
	// minLookPause is the shortest pause after a look. The pause is lookPauseFactor times the
	// duration of the newest good look if that is longer, so looks cost less than 1 % of a
	// core. maxLookPause bounds it, so that one slow look on a busy machine does not delay
	// the next one for minutes.
	minLookPause    = time.Second
	lookPauseFactor = 100
	maxLookPause    = 15 * time.Second
	// askPause separates the two looks of Ask. Envoy does not count a request during the
	// back-off of a retry, which takes up to 100 ms.
	askPause = 101 * time.Millisecond
)

// shown is what one good look has shown.
type shown struct {
	began time.Duration
	hosts map[look.Host]int
	addrs map[netip.Addr]listing
	// entries is how many entries Envoy listed, first what Tracker.first was when the look began.
	entries int
	first   uint64
}

// listing is the sum over the ports of one address.
type listing struct{ open, ports int }

// Run looks until ctx ends.
func (t *Tracker) Run(ctx context.Context) {
	for ctx.Err() == nil {
		_ = t.Look(ctx) // LookError has the error
		t.mu.Lock()
		pause := min(max(minLookPause, lookPauseFactor*t.newest.Took), maxLookPause)
		t.mu.Unlock()
		wait.Sleep(ctx, pause)
	}
}

// Look looks once. Concurrent calls take turns. The error says why this look failed.
func (t *Tracker) Look(ctx context.Context) error {
	select {
	case t.lookTurn <- struct{}{}:
		defer func() { <-t.lookTurn }()
	case <-ctx.Done():
		return errors.New("no look in time")
	}
	began := max(t.o.Now(), time.Duration(t.lookBegan.Load())+1)
	// Stored before Envoy is asked: the look proves nothing about answers read from now on.
	t.lookBegan.Store(int64(began))
	first := t.first.Load()
	l, err := t.o.Look(ctx)
	var moved connections
	if err == nil && t.metering.Load() {
		moved = t.connections()
	}

	t.mu.Lock()
	defer t.mu.Unlock()
	if ctx.Err() != nil && err != nil {
		return err // the caller ran out of time, which says nothing about Envoy
	}
	if err == nil {
		t.apply(&shown{began, l.Hosts, map[netip.Addr]listing{}, l.Entries, first}, moved)
		took := min(t.o.Now()-began, look.MaxDuration) // the clock may have counted a suspend
		t.newest = Report{Gateway: l.Gateway, EnvoyEnded: l.Hosts == nil, Began: began, Took: took}
	} else {
		t.newest = Report{LookError: err.Error(), Took: t.newest.Took}
		if t.o.MaxOpen > 0 {
			for _, e := range t.entries.All() {
				e.crowded.Store(false) // looks that fail would not show that it is over
			}
		}
	}
	select {
	case t.lookDone <- struct{}{}:
	default:
	}
	return err
}

// apply updates all entries with the result of a good look. t.mu is held.
func (t *Tracker) apply(now *shown, moved connections) {
	before, began, ended := t.shown.Load(), now.began, t.o.Now()
	for h, open := range now.hosts {
		l := now.addrs[h.Addr()]
		now.addrs[h.Addr()] = listing{l.open + open, l.ports + 1}
	}
	for _, e := range t.entries.All() {
		open := now.addrs[e.addr].open
		e.crowded.Store(t.o.MaxOpen > 0 && open >= t.o.MaxOpen)
		active, kind := open > 0, e.kind
		unread, lastRead := e.use()
		admitted := unread || lastRead >= before.began
		if admitted {
			e.showsBy = began + t.o.ConnectWindow
		}
		// The looks before this one could not show yet what was admitted, and it may have ended since.
		unseen := before.began < e.showsBy && began >= e.showsBy
		if admitted || unseen {
			kind = activity.Admission
		}
		switch {
		case !active:
		case e.minBytes == 0:
			kind = activity.Open
		case moved.err != nil || len(moved.to[e.addr]) == 0: // the kernel has no count for it
			kind = activity.Unknown
		default:
			if active = moved.fillBucket(t.buckets, e, began); active {
				kind = activity.Bytes
			}
		}
		if active || admitted || unseen || e.inUse {
			e.lastUsed, e.kind = ended, kind
		}
		e.inUse = active || unread || lastRead >= began
	}
	t.lookEnded, t.buckets = ended, moved.buckets
	t.shown.Store(now)
}
