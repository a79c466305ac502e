package allocator

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

func TestLeaseValidityStartsWhenARenewalIsSent(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	replica := func(name string, duration time.Duration) *timedLock {
		return newTimedLock(clients.Kubernetes.CoordinationV1(), "default", replica{control: name + ":9090", api: name + ":8081"}.identity(name), duration)
	}
	a, b := replica("a", time.Hour), replica("b", time.Hour)
	require.False(t, a.valid(), "never held")

	record := resourcelock.LeaderElectionRecord{HolderIdentity: a.Identity(), LeaseDurationSeconds: 3600}
	require.NoError(t, a.Create(t.Context(), record))
	require.True(t, a.valid())

	// b reads the lease, and a renews it before b writes: b's write must fail
	// and count for nothing.
	_, _, err = b.Get(t.Context())
	require.NoError(t, err)
	_, _, err = a.Get(t.Context())
	require.NoError(t, err)
	record.RenewTime = metav1.NewTime(time.Unix(1_700_000_000, 0))
	require.NoError(t, a.Update(t.Context(), record))
	record.HolderIdentity, record.LeaderTransitions = b.Identity(), 1
	require.Error(t, b.Update(t.Context(), record))
	require.False(t, b.valid())

	// a gives it up, b takes it.
	record.HolderIdentity, record.LeaderTransitions = "", 0
	require.NoError(t, a.Update(t.Context(), record))
	require.False(t, a.valid())
	_, _, err = b.Get(t.Context())
	require.NoError(t, err)
	record.HolderIdentity, record.LeaderTransitions = b.Identity(), 1
	require.NoError(t, b.Update(t.Context(), record))
	require.True(t, b.valid())

	// A renewal that was sent too long ago is worth nothing.
	short := replica("b", 0)
	_, _, err = short.Get(t.Context())
	require.NoError(t, err)
	require.NoError(t, short.Update(t.Context(), record))
	require.False(t, short.valid())
}

// While the answer is on its way, or this process stands still, the lease runs already.
// Invariant: I9
func TestLateAnswerDoesNotExtendTheLease(t *testing.T) {
	l := newTimedLock(nil, "default", "a", time.Hour)
	var written time.Duration
	require.NoError(t, l.timed(resourcelock.LeaderElectionRecord{HolderIdentity: "a"}, func() error {
		written = bootclock.Now()
		for bootclock.Now() == written {
		}
		return nil
	}))
	require.LessOrEqual(t, time.Duration(l.renewed.Load()), written)
	require.True(t, l.valid())
}

func TestCandidateDetectsClockSkewOfTheLeader(t *testing.T) {
	type get struct {
		holder  string
		renewed time.Duration // on the holder's clock
		read    time.Duration // on ours
	}
	const ms = time.Millisecond
	for name, c := range map[string]struct {
		gets []get
		want []time.Duration
	}{
		"the same clock":              {[]get{{"b", 0, 100 * ms}, {"b", 500 * ms, 600 * ms}, {"b", 1000 * ms, 1100 * ms}}, nil},
		"a little ahead":              {[]get{{"b", 0, 2 * time.Second}, {"b", 500 * ms, 2500 * ms}}, nil},
		"ahead":                       {[]get{{"b", 0, time.Minute}, {"b", 500 * ms, time.Minute + 500*ms}, {"b", 1000 * ms, time.Minute + 1000*ms}}, []time.Duration{time.Minute - 500*ms}},
		"behind":                      {[]get{{"b", time.Minute, 0}, {"b", time.Minute + 500*ms, 500 * ms}, {"b", time.Minute + 1000*ms, 1000 * ms}}, []time.Duration{-time.Minute}},
		"a holder that has ended":     {[]get{{"b", 0, time.Minute}, {"b", 0, time.Minute + 500*ms}, {"b", 0, time.Minute + time.Second}}, nil},
		"looked at after a long time": {[]get{{"b", 0, 0}, {"b", 500 * ms, time.Hour}}, nil},
		"another holder":              {[]get{{"b", 0, time.Minute}, {"c", 500 * ms, time.Minute + 500*ms}}, nil},
		"each holder once": {
			[]get{{"b", 0, time.Minute}, {"b", 500 * ms, time.Minute + 500*ms}, {"c", 0, time.Minute + time.Second}, {"c", 500 * ms, time.Minute + 1500*ms}, {"c", time.Second, 2 * time.Minute}},
			[]time.Duration{time.Minute - 500*ms, time.Minute + 500*ms},
		},
		"this replica": {[]get{{"a", 0, time.Minute}, {"a", 500 * ms, time.Minute + 500*ms}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := newTimedLock(nil, "default", "a", time.Hour)
			var got []time.Duration
			l.onClockSkew = func(_ string, ahead time.Duration) { got = append(got, ahead) }
			began := time.Unix(1_700_000_000, 0)
			for _, g := range c.gets {
				l.compare(resourcelock.LeaderElectionRecord{HolderIdentity: g.holder, RenewTime: metav1.NewTime(began.Add(g.renewed))}, began.Add(g.read), began.Add(g.read))
			}
			require.Equal(t, c.want, got)
		})
	}
}

