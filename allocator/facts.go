package allocator

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/journal"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// The prefix of a record's key says what the record is about.
const (
	sandboxPrefix = "sandbox/"
	podPrefix     = "pod/"
	sessionPrefix = "session/"
)

const (
	// longerFormat is the format of batches with facts that are Longer.
	longerFormat = 2
	// unknownMaxStale is the max-stale of a router whose session an earlier version has journaled: the
	// default. The router says its own when it joins again.
	unknownMaxStale = 15 * time.Minute
)

// toRecord encodes a fact for the journal. The record has no namespace: it is that of the journal.
func toRecord(f core.Fact) (journal.Record, error) {
	r := &journalv1.Record{Key: keyOf(f.Thing()), Term: f.Revision.Term, Counter: f.Revision.Counter}
	switch s := f.Subject.(type) {
	case *core.SandboxFact:
		r.State = &journalv1.Record_Sandbox{Sandbox: &journalv1.Sandbox{
			Pool: s.Pool.Name, PodName: s.Pod.Name, PodUid: s.Pod.ID(), PodIp: s.IP.AsSlice(),
			ClaimedAt: micros(s.ClaimedAt), EndAt: micros(s.EndAt), ReleasedAt: micros(s.ReleasedAt),
			Metadata: s.Metadata, Team: s.Team, User: s.User, IdempotencyKey: s.IdempotencyKey, RequestHash: hashOf(s.Binding), Batch: s.Batch,
			Phase: phases[s.Phase], Reason: s.Reason, DefaultPort: uint32(s.DefaultPort), Ports: ports(s.Ports), Restarts: uint32(s.Restarts),
			IdleTimeout: s.IdleTimeout.Microseconds(), MinBytesPerMinute: s.MinBytes, LifetimeEnd: micros(s.LifetimeEnd), StartBy: micros(s.StartBy),
			Access: journalv1.Access(s.Access), MaskHost: s.MaskHost, HttpsPorts: ports(s.HTTPSPorts),
			AgentPort: uint32(s.Agent.Port), AgentPublic: s.Agent.Public, AgentEgress: s.Agent.Egress, Ungranted: uint32(s.Ungranted),
			StartedAt: micros(s.StartedAt), Message: s.Message, ExitCode: s.ExitCode,
			Lifetime: s.Lifetime.Microseconds(), SleepWhenIdle: s.Sleep.WhenIdle, SleepAtEnd: s.Sleep.AtEnd, WakeOnTraffic: s.Sleep.WakeOnTraffic,
			AsleepAt: micros(s.AsleepAt), Wakeable: s.Wakeable,
			StopAfter: s.Sleep.StopAfter.Microseconds(), Incarnation: uint32(s.Incarnation), Archive: s.Archive,
			NetworkAllow: s.Network.Allow, NetworkDeny: s.Network.Deny, NetworkHeaders: s.Network.Headers,
		}}
	case *core.SessionFact:
		session := &journalv1.Session{Left: s.Left, From: s.From, Earlier: s.Earlier, Egress: s.Egress}
		if !s.Assumed {
			session.MaxStaleNanos = uint64(s.MaxStale)
		}
		if s.Gateway != (core.Gateway{}) {
			session.GatewayHash = s.Gateway[:]
		}
		if s.Longer {
			r.Format = longerFormat
		}
		if d := s.Declared; d != nil {
			session.Declared = &journalv1.Declaration{By: d.By, Reason: d.Reason, At: micros(d.At)}
		}
		r.State = &journalv1.Record_Session{Session: session}
	case *core.RetirementFact:
		r.State = &journalv1.Record_Retirement{Retirement: &journalv1.Retirement{PodName: s.Pod.Name, After: s.After, PodIps: addresses(s.At)}}
	}
	raw, err := proto.Marshal(r)
	if err != nil {
		return journal.Record{}, fmt.Errorf("encode %s: %w", r.GetKey(), err) // a string that is not UTF-8
	}
	return journal.Record{Key: r.GetKey(), Term: r.GetTerm(), Counter: r.GetCounter(), Format: int(r.GetFormat()), Raw: raw, Joined: f.Joined}, nil
}

