package allocator

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// timedLock is a Lease that remembers when the last renewal that succeeded was
// sent, on the clock that counts suspended time. The election library measures
// from the answer and on a clock that stands still in a suspended machine.
type timedLock struct {
	*resourcelock.LeaseLock
	duration time.Duration
	renewed  atomic.Int64 // bootclock; 0: never

	// clocksApart, if set, is called once for each holder whose wall clock and that of this
	// replica are apart by at least ahead. It is positive if this replica's clock is ahead.
	clocksApart func(holder string, ahead time.Duration)
	// Of the last Get, which the election calls one after the other.
	last   resourcelock.LeaderElectionRecord
	lastAt time.Time // zero: there was none
	told   string    // the holder for which clocksApart was called last
}

// clocksMost is how far clocks may be apart before it is worth a word.
const clocksMost = 2 * time.Second

// Get implements resourcelock.Interface. A replica that stands for election reads each
// renewal soon after the holder has written it, which tells how far their clocks are
// apart: the renewal was written between this Get and the last one.
func (l *timedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	asked := time.Now()
	r, raw, err := l.LeaseLock.Get(ctx)
	if err != nil {
		return r, raw, err
	}
	l.compare(*r, asked, time.Now())
	return r, raw, nil
}

// compare judges a record that was asked for and read at these times of this clock.
func (l *timedLock) compare(r resourcelock.LeaderElectionRecord, asked, read time.Time) {
	renewed := r.RenewTime.Time
	if !l.lastAt.IsZero() && r.HolderIdentity == l.last.HolderIdentity && !renewed.Equal(l.last.RenewTime.Time) &&
		r.HolderIdentity != l.Identity() && r.HolderIdentity != l.told && l.clocksApart != nil {
		least, most := l.lastAt.Sub(renewed), read.Sub(renewed)
		switch {
		case least > clocksMost:
			l.told = r.HolderIdentity
			l.clocksApart(r.HolderIdentity, least)
		case most < -clocksMost:
			l.told = r.HolderIdentity
			l.clocksApart(r.HolderIdentity, most)
		}
	}
	l.last, l.lastAt = r, asked
}

// leaseName is the Lease for which replicas stand.
const leaseName = "berth-allocator"

func newTimedLock(client coordinationv1.LeasesGetter, namespace, identity string, duration time.Duration) *timedLock {
	return &timedLock{
		LeaseLock: &resourcelock.LeaseLock{
			LeaseMeta:  metav1.ObjectMeta{Namespace: namespace, Name: leaseName},
			Client:     client,
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity},
		},
		duration: duration,
	}
}

// Create implements resourcelock.Interface.
func (l *timedLock) Create(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.timed(r, func() error { return l.LeaseLock.Create(ctx, r) })
}

// Update implements resourcelock.Interface.
func (l *timedLock) Update(ctx context.Context, r resourcelock.LeaderElectionRecord) error {
	return l.timed(r, func() error { return l.LeaseLock.Update(ctx, r) })
}

func (l *timedLock) timed(r resourcelock.LeaderElectionRecord, write func() error) error {
	sent := bootclock.Now()
	if err := write(); err != nil {
		return err
	}
	if r.HolderIdentity != l.Identity() {
		l.renewed.Store(0) // given up
		return nil
	}
	l.renewed.Store(int64(sent))
	return nil
}

// valid reports whether this replica holds the lease: the lease has not run out since its
// last renewal was sent, so no other replica can have taken it.
func (l *timedLock) valid() bool {
	renewed := l.renewed.Load()
	return renewed != 0 && bootclock.Now()-time.Duration(renewed) < l.duration
}

// renewedSince reports whether a renewal that was sent after a moment has succeeded: then
// no other replica can have held the lease before it.
func (l *timedLock) renewedSince(at time.Duration) bool { return l.renewed.Load() > int64(at) }

// Bounds of a lease. Leases are written in whole seconds. Pods that somebody deletes
// serve for longer than a lease (serveOn), and drains wait for them.
const (
	leaseLeast = time.Second
	leaseMost  = time.Minute
)

// CheckElection returns what is wrong with timings of an election, or nil.
func CheckElection(lease, renew, retry time.Duration) error {
	switch {
	case retry <= 0 || renew <= 2*retry || lease <= renew:
		return errors.New("each must be larger than the next, and the time to renew more than twice the retry period")
	case lease%time.Second != 0 || lease < leaseLeast || lease > leaseMost:
		return fmt.Errorf("the lease must last for whole seconds, %v to %v: a Lease has seconds, and a pod that is deleted goes on serving for longer than a lease", leaseLeast, leaseMost)
	}
	return nil
}

// takeOver is what a new leader may need until it acts on what it finds and the routers
// have joined it: two reads of the journal, and lists of pods and Sandbox objects.
const takeOver = 3 * time.Second

// failover bounds the time from the moment in which a leader is killed until the next one
// acts. Another replica sees the last renewal one period of its own late at most, waits for
// the lease to run out, and tries again within another period. The election library makes
// a period up to JitterFactor longer.
func failover(lease, retry time.Duration) time.Duration {
	period := retry + time.Duration(leaderelection.JitterFactor*float64(retry))
	return lease + 2*period + takeOver
}

// serveOn is for how long pods go on serving that somebody else deletes.
func (o *Options) serveOn() time.Duration {
	return pods.ServeOn(failover(o.LeaseDuration, o.RetryPeriod), o.Window)
}

// replica is where one replica can be reached, host:port each.
type replica struct{ control, api string }

// identity names a holder of the lease: its addresses and something random, so
// that whoever reads the lease can find the leader.
func (r replica) identity(random string) string { return r.control + "_" + r.api + "_" + random }

// replicaOf reads an identity. What it does not say is empty.
func replicaOf(identity string) replica {
	parts := strings.Split(identity, "_")
	if len(parts) != 3 {
		return replica{}
	}
	return replica{control: parts[0], api: parts[1]}
}
