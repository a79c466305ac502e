package control

import (
	"cmp"
	"crypto/sha256"
	"fmt"
	"math"
	"net/netip"
	"sync/atomic"
	"time"
	"unique"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/egress"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/internal/loglimit"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/routecache"
)

// Options configure Sandboxes. All are required unless they say otherwise.
type Options struct {
	Server *egress.Server
	// Reach is which addresses are outside. Optional, as in policy.Policy.
	Reach *policy.Reach
	// Now is the clock of SetFreshUntil.
	Now func() time.Duration
	Log *zap.Logger
}

// Sandboxes implements controlclient.Egress.
type Sandboxes struct {
	o          Options
	freshUntil atomic.Int64 // on the clock of Now
	// pools has what the newest route of each pool says of it. Pools have many sandboxes, and one copy of their rules.
	pools map[string]pool
}

type pool struct {
	said  *controlv1.EgressRules
	rules *policy.Rules
}

// nothing are rules that allow nothing.
var nothing = func() *policy.Rules {
	r, err := policy.Parse(policy.List{}, policy.List{Entries: []string{policy.All}})
	if err != nil {
		panic(err)
	}
	return r
}()

// New checks the options and returns Sandboxes that are not fresh.
func New(o Options) (*Sandboxes, error) {
	if err := options.Require(o, "Server", "Now", "Log"); err != nil {
		return nil, err
	}
	o.Log = loglimit.PerMessage(o.Log, 1, time.Minute) // of all sandboxes
	return &Sandboxes{o: o, pools: map[string]pool{}}, nil
}

// Set implements controlclient.Egress.
func (s *Sandboxes) Set(r *controlv1.Route) error {
	sandbox, err := s.sandbox(r)
	if err != nil {
		return err
	}
	return s.o.Server.Set(sandbox)
}

// Forget implements controlclient.Egress.
func (s *Sandboxes) Forget(id string) { s.o.Server.Forget(id) }

// Replace implements controlclient.Egress.
func (s *Sandboxes) Replace(all []*controlv1.Route) error {
	s.pools = map[string]pool{}
	sandboxes := make([]egress.Sandbox, 0, len(all))
	for _, r := range all {
		sandbox, err := s.sandbox(r)
		if err != nil {
			return err
		}
		sandboxes = append(sandboxes, sandbox)
	}
	return s.o.Server.Replace(sandboxes)
}

// sandbox reads a route.
func (s *Sandboxes) sandbox(r *controlv1.Route) (egress.Sandbox, error) {
	addr, err := netip.ParseAddr(r.GetPodIp())
	if err != nil {
		return egress.Sandbox{}, fmt.Errorf("route: pod_ip: %w", err)
	}
	said := r.GetEgress()
	if n := len(said.GetTokenHash()); n != sha256.Size {
		return egress.Sandbox{}, fmt.Errorf("route: egress.token_hash: %d bytes, not %d", n, sha256.Size)
	}
	sandbox := egress.Sandbox{
		ID: r.GetSandboxId(), Incarnation: said.GetIncarnation(), Addr: addr.Unmap(),
		TokenHash: [sha256.Size]byte(said.GetTokenHash()), Pool: unique.Make(r.GetPool()).Value(),
	}
	if sandbox.Policy, err = s.policy(sandbox.Pool, said); err != nil {
		s.o.Log.Error("the rules of a sandbox cannot be read, so it may reach nothing: is the router an earlier version?",
			zap.String("sandboxID", sandboxid.Short(sandbox.ID)), zap.Error(err))
		sandbox.Policy = policy.Policy{Pool: nothing}
	}
	sandbox.HeadersUnknown = said.GetHeadersUnknown()
	for _, h := range said.GetHeaders() {
		port := cmp.Or(h.GetPort(), policy.CredentialPort)
		if port > math.MaxUint16 {
			return egress.Sandbox{}, fmt.Errorf("route: egress.headers: port %d is not in 1 to 65535", port)
		}
		sandbox.Headers = append(sandbox.Headers, egress.Header{
			Host: unique.Make(h.GetHost()).Value(), Port: uint16(port), Name: unique.Make(h.GetName()).Value(),
			Value: h.GetValue(), Credential: unique.Make(h.GetCredential()).Value(),
		})
	}
	return sandbox, nil
}

