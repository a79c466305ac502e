package processnode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestShortestGraceThatWasAskedForCounts(t *testing.T) {
	for _, c := range []struct {
		name                    string
		own, deletion, eviction *int64
		want                    time.Duration
	}{
		{"the pod's own when nobody asks", new(int64(30)), nil, nil, 30 * time.Second},
		{"the deletion's, shorter", new(int64(30)), new(int64(5)), nil, 5 * time.Second},
		{"the deletion's, longer", new(int64(30)), new(int64(60)), nil, time.Minute},
		{"the shorter of deletion and eviction", new(int64(30)), new(int64(60)), new(int64(1)), time.Second},
		{"never less than a second", new(int64(30)), new(int64(0)), nil, time.Second},
		{"nobody says anything", nil, nil, nil, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := worker{pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionGracePeriodSeconds: c.deletion}}}
			w.pod.Spec.TerminationGracePeriodSeconds = c.own
			if c.eviction != nil {
				w.verdict = &verdict{grace: c.eviction}
			}
			require.Equal(t, c.want, w.gracePeriod())
		})
	}
}

func TestADeafWorkerNeitherLooksNorActs(t *testing.T) {
	stopped := &run{killer: &killer{}}
	w := worker{pod: &corev1.Pod{}, containers: []*container{{run: stopped}, {run: &run{exit: &corev1.ContainerStateTerminated{}}}}}
	w.inbox.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{}}}
	w.sync()
	require.Nil(t, w.pod.DeletionTimestamp, "the deletion waits in the inbox")
	require.NotNil(t, w.containers[1].run, "the neighbour's end is not told yet")
	stopped.killer.done = true
	require.True(t, w.stopping(), "the hook is over, the process is not")
	stopped.exit = &corev1.ContainerStateTerminated{}
	require.False(t, w.stopping())
}
