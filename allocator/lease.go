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

// timedLock is a Lease that stores when its last successful renewal was sent, on a clock that
// counts suspended time. The election library measures from the answer instead, and on a clock that
// stops while the machine is suspended.
type timedLock struct {
	*resourcelock.LeaseLock
	duration time.Duration
	renewed  atomic.Int64 // bootclock; 0: never

	// onClockSkew, if set, is called once for each holder whose wall clock differs from this
	// replica's by at least ahead. ahead is positive if this replica's clock is ahead.
	onClockSkew func(holder string, ahead time.Duration)
	// The result of the last Get, which the election calls sequentially.
	last   resourcelock.LeaderElectionRecord
	lastAt time.Time // zero before the first Get
	warned string    // the last holder that onClockSkew was called for
}

// maxClockSkew is the difference of two clocks above which a replica warns.
const maxClockSkew = 2 * time.Second

// Get implements resourcelock.Interface. A candidate reads each renewal soon after the holder wrote
// it, namely between this Get and the previous one. That bounds the difference of their clocks.
func (l *timedLock) Get(ctx context.Context) (*resourcelock.LeaderElectionRecord, []byte, error) {
	asked := time.Now()
	r, raw, err := l.LeaseLock.Get(ctx)
	if err != nil {
		return r, raw, err
	}
	l.compare(*r, asked, time.Now())
	return r, raw, nil
}

// compare checks the clock of the holder in a record that was requested and read at these times.
func (l *timedLock) compare(r resourcelock.LeaderElectionRecord, asked, read time.Time) {
	renewed := r.RenewTime.Time
	if !l.lastAt.IsZero() && r.HolderIdentity == l.last.HolderIdentity && !renewed.Equal(l.last.RenewTime.Time) &&
		r.HolderIdentity != l.Identity() && r.HolderIdentity != l.warned && l.onClockSkew != nil {
		least, most := l.lastAt.Sub(renewed), read.Sub(renewed)
		switch {
		case least > maxClockSkew:
			l.warned = r.HolderIdentity
			l.onClockSkew(r.HolderIdentity, least)
		case most < -maxClockSkew:
			l.warned = r.HolderIdentity
			l.onClockSkew(r.HolderIdentity, most)
		}
	}
	l.last, l.lastAt = r, asked
}

// leaseName is the name of the replicas' Lease.
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

// valid reports whether this replica certainly holds the lease: it has not expired since its last
// renewal was sent, so no other replica can have taken it.
func (l *timedLock) valid() bool {
	renewed := l.renewed.Load()
	return renewed != 0 && bootclock.Now()-time.Duration(renewed) < l.duration
}

// renewedSince reports whether a renewal sent after this time of the boot clock has succeeded. No
// other replica can then have held the lease before that time.
func (l *timedLock) renewedSince(at time.Duration) bool { return l.renewed.Load() > int64(at) }

// Bounds of a lease. A Lease object counts whole seconds. A pod deleted by another client serves on
// for longer than a lease (serveOn), and node drains wait for that.
const (
	minLease = time.Second
	maxLease = time.Minute
)

// CheckElection returns an error that says what is wrong with the timings of an election, or nil.
func CheckElection(lease, renew, retry time.Duration) error {
	switch {
	case retry <= 0 || renew <= 2*retry || lease <= renew:
		return errors.New("each must be larger than the next, and the renew deadline more than twice the retry period")
	case lease%time.Second != 0 || lease < minLease || lease > maxLease:
		return fmt.Errorf("the lease must be %v to %v in whole seconds: a Lease object counts seconds, and a deleted pod serves on for longer than a lease", minLease, maxLease)
	}
	return nil
}

// takeOver bounds the time from the election of a new leader until it acts and the routers have
// joined it: two reads of the journal and lists of pods and Sandbox objects.
const takeOver = 3 * time.Second

// failover bounds the time from the death of a leader until the next one acts. A candidate sees the
// last renewal up to one period of its own late, waits for the lease to expire, and tries again
// within another period. The election library extends a period by up to JitterFactor.
func failover(lease, retry time.Duration) time.Duration {
	period := retry + time.Duration(leaderelection.JitterFactor*float64(retry))
	return lease + 2*period + takeOver
}

// serveOn returns how long pods serve on that another client deletes.
func (o *Options) serveOn() time.Duration {
	return pods.ServeOn(failover(o.LeaseDuration, o.RetryPeriod), o.ConnectWindow)
}

// podSettings are those with which pods are made.
func (o *Options) podSettings() pods.Settings {
	return pods.Settings{
		ServeOn: o.serveOn(), AgentImage: o.AgentImage, AgentKey: o.agentKey, AsleepCPU: o.AsleepCPU,
		EgressUnchecked: o.EgressUnchecked, EgressPublic: strings.Join(o.EgressPublic, ","),
	}
}

// replica holds the addresses of one replica, host:port each.
type replica struct{ control, api string }

// identity returns a lease holder's name: its addresses, by which replicas find the leader, and a name, by which
// people do. The name must tell this process from every other.
func (r replica) identity(name string) string {
	return r.control + "_" + r.api + "_" + strings.ReplaceAll(name, "_", "-")
}

// replicaOf is the inverse of identity. It returns empty addresses for any other text.
func replicaOf(identity string) replica {
	parts := strings.Split(identity, "_")
	if len(parts) != 3 {
		return replica{}
	}
	return replica{control: parts[0], api: parts[1]}
}
