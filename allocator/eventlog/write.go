package eventlog

import (
	"context"
	"fmt"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/internal/wait"
)

// write compares states until a segment is full or none waits, and stores their events. It tries again until it
// succeeds or ctx ends. full: the segment is. bytes is how many were written.
func (l *Log) write(ctx context.Context) (full bool, bytes int, err error) {
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		next, until, err := l.compose()
		if err != nil {
			return false, 0, err
		}
		if next == nil { // no state tells anything new
			l.mu.Lock()
			l.doneUntil(until)
			l.mu.Unlock()
			return false, 0, nil
		}
		if l.o.Valid() {
			if err = l.put(ctx, next); err == nil {
				l.mu.Lock()
				l.enter(next)
				l.through = next.through
				l.stats.Written += uint64(len(next.data))
				l.doneUntil(until)
				l.mu.Unlock()
				return next.full(), len(next.data), nil
			}
			if ctx.Err() != nil {
				return false, 0, ctx.Err()
			}
			l.failed(fmt.Errorf("write segment %s: %w", next.name(), err))
		}
		if !wait.Sleep(ctx, pause) {
			return false, 0, ctx.Err()
		}
		if err := l.refresh(ctx, next); err != nil {
			return false, 0, err
		}
	}
}

func (l *Log) put(ctx context.Context, s *segment) error {
	write := l.o.Store.Update
	if s.version == "" {
		write = l.o.Store.Create
	}
	meta, err := write(ctx, s.toObject())
	if err == nil {
		s.version = meta.ResourceVersion
	}
	return err
}

// compose returns the segment that tells the first states that wait, and the position behind these; nil if none of them
// tells anything new. Nothing changes before it is written.
func (l *Log) compose() (*segment, uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	next := &segment{first: 1, term: l.o.Term, through: l.through}
	var text []byte
	var dropped time.Time // what was created before is not told again, because the log had it
	if n := len(l.segments); n > 0 {
		if oldest := l.segments[0]; oldest.first > 1 {
			dropped = oldest.oldest
		}
		last := l.segments[n-1]
		if next.first = last.next(); !last.full() {
			var err error
			if text, err = l.codec.text(last.data); err != nil {
				return nil, 0, fmt.Errorf("decompress segment %s: %w", last.name(), err)
			}
			next.first, next.n, next.version, next.oldest, next.newest = last.first, last.n, last.version, last.oldest, last.newest
			next.events = slices.Clone(last.events)
		}
	}
	var events []Event
	now := map[string]*known{} // as the events will have it
	states := 0
	for ; states < len(l.waiting) && next.n+len(events) < maxEvents && len(text) < maxRaw; states++ {
		t := l.waiting[states]
		k := now[t.s.ID]
		if before := l.known[t.s.ID]; k == nil && before != nil {
			copied := *before
			k = &copied
		}
		told := derive(t.s, k, k == nil && t.s.ClaimedAt.Before(dropped), t.at, l.o.Build(t.s.Pool.Name))
		next.through = t.s.Revision
		if len(told) == 0 {
			continue
		}
		line, err := lines(told)
		if err != nil {
			return nil, 0, err
		}
		if k == nil {
			k = &known{id: t.s.ID, team: t.s.Team}
		}
		for i := range told {
			k.note(&told[i])
		}
		now[t.s.ID] = k
		text, events = append(text, line...), append(events, told...)
	}
	if len(events) == 0 {
		return nil, l.gone + uint64(states), nil
	}
	oldest, newest := next.oldest, next.newest
	next.date(events)
	if next.n > 0 {
		next.oldest = oldest
	}
	if newest.After(next.newest) {
		next.newest = newest
	}
	next.raw, next.data, next.n, next.decoded = len(text), l.codec.encoder.EncodeAll(text, nil), next.n+len(events), events
	return next, l.gone + uint64(states), nil
}

// refresh reads the segment whose write has failed, because the write may have succeeded, or an earlier leader may
// have written meanwhile.
func (l *Log) refresh(ctx context.Context, wanted *segment) error {
	o, err := l.o.Store.Get(ctx, wanted.name())
	switch {
	case apierrors.IsNotFound(err):
		if wanted.version != "" { // another client has deleted it
			l.mu.Lock()
			l.segments[len(l.segments)-1].version = ""
			l.mu.Unlock()
		}
		return nil
	case err != nil:
		return nil //nolint:nilerr // the write is tried again
	case uint64(o.Spec.Term) > l.o.Term && uint64(o.Spec.Term) > l.latest:
		return errDeposed
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if n := len(l.segments); n > 0 && l.segments[n-1].name() == o.Name && l.segments[n-1].version == o.ResourceVersion {
		return nil
	}
	l.enter(l.read(o))
	return nil
}
