package egress

import (
	"net/netip"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/egress/policy"
)

const (
	// maxAudited bounds the destinations of one sandbox that are logged, those that were admitted and those that were
	// refused each by itself, so that refusals hide nothing that leaves.
	maxAudited = 256
	// maxLogged bounds the lines per second of each kind.
	maxLogged = 100
)

// audited is a destination of a sandbox, and what became of it. reason is empty for one that was admitted.
type audited struct {
	dest   policy.Dest
	reason apierror.Reason
}

// audit returns what writes a line for a new destination of a sandbox, and nil for one that is not new. The caller has
// the lock of the table, and a log may block: it writes the line when it has given the lock back.
func (s *Server) audit(e *entry, dest policy.Dest, reason apierror.Reason, why string, addr netip.Addr) func() {
	key, seen := audited{dest, reason}, e.admittedTo
	if reason != "" {
		seen = e.refusedTo
	}
	if _, old := seen[key]; old || len(seen) > maxAudited {
		return nil
	}
	seen[key] = struct{}{}
	fields := []zap.Field{zap.String("sandboxID", sandboxid.Short(e.ID)), zap.String("pool", e.Pool)}
	if len(seen) > maxAudited {
		return func() {
			s.log.Info("egress: further destinations of the sandbox are not logged",
				append(fields, zap.Bool("refused", reason != ""))...)
		}
	}
	fields = append(fields, zap.String("destination", dest.String()))
	if reason == "" {
		fields = append(fields, zap.Stringer("address", addr))
		return func() { s.log.Info("egress: admitted", fields...) }
	}
	fields = append(fields, zap.String("reason", string(reason)), zap.String("why", why))
	return func() { s.log.Info("egress: refused", fields...) }
}

// sampled returns log with at most maxLogged lines per second and message.
func sampled(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, maxLogged, 0)
	}))
}
