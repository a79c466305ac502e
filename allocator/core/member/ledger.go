package member

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// Config is fixed for the life of a Ledger. All fields are required.
type Config struct {
	// Expiry returns how long after the receipt of its last ping a router with this max-stale may
	// still serve its routes, or an egress router its rules.
	Expiry func(maxStale time.Duration, egress bool) time.Duration
	// ConnectWindow is how long a request that was admitted may need to open its connection. The
	// session of an earlier journal lasts that much longer than others, because pods that are
	// handed out after its end have no fence that waits for the window.
	ConnectWindow time.Duration
	// ReturnWithin is how long after its last ping a router that lost its connection may be about
	// to connect again.
	ReturnWithin time.Duration
}

// Session is the membership of one router process. Only the Ledger changes it.
type Session struct {
	ID     string
	From   string // the address that it joined from last, for people
	Stream uint64 // 0: not connected
	// Durable: the session is in the journal.
	Durable bool
	// Earlier: it stands for all routers of an earlier journal.
	Earlier bool
	// MaxStale is how long the router serves its routes without an answer. What a router has said only
	// grows. Assumed: no router has said it.
	MaxStale time.Duration
	Assumed  bool
	// Gateway is that of the router. Only routers that show its secret are believed to have found this
	// one dead, if it is not zero. It does not change then.
	Gateway fact.Gateway
	// Egress: its router is an egress router. It never changes.
	Egress bool
	// LastPing is an upper bound of when a leader last heard the router. It is later than the join
	// if another leader may have heard the router since. HeardAt is when this leader last heard
	// it; 0: never.
	LastPing, HeardAt time.Duration
	// Sequence is that of the last message on the stream, Acked that of the last one that the
	// router has acknowledged.
	Sequence, Acked uint64

	pinged      bool // the ping of this nonce is not answered yet
	nonce       uint64
	deaths      int    // that it has reported and that are not durable yet
	learning    int    // of what it says, that are not durable yet
	expired     bool   // Expired has listed it
	reportedBy  string // that has found it dead while it was connected, at reportedAt; empty: none has
	reportedAt  time.Duration
	declaration *Declaration
	ended       bool
	routes      []sentRoute // that it has not acknowledged
}

// sentRoute is a message with the route of a sandbox.
type sentRoute struct {
	sequence uint64
	sandbox  string
}

// Declaration is an operator's statement that a router and its Envoy have ended, on its way into
// the journal.
type Declaration struct {
	// Tokens are those of the callers.
	Tokens []uint64
	// Withdraw calls the fact off. It returns false if that is too late. The caller of Declare
	// sets it.
	Withdraw func() bool
}

// Ban refuses the ID of a router that was declared dead while its routes may be fresh. Nothing
// waits for that ID any more. If the router lives after all, it must join under a new ID.
type Ban struct {
	Session string
	Until   time.Duration
	// Fact is the revision of the declaration.
	Fact fact.Revision
	// Fences is how many fences waited for the router.
	Fences int
}

// Ledger has the sessions of all routers.
type Ledger struct {
	cfg      Config
	sessions []*Session // by ID
	streams  map[uint64]*Session
	bans     map[string]Ban
}

// New returns an empty ledger.
func New(cfg Config) *Ledger {
	return &Ledger{cfg: cfg, streams: map[uint64]*Session{}, bans: map[string]Ban{}}
}

func (l *Ledger) find(id string) (at int, found bool) {
	return slices.BinarySearchFunc(l.sessions, id, func(s *Session, id string) int { return strings.Compare(s.ID, id) })
}

// Get returns the session of an ID, nil if there is none.
func (l *Ledger) Get(id string) *Session {
	if at, found := l.find(id); found {
		return l.sessions[at]
	}
	return nil
}

// OfStream returns the session of a stream, nil if the stream has ended or was replaced.
func (l *Ledger) OfStream(stream uint64) *Session { return l.streams[stream] }

// All lists the sessions by ID. The caller must not change the slice.
func (l *Ledger) All() []*Session { return l.sessions }

// Reachable lists, by ID, the sessions whose routers can be sent messages.
func (l *Ledger) Reachable() (all []*Session) {
	for _, s := range l.sessions {
		if s.Stream != 0 && s.Durable {
			all = append(all, s)
		}
	}
	return all
}

