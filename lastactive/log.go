package lastactive

import "time"

// Log is one stream of Envoy's access log. Its methods must be called in the order of
// the stream.
type Log struct {
	t *Tracker
	// flush is the flush interval that counts for it, and lie that it is longer than
	// Options.Flush.
	flush time.Duration
	lie   bool

	// Under Tracker.mu:
	stopped bool
	heard   time.Duration // when the newest message came
	alive   time.Duration // since when none has been missing
	closed  time.Duration // never: it is open
	count   int
	// spoken counts messages that came at least a flush and what Envoy may keep back after
	// the last one that was counted, at spokeAt: each of them would name what is open.
	spoken  int
	spokeAt time.Duration
	// first and last are the ends of the list of its streams, in the order in which they
	// were seen last.
	first, last *logStream
}

// logStream is a request that the log has shown to be open.
type logStream struct {
	id           string
	entry        *Entry
	log          *Log
	older, newer *logStream // of the log
	prev, next   *logStream // of the entry
	bytes        uint64
	seen         time.Duration
	spoken       int           // Log.spoken then
	until        time.Duration // it can have ended in a gap of the log until then
}

// LogEntry is one entry of an access log.
type LogEntry struct {
	// ID is the sandbox. Empty: none; such an entry is not activity.
	ID string
	// Stream names the request, unlike any other. If it is empty the request cannot be
	// followed: the entry is activity and leaves nothing open.
	Stream string
	// Bytes is how many the request has moved so far, both ways.
	Bytes uint64
	// End: the request has ended.
	End bool
}

// whyLonger is why there is doubt if Envoy reports less often than it should.
const whyLonger = "Envoy's flush interval is longer than this router was told"

// OpenLog begins a stream of the log. flush is the flush interval that Envoy says it
// has; 0 if it does not. If it is more than Options.Flush then there is doubt for as
// long as the stream is open, because Options.Window is too short.
func (t *Tracker) OpenLog(flush time.Duration) *Log {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.now()
	l := &Log{t: t, flush: max(flush, t.flush), lie: flush > t.flush, heard: now, alive: now, closed: never}
	t.logs[l] = struct{}{}
	t.clock.mu.Lock()
	t.clock.window = max(t.clock.window, l.silenceMost())
	t.clock.mu.Unlock()
	return l
}

// Announce takes the flush interval that Envoy says it has with a request, and must be
// called before the request's Begin. If it is more than Options.Flush there is doubt for
// three of it: until the log itself says so, if the request is long.
func (t *Tracker) Announce(flush time.Duration) {
	if flush > t.flush {
		t.doubtFrom(t.clock.now(), flush, whyLonger)
	}
}

// Close ends the stream. What Envoy has reported last, and reports until it has opened
// another one, is lost: what was in use lately was until now, for all that is known, and
// there is doubt for three flush intervals.
func (l *Log) Close() {
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	if l.closed != never {
		return
	}
	l.closed = t.clock.now()
	// What is on its way is not older: a pause of this process is a gap of its own.
	l.lostFrom(l.closed-logBuffer, l.closed, "a log stream was cut")
}

// Stop ends the stream from this side, because the process is about to end and admits
// nothing any more. That makes no doubt: what was open stays so for Final, and so does
// what the log might have shown to be open from now on. Doubt that there is, because it
// stood still, stays.
func (l *Log) Stop() {
	t := l.t
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.clock.now()
	if left, why := l.doubtNow(now); left > 0 && !l.lie && !l.stopped {
		t.clock.mu.Lock()
		t.clock.doubt(now+left, why)
		t.clock.mu.Unlock()
	}
	l.stopped = true
	t.blind = min(t.blind, now)
}

// Record takes what one message of the log says; one without entries, too, shows that
// the log is alive.
func (l *Log) Record(entries []LogEntry) {
	t := l.t
	t.mu.Lock()
	now := t.clock.now()
	if now-l.heard > l.silenceMost() {
		if l.count > 0 { // else it had nothing to say
			l.lostFrom(l.heard, now, "a log stream stood still")
		}
		l.alive = now
	}
	t.mu.Unlock()
	for i := range entries {
		if entries[i].ID != "" {
			t.record(l, &entries[i])
		}
	}
	t.mu.Lock()
	if now-l.spokeAt >= l.flush+logBuffer {
		l.spoken, l.spokeAt = l.spoken+1, now
	}
	l.heard = now // not before: what the message names is not to be missed in it
	t.bridge()
	l.sweep(now)
	t.mu.Unlock()
}

// silenceMost is how long a log that has something open is silent if nothing is wrong.
func (l *Log) silenceMost() time.Duration { return l.t.window + l.flush - l.t.flush }

