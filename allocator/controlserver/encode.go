package controlserver

import (
	"crypto/sha256"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Deliver queues an effect for its router. It returns false for an effect that is not for a router.
// It never blocks, and must be called by one goroutine.
func (s *Server) Deliver(term uint64, e core.Effect) bool {
	switch e := e.(type) {
	case core.SendSnapshot:
		s.push(e.Stream, s.snapshot(term, e)...)
	case core.SendRoute:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Sequence: e.Sequence, Message: &controlv1.AllocatorMessage_Route{Route: s.route(e.Stream, &e.Sandbox)}})
	case core.SendRelease:
		release := &controlv1.Release{SandboxIds: e.IDs}
		for _, end := range e.Ends {
			release.Ends = append(release.Ends, endOf(end))
		}
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Sequence: e.Sequence, Message: &controlv1.AllocatorMessage_Release{Release: release}})
	case core.SendClose:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Sequence: e.Sequence, Message: &controlv1.AllocatorMessage_Resolved{
			Resolved: &controlv1.Resolved{SandboxId: e.ID, Answer: starting(0)},
		}})
	case core.SendResolved:
		r := &controlv1.Resolved{SandboxId: e.ID}
		switch {
		case e.Sandbox != nil:
			r.Answer = &controlv1.Resolved_Route{Route: s.route(e.Stream, e.Sandbox)}
		case e.Sleeper != nil:
			asleep := &controlv1.Asleep{Wakeable: e.Sleeper.Wakeable, Busy: e.Busy}
			if !s.isEgress(e.Stream) { // nothing of it may leave until it has a route
				asleep.Route = s.route(e.Stream, e.Sleeper)
			}
			r.Answer = &controlv1.Resolved_Asleep{Asleep: asleep}
		case e.Starting:
			r.Answer = starting(e.Hold)
		case e.Gone:
			r.Answer = &controlv1.Resolved_Gone{Gone: &controlv1.Gone{End: endOf(e.End)}}
		default:
			r.Answer = &controlv1.Resolved_Unknown{Unknown: &controlv1.Unknown{}}
		}
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Resolved{Resolved: r}})
	case core.SendQuiesce:
		q := &controlv1.Quiesce{Number: e.Number}
		for _, question := range e.Questions {
			q.Questions = append(q.Questions, &controlv1.Question{SandboxId: question.ID, MinBytesPerMinute: question.MinBytes})
		}
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Quiesce{Quiesce: q}})
	case core.SendProbe:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Probe{Probe: &controlv1.Probe{
			Number: e.Number, SandboxId: e.ID, PodIp: e.To.Addr().String(), Port: uint32(e.To.Port()), Path: e.Path,
		}}})
	case core.SendResume:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Resume{Resume: &controlv1.Resume{SandboxIds: e.IDs}}})
	case core.SendPong:
		s.push(e.Stream, &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Pong{Pong: &controlv1.Pong{Nonce: e.Nonce, KeepProofs: e.Keep}}})
	case core.CloseStream:
		switch {
		case e.Left:
			s.cut(e.Stream, nil)
		case e.Banned:
			s.cut(e.Stream, controlv1.DeclaredDead())
		default:
			s.cut(e.Stream, status.Error(codes.Aborted, "another stream joined under the same router ID, or the session expired"))
		}
	default:
		return false
	}
	return true
}

func (s *Server) snapshot(term uint64, e core.SendSnapshot) []*controlv1.AllocatorMessage {
	var parts []*controlv1.AllocatorMessage
	rest := e.Routes
	for {
		part, size := &controlv1.Snapshot{Routes: make([]*controlv1.Route, 0, min(len(rest), snapshotPart))}, 0
		for n := 0; n < min(len(rest), snapshotPart) && size < snapshotBytes; n++ {
			route := s.route(e.Stream, &rest[n])
			part.Routes, size = append(part.Routes, route), size+proto.Size(route)
		}
		n := len(part.Routes)
		part.Last = n == len(rest)
		m := &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Snapshot{Snapshot: part}}
		parts = append(parts, m)
		if rest = rest[n:]; len(rest) == 0 {
			m.Sequence = e.Sequence // the router acknowledges the whole snapshot
			return parts
		}
	}
}

// keys returns the API keys as messages, and a channel that is closed when they have changed; nil: they
// never do.
func (s *Server) keys(term uint64) ([]*controlv1.AllocatorMessage, <-chan struct{}) {
	byTeam, changed := map[string][][sha256.Size]byte{}, (<-chan struct{})(nil)
	if s.o.Keys != nil {
		byTeam, changed = s.o.Keys.ByTeam()
	}
	part, n := &controlv1.Keys{Unread: byTeam == nil}, 0
	parts := []*controlv1.Keys{part}
	for team, hashes := range byTeam {
		for len(hashes) > 0 {
			if n == keysPart {
				part, n = &controlv1.Keys{}, 0
				parts = append(parts, part)
			}
			some := min(len(hashes), keysPart-n)
			of := &controlv1.TeamKeys{Team: team}
			for _, hash := range hashes[:some] {
				of.Hashes = append(of.Hashes, hash[:])
			}
			part.Teams, hashes, n = append(part.Teams, of), hashes[some:], n+some
		}
	}
	part.Last = true
	messages := make([]*controlv1.AllocatorMessage, len(parts))
	for i, p := range parts {
		messages[i] = &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Keys{Keys: p}}
	}
	return messages, changed
}