// Add makes a session known that has no stream: of an earlier term, or of an earlier journal.
func (l *Ledger) Add(s Session) *Session {
	at, _ := l.find(s.ID)
	l.sessions = slices.Insert(l.sessions, at, &s)
	return &s
}

// Learn notes what a router that may join says of itself. It reports whether its session does not have
// that: its max-stale is longer or was assumed, or its gateway was not known. The session must then be
// journaled again, and Learned follows. Until then the router may not join.
func (l *Ledger) Learn(s *Session, maxStale time.Duration, gateway fact.Gateway) bool {
	said := s.MaxStale
	if s.Assumed {
		said = 0
	}
	if maxStale <= said && gateway == s.Gateway {
		return false
	}
	s.MaxStale, s.Assumed, s.Gateway = max(said, maxStale), false, gateway
	s.learning++
	return true
}

// Learned notes that what the router of a session has said is in the journal.
func (l *Ledger) Learned(s *Session) { s.learning-- }

// MayJoin reports whether a router may join under an ID. If that was declared dead, and the
// declaration can still be withdrawn, the router lives: withdrawn are then the callers of the
// declaration. Banned: the router must choose another ID. Otherwise it may try again. A router of another
// gateway or of the other kind may not.
func (l *Ledger) MayJoin(id string, gateway fact.Gateway, egress bool) (ok, banned bool, withdrawn []uint64) {
	if _, banned = l.bans[id]; banned {
		return false, true, nil
	}
	s := l.Get(id)
	if s != nil && (s.learning > 0 || s.expired || !s.isAt(gateway) || s.Egress != egress) {
		return false, false, nil
	}
	if s == nil || s.declaration == nil {
		return true, false, nil
	}
	if !s.declaration.Withdraw() {
		return false, false, nil
	}
	withdrawn = s.declaration.Tokens
	s.declaration = nil
	return true, false, withdrawn
}

// Join connects a router that may join. Its session has no stream. isNew: the session must be
// journaled.
func (l *Ledger) Join(id, from string, maxStale time.Duration, gateway fact.Gateway, egress bool, stream uint64, now time.Duration) (s *Session, isNew bool) {
	if s = l.Get(id); s == nil {
		s, isNew = l.Add(Session{ID: id, MaxStale: maxStale, Gateway: gateway, Egress: egress}), true
	}
	s.From, s.Stream, s.pinged, s.reportedBy = from, stream, false, ""
	s.heard(now)
	l.streams[stream] = s
	return s, isNew
}

func (s *Session) heard(now time.Duration) { s.LastPing, s.HeardAt = max(s.LastPing, now), now }

// Has reports whether the router of a session has what concerns a sandbox of this agent: an egress router has only what
// leaves through its gateway.
func (s *Session) Has(agent fact.Agent) bool { return !s.Egress || agent.Egress }

// Ended reports whether a session has ended.
func (s *Session) Ended() bool { return s.ended }

// Recorded notes that a session is in the journal. It reports whether its router waits for its
// routes: it does not if the session has ended since, or is not connected.
func (l *Ledger) Recorded(s *Session) bool {
	s.Durable = true
	return s.Stream != 0
}

// Disconnect notes that the stream of a session has ended. The router may serve its routes until
// the session ends. It returns the stream, 0 if there was none.
func (l *Ledger) Disconnect(s *Session) (stream uint64) {
	stream = s.Stream
	delete(l.streams, stream)
	s.Stream, s.routes = 0, nil
	return stream
}

// NextSequence numbers a message that is sent to a session.
func (l *Ledger) NextSequence(s *Session) uint64 {
	s.Sequence++
	return s.Sequence
}

// FirstSequence numbers the first message of the stream of a session.
func (l *Ledger) FirstSequence(s *Session) uint64 {
	s.Sequence, s.Acked, s.routes = 1, 0, nil
	return s.Sequence
}

// SentRoute numbers a message to a session that has the route of a sandbox.
func (l *Ledger) SentRoute(s *Session, sandbox string) uint64 {
	s.routes = append(s.routes, sentRoute{l.NextSequence(s), sandbox})
	return s.Sequence
}

// Acknowledges reports whether a connected session has acknowledged the latest route of a sandbox,
// in a message of its own or in the first message of the stream.
func (s *Session) Acknowledges(sandbox string) bool {
	return s.Stream != 0 && s.Acked > 0 && !slices.ContainsFunc(s.routes, func(r sentRoute) bool { return r.sandbox == sandbox })
}

