package guard

import (
	"net/netip"
	"slices"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
)

// Guard checks the effects of one term.
type Guard struct {
	window    time.Duration
	now       time.Duration // boot clock
	sandboxes map[string]*sandbox
	pods      map[podID]*sandbox  // those that have or had a sandbox
	unfenced  map[string]*sandbox // released, and not fenced
	retired   map[podID]string    // durable intents: the sandbox whose fence they wait for, "" for none
	sessions  map[string]*session
	streams   map[uint64]joined
	writing   []core.Fact // handed to the writer
}

// podID is what tells the lives of pods apart.
type podID struct {
	uid  string
	life int
}

func idOf(key core.PodKey) podID { return podID{key.UID, key.Life} }

type sandbox struct {
	id                                 string
	pod                                podID
	ip                                 netip.Addr
	pool                               core.PoolKey
	durable, running, released, fenced bool
	// asleep is the revision of the newest durable fact if that says that its processes may be stopped; else zero.
	// thawed: its agent has obeyed an order of that revision.
	asleep core.Revision
	thawed bool
	// stopped: the newest durable fact says that no pod serves it. Its next pod has a higher incarnation. sent: routers may
	// have its route, because it was sent since it was asleep last.
	stopped, sent bool
	incarnation   int
	egress        bool // egress routers have its rules
	// ending: its release was handed to the writer. former is what it was until it was bound to its present pod; nil: it
	// was not stopped.
	ending bool
	former *sandbox
	fence  *fence // while released and not fenced
}

// fence is what the release of a sandbox waits for.
type fence struct {
	waiting   map[string]struct{} // sessions
	cleared   bool
	clearedAt time.Duration
}

type session struct {
	// durable, earlier, egress, maxStale and gateway are as journaled. What was assumed of max-stale counts as 0.
	durable, earlier, egress bool
	maxStale                 time.Duration
	gateway                  core.Gateway
	routed                   bool
	open                     uint64 // its stream; 0: not connected
	reported                 bool   // dead, while it was connected
	// sent is the stream that got the last snapshot, sequence that of the last message on it.
	sent, sequence uint64
	owed           []message
}

// message is one whose acknowledgement ends the wait for a session.
type message struct {
	sequence  uint64
	sandboxes []string
}

// joined is what a router has said at the begin of its stream.
type joined struct {
	session  string
	maxStale time.Duration
	gateway  core.Gateway
}

// New returns a Guard that knows nothing. window is how long an admitted request may need to open its connection.
func New(window time.Duration) *Guard {
	return &Guard{
		window: window, sandboxes: map[string]*sandbox{}, pods: map[podID]*sandbox{}, unfenced: map[string]*sandbox{},
		retired: map[podID]string{}, sessions: map[string]*session{}, streams: map[uint64]joined{},
	}
}

// Recover makes the state known that the core recovers from. It is called once, before Step.
func (g *Guard) Recover(now time.Duration, st core.State) {
	g.now = now
	latest, ungranted := make(map[string]*core.Sandbox, len(st.Objects)), map[string]bool{}
	for i := range st.Objects {
		latest[st.Objects[i].ID] = &st.Objects[i]
	}
	for _, f := range st.Facts {
		switch s := f.Subject.(type) {
		case *core.SandboxFact: // the higher revision counts
			if shown := latest[s.ID]; shown == nil || shown.Revision.Less(f.Revision) {
				latest[s.ID], ungranted[s.ID] = &s.Sandbox, s.Ungranted > 0
			}
		default:
			g.durable(f)
		}
	}
	for _, s := range g.sessions {
		s.routed = true
	}
	for _, s := range latest {
		sb := g.bind(s)
		sb.durable, sb.running = true, s.Phase != core.Starting
		sb.sent = s.Phase == core.Running && !ungranted[s.ID]
		sb.sleeps(s)
		switch s.Phase {
		case core.Released:
			g.release(sb)
		case core.Ended:
			sb.released, sb.fenced = true, true
		default:
		}
	}
}

// sleeps notes whether the processes of a sandbox may be stopped.
func (sb *sandbox) sleeps(s *core.Sandbox) {
	sb.asleep, sb.thawed = core.Revision{}, false
	if s.Phase == core.FallingAsleep || s.Phase == core.Asleep || s.Phase == core.Waking {
		sb.asleep, sb.sent = s.Revision, false
	}
	sb.stopped = s.Phase == core.Stopped
}

func (g *Guard) bind(s *core.Sandbox) *sandbox {
	sb := &sandbox{id: s.ID, pod: idOf(s.Pod), ip: s.IP, pool: s.Pool, incarnation: s.Incarnation, egress: s.Agent.Egress}
	if before := g.sandboxes[s.ID]; before != nil { // it was stopped
		delete(g.pods, before.pod)
		before.former, sb.former = nil, before
	}
	g.sandboxes[s.ID], g.pods[sb.pod] = sb, sb
	return sb
}

// heard notes what an event says. refused: the router of a SessionJoined may not join.
func (g *Guard) heard(ev core.Event, refused bool) {
	switch ev := ev.(type) {
	case core.Written:
		for _, f := range g.writing {
			g.durable(f)
		}
		g.writing = nil
	case core.SessionJoined:
		if !refused {
			s := g.session(ev.Session)
			s.open, s.reported = ev.Stream, false
			g.streams[ev.Stream] = joined{ev.Session, ev.MaxStale, ev.Gateway}
		}
	case core.Thawed:
		if sb := g.sandboxes[ev.ID]; sb != nil && ev.OK && ev.Revision == sb.asleep {
			sb.thawed = true
		}
	case core.SessionLeft:
		g.left(ev)
	case core.SessionGoodbye:
		if s := g.sessions[ev.Session]; s != nil && s.isAt(ev.Gateway) && (!s.durable || s.egress == ev.Egress) {
			g.end(ev.Session, s)
		}
	case core.SessionDead:
		s := g.sessions[ev.Session]
		switch {
		case s == nil || ev.By == ev.Session || !s.isAt(ev.Gateway):
		case s.open != 0:
			s.reported = true
		default:
			g.end(ev.Session, s)
		}
	case core.SessionAck:
		g.acknowledged(ev)
	case core.Tick:
		for _, sb := range g.unfenced {
			g.complete(sb)
		}
	}
}