func TestLeaseIdentityHoldsTheLeadersAddresses(t *testing.T) {
	for _, r := range []replica{{"10.0.0.1:9090", "10.0.0.1:8081"}, {"[fd00::1]:9090", "[fd00::1]:8081"}} {
		require.Equal(t, r, replicaOf(r.identity("berth-allocator-7d9f-x2k8v-x7k2")))
		require.Contains(t, r.identity("berth-allocator-7d9f-x2k8v-x7k2"), "_berth-allocator-7d9f-x2k8v-x7k2", "for people")
		require.Equal(t, r, replicaOf(r.identity("a_host_of_a_developer-x7k2")))
	}
	for _, other := range []string{"", "another", "10.0.0.1:9090_x7k2", "a_b_c_d"} {
		require.Empty(t, replicaOf(other), other)
	}
}

func TestContradictoryElectionTimingsAreRefused(t *testing.T) {
	for name, c := range map[string]struct {
		lease, renew, retry time.Duration
		wrong               string
	}{
		"as they are by default":  {4 * time.Second, 3 * time.Second, 300 * time.Millisecond, ""},
		"the longest":             {time.Minute, 59 * time.Second, 29 * time.Second, ""},
		"no retry period":         {4 * time.Second, 3 * time.Second, 0, "larger than the next"},
		"two attempts at most":    {4 * time.Second, 3 * time.Second, 1500 * time.Millisecond, "more than twice"},
		"gives up after the end":  {4 * time.Second, 4 * time.Second, 300 * time.Millisecond, "larger than the next"},
		"parts of a second":       {4500 * time.Millisecond, 3 * time.Second, 300 * time.Millisecond, "whole seconds"},
		"longer than a drain may": {61 * time.Second, 3 * time.Second, 300 * time.Millisecond, "1s to 1m0s"},
	} {
		t.Run(name, func(t *testing.T) {
			err := CheckElection(c.lease, c.renew, c.retry)
			if c.wrong == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.wrong)
			if c.retry == 0 {
				return // New takes that for the default
			}
			_, err = New(Options{
				Clients: &kube.Clients{}, Namespace: "x", ControlAddress: "x", APIAddress: "x", MaxStale: 1, ConnectWindow: 1, Policy: baseline(t),
				Metrics: prometheus.NewRegistry(), Log: zap.NewNop(), LeaseDuration: c.lease, RenewDeadline: c.renew, RetryPeriod: c.retry,
			})
			require.ErrorContains(t, err, c.wrong)
		})
	}
}

// A replica that follows sees a renewal, and the end of the lease, a period late at most.
func TestPodsServeThroughADefaultFailover(t *testing.T) {
	o := Options{LeaseDuration: 4 * time.Second, RetryPeriod: 300 * time.Millisecond, ConnectWindow: envoy.ConnectWindow}
	const period = 660 * time.Millisecond // with the library's jitter
	require.Equal(t, 4*time.Second+2*period+takeOver, failover(o.LeaseDuration, o.RetryPeriod))
	require.Equal(t, failover(o.LeaseDuration, o.RetryPeriod)+time.Second+envoy.ConnectWindow, o.serveOn())
	require.Less(t, failover(o.LeaseDuration, o.RetryPeriod)-takeOver, 6*time.Second, "claims fail for longer than documented")
}