func (t *Tracker) record(l *Log, entry *LogEntry) {
	for {
		if _, tracked := t.entries.Load(entry.ID); tracked {
			t.mu.Lock()
			e, tracked := t.entries.Load(entry.ID)
			if tracked {
				t.log(l, e, entry, t.clock.now())
			}
			t.mu.Unlock()
			if tracked {
				return
			}
			continue // it has left meanwhile, and not necessarily because it is gone
		}
		// These take the locks of others, so t.mu is not held.
		if t.gone(entry.ID) {
			return
		}
		every := t.reportEvery(t.idleTimeout(entry.ID))
		t.mu.Lock()
		e, tracked := t.entries.Load(entry.ID)
		if !tracked {
			e = t.add(entry.ID, every)
		}
		t.log(l, e, entry, t.clock.now())
		t.mu.Unlock()
		// Of a release between the first question and the creation Forget saw nothing.
		if t.gone(entry.ID) {
			t.Forget(entry.ID)
		}
		return
	}
}

// log notes what an entry of the log says. t.mu is held.
func (t *Tracker) log(l *Log, e *Entry, entry *LogEntry, now time.Duration) {
	e.logged = now
	if time.Duration(e.due.Load()) <= now {
		e.enqueue()
	}
	s := t.streams[entry.Stream]
	if s != nil && s.entry != e {
		t.drop(s) // the stream's ID is not unique, or Envoy has changed its mind
		s = nil
	}
	// Of what is seen for the first time it is not known when its bytes moved.
	if s == nil || s.bytes != entry.Bytes {
		e.moved = now
	}
	switch {
	case entry.Stream == "":
	case entry.End:
		if s != nil {
			t.drop(s)
		}
	case s == nil && len(t.streams) >= t.streamsMost:
		t.doubtFrom(now, l.flush, "more streams are open than are remembered")
	case s == nil:
		s = &logStream{id: entry.Stream, entry: e, log: l, bytes: entry.Bytes, seen: now, spoken: l.spoken}
		t.streams[s.id] = s
		e.open++
		if s.next = e.streams; s.next != nil {
			s.next.prev = s
		}
		e.streams = s
		l.append(s)
	default:
		s.log.remove(s)
		s.log, s.bytes, s.seen, s.spoken = l, entry.Bytes, now, l.spoken
		l.append(s)
	}
}

// drop forgets a stream. t.mu is held.
func (t *Tracker) drop(s *logStream) {
	delete(t.streams, s.id)
	s.log.remove(s)
	s.entry.open--
	if s.next != nil {
		s.next.prev = s.prev
	}
	if s.prev != nil {
		s.prev.next = s.next
	} else {
		s.entry.streams = s.next
	}
}

// append puts s to the end of the log's list.
func (l *Log) append(s *logStream) {
	s.older, s.newer = l.last, nil
	if l.last != nil {
		l.last.newer = s
	} else {
		l.first = s
	}
	l.last = s
	l.count++
}

func (l *Log) remove(s *logStream) {
	if s.older != nil {
		s.older.newer = s.newer
	} else {
		l.first = s.newer
	}
	if s.newer != nil {
		s.newer.older = s.older
	} else {
		l.last = s.older
	}
	l.count--
}

// sweep drops the streams whose end was lost: the log went on and has not named them
// any more, or it has been closed and no other one has named them. t.mu is held.
func (l *Log) sweep(now time.Duration) {
	for l.first != nil {
		s := l.first
		var since time.Duration // from then on it would have been reported
		if l.closed != never {
			if since = max(l.closed, s.seen); now-since < doubtFlushes*l.flush {
				break
			}
		} else if since = max(l.alive, s.seen); l.heard-since < doubtFlushes*(l.flush+logBuffer) && l.spoken-s.spoken <= doubtFlushes {
			break
		}
		// It can have been open, and have moved bytes, until it was to be reported.
		until := max(min(since+l.flush+logBuffer, now), s.until)
		s.entry.logged, s.entry.moved = max(s.entry.logged, until), max(s.entry.moved, until)
		l.t.drop(s)
	}
	if l.first == nil && l.closed != never {
		delete(l.t.logs, l)
	}
}

// doubtNow is the doubt that there is for as long as the log is as it is.
func (l *Log) doubtNow(now time.Duration) (left time.Duration, why string) {
	switch silent := now - l.heard - l.silenceMost(); {
	case l.closed != never || l.stopped && !l.lie:
	case l.lie:
		return doubtFlushes * l.flush, whyLonger
	case l.count > 0 && silent > 0:
		return doubtFlushes*l.flush - silent, "a log stream stands still"
	}
	return 0, ""
}
