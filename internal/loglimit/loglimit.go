// Package loglimit bounds how many lines of a log say the same.
package loglimit

import (
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// PerMessage returns log with at most this many lines of each level and message in an interval. It drops the others.
func PerMessage(log *zap.Logger, lines int, interval time.Duration) *zap.Logger {
	return log.WithOptions(zap.WrapCore(func(core zapcore.Core) zapcore.Core {
		return zapcore.NewSamplerWithOptions(core, interval, lines, 0)
	}))
}
