package guard

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

// The assertions.
const (
	PodFenced      = "pod_fenced"
	SessionDurable = "session_durable"
	ClaimDurable   = "claim_durable"
	OneBinding     = "one_binding"
	RouteAwake     = "route_awake"
)

// Assertions are all of them.
var Assertions = []string{PodFenced, SessionDurable, ClaimDurable, OneBinding, RouteAwake}

// Violation is an effect that must not be carried out.
type Violation struct {
	Assertion string
	// Subject is the pod, the sandbox or the session that it is about, for people.
	Subject string
	// Pool is that of the sandbox; zero: it is not known. Pod is set if the pod is not on record.
	Pool core.PoolKey
	Pod  core.PodKey
	// What says what was wrong. Dump is what the guard knows about the subject.
	What, Dump string
}

// String returns all of a violation in one line.
func (v Violation) String() string {
	return fmt.Sprintf("%s: %s: %s (%s)", v.Assertion, v.Subject, v.What, v.Dump)
}

// Step takes an event, or nil for Recover, and the effects that the core has answered it with. It returns the effects
// that may be carried out, and the violations. In place of an effect that would leave a gap it returns one that
// does no harm: a stream is closed, a claim is refused, a Write has the other facts.
func (g *Guard) Step(now time.Duration, ev core.Event, effects []core.Effect) (allowed []core.Effect, all []Violation) {
	g.now = now
	g.heard(ev, refuses(ev, effects))
	allowed = effects
	for i, e := range effects {
		instead, v := g.check(e)
		if len(v) == 0 {
			if len(all) > 0 {
				allowed = append(allowed, e)
			}
			continue
		}
		if len(all) == 0 {
			allowed = append([]core.Effect(nil), effects[:i]...)
		}
		for _, v := range v {
			v.Dump = fmt.Sprintf("after %T: %T: %s", ev, e, v.Dump)
			all = append(all, v)
		}
		if instead != nil {
			allowed = append(allowed, instead)
		}
	}
	return allowed, all
}

// refuses reports whether a router that joins is refused.
func refuses(ev core.Event, effects []core.Effect) bool {
	if join, ok := ev.(core.SessionJoined); ok {
		for _, e := range effects {
			if c, ok := e.(core.CloseStream); ok && c.Stream == join.Stream {
				return true
			}
		}
	}
	return false
}

// check returns the violations of an effect, and what may be carried out instead of it; nil: nothing. It notes an
// effect that has none.
func (g *Guard) check(e core.Effect) (instead core.Effect, all []Violation) {
	switch e := e.(type) {
	case core.Write:
		return g.checkWrite(e)
	case core.DeletePod:
		all = g.checkPod(e.Pod)
	case core.RecyclePod:
		all = g.checkPod(e.Pod)
	case core.SendSnapshot:
		return g.checkSnapshot(e)
	case core.SendRoute:
		return g.checkRoute(e.Stream, &e.Sandbox, e.Sequence)
	case core.SendResolved:
		if e.Sandbox != nil {
			return g.checkRoute(e.Stream, e.Sandbox, 0)
		}
	case core.SendRelease:
		if s := g.sessions[g.streams[e.Stream].session]; s != nil && s.sent == e.Stream {
			s.sequence, s.owed = e.Sequence, append(s.owed, message{e.Sequence, e.IDs})
		}
	case core.SendClose: // an acknowledgement of it is one of the releases before it
		if s := g.sessions[g.streams[e.Stream].session]; s != nil && s.sent == e.Stream {
			s.sequence = e.Sequence
		}
	case core.CloseStream:
		if s := g.sessions[g.streams[e.Stream].session]; s != nil && s.open == e.Stream {
			s.open = 0
		}
	case core.Claimed:
		if _, all = g.known(&e.Sandbox, e.Sandbox.Phase == core.Running); len(all) > 0 {
			instead = core.ClaimRefused{Token: e.Token}
		}
	case core.BatchClaimed:
		for i := range e.Sandboxes {
			_, v := g.known(&e.Sandboxes[i], e.Sandboxes[i].Phase == core.Running)
			all = append(all, v...)
		}
		if len(all) > 0 {
			instead = core.ClaimRefused{Token: e.Token}
		}
	case core.Configure:
		_, all = g.known(&e.Sandbox, false)
	case core.Freeze:
		_, all = g.known(&e.Sandbox, true)
	case core.Thaw:
		_, all = g.known(&e.Sandbox, true)
	case core.StartSandbox:
		_, all = g.known(&e.Sandbox, false)
	case core.WriteObject:
		_, all = g.known(&e.Sandbox, false)
	case core.DeleteObject:
		g.forget(e.ID)
	case core.Settle:
		if pod, ok := e.Thing.(core.PodKey); ok {
			delete(g.retired, idOf(pod))
		}
	}
	return instead, all
}