// Acknowledge notes that every message of a stream up to a sequence has taken effect. It returns
// the session, nil if there is none, or if no such message was sent.
func (l *Ledger) Acknowledge(stream, sequence uint64) *Session {
	s := l.streams[stream]
	if s == nil || sequence > s.Sequence {
		return nil
	}
	s.Acked = max(s.Acked, sequence)
	first := slices.IndexFunc(s.routes, func(r sentRoute) bool { return r.sequence > s.Acked })
	if first < 0 {
		first = len(s.routes)
	}
	s.routes = slices.Delete(s.routes, 0, first)
	return s
}

// Ping notes a ping. It returns the session, nil if there is none. Pong answers the ping.
func (l *Ledger) Ping(stream, nonce uint64, now time.Duration) *Session {
	s := l.streams[stream]
	if s != nil {
		s.heard(now)
		s.pinged, s.nonce = true, nonce
		if now > s.reportedAt+l.cfg.ReturnWithin { // no ping takes so long: it lives
			s.reportedBy = ""
		}
	}
	return s
}

// Pong returns the nonce of the last ping if it is not answered yet and can be answered now.
func (l *Ledger) Pong(s *Session) (nonce uint64, ok bool) {
	if !s.pinged || s.Stream == 0 || !s.Durable || s.deaths > 0 {
		return 0, false
	}
	s.pinged = false
	return s.nonce, true
}

// Goodbye notes that the router of a session says on a stream that it leaves. It returns the session, nil if there is
// none or if the router is beside another gateway or of the other kind, and whether that is its stream. The stream is disconnected then.
func (l *Ledger) Goodbye(id string, gateway fact.Gateway, egress bool, stream uint64, now time.Duration) (s *Session, here bool) {
	if s = l.Get(id); s == nil || !s.isAt(gateway) || s.Egress != egress {
		return nil, false
	}
	s.heard(now)
	if here = s.Stream != 0 && s.Stream == stream; here {
		l.Disconnect(s)
	}
	return s, here
}

// isAt reports whether a router that shows this gateway is beside the router of a session. Routers of
// earlier versions show none: every router counts as beside them.
func (s *Session) isAt(gateway fact.Gateway) bool {
	return !s.Earlier && (s.Gateway == fact.Gateway{} || s.Gateway == gateway)
}

// Dead notes that a router has found the process of another one to have ended. It returns both
// sessions. dead is nil if there is none, if it is the reporter itself, or if the reporter has not
// shown its gateway; reporter is nil if it has none. DeathRecorded follows when the end is durable. If
// the session is connected, dead is nil and Reported returns the reporter when that has ended.
func (l *Ledger) Dead(id, by string, gateway fact.Gateway, now time.Duration) (dead, reporter *Session) {
	dead, reporter = l.Get(id), l.Get(by)
	if dead == nil || dead == reporter || !dead.isAt(gateway) {
		return nil, nil
	}
	if dead.Stream != 0 {
		dead.reportedBy, dead.reportedAt = by, now
		return nil, nil
	}
	if reporter != nil {
		reporter.deaths++
	}
	return dead, reporter
}

// Reported returns the router that has found a session dead while it was connected.
func (l *Ledger) Reported(s *Session) (by string, ok bool) { return s.reportedBy, s.reportedBy != "" }

// Reports reports whether a router has found another one dead that is still connected.
func (l *Ledger) Reports(reporter *Session) bool {
	return slices.ContainsFunc(l.sessions, func(s *Session) bool { return s.Stream != 0 && s.reportedBy == reporter.ID })
}

// DeathRecorded notes that a death that a router has reported is durable.
func (l *Ledger) DeathRecorded(reporter *Session) { reporter.deaths-- }

// End removes a session. It returns the stream that was open, 0 if there was none.
func (l *Ledger) End(s *Session) (stream uint64) {
	at, _ := l.find(s.ID)
	l.sessions = slices.Delete(l.sessions, at, at+1)
	s.ended = true
	return l.Disconnect(s)
}

// Expired lists the sessions whose routes must be stale, each once. A session that is listed is then disconnected, and
// ends when that is durable: a leader that was deposed does not know what its routers have heard since. Its router may
// not join before that. A session that is being declared dead ends with its declaration.
func (l *Ledger) Expired(now time.Duration) (all []*Session) {
	for _, s := range l.sessions {
		if !s.expired && s.declaration == nil && now > l.ExpiresAt(s) {
			s.expired = true
			all = append(all, s)
		}
	}
	return all
}

