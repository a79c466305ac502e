package pods_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// labeler is a Labeler that works until the end of the test.
func (f *fixture) labeler(workers int) *pods.Labeler {
	l, err := pods.NewLabeler(pods.LabelerOptions{
		Client: f.clients.Kubernetes, Yield: func(context.Context) {}, Log: zaptest.NewLogger(f),
	})
	require.NoError(f, err)
	ctx, stop := context.WithCancel(context.Background())
	var working sync.WaitGroup
	working.Go(func() { l.Run(ctx, workers) })
	f.Cleanup(working.Wait)
	f.Cleanup(stop)
	return l
}

func TestLabeler(t *testing.T) {
	f := setUp(t)
	l := f.labeler(4)
	shown := func(name, phase, id string) {
		t.Helper()
		require.Eventually(t, func() bool {
			p := f.get(name)
			return p.Labels[v1alpha1.LabelPhase] == phase && p.Labels[v1alpha1.LabelSandbox] == id
		}, time.Minute, 10*time.Millisecond)
	}

	t.Run("a pod shows what holds it, whatever happens on the way", func(*testing.T) {
		key := f.create("shown")
		f.faults.drop.Store(2)
		f.faults.lose.Store(3)
		l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: "id1"})
		shown("shown", v1alpha1.PhaseClaimed, "id1")
		l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: "id1", Released: true})
		shown("shown", v1alpha1.PhaseReleased, "id1")
		f.faults.lose.Store(0)
	})

	t.Run("the last of many stands", func(t *testing.T) {
		key := f.create("many")
		for range 50 {
			l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: "id2"})
		}
		l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: "id2", Released: true})
		require.Eventually(t, func() bool { return l.Waiting() == 0 }, time.Minute, time.Millisecond)
		shown("many", v1alpha1.PhaseReleased, "id2")
	})

	t.Run("another pod of the name, or none, is left alone", func(t *testing.T) {
		old := f.create("again")
		f.remove("again")
		f.create("again")
		f.sink.take()
		l.Label(core.LabelPod{Pod: old, ID: "id3"})
		l.Label(core.LabelPod{Pod: core.PodKey{Namespace: "default", Name: "nobody", UID: "x"}, ID: "id4"})
		require.Eventually(t, func() bool { return l.Waiting() == 0 }, time.Minute, time.Millisecond)
		marker := f.create("marker")
		l.Label(core.LabelPod{Pod: marker, Pool: "pool", ID: "id5"})
		shown("marker", v1alpha1.PhaseClaimed, "id5")
		require.Equal(t, v1alpha1.PhaseWarm, f.get("again").Labels[v1alpha1.LabelPhase])
	})

	t.Run("a node is not removed under a pod that is or was in use, whatever the template says", func(t *testing.T) {
		const safe, disrupt = "cluster-autoscaler.kubernetes.io/safe-to-evict", "karpenter.sh/do-not-disrupt"
		pool := f.pool
		defer func() { f.pool = pool }()
		for name, annotations := range map[string]map[string]string{"plain": nil, "says-otherwise": {safe: "true", disrupt: "false", "note": "x"}} {
			f.pool = pool.DeepCopy()
			f.pool.Spec.Template.Metadata.Annotations = annotations
			key := f.create(name)
			for id, want := range annotations {
				require.Equal(t, want, f.get(name).Annotations[id], "a warm pod is the template's")
			}
			for _, released := range []bool{false, true} { // until its address is free
				l.Label(core.LabelPod{Pod: key, Pool: "pool", ID: name, Released: released})
				shown(name, map[bool]string{false: v1alpha1.PhaseClaimed, true: v1alpha1.PhaseReleased}[released], name)
				now := f.get(name).Annotations
				require.Equal(t, "false", now[safe])
				require.Equal(t, "true", now[disrupt])
				require.Equal(t, annotations["note"], now["note"])
			}
		}
	})
}

func TestRestoringThePoolLabelTouchesNothingElse(t *testing.T) {
	f := setUp(t)
	l, err := pods.NewLabeler(pods.LabelerOptions{
		Client: f.clients.Kubernetes, Yield: func(context.Context) {}, Log: zaptest.NewLogger(t),
	})
	require.NoError(t, err)
	ctx, stop := context.WithCancel(t.Context())
	var working sync.WaitGroup
	working.Go(func() { l.Run(ctx, 1) })
	defer working.Wait()
	defer stop()
	key := f.create("idle")
	f.patch("idle", `{"metadata":{"labels":{"berth.sh/pool":null}}}`)
	before := f.get("idle")
	l.Label(core.LabelPod{Pod: key, Pool: "pool", Restored: true})
	require.Eventually(t, func() bool { return f.get("idle").Labels[v1alpha1.LabelPool] == "pool" }, time.Minute, 10*time.Millisecond)
	now := f.get("idle")
	require.Equal(t, v1alpha1.PhaseWarm, now.Labels[v1alpha1.LabelPhase])
	require.Equal(t, before.Annotations, now.Annotations)
	require.NotContains(t, now.Labels, v1alpha1.LabelSandbox)
}
