package controlclient

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/netip"
	"time"
	"unique"

	"go.uber.org/zap"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/routecache"
)

// apply puts one message into effect, and has it acknowledged once Envoy has read all
// earlier answers. An error ends the stream.
func (s *stream) apply(ctx context.Context, m *controlv1.AllocatorMessage) error {
	if err := s.client.accept(m, !s.joined); err != nil {
		return err
	}
	if !s.joined && m.GetSnapshot() == nil {
		return fmt.Errorf("control stream: expected a snapshot first, got %T", m.GetMessage())
	}
	// An acknowledgement covers all earlier messages, so none may be missing.
	sequence := m.GetSequence()
	if sequence != 0 && sequence != s.sequence+1 {
		return fmt.Errorf("control stream: message %d follows message %d", sequence, s.sequence)
	}
	dispatch := s.dispatch
	if s.client.o.Egress != nil {
		dispatch = s.dispatchEgress
	}
	if err := dispatch(ctx, m); err != nil {
		return err
	}
	if sequence != 0 {
		s.sequence = sequence
		s.client.gate.Barrier(func() { s.acknowledge(sequence) })
	}
	return nil
}

// dispatch calls the method for the kind of a message. It ignores unknown kinds.
func (s *stream) dispatch(ctx context.Context, m *controlv1.AllocatorMessage) error {
	c, sequence := s.client, m.GetSequence()
	switch m := m.GetMessage().(type) {
	case *controlv1.AllocatorMessage_Snapshot:
		return s.applySnapshot(m.Snapshot)
	case *controlv1.AllocatorMessage_Route:
		return s.applyRoute(m.Route)
	case *controlv1.AllocatorMessage_Release:
		for i, id := range m.Release.GetSandboxIds() {
			var end *controlv1.End
			if ends := m.Release.GetEnds(); i < len(ends) {
				end = ends[i]
			}
			c.o.Sandboxes.Release(id, toEnd(end))
		}
	case *controlv1.AllocatorMessage_Quiesce:
		s.applyQuiesce(m.Quiesce)
	case *controlv1.AllocatorMessage_Probe:
		s.probe(ctx, m.Probe)
	case *controlv1.AllocatorMessage_Resume:
		for _, id := range m.Resume.GetSandboxIds() {
			c.o.Sandboxes.Resume(id)
		}
	case *controlv1.AllocatorMessage_Resolved:
		return s.applyResolved(m.Resolved, sequence != 0)
	case *controlv1.AllocatorMessage_Keys:
		return s.applyKeys(m.Keys)
	case *controlv1.AllocatorMessage_Pong:
		s.applyPong(m.Pong)
	}
	return nil
}

// applySnapshot collects one part of the snapshot, and replaces the cache after the last.
func (s *stream) applySnapshot(m *controlv1.Snapshot) error {
	for _, r := range m.GetRoutes() {
		route, err := toRoute(r)
		if err != nil {
			return err
		}
		s.snapshot[r.GetSandboxId()] = route
	}
	if !m.GetLast() {
		return nil
	}
	c, routes := s.client, s.snapshot
	c.o.Sandboxes.Replace(routes)
	s.snapshot = map[string]routecache.Route{}
	s.join(len(routes))
	notify(s.snapshotApplied)
	return nil
}

// join makes the stream the session: its snapshot is in effect.
func (s *stream) join(routes int) {
	c := s.client
	s.joined = true
	c.o.Log.Info("joined", zap.Uint64("term", c.Term()), zap.Int("routes", routes))
	c.setCurrent(s)
	c.gate.Connected()
}

// applyKeys collects one part of the API keys, and replaces them after the last.
func (s *stream) applyKeys(m *controlv1.Keys) error {
	for _, of := range m.GetTeams() {
		for _, hash := range of.GetHashes() {
			if len(hash) != sha256.Size {
				return fmt.Errorf("keys: hashes: %d bytes, not %d", len(hash), sha256.Size)
			}
			s.keys[of.GetTeam()] = append(s.keys[of.GetTeam()], [sha256.Size]byte(hash))
		}
	}
	switch {
	case m.GetUnread():
		s.client.o.Keys.Replace(nil)
	case !m.GetLast():
		return nil
	default:
		s.client.o.Keys.Replace(s.keys)
	}
	s.hasSecrets = true
	s.keys = map[string][][sha256.Size]byte{}
	return nil
}

func (s *stream) applyRoute(m *controlv1.Route) error {
	route, err := toRoute(m)
	if err != nil {
		return err
	}
	s.client.o.Sandboxes.Put(m.GetSandboxId(), route)
	return nil
}

// applyResolved passes the answer to a question to the cache. An answer of an unknown kind
// has no route, so it counts as Unknown. What has a sequence and starts is a close.
func (s *stream) applyResolved(m *controlv1.Resolved, sequenced bool) error {
	answer := routecache.Answer{Status: routecache.Unknown}
	switch a := m.GetAnswer().(type) {
	case *controlv1.Resolved_Route:
		route, err := toRoute(a.Route)
		if err != nil {
			return err
		}
		answer = routecache.Answer{Status: routecache.Routable, Route: route}
	case *controlv1.Resolved_Gone:
		answer.Status, answer.End = routecache.Gone, toEnd(a.Gone.GetEnd())
	case *controlv1.Resolved_Asleep:
		route, err := toRoute(a.Asleep.GetRoute())
		if err != nil {
			return err
		}
		answer = routecache.Answer{Status: routecache.Asleep, Route: route, Wakeable: a.Asleep.GetWakeable(), Busy: a.Asleep.GetBusy()}
	case *controlv1.Resolved_Starting:
		if sequenced {
			s.client.o.Sandboxes.Close(m.GetSandboxId())
			return nil
		}
		answer.Status = routecache.Starting
		answer.Hold = time.Duration(a.Starting.GetHoldMillis()) * time.Millisecond
	case *controlv1.Resolved_Unknown:
	}
	s.client.o.Sandboxes.Resolve(m.GetSandboxId(), answer)
	return nil
}

