// Package rate bounds how often something may happen.
package rate

import (
	"errors"
	"time"
)

// atOnce is how many may happen at once under every Limit: twice what a large web page loads, and more than a batch of
// claims.
const atOnce = 2000

// Limit is a token bucket, as the generic cell rate algorithm: all that is kept of a bucket is the moment at which it is
// full. A bucket that was never used has the moment 0. The zero Limit is no limit.
type Limit struct{ every, burst time.Duration }

// Check returns an error for a rate that PerSecond does not take.
func Check(n float64) error {
	if n == 0 || n >= 0.001 && n <= 1_000_000 {
		return nil
	}
	return errors.New("must be 0, for no limit, or 0.001 to 1000000")
}

// PerSecond returns the limit of n per second on average. At once may happen 2,000, or those of two seconds if that is
// more. 0: no limit.
func PerSecond(n float64) Limit {
	if n == 0 {
		return Limit{}
	}
	return New(n, int(max(atOnce, 2*n)))
}

// New returns the limit of n per second on average, above 0, of which burst may happen at once.
func New(n float64, burst int) Limit {
	every := time.Duration(float64(time.Second) / n)
	return Limit{every, every * time.Duration(burst)}
}

// Every is the time after which a bucket has one token more. 0: no limit.
func (l Limit) Every() time.Duration { return l.every }

// Take takes a token from a bucket that is full at the moment full, and returns when it is full then. If the bucket has
// none it takes nothing, and wait is the time until it has one. All moments are on one clock, from 0.
func (l Limit) Take(full, now time.Duration) (after, wait time.Duration) {
	after = max(full, now) + l.every
	if wait = after - now - l.burst; wait > 0 {
		return full, wait
	}
	return after, 0
}
