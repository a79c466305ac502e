package rest

import (
	"maps"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/loglimit"
	"github.com/berth-sandbox/berth/internal/rate"
)

// keyRates bounds the calls of each API key at this replica, those that other replicas forward to it included. It may be
// used concurrently.
type keyRates struct {
	limit   rate.Limit
	started time.Time
	log     *zap.Logger

	mu   sync.Mutex
	full map[string]time.Duration // when the bucket of a key is full, since started; by the key's name
}

func newKeyRates(limit rate.Limit, log *zap.Logger) *keyRates {
	log = loglimit.PerMessage(log, 1, time.Minute) // a message has the name of the key
	return &keyRates{limit: limit, started: time.Now(), log: log, full: map[string]time.Duration{}}
}

// take takes what one call costs, and returns why the call is refused.
func (k *keyRates) take(key string) *apierror.Error {
	if k.limit.Every() == 0 {
		return nil
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	now := time.Since(k.started)
	if _, known := k.full[key]; !known {
		maps.DeleteFunc(k.full, func(_ string, full time.Duration) bool { return full <= now })
	}
	after, wait := k.limit.Take(k.full[key], now)
	if wait > 0 {
		e := apierror.New(apierror.RateLimited, "the key %s makes more calls per second than this replica allows for one key; try again", key)
		k.log.Info("calls are refused: " + e.Message)
		e.RetryAfter = int((wait + time.Second - 1) / time.Second)
		return e
	}
	k.full[key] = after
	return nil
}