// fromRecord is the inverse of toRecord. It returns false for a record of a kind that this version
// does not know; such records are carried unchanged.
func fromRecord(r journal.Record, namespace string) (core.Fact, bool, error) {
	var m journalv1.Record
	if err := proto.Unmarshal(r.Raw, &m); err != nil {
		return core.Fact{}, false, fmt.Errorf("journal record %s: %w", r.Key, err)
	}
	f := core.Fact{Revision: core.Revision{Term: r.Term, Counter: r.Counter}}
	var err error
	switch state := m.GetState().(type) {
	case *journalv1.Record_Sandbox:
		f.Subject, err = sandboxOf(r.Key, namespace, state.Sandbox, f.Revision)
	case *journalv1.Record_Retirement:
		f.Subject, err = retirementOf(r.Key, namespace, state.Retirement)
	case *journalv1.Record_Session:
		f.Subject = sessionOf(r.Key, state.Session, m.GetFormat())
	default:
		return core.Fact{}, false, nil
	}
	if err != nil {
		return core.Fact{}, false, fmt.Errorf("journal record %s: %w", r.Key, err)
	}
	return f, true, nil
}

func sandboxOf(key, namespace string, s *journalv1.Sandbox, revision core.Revision) (*core.SandboxFact, error) {
	sandbox := &core.SandboxFact{Ungranted: int(s.GetUngranted()), Sandbox: core.Sandbox{
		Binding: core.Binding{
			ID:        strings.TrimPrefix(key, sandboxPrefix),
			ClaimedAt: moment(s.GetClaimedAt()), EndAt: moment(s.GetEndAt()), Metadata: s.GetMetadata(),
			LifetimeEnd: moment(s.GetLifetimeEnd()), StartBy: moment(s.GetStartBy()),
			IdleTimeout: time.Duration(s.GetIdleTimeout()) * time.Microsecond, MinBytes: s.GetMinBytesPerMinute(),
			Team: s.GetTeam(), User: s.GetUser(), IdempotencyKey: s.GetIdempotencyKey(), Batch: s.GetBatch(),
			MaskHost: s.GetMaskHost(), Agent: core.Agent{Port: uint16(s.GetAgentPort()), Public: s.GetAgentPublic(), Egress: s.GetAgentEgress()},
			Lifetime: time.Duration(s.GetLifetime()) * time.Microsecond,
			Sleep: core.SleepPolicy{
				WhenIdle: s.GetSleepWhenIdle(), AtEnd: s.GetSleepAtEnd(), WakeOnTraffic: s.GetWakeOnTraffic(),
				StopAfter: time.Duration(s.GetStopAfter()) * time.Microsecond,
			},
			Network: core.EgressRules{Allow: s.GetNetworkAllow(), Deny: s.GetNetworkDeny(), Headers: s.GetNetworkHeaders()},
		},
		Pool:        core.PoolKey{Namespace: namespace, Name: s.GetPool()},
		Pod:         fact.PodKeyOf(namespace, s.GetPodName(), s.GetPodUid()),
		DefaultPort: uint16(s.GetDefaultPort()), Restarts: int(s.GetRestarts()), Revision: revision,
		StartedAt: moment(s.GetStartedAt()), ReleasedAt: moment(s.GetReleasedAt()),
		AsleepAt: moment(s.GetAsleepAt()), Wakeable: s.GetWakeable(),
		Incarnation: int(s.GetIncarnation()), Archive: s.GetArchive(),
		Cause: core.Cause{Reason: s.GetReason(), Message: s.GetMessage(), ExitCode: s.ExitCode},
	}}
	copy(sandbox.RequestHash[:], s.GetRequestHash())
	for _, p := range s.GetPorts() {
		sandbox.Ports = append(sandbox.Ports, uint16(p))
	}
	for _, p := range s.GetHttpsPorts() {
		sandbox.HTTPSPorts = append(sandbox.HTTPSPorts, uint16(p))
	}
	if sandbox.Access = core.Access(s.GetAccess()); !sandbox.Access.Known() { // public would open the sandbox
		return nil, fmt.Errorf("unknown access %v", s.GetAccess())
	}
	var err error
	if sandbox.IP, err = addressOf(s.GetPodIp()); err != nil {
		return nil, err
	}
	for phase, encoded := range phases {
		if encoded == s.GetPhase() {
			sandbox.Phase = phase
		}
	}
	if sandbox.Phase == 0 {
		return nil, fmt.Errorf("unknown phase %v", s.GetPhase())
	}
	return sandbox, nil
}

