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
	// maxAudited bounds the destinations of one sandbox that are logged.
	maxAudited = 256
	// maxLogged bounds the lines per second of each kind.
	maxLogged = 100
)

// audited is a destination of a sandbox, and what became of it. reason is empty for one that was admitted.
type audited struct {
	dest   policy.Dest
	reason apierror.Reason
}

// audit writes a line for each new destination of a sandbox. The caller has the lock of the table.
func (s *Server) audit(e *entry, dest policy.Dest, reason apierror.Reason, why string, addr netip.Addr) {
	key := audited{dest, reason}
	if _, old := e.seen[key]; old || len(e.seen) > maxAudited {
		return
	}
	of := []zap.Field{zap.String("sandboxID", sandboxid.Short(e.ID)), zap.String("pool", e.Pool)}
	e.seen[key] = struct{}{}
	if len(e.seen) > maxAudited {
		s.log.Info("egress: further destinations of the sandbox are not logged", of...)
		return
	}
	fields := append(of, zap.String("destination", dest.String()))
	if reason != "" {
		s.log.Info("egress: refused", append(fields, zap.String("reason", string(reason)), zap.String("why", why))...)
		return
	}
	s.log.Info("egress: admitted", append(fields, zap.Stringer("address", addr))...)
}

// sampled returns log with at most maxLogged lines per second and message.
func sampled(log *zap.Logger) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, time.Second, maxLogged, 0)
	}))
}
