package processnode

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestDeletionGraceCountsBeforeThePodsOwn(t *testing.T) {
	for _, c := range []struct {
		name          string
		own, deletion *int64
		want          time.Duration
	}{
		{"the pod's own without a deletion", new(int64(30)), nil, 30 * time.Second},
		{"the deletion's, shorter", new(int64(30)), new(int64(5)), 5 * time.Second},
		{"the deletion's, longer", new(int64(30)), new(int64(60)), time.Minute},
		{"never less than a second", new(int64(30)), new(int64(0)), time.Second},
		{"neither is set", nil, nil, time.Second},
	} {
		t.Run(c.name, func(t *testing.T) {
			w := worker{pod: &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionGracePeriodSeconds: c.deletion}}}
			w.pod.Spec.TerminationGracePeriodSeconds = c.own
			require.Equal(t, c.want, w.gracePeriod())
		})
	}
}

func TestWorkerWaitsForStopsUnderWay(t *testing.T) {
	stopped := &run{killer: &killer{}}
	w := worker{pod: &corev1.Pod{}, containers: []*container{{run: stopped},
		{run: &run{exit: &corev1.ContainerStateTerminated{}}}}}
	w.inbox.pod = &corev1.Pod{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{}}}
	w.sync()
	require.Nil(t, w.pod.DeletionTimestamp, "the deletion stays in the inbox")
	require.NotNil(t, w.containers[1].run, "the end of the other container is not reported yet")
	stopped.killer.done = true
	require.True(t, w.stopping(), "the sleep is over, the process is not")
	stopped.exit = &corev1.ContainerStateTerminated{}
	require.False(t, w.stopping())
}
