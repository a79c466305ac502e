package egress

import (
	"bytes"
	"context"
	"encoding/base64"
	"hash/maphash"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/extproc/wire"
	"github.com/berth-sandbox/berth/internal/rate"
)

// question is the part of a request that the router reads. Nothing in it is a view into the message.
type question struct {
	authority, method, scheme string
	peer                      netip.Addr
	// id and token are the credential. Without one id is empty.
	id    string
	token []byte
	// counted: it has taken a token of the rate of its sandbox.
	counted bool
}

// read reads the headers of a request. Envoy sends each of them once, but for the credential.
func read(headers []wire.Header) (q question) {
	credentials := 0
	for _, h := range headers {
		switch string(h.Key) {
		case ":authority":
			q.authority = string(h.Value)
		case ":method":
			q.method = string(h.Value)
		case envoy.SchemeHeader:
			q.scheme = string(h.Value)
		case envoy.PeerHeader:
			q.peer, _ = netip.ParseAddr(string(h.Value))
			q.peer = q.peer.Unmap()
		case "proxy-authorization":
			credentials++
			q.id, q.token = credential(h.Value)
		}
	}
	if credentials != 1 {
		q.id = ""
	}
	return q
}

// maxCredential bounds a credential: a sandbox ID, a colon and a token, in base64.
const maxCredential = 512

// credential reads a value of Proxy-Authorization (RFC 7617). The ID is empty if it is not one.
func credential(value []byte) (id string, token []byte) {
	scheme, encoded, _ := bytes.Cut(value, []byte(" "))
	encoded = bytes.TrimLeft(encoded, " ")
	if !strings.EqualFold(string(scheme), "basic") || len(encoded) > maxCredential {
		return "", nil
	}
	var buffer [maxCredential]byte
	n, err := base64.StdEncoding.Decode(buffer[:], encoded)
	if err != nil {
		return "", nil
	}
	user, password, found := bytes.Cut(buffer[:n], []byte(":"))
	if !found || len(password) == 0 {
		return "", nil
	}
	return string(user), bytes.Clone(password)
}

func tooFast(pause time.Duration) *apierror.Error {
	return limited(pause,
		"the sandbox sends more requests per second than this gateway lets pass for one sandbox; try again")
}

func tooOften(dest policy.Dest, pause time.Duration) *apierror.Error {
	return limited(pause, "the sandbox sends more requests per second to %s than this gateway lets pass to one address; "+
		"use one connection for several, or try again", dest)
}

func limited(pause time.Duration, format string, args ...any) *apierror.Error {
	refusal := apierror.New(apierror.RateLimited, format, args...)
	refusal.RetryAfter = int((pause + time.Second - 1) / time.Second)
	return refusal
}

func refuse(format string, args ...any) *apierror.Error {
	return apierror.New(apierror.EgressRefused, format, args...)
}

// decision is what the router has decided about a request: it is admitted, or refused.
type decision struct {
	admitted *request
	refusal  *apierror.Error
	// log, if set, writes the line that the decision deserves.
	log func()
}

// decide decides about a request. wait is false in the goroutine that serves a connection: then it returns false if the
// name has to be looked up.
func (s *Server) decide(ctx context.Context, q *question, wait bool) (d decision, ok bool) {
	t := &s.table
	t.mu.Lock()
	defer t.mu.Unlock()
	e, refusal := s.find(q)
	unknown := refusal != nil && refusal.Reason == apierror.EgressRefused && len(t.at[q.peer]) == 0
	if unknown && s.asks.ask != nil && sandboxid.Valid(q.id) { // it may be new
		if !wait {
			return decision{}, false
		}
		t.mu.Unlock()
		s.asks.wait(ctx, q.id, q.peer)
		t.mu.Lock()
		e, refusal = s.find(q)
	}
	if refusal != nil {
		return decision{refusal: refusal}, true
	}
	if !q.counted {
		after, pause := s.rate.Take(e.full, time.Since(s.began))
		if pause > 0 {
			return s.refused(e, policy.Dest{}, tooFast(pause)), true
		}
		e.full, q.counted = after, true
	}
	dest, refusal := s.destination(q)
	if refusal == nil {
		dest, _ = e.withHeaders(q, dest)
		refusal = permit(e, dest)
	}
	if refusal == nil && e.open >= s.maxOpen {
		refusal = apierror.New(apierror.TooManyOpen,
			"the sandbox has %d requests open at the egress gateway; end some, or try again", e.open)
	}
	if refusal != nil {
		return s.refused(e, dest, refusal), true
	}
	addrs := []netip.Addr{dest.Addr}
	if !dest.Addr.IsValid() {
		var known bool
		if addrs, known = s.names.known(dest.Host); !known {
			if !wait {
				return decision{}, false
			}
			e.open++
			pool := e.Pool
			t.mu.Unlock()
			addrs, refusal = s.names.lookup(ctx, dest.Host, pool, e.lookups)
			t.mu.Lock()
			e.open--
			if refusal == nil {
				dest, refusal = s.again(e, q)
			}
		}
	}
	if refusal != nil {
		return s.refused(e, dest, refusal), true
	}
	addr := s.choose(e, dest, addrs)
	if !addr.IsValid() {
		refusal = refuse("the rules of the sandbox allow no address of %s", dest.Host)
		if !slices.ContainsFunc(addrs, e.Policy.Reach.Permits) {
			// The answer is the same for a name without an address, or it would tell which names there are inside.
			refusal = apierror.New(apierror.EgressUnreachable, "%s has no address outside the cluster", dest.Host)
		}
		return s.refused(e, dest, refusal), true
	}
	r := &request{table: t, of: e, id: e.ID, incarnation: e.Incarnation, dest: dest, addr: addr}
	if _, needs := e.withHeaders(q, dest); needs {
		if r.headers, refusal = s.headersFor(e, dest); refusal != nil {
			return s.refused(e, dest, refusal), true
		}
	}
	if pause := s.connects(e, netip.AddrPortFrom(addr, dest.Port)); pause > 0 {
		return s.refused(e, dest, tooOften(dest, pause)), true
	}
	e.admits[r] = struct{}{}
	e.open++
	t.unended++
	e.counts.Admitted++
	e.recent.note(dest, "")
	return decision{admitted: r, log: s.audit(e, dest, "", "", addr)}, true
}