// checkWrite checks what is handed to the writer. Facts that are joined to one with a violation are withheld too.
func (g *Guard) checkWrite(e core.Write) (instead core.Effect, all []Violation) {
	g.writing = make([]core.Fact, 0, len(e.Facts))
	for rest := e.Facts; len(rest) > 0; {
		n, found := 1, g.checkFact(rest[0])
		for ; n < len(rest) && rest[n].Joined; n++ {
			found = append(found, g.checkFact(rest[n])...)
		}
		if len(found) == 0 {
			g.writing = append(g.writing, rest[:n]...)
		}
		all, rest = append(all, found...), rest[n:]
	}
	if len(all) > 0 {
		instead = core.Write{Facts: g.writing}
	}
	return instead, all
}

func (g *Guard) checkFact(f core.Fact) []Violation {
	s, ok := f.Subject.(*core.SandboxFact)
	if !ok {
		return nil
	}
	sb, pod := g.sandboxes[s.ID], idOf(s.Pod)
	_, retired := g.retired[pod]
	what := ""
	switch {
	case sb != nil && sb.stopped && !sb.ending && s.Incarnation > sb.incarnation && g.pods[pod] == nil && !retired:
		g.bind(&s.Sandbox)
	case sb != nil && s.Phase == core.Stopped && sb.sent:
		what = "it is stopped, and routers may have its route"
	case sb != nil && (sb.pod != pod || sb.ip != s.IP):
		what = "the ID is bound to another pod or address"
	case sb != nil && sb.released && s.Phase != core.Released:
		what = "the ID is bound, and its sandbox is released"
	case sb != nil:
	case g.pods[pod] != nil:
		what = "its pod is bound to sandbox " + sandboxid.Short(g.pods[pod].id)
	case retired:
		what = "its pod is retired"
	default:
		g.bind(&s.Sandbox)
	}
	if what == "" {
		g.sandboxes[s.ID].ending = s.Phase == core.Released
		return nil
	}
	return g.violation(OneBinding, "sandbox "+sandboxid.Short(s.ID), what, s.Pool, sb)
}

// checkPod checks the deletion of a pod, and the end of a life of it.
func (g *Guard) checkPod(key core.PodKey) []Violation {
	pod, subject := idOf(key), "pod "+key.Name
	sb := g.pods[pod]
	if sb == nil {
		after, retired := g.retired[pod]
		if !retired {
			v := g.violation(PodFenced, subject, "it is to be deleted, and no durable fact says so", core.PoolKey{}, nil)
			v[0].Pod = key
			return v
		}
		if sb = g.sandboxes[after]; sb == nil { // none, or its record was dropped after its end
			return nil
		}
	}
	if sb.stopped || g.complete(sb) {
		return nil
	}
	return g.violation(PodFenced, subject, "the fence of its sandbox is not complete", sb.pool, sb)
}

// receives returns the session of a stream if it may receive routes.
func (g *Guard) receives(stream uint64) (id string, s *session, v []Violation) {
	j := g.streams[stream]
	what := "a route is sent to it before it is durable"
	switch s = g.sessions[j.session]; {
	case s == nil || !s.durable:
	case j.maxStale > s.maxStale || j.gateway != s.gateway:
		what = "a route is sent to it before its max-stale and gateway are durable"
	default:
		return j.session, s, nil
	}
	return j.session, s, g.violation(SessionDurable, "session "+j.session, what, core.PoolKey{}, nil)
}

// checkRoute checks the route of a sandbox that is sent in a message with a sequence; 0: it has none. A message without
// a release takes the place of one with a sequence, because a router ends a stream with a gap.
func (g *Guard) checkRoute(stream uint64, of *core.Sandbox, sequence uint64) (instead core.Effect, all []Violation) {
	id, s, all := g.receives(stream)
	if len(all) > 0 {
		return core.CloseStream{Stream: stream}, all
	}
	s.sequence = max(s.sequence, sequence)
	sb, all := g.servable(of)
	switch {
	case len(all) == 0:
		g.routed(id, sb)
	case sequence > 0:
		instead = core.SendRelease{Stream: stream, Sequence: sequence}
	}
	return instead, all
}