// durable notes a fact that is in the journal.
func (g *Guard) durable(f core.Fact) {
	switch s := f.Subject.(type) {
	case *core.SandboxFact:
		sb := g.sandboxes[s.ID]
		sb.durable, sb.running = true, sb.running || s.Phase == core.Running
		sb.sleeps(&s.Sandbox)
		if s.Phase == core.Released && !sb.released {
			g.release(sb)
		}
	case *core.RetirementFact:
		g.retired[idOf(s.Pod)] = s.After
	case *core.SessionFact:
		g.sessionDurable(s)
	}
}

func (g *Guard) sessionDurable(f *core.SessionFact) {
	s := g.session(f.ID)
	if f.Left {
		stream := s.open // of its successor, if a router has joined since
		g.end(f.ID, s)
		if s.open, s.durable = stream, false; stream == 0 {
			delete(g.sessions, f.ID)
		}
		return
	}
	s.durable, s.earlier, s.egress, s.gateway, s.maxStale = true, f.Earlier, f.Egress, f.Gateway, f.MaxStale
	if f.Assumed {
		s.maxStale = 0
	}
	if f.Earlier && !s.routed { // it has routes that no leader of this journal has sent
		s.routed = true
		for _, sb := range g.unfenced {
			if !g.complete(sb) {
				sb.fence.waiting[f.ID] = struct{}{}
			}
		}
	}
}

// session returns the session of an ID, and creates it if there is none.
func (g *Guard) session(id string) *session {
	s := g.sessions[id]
	if s == nil {
		s = &session{}
		g.sessions[id] = s
	}
	return s
}

// isAt reports whether a router that shows a gateway speaks for a session.
func (s *session) isAt(gateway core.Gateway) bool {
	return !s.earlier && (s.gateway == core.Gateway{} || s.gateway == gateway)
}

// end notes that a session sends no requests any more.
func (g *Guard) end(id string, s *session) {
	s.routed, s.open, s.reported, s.owed = false, 0, false, nil
	for _, sb := range g.unfenced {
		g.waitsNot(sb, id)
	}
}

func (g *Guard) left(ev core.SessionLeft) {
	id := g.streams[ev.Stream].session
	delete(g.streams, ev.Stream)
	s := g.sessions[id]
	if s == nil || id != ev.Session {
		return
	}
	if s.open == ev.Stream {
		s.open = 0
	}
	if s.reported && s.open == 0 {
		g.end(id, s)
	}
}

func (g *Guard) acknowledged(ev core.SessionAck) {
	id := g.streams[ev.Stream].session
	s := g.sessions[id]
	if s == nil || s.sent != ev.Stream || ev.Sequence > s.sequence {
		return
	}
	n := 0
	for ; n < len(s.owed) && s.owed[n].sequence <= ev.Sequence; n++ {
		for _, sandbox := range s.owed[n].sandboxes {
			if sb := g.unfenced[sandbox]; sb != nil {
				g.waitsNot(sb, id)
			}
		}
	}
	s.owed = slices.Delete(s.owed, 0, n)
}

// release begins the fence of a sandbox.
func (g *Guard) release(sb *sandbox) {
	sb.released, sb.fence = true, &fence{waiting: make(map[string]struct{}, len(g.sessions))}
	g.unfenced[sb.id] = sb
	for id, s := range g.sessions {
		if s.routed && (sb.egress || !s.egress) {
			sb.fence.waiting[id] = struct{}{}
		}
	}
	g.waitsNot(sb, "")
}

// waitsNot ends the wait of a fence for a session.
func (g *Guard) waitsNot(sb *sandbox, session string) {
	f := sb.fence
	if delete(f.waiting, session); len(f.waiting) == 0 && !f.cleared {
		f.cleared, f.clearedAt = true, g.now
	}
}

// complete reports whether the fence of a sandbox is complete. It stays so, unless a route of the sandbox is sent.
func (g *Guard) complete(sb *sandbox) bool {
	if f := sb.fence; f != nil && f.cleared && len(f.waiting) == 0 && g.now >= f.clearedAt+g.window {
		sb.fenced, sb.fence = true, nil
		delete(g.unfenced, sb.id)
	}
	return sb.fenced
}

// routed notes that a session is sent the route of a sandbox. The route of one that is released by the same event
// may be sent before the release.
func (g *Guard) routed(session string, sb *sandbox) {
	sb.sent = true
	if !sb.released {
		return
	}
	if sb.fence == nil {
		sb.fence, sb.fenced = &fence{waiting: map[string]struct{}{}}, false
		g.unfenced[sb.id] = sb
	}
	sb.fence.waiting[session], sb.fence.cleared = struct{}{}, false
}

// forget drops a sandbox whose record the core drops.
func (g *Guard) forget(id string) {
	sb := g.sandboxes[id]
	if sb == nil || !g.complete(sb) {
		return
	}
	delete(g.sandboxes, id)
	if g.pods[sb.pod] == sb {
		delete(g.pods, sb.pod)
	}
}