// find returns the sandbox that a request is of.
func (s *Server) find(q *question) (*entry, *apierror.Error) {
	t := &s.table
	if !t.ready || t.shut || !s.o.Fresh() {
		return nil, apierror.New(apierror.RouterNotReady,
			"the egress gateway does not know the rules of the sandboxes at the moment; try again")
	}
	at := t.at[q.peer]
	if len(at) == 0 {
		return nil, refuse("the address %s is not that of a sandbox which uses this gateway", q.peer)
	}
	if q.id == "" {
		return nil, apierror.New(apierror.EgressCredential,
			"the proxy needs the ID of the sandbox as the user, and its token as the password")
	}
	if len(at) != 1 || at[0].ID != q.id || !at[0].hasToken(q.token) {
		return nil, refuse("the credential is not that of the one sandbox at the address %s", q.peer)
	}
	return at[0], nil
}

// destination reads where a request goes.
func (s *Server) destination(q *question) (policy.Dest, *apierror.Error) {
	port := uint16(0) // CONNECT names one
	switch {
	case q.method == http.MethodTrace:
		return policy.Dest{}, refuse("TRACE is not passed on, because the answer would have the headers of the request")
	case q.method == http.MethodConnect:
	case q.scheme != "http":
		return policy.Dest{}, refuse(
			"this is a proxy: send CONNECT, or a request in absolute form, such as GET http://example.com/")
	default:
		port = 80
	}
	dest, err := policy.Destination(q.authority, port)
	if err != nil {
		return policy.Dest{}, refuse("%v", err)
	}
	if d := s.o.ClusterDomain; d != "" && strings.HasSuffix("."+dest.Host, "."+d) {
		return policy.Dest{}, refuse("authority %s: names of the cluster are not outside it", dest.Host)
	}
	return dest, nil
}

// permit asks the rules that a sandbox has now, without an address.
func permit(e *entry, dest policy.Dest) *apierror.Error {
	if verdict, reason := e.Policy.Decide(dest); verdict == policy.Refused {
		return refuse("the sandbox may not reach %s: %s", dest, says[reason])
	}
	return nil
}

// says has the words for what policy refuses.
var says = map[policy.Reason]string{
	policy.ClosedPort: "the pool does not open this port",
	policy.NotOutside: "the address is not a public one",
	policy.PoolRules:  "the rules of the pool do not allow it",
	policy.ClaimRules: "the rules of the sandbox do not allow it",
}

// again checks, after a wait, what may have changed. The name is the same.
func (s *Server) again(e *entry, q *question) (policy.Dest, *apierror.Error) {
	dest, refusal := s.destination(q)
	if refusal != nil {
		return dest, refusal
	}
	now, refusal := s.find(q)
	switch {
	case refusal != nil:
		return dest, refusal
	case now != e:
		return dest, refuse("the sandbox has ended")
	}
	dest, _ = e.withHeaders(q, dest)
	return dest, permit(e, dest)
}

// choose returns one of the addresses that the rules permit: one of IPv4 if there is any, and not always the same.
func (s *Server) choose(e *entry, dest policy.Dest, addrs []netip.Addr) (chosen netip.Addr) {
	s.turn++
	for i := range addrs {
		addr := addrs[(uint(i)+s.turn)%uint(len(addrs))]
		if (!chosen.IsValid() || addr.Is4() && !chosen.Is4()) && e.Policy.Permits(dest, addr) {
			chosen = addr
		}
	}
	return chosen
}

const (
	// originRate and originBurst bound the requests of one sandbox to one address and port, each of which may take a port
	// of the gateway towards it, for a minute after its connection.
	originRate, originBurst = 30, 1000
	// origins is how many buckets the addresses share that one sandbox sends requests to.
	origins = 64
)

var toOrigin = rate.New(originRate, originBurst)

// connects takes a token for a request to an address. If there is none, pause is the time until there is one.
func (s *Server) connects(e *entry, to netip.AddrPort) (pause time.Duration) {
	if e.origins == nil {
		e.origins = &[origins]time.Duration{}
	}
	full := &e.origins[maphash.Comparable(s.seed, to)%origins]
	*full, pause = toOrigin.Take(*full, time.Since(s.began))
	return pause
}

// refused counts and logs a refusal.
func (s *Server) refused(e *entry, dest policy.Dest, refusal *apierror.Error) decision {
	e.counts.Refused++
	own := *refusal // one of a look-up is shared
	own.SandboxID = e.ID
	d := decision{refusal: &own}
	if dest.Port != 0 { // what cannot be read is not logged
		e.recent.note(dest, refusal.Reason)
		d.log = s.audit(e, dest, refusal.Reason, refusal.Message, netip.Addr{})
	}
	return d
}