// ExpiresAt is when a session expires if its router is not heard again.
func (l *Ledger) ExpiresAt(s *Session) time.Duration {
	at := s.LastPing + l.cfg.Expiry(s.MaxStale, s.Egress)
	if s.Earlier {
		at += l.cfg.ConnectWindow
	}
	return at
}

// Returns is for how much longer a router that is not connected may be about to come back: this
// leader has heard it a moment ago, or the one before may have.
func (l *Ledger) Returns(s *Session, now time.Duration) time.Duration {
	return max(0, s.LastPing+l.cfg.ReturnWithin-now)
}

// Quarantine is for how much longer routers of an earlier journal may serve routes; 0: there are
// none.
func (l *Ledger) Quarantine(now time.Duration) (left time.Duration) {
	for _, s := range l.sessions {
		if s.Earlier {
			left = max(left, l.ExpiresAt(s)-now)
		}
	}
	return left
}

// HasEarlier reports whether a session stands for the routers of an earlier journal.
func (l *Ledger) HasEarlier() bool { return slices.ContainsFunc(l.sessions, isEarlier) }

// LastEarlier reports whether a session stands for the routers of an earlier journal, and none of
// the others does that will not end in the same way. A declaration or an expiry on its way into the journal
// may end a session at any time.
func (l *Ledger) LastEarlier(s *Session) bool {
	return s.Earlier && !slices.ContainsFunc(l.sessions, func(o *Session) bool {
		return o != s && o.Earlier && o.declaration == nil && !o.expired
	})
}

func isEarlier(s *Session) bool { return s.Earlier }

// Declare notes the declaration of an operator that the router of a session has ended. The session
// is not connected, and Returns is 0 for it. isNew: the declaration must be journaled. Otherwise an
// earlier one is on its way, and has this token, too.
func (l *Ledger) Declare(s *Session, token uint64) (d *Declaration, isNew bool) {
	if isNew = s.declaration == nil; isNew {
		s.declaration = &Declaration{}
	}
	s.declaration.Tokens = append(s.declaration.Tokens, token)
	return s.declaration, isNew
}

// Ban refuses the ID of a router that was declared dead until its routes must be stale.
func (l *Ledger) Ban(id string, fact fact.Revision, fences int, until time.Duration) {
	l.bans[id] = Ban{Session: id, Until: until, Fact: fact, Fences: fences}
}

// Banned returns the ban of an ID, if there is one.
func (l *Ledger) Banned(id string) (b Ban, ok bool) {
	b, ok = l.bans[id]
	return b, ok
}

// Lift ends the bans whose time is over. It returns them by ID.
func (l *Ledger) Lift(now time.Duration) (over []Ban) {
	for _, id := range slices.Sorted(maps.Keys(l.bans)) {
		if b := l.bans[id]; now > b.Until {
			delete(l.bans, id)
			over = append(over, b)
		}
	}
	return over
}

// Check returns the first contradiction between the tables. It is for tests.
func (l *Ledger) Check() error {
	streams := 0
	for i, s := range l.sessions {
		if i > 0 && l.sessions[i-1].ID >= s.ID {
			return fmt.Errorf("member: session %s comes after %s", s.ID, l.sessions[i-1].ID)
		}
		if s.Stream != 0 {
			streams++
		}
		_, banned := l.bans[s.ID]
		switch {
		case s.ended || banned:
			return fmt.Errorf("member: session %s is listed; ended: %v, banned: %v", s.ID, s.ended, banned)
		case s.Stream != 0 && l.streams[s.Stream] != s:
			return fmt.Errorf("member: session %s is not kept with its stream %d", s.ID, s.Stream)
		case s.Stream != 0 && (s.declaration != nil || s.expired):
			return fmt.Errorf("member: session %s is connected, and is being declared dead, or has expired", s.ID)
		case s.HeardAt > s.LastPing || s.Acked > s.Sequence || s.deaths < 0 || s.Sequence > 0 && !s.Durable:
			return fmt.Errorf("member: session %+v contradicts itself", *s)
		}
	}
	if streams != len(l.streams) {
		return fmt.Errorf("member: %d sessions are connected, %d streams are kept", streams, len(l.streams))
	}
	return nil
}