// applyPong extends the freshness of the cache. A pong to a ping that this stream did not
// send has no effect.
func (s *stream) applyPong(m *controlv1.Pong) {
	p, ok := s.answeredPing(m.GetNonce())
	if !ok {
		return
	}
	c := s.client
	c.o.OnPong(c.o.Now() - p.sent)
	switch { // The leader sends none, so it would not say which of the earlier ones are revoked.
	case s.hasSecrets:
	case c.o.Egress != nil:
		c.o.Egress.SetCredentials(nil)
	default:
		c.o.Keys.Replace(nil)
	}
	c.gate.SetFreshUntil(p.sent + c.o.MaxStale)
	c.closeReady()
	if m.GetKeepProofs() {
		return // the leader may end before it acts on what it was told
	}
	if err := c.o.DeadRouters.Forget(p.dead); err != nil {
		c.o.Log.Warn("the lock file of a dead router was not removed, so it is reported again", zap.Error(err))
	}
}

// acknowledge schedules the acknowledgement of all messages up to sequence.
func (s *stream) acknowledge(sequence uint64) {
	s.mu.Lock()
	s.applied = sequence
	s.mu.Unlock()
	notify(s.ackPending)
}

// notify sends to a channel of capacity 1. If it is full, the receiver is notified already.
func notify(ch chan<- struct{}) {
	select {
	case ch <- struct{}{}:
	default:
	}
}

// toEnd makes equal reasons share their memory, as toRoute does with pools, because many tombstones have one.
func toEnd(e *controlv1.End) routecache.End {
	return routecache.End{Reason: unique.Make(e.GetReason()).Value(), AtUnix: e.GetAtUnix()}
}

func toRoute(r *controlv1.Route) (routecache.Route, error) {
	addr, err := netip.ParseAddr(r.GetPodIp())
	if err != nil {
		return routecache.Route{}, fmt.Errorf("route: pod_ip: %w", err)
	}
	// 0 is valid: the default port is unknown if the sandbox's pool is gone, and its other
	// ports must stay reachable.
	if r.GetDefaultPort() > 65535 {
		return routecache.Route{}, fmt.Errorf("route: default_port %d is above 65535", r.GetDefaultPort())
	}
	open, err := toPorts("ports", r.GetPorts())
	if err != nil {
		return routecache.Route{}, err
	}
	terms, err := toTerms(r)
	return routecache.Route{
		Addr: addr.Unmap(), DefaultPort: uint16(r.GetDefaultPort()), Ports: open,
		MinBytes: r.GetMinBytesPerMinute(), Terms: terms, Pool: unique.Make(r.GetPool()).Value(),
	}, err
}

// toTerms returns nil for a public sandbox without special terms, which most are.
func toTerms(r *controlv1.Route) (*routecache.Terms, error) {
	if r.GetAccess() == controlv1.Access_ACCESS_PUBLIC && r.GetMaskHost() == "" && len(r.GetHttpsPorts()) == 0 && r.GetAgentPort() == 0 {
		return nil, nil
	}
	if r.GetAgentPort() > 65535 {
		return nil, fmt.Errorf("route: agent_port: %d is not in 0 to 65535", r.GetAgentPort())
	}
	https, err := toPorts("https_ports", r.GetHttpsPorts())
	if err != nil {
		return nil, err
	}
	terms := &routecache.Terms{
		Team: r.GetTeam(), MaskHost: r.GetMaskHost(), HTTPSPorts: https,
		AgentPort: uint16(r.GetAgentPort()), AgentPublic: r.GetAgentPublic(),
	}
	if n := copy(terms.Secret[:], r.GetAccessSecret()); n != 0 && len(r.GetAccessSecret()) != len(terms.Secret) {
		return nil, fmt.Errorf("route: access_secret: %d bytes, not %d", len(r.GetAccessSecret()), len(terms.Secret))
	}
	switch r.GetAccess() {
	case controlv1.Access_ACCESS_PUBLIC:
		terms.Access = routecache.Public
	case controlv1.Access_ACCESS_TOKEN:
		terms.Access = routecache.Token
	case controlv1.Access_ACCESS_TEAM:
		terms.Access = routecache.Team
	default: // a later version's, whose sandboxes must not be open here
		terms.Access = routecache.Closed
	}
	return terms, nil
}

func toPorts(field string, all []uint32) (routecache.Ports, error) {
	ports := make([]uint16, 0, len(all))
	for _, port := range all {
		if port == 0 || port > 65535 {
			return routecache.Ports{}, fmt.Errorf("route: %s: %d is not in 1 to 65535", field, port)
		}
		ports = append(ports, uint16(port))
	}
	return routecache.NewPorts(ports), nil
}