// route is what the router of a stream gets of a sandbox. What opens a sandbox is not for egress routers.
func (s *Server) route(stream uint64, sb *core.Sandbox) *controlv1.Route {
	if s.isEgress(stream) {
		return &controlv1.Route{SandboxId: sb.ID, PodIp: sb.IP.String(), Pool: sb.Pool.Name, Egress: s.egress(sb)}
	}
	r := &controlv1.Route{
		SandboxId: sb.ID, PodIp: sb.IP.String(), DefaultPort: uint32(sb.DefaultPort), Ports: ports(sb.Ports),
		MinBytesPerMinute: sb.MinBytes, Access: controlv1.Access(sb.Access), MaskHost: sb.MaskHost, HttpsPorts: ports(sb.HTTPSPorts),
		Pool: sb.Pool.Name,
	}
	if sb.Access == core.AccessTeam {
		r.Team = sb.Team
	}
	r.AgentPort, r.AgentPublic = uint32(sb.Agent.Port), sb.Agent.Public
	if needed := sb.Access != core.AccessPublic || sb.Agent.Port != 0 && !sb.Agent.Public; needed && s.o.AccessKey != nil {
		secret := s.o.AccessKey.Secret(sb.ID)
		r.AccessSecret = secret[:]
	}
	return r
}

// egress is what an egress router gets of a sandbox. A Join of one is refused without an access key.
func (s *Server) egress(sb *core.Sandbox) *controlv1.Egress {
	hash := sha256.Sum256([]byte(s.o.AccessKey.EgressToken(sb.ID, sb.Incarnation)))
	e := &controlv1.Egress{Claim: rules(sb.Network), Incarnation: uint64(sb.Incarnation), TokenHash: hash[:]}
	pool := sb.PoolEgress
	if pool == nil {
		return e // it reaches nothing
	}
	e.Pool, e.Ports, e.HeadersUnknown = rules(pool.EgressRules), ports(pool.Ports), pool.CredentialsUnknown
	for _, c := range pool.Credentials {
		e.Headers = append(e.Headers, &controlv1.EgressHeader{Host: c.Host, Port: uint32(c.Port), Name: c.Header, Credential: c.Value})
	}
	headers, err := s.sealer.Open(sb.ID, sb.Network.Headers)
	if err != nil {
		e.HeadersUnknown = true
		s.rare.Error("headers of a sandbox cannot be read, so the egress gateways refuse what may need them: "+err.Error(),
			zap.String("sandboxID", sandboxid.Short(sb.ID)))
	}
	for _, h := range headers { // they come after those of the pool, and count before them
		e.Headers = append(e.Headers, &controlv1.EgressHeader{
			Host: h.Host, Port: uint32(h.Port), Name: h.Name, Value: h.Value,
		})
	}
	return e
}

// credentials returns the values of pools as messages, and a channel that is closed when they have changed; nil: they never
// do.
func (s *Server) credentials(term uint64) ([]*controlv1.AllocatorMessage, <-chan struct{}) {
	values, changed := map[string]string{}, (<-chan struct{})(nil)
	if s.o.Credentials != nil {
		values, changed = s.o.Credentials.All()
	}
	part, size := &controlv1.Credentials{Values: map[string]string{}, Unread: values == nil}, 0
	parts := []*controlv1.Credentials{part}
	for name, value := range values {
		if size >= snapshotBytes {
			part, size = &controlv1.Credentials{Values: map[string]string{}}, 0
			parts = append(parts, part)
		}
		part.Values[name], size = value, size+len(name)+len(value)
	}
	part.Last = true
	messages := make([]*controlv1.AllocatorMessage, len(parts))
	for i, p := range parts {
		messages[i] = &controlv1.AllocatorMessage{Term: term, Message: &controlv1.AllocatorMessage_Credentials{Credentials: p}}
	}
	return messages, changed
}

func rules(r core.EgressRules) *controlv1.EgressRules {
	return &controlv1.EgressRules{Allow: r.Allow, Deny: r.Deny}
}

func starting(hold time.Duration) *controlv1.Resolved_Starting {
	return &controlv1.Resolved_Starting{Starting: &controlv1.Starting{HoldMillis: uint32(hold.Milliseconds())}}
}

func endOf(e core.End) *controlv1.End {
	if e.At.IsZero() {
		return &controlv1.End{}
	}
	return &controlv1.End{Reason: e.Reason, AtUnix: e.At.Unix()}
}

func ports(all []uint16) []uint32 {
	var encoded []uint32
	for _, port := range all {
		encoded = append(encoded, uint32(port))
	}
	return encoded
}
