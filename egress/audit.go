package egress

import (
	"hash/maphash"
	"net/netip"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/internal/rate"
)

// The kinds of lines. Each has its own bounds, so that refusals hide nothing that leaves.
const (
	lineAdmitted = iota
	lineRefused
)

const (
	// maxAudited bounds the destinations of one sandbox that are remembered, of each kind. Then all are new again.
	maxAudited = 256
	// maxLogged bounds the lines per second of each kind that are no audit.
	maxLogged = 100
)

// sandboxLines and allLines bound the lines of each kind of one sandbox and of all.
var sandboxLines, allLines = rate.New(1, 64), rate.New(500, 1000)

// audited is a destination of a sandbox, and what became of it. reason is empty for one that was admitted.
type audited struct {
	dest   policy.Dest
	reason apierror.Reason
}

// audit is what the log has of one sandbox.
type audit struct {
	seen   map[uint64]struct{} // hashes of the destinations that it has
	full   time.Duration       // when the bucket of sandboxLines is full
	missed uint64              // requests since the newest line whose destination it does not have
}

// audit returns what writes a line for a new destination of a sandbox, and nil for one that is not new or for which the
// bounds leave no line. The caller has the lock of the table, and a log may block: it writes the line when it has given
// the lock back.
func (s *Server) audit(e *entry, dest policy.Dest, reason apierror.Reason, why string, addr netip.Addr) func() {
	kind := lineAdmitted
	if reason != "" {
		kind = lineRefused
	}
	a, key := &e.audits[kind], maphash.Comparable(s.seed, audited{dest, reason})
	if _, old := a.seen[key]; old {
		return nil
	}
	now := time.Since(s.began)
	own, pause := sandboxLines.Take(a.full, now)
	all, pauseOfAll := allLines.Take(s.lines[kind], now)
	if pause > 0 || pauseOfAll > 0 {
		a.missed++
		s.metrics.unlogged.Inc()
		return nil
	}
	a.full, s.lines[kind] = own, all
	if a.seen == nil || len(a.seen) >= maxAudited {
		a.seen = map[uint64]struct{}{}
	}
	a.seen[key] = struct{}{}
	fields := []zap.Field{
		zap.String("sandboxID", sandboxid.Short(e.ID)), zap.String("pool", e.Pool), zap.String("destination", dest.String()),
	}
	if a.missed > 0 {
		fields = append(fields, zap.Uint64("missed", a.missed))
		a.missed = 0
	}
	if reason == "" {
		fields = append(fields, zap.Stringer("address", addr))
		return func() { s.o.Log.Info("egress: admitted", fields...) }
	}
	fields = append(fields, zap.String("reason", string(reason)), zap.String("why", why))
	return func() { s.o.Log.Info("egress: refused", fields...) }
}
