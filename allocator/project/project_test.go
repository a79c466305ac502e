package project_test

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/project"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func sandbox(phase core.Phase, term, counter uint64) core.Sandbox {
	s := core.Sandbox{
		Binding: core.Binding{
			ID: "abcdefghijklmnopqrst", ClaimedAt: time.Unix(1_700_000_000, 0).UTC(),
			EndAt: time.Unix(1_700_000_300, 0).UTC(), Metadata: map[string]string{"k": "v"},
			Team: "team", User: "user", IdempotencyKey: "key", RequestHash: [32]byte{1, 2, 3},
		},
		DefaultPort: 8080, Ports: []uint16{80, 8080},
		Pool: core.PoolKey{Namespace: "default", Name: "pool"}, Pod: core.PodKey{Namespace: "default", Name: "pod", UID: "uid"},
		IP: netip.MustParseAddr("127.1.2.3"), Phase: phase, Revision: core.Revision{Term: term, Counter: counter},
	}
	if phase == core.Released || phase == core.Ended {
		s.Reason, s.EndedAt = core.ReasonKilled, time.Unix(1_700_000_100, 0).UTC()
	}
	return s
}

func TestRecordsGoForwardsOnlyAndCanBeReadBack(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	recorded := make(chan core.Recorded, 16)
	p := project.New(clients.Berth, "default", func(ev core.Event) { recorded <- ev.(core.Recorded) }, func(context.Context) {}, zaptest.NewLogger(t))
	w := &project.Watcher{Client: clients.Berth, Namespace: "default", Log: zaptest.NewLogger(t)}
	ctx, stop := context.WithCancel(t.Context())
	var working sync.WaitGroup
	working.Go(func() { p.Run(ctx, 4) })
	defer working.Wait()
	defer stop()

	write := func(s core.Sandbox) {
		t.Helper()
		p.Record(s)
		select {
		case r := <-recorded:
			require.Equal(t, core.Recorded{ID: s.ID, Revision: s.Revision}, r)
		case <-time.After(time.Minute):
			t.Fatal("not recorded within a minute")
		}
	}
	read := func() core.Sandbox {
		t.Helper()
		all, _, err := w.List(t.Context())
		require.NoError(t, err)
		require.Len(t, all, 1)
		return all[0]
	}

	running := sandbox(core.Running, 2, 1)
	write(running)
	require.Equal(t, running, read())

	released := sandbox(core.Released, 2, 2)
	write(released)
	require.Equal(t, released, read())

	// What an older term writes late changes nothing.
	write(sandbox(core.Running, 1, 99))
	require.Equal(t, released, read())

	ended := sandbox(core.Ended, 3, 1)
	write(ended)
	require.Equal(t, ended, read())
	write(released)
	require.Equal(t, ended, read())

	// Of many states that come at once, the last one is there in the end.
	for counter := uint64(3); counter <= 50; counter++ {
		p.Record(sandbox(core.Ended, 3, counter))
	}
	require.Eventually(t, func() bool { return read().Revision == core.Revision{Term: 3, Counter: 50} }, time.Minute, 10*time.Millisecond)

	for len(recorded) > 0 {
		<-recorded
	}
	p.Forget(t.Context(), ended.ID)
	all, _, err := w.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
	p.Forget(t.Context(), ended.ID) // once more is no error

	// One that a leader wrote late, and that nobody knows, still has its finalizer.
	write(sandbox(core.Running, 3, 100))
	p.Forget(t.Context(), running.ID)
	all, _, err = w.List(t.Context())
	require.NoError(t, err)
	require.Empty(t, all)
}

func TestTheRecordOfASandboxCannotBeMovedToAnotherPod(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	record := &v1alpha1.Sandbox{Spec: v1alpha1.SandboxSpec{Pool: "pool", PodName: "pod", PodUID: "one", ClaimedAt: metav1.NowMicro()}}
	record.Name = "abcdefghijklmnopqrst"
	require.NoError(t, clients.Berth.Post().Namespace("default").Resource("sandboxes").Body(record).Do(t.Context()).Into(record))
	record.Spec.PodUID = "two"
	err = clients.Berth.Put().Namespace("default").Resource("sandboxes").Name(record.Name).Body(record).Do(t.Context()).Error()
	require.ErrorContains(t, err, "spec.podUID")
}
