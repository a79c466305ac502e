package controlserver

import (
	"context"
	"crypto/sha256"
	"net/netip"
	"regexp"
	"slices"
	"strings"
	"time"

	"go.uber.org/zap"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/berth-sandbox/berth/allocator/core"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/internal/controltls"
)

var routerID = regexp.MustCompile(`^[a-z0-9-]{16,64}$`)

// checkID checks the ID of a router. A router that joined or died as the session of an earlier journal
// would end the quarantine.
func checkID(field, id string) error {
	switch {
	case !routerID.MatchString(id):
		return status.Errorf(codes.InvalidArgument, "%s %.100q: must be 16 to 64 characters of a-z, 0-9 and -", field, id)
	case strings.HasPrefix(id, core.EarlierPrefix):
		return status.Errorf(codes.InvalidArgument, "%s %q: %s is reserved for routers of an earlier journal: begin the ID with something else",
			field, id, core.EarlierPrefix)
	}
	return nil
}

// MaxMaxStale bounds the --max-stale of routers and allocators: a fence waits for so long for a router
// that has vanished.
const MaxMaxStale = 24 * time.Hour

// check returns why a router must not join. A router of another journal counts in any case: the
// other routers of that journal may serve too.
func (s *Server) check(ctx context.Context, leader Leader, join *controlv1.Join) error {
	if err := checkID("join.router_id", join.GetRouterId()); err != nil {
		return err
	}
	if err := checkRole(ctx, join); err != nil {
		return err
	}
	if err := s.checkEgress(join); err != nil {
		return err
	}
	if theirs := join.GetMaxStaleNanos(); join.GetEgressMaxStaleNanos() == 0 && (theirs == 0 || theirs > uint64(MaxMaxStale)) {
		return status.Errorf(codes.InvalidArgument, "join.max_stale_nanos %d: must be 1 to %d (%v): lower --max-stale of the router", theirs, MaxMaxStale, MaxMaxStale)
	}
	if err := checkSecret("join.gateway_hash", join.GetGatewayHash()); err != nil {
		return err
	}
	if !leader.Valid() {
		// Its first pong would end the stream again: joins and leaves would follow each other, in
		// the log and in the core, while the lease is in doubt.
		return errUnsure
	}
	earlier, err := s.checkSeen(leader, join)
	if err != nil {
		return err
	}
	if earlier != "" {
		leader.Submit(core.EarlierSeen{Journal: earlier, MaxStale: maxStaleOf(join)})
	}
	return nil
}

// checkRole checks that the certificate of a router is for the kind of session that it asks for. Only the certificate
// of a router opens a session that gets what opens sandboxes, and only that of an egress router one that gets rules.
func checkRole(ctx context.Context, join *controlv1.Join) error {
	name, mode := controltls.RouterName, "Ingress"
	if join.GetEgressMaxStaleNanos() != 0 {
		name, mode = controltls.EgressName, "Egress"
	}
	if err := controltls.CheckRole(ctx, name); err != nil {
		return status.Errorf(codes.PermissionDenied, "join: a router with --mode=%s needs a certificate for the DNS name %s: "+
			"give its --control-tls-dir one: %v", mode, name, err)
	}
	return nil
}

// checkEgress checks what only egress routers say.
func (s *Server) checkEgress(join *controlv1.Join) error {
	theirs := join.GetEgressMaxStaleNanos()
	switch {
	case theirs == 0:
		return nil
	case join.GetMaxStaleNanos() != 0:
		return status.Errorf(codes.InvalidArgument, "join.max_stale_nanos %d: must be 0 for an egress router", join.GetMaxStaleNanos())
	case theirs < uint64(controlv1.MinEgressMaxStale) || theirs > uint64(s.o.MaxStale):
		return status.Errorf(codes.InvalidArgument, "join.egress_max_stale_nanos %d: must be %d (%v) to %d (the %v of the allocators): change --max-stale of the router",
			theirs, controlv1.MinEgressMaxStale, controlv1.MinEgressMaxStale, s.o.MaxStale, s.o.MaxStale)
	case len(join.GetGatewayHash()) == 0:
		return status.Error(codes.InvalidArgument, "join.gateway_hash: must be set for an egress router")
	case s.o.AccessKey == nil:
		return status.Error(codes.FailedPrecondition, "the allocators have no access key, which the credentials of sandboxes for the egress gateway are made of: set --access-key-file of the allocators")
	}
	return nil
}

// maxStaleOf is the max-stale of a router of either kind.
func maxStaleOf(join *controlv1.Join) time.Duration {
	return time.Duration(join.GetMaxStaleNanos() + join.GetEgressMaxStaleNanos())
}

// checkSecret checks a secret, or the hash of one. Routers of earlier versions have none.
func checkSecret(field string, secret []byte) error {
	if n := len(secret); n != 0 && n != sha256.Size {
		return status.Errorf(codes.InvalidArgument, "%s: %d bytes: must have %d, or none", field, n, sha256.Size)
	}
	return nil
}

// checkSeen compares what a router has seen of the journal with the journal. It returns the ID of
// another journal whose routes the router may still serve. It returns an error if the journal was
// restored from a backup, and then makes the leader begin it anew.
func (s *Server) checkSeen(leader Leader, join *controlv1.Join) (earlier string, err error) {
	journal, term, position := join.GetJournal(), join.GetHighestTerm(), join.GetPosition()
	if term > core.MaxTerm {
		return "", status.Errorf(codes.InvalidArgument, "join.highest_term %d: must be %d at most", term, uint64(core.MaxTerm))
	}
	left := slices.Contains(join.GetLeftJournals(), leader.Journal())
	if !left && journal != "" && journal != leader.Journal() {
		if join.GetServing() {
			return journal, nil
		}
		return "", nil
	}
	var ahead bool
	switch {
	case left, term > leader.Term(): // a router follows no leader of a journal that it has left
		ahead = true
	case term == leader.Term(): // of another leader, whose writes are no longer in the journal
		ahead = position > leader.Position()
	default:
		ahead = position >= leader.Began()
	}
	if !ahead {
		return "", nil
	}
	// This leader holds the lease. If it is deposed all the same, it cannot write to the journal
	// and only ends.
	s.o.Log.Error("a router has seen more than the journal holds: the journal was restored from a backup and is begun anew, see docs/backup.md",
		zap.String("router", join.GetRouterId()), zap.String("seenJournal", journal), zap.Uint64("seenTerm", term), zap.Uint64("seenPosition", position),
		zap.String("journal", leader.Journal()), zap.Uint64("term", leader.Term()), zap.Uint64("position", leader.Position()))
	leader.Restored(term)
	return "", status.Errorf(codes.FailedPrecondition, "the journal is begun anew: the router has seen journal %q up to term %d, position %d, and journal %q ends at term %d, position %d",
		journal, term, position, leader.Journal(), leader.Term(), leader.Position())
}

// addressOf returns the IP address of a router, "" if unknown.
func addressOf(ctx context.Context) string {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return ""
	}
	at, err := netip.ParseAddrPort(p.Addr.String())
	if err != nil {
		return ""
	}
	return at.Addr().Unmap().String()
}