func retirementOf(key, namespace string, s *journalv1.Retirement) (*core.RetirementFact, error) {
	retired := &core.RetirementFact{
		Pod: fact.PodKeyOf(namespace, s.GetPodName(), strings.TrimPrefix(key, podPrefix)), After: s.GetAfter(),
	}
	for _, raw := range s.GetPodIps() {
		ip, err := addressOf(raw)
		if err != nil {
			return nil, err
		}
		retired.At = append(retired.At, ip)
	}
	return retired, nil
}

func sessionOf(key string, s *journalv1.Session, format uint32) *core.SessionFact {
	session := &core.SessionFact{
		ID: strings.TrimPrefix(key, sessionPrefix), From: s.GetFrom(), Left: s.GetLeft(), Earlier: s.GetEarlier(),
		MaxStale: time.Duration(s.GetMaxStaleNanos()), Longer: format >= longerFormat, Egress: s.GetEgress(),
	}
	copy(session.Gateway[:], s.GetGatewayHash())
	if session.MaxStale == 0 && !session.Earlier { // every leader adds its own value to those of an earlier journal
		session.MaxStale, session.Assumed = unknownMaxStale, true
	}
	if d := s.GetDeclared(); d != nil {
		session.Declared = &core.Declaration{By: d.GetBy(), Reason: d.GetReason(), At: moment(d.GetAt())}
	}
	return session
}

// keyOf returns the key of the records about a thing.
func keyOf(t fact.Thing) string {
	switch t := t.(type) {
	case core.SandboxID:
		return sandboxPrefix + string(t)
	case core.SessionID:
		return sessionPrefix + string(t)
	}
	return podPrefix + t.(core.PodKey).ID()
}

var phases = map[core.Phase]journalv1.Phase{
	core.Starting:      journalv1.Phase_PHASE_STARTING,
	core.Running:       journalv1.Phase_PHASE_RUNNING,
	core.Released:      journalv1.Phase_PHASE_RELEASED,
	core.FallingAsleep: journalv1.Phase_PHASE_FALLING_ASLEEP, core.Asleep: journalv1.Phase_PHASE_ASLEEP, core.Waking: journalv1.Phase_PHASE_WAKING,
	core.Stopped: journalv1.Phase_PHASE_STOPPED,
}

func hashOf(b core.Binding) []byte {
	if b.IdempotencyKey == "" {
		return nil
	}
	return b.RequestHash[:]
}

func ports(all []uint16) []uint32 {
	var encoded []uint32
	for _, p := range all {
		encoded = append(encoded, uint32(p))
	}
	return encoded
}

func addresses(all []netip.Addr) [][]byte {
	var encoded [][]byte
	for _, a := range all {
		encoded = append(encoded, a.AsSlice())
	}
	return encoded
}

func addressOf(raw []byte) (netip.Addr, error) {
	ip, ok := netip.AddrFromSlice(raw)
	if !ok {
		return netip.Addr{}, fmt.Errorf("%d bytes are not an IP address", len(raw))
	}
	return ip, nil
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

func moment(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros).UTC()
}