// SetCredentials implements controlclient.Egress.
func (s *Sandboxes) SetCredentials(values map[string]string) { s.o.Server.SetCredentials(values) }

// policy reads what a sandbox may reach.
func (s *Sandboxes) policy(name string, said *controlv1.Egress) (p policy.Policy, err error) {
	p.Reach = s.o.Reach
	for _, port := range said.GetPorts() {
		if port == 0 || port > math.MaxUint16 {
			return p, fmt.Errorf("egress.ports: %d is not in 1 to 65535", port)
		}
		p.Ports = append(p.Ports, uint16(port))
	}
	if said.GetPool() == nil {
		p.Pool = nothing
		return p, nil
	}
	of := s.pools[name]
	if of.said == nil || !proto.Equal(of.said, said.GetPool()) {
		of.said = said.GetPool()
		if of.rules, err = parse("egress.pool", of.said); err != nil {
			return p, err
		}
		s.pools[name] = of
	}
	p.Pool = of.rules
	p.Claim, err = parse("egress.claim", said.GetClaim())
	return p, err
}

// parse reads rules. Without entries they allow everything.
func parse(field string, r *controlv1.EgressRules) (*policy.Rules, error) {
	if len(r.GetAllow()) == 0 && len(r.GetDeny()) == 0 {
		return nil, nil
	}
	return policy.Parse(
		policy.List{Field: field + ".allow", Entries: r.GetAllow()},
		policy.List{Field: field + ".deny", Entries: r.GetDeny()})
}

// Answered implements controlclient.Egress.
func (s *Sandboxes) Answered(id string) { s.o.Server.Answered(id) }

// Usage implements controlclient.Egress.
func (s *Sandboxes) Usage(id string) *controlv1.EgressUsage {
	counts, known := s.o.Server.Counts(id)
	usage := &controlv1.EgressUsage{
		Known: known, Admitted: counts.Admitted, Refused: counts.Refused, Open: uint32(counts.Open),
		SentBytes: counts.Sent, ReceivedBytes: counts.Received,
	}
	for _, d := range counts.Destinations {
		host := d.Host
		if d.Addr.IsValid() {
			host = d.Addr.String()
		}
		usage.Destinations = append(usage.Destinations, &controlv1.EgressDestination{
			Host: host, Port: uint32(d.Port), Reason: string(d.Reason), Count: d.Count, AgeMillis: uint64(d.Age.Milliseconds()),
		})
	}
	return usage
}

// never is a time of freshness that is over and stays so.
const never = -1

// SetFreshUntil implements controlclient.Gate.
func (s *Sandboxes) SetFreshUntil(at time.Duration) {
	if before := s.freshUntil.Load(); before != never {
		s.freshUntil.CompareAndSwap(before, int64(at))
	}
}

// Expire implements controlclient.Gate. It is final.
func (s *Sandboxes) Expire() { s.freshUntil.Store(never) }

// Fresh implements controlclient.Gate.
func (s *Sandboxes) Fresh() bool { return s.o.Now() < time.Duration(s.freshUntil.Load()) }

// Connected implements controlclient.Gate.
func (s *Sandboxes) Connected() {}

// Disconnected implements controlclient.Gate.
func (s *Sandboxes) Disconnected() {}

// Barrier implements controlclient.Gate.
func (s *Sandboxes) Barrier(drained func()) { s.o.Server.Barrier(drained) }

// Unread implements controlclient.Gate.
func (s *Sandboxes) Unread() int { return s.o.Server.Unended() }

// Dump implements admin.Cache.
func (s *Sandboxes) Dump() []routecache.Entry {
	sandboxes := s.o.Server.Sandboxes()
	all := make([]routecache.Entry, len(sandboxes))
	for i, sandbox := range sandboxes {
		route := routecache.Route{Addr: sandbox.Addr, Ports: routecache.NewPorts(sandbox.Policy.Open())}
		all[i] = routecache.Entry{ID: sandbox.ID, Route: route}
	}
	return all
}
