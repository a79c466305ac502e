package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// BenchmarkRefill: how long a pool takes for 300 warm pods, and for their deletion, beside 300 raw creates of the same
// pods by 16 clients in the same run. Both end when a list shows 300 ready pods.
func BenchmarkRefill(b *testing.B) {
	const count, rounds = 300, 3
	g := newGround(b)
	g.pool("refill", 10, 0)
	pool, err := g.berth.ReadPool(g.Context(), "refill")
	require.NoError(b, err)
	for range b.N {
		var raw, refill, down []float64
		for i := range rounds {
			prefix := fmt.Sprintf("raw-%d", i)
			began := time.Now()
			g.parallel(count, 16, func(n int) error {
				p := pods.Build(&pool, fmt.Sprintf("%s-%d", prefix, n), pods.Settings{})
				p.OwnerReferences = nil // no pod of the pool
				p.Labels = map[string]string{"raw": prefix}
				_, err := g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).Create(g.Context(), p, metav1.CreateOptions{})
				return err
			})
			g.ready("raw="+prefix, count)
			raw = append(raw, time.Since(began).Seconds())
			none := int64(0)
			require.NoError(b, g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).DeleteCollection(g.Context(),
				metav1.DeleteOptions{GracePeriodSeconds: &none}, metav1.ListOptions{LabelSelector: "raw=" + prefix}))
			g.ready("raw="+prefix, 0)

			began = time.Now()
			g.warm("refill", count)
			g.ready(v1alpha1.LabelPool+"=refill", count)
			refill = append(refill, time.Since(began).Seconds())
			g.full("refill", count)
			began = time.Now()
			g.warm("refill", 0)
			g.ready(v1alpha1.LabelPool+"=refill", 0)
			down = append(down, time.Since(began).Seconds())
			g.full("refill", 0)
		}
		b.Logf("raw %.2f s, refill %.2f s, scale down %.2f s", raw, refill, down)
		b.ReportMetric(median(refill)/median(raw), "refill/raw")
		b.ReportMetric(median(refill), "refill_s")
		b.ReportMetric(median(down), "down_s")
	}
}

// warm changes how many pods a pool keeps.
func (g *ground) warm(name string, pods int) {
	require.NoError(g, g.pools(g.berth.Clients.Berth.Patch(types.MergePatchType)).Name(name).
		Body(fmt.Appendf(nil, `{"spec":{"warm":%d}}`, pods)).Do(g.Context()).Error())
}

// ready waits until so many pods are ready, and no others exist.
func (g *ground) ready(selector string, pods int) {
	require.Eventually(g, func() bool {
		list, err := g.berth.Clients.Kubernetes.CoreV1().Pods(harness.Namespace).
			List(g.Context(), metav1.ListOptions{LabelSelector: selector})
		if err != nil || len(list.Items) != pods {
			return false
		}
		for i := range list.Items {
			if list.Items[i].Status.Phase != corev1.PodRunning {
				return false
			}
		}
		return true
	}, 10*time.Minute, 50*time.Millisecond)
}