// checkSnapshot checks the first message of a stream. Its acknowledgement ends every wait for the session but those for
// its routes.
func (g *Guard) checkSnapshot(e core.SendSnapshot) (instead core.Effect, all []Violation) {
	id, s, all := g.receives(e.Stream)
	if len(all) > 0 {
		return core.CloseStream{Stream: e.Stream}, all
	}
	stays := map[string]bool{} // routes to released sandboxes
	for i := range e.Routes {
		sb, v := g.servable(&e.Routes[i])
		if all = append(all, v...); len(v) == 0 {
			g.routed(id, sb)
			if sb.released {
				stays[sb.id] = true
			}
		}
	}
	var over []string
	for _, sb := range g.unfenced {
		if _, waits := sb.fence.waiting[id]; waits && !stays[sb.id] {
			over = append(over, sb.id)
		}
	}
	s.routed, s.sent, s.sequence, s.owed = true, e.Stream, e.Sequence, []message{{e.Sequence, over}}
	if len(all) > 0 {
		e.Routes = slices.DeleteFunc(slices.Clone(e.Routes), func(s core.Sandbox) bool {
			_, v := g.servable(&s)
			return len(v) > 0
		})
		instead = e
	}
	return instead, all
}

// known checks that the binding of a sandbox is durable. running: so is its start.
func (g *Guard) known(s *core.Sandbox, running bool) (*sandbox, []Violation) {
	sb := g.sandboxes[s.ID]
	if s.Phase == core.Stopped && sb != nil && sb.former != nil && sb.former.pod == idOf(s.Pod) && sb.former.ip == s.IP {
		return sb.former, nil // until it has its next pod it is what it was
	}
	if sb != nil && sb.durable && sb.pod == idOf(s.Pod) && sb.ip == s.IP && (sb.running || !running) {
		return sb, nil
	}
	return nil, g.violation(ClaimDurable, "sandbox "+sandboxid.Short(s.ID), "it is used before its claim or its start is durable", s.Pool, sb)
}

// servable checks that the route of a sandbox may be sent: its start is durable, and its processes run.
func (g *Guard) servable(s *core.Sandbox) (*sandbox, []Violation) {
	sb, all := g.known(s, true)
	if len(all) == 0 && (sb.stopped || sb.asleep != (core.Revision{}) && !sb.thawed) {
		return nil, g.violation(RouteAwake, "sandbox "+sandboxid.Short(s.ID), "its route is sent, and its processes may be stopped", s.Pool, sb)
	}
	return sb, all
}

// violation describes what is known of a sandbox; nil: nothing is.
func (g *Guard) violation(assertion, subject, what string, pool core.PoolKey, sb *sandbox) []Violation {
	return []Violation{{Assertion: assertion, Subject: subject, Pool: pool, What: what, Dump: g.dump(sb)}}
}

// maxDumped bounds the sessions that a dump lists.
const maxDumped = 10

// dump lists what the guard knows. It has IDs, numbers and names of types only: everything else may be a secret of a
// caller.
func (g *Guard) dump(sb *sandbox) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d sandboxes, %d of them unfenced, %d sessions, %d facts being written", len(g.sandboxes), len(g.unfenced), len(g.sessions), len(g.writing))
	if sb == nil {
		return b.String()
	}
	fmt.Fprintf(&b, "; sandbox %s on pod %s, durable %v, running %v, released %v, fenced %v",
		sandboxid.Short(sb.id), fact.PodKey{UID: sb.pod.uid, Life: sb.pod.life}.ID(), sb.durable, sb.running, sb.released, sb.fenced)
	if sb.fence == nil {
		return b.String()
	}
	waits := slices.Sorted(maps.Keys(sb.fence.waiting))
	if len(waits) == 0 {
		fmt.Fprintf(&b, ", no session is waited for since %v", g.now-sb.fence.clearedAt)
	}
	for i, id := range waits {
		if i == maxDumped {
			fmt.Fprintf(&b, ", and %d others", len(waits)-i)
			break
		}
		s := g.session(id)
		fmt.Fprintf(&b, ", waits for session %s on stream %d, sent up to %d", id, s.open, s.sequence)
	}
	return b.String()
}
