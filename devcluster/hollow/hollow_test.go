package hollow

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/devcluster"
)

const limit = time.Minute

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// world is hollow nodes and a client to use them.
type world struct {
	t      testing.TB
	nodes  *Nodes
	client kubernetes.Interface
}

func newWorld(t testing.TB, c *devcluster.Cluster, o Options) *world {
	t.Helper()
	w := &world{t: t}
	var err error
	w.client, err = kubernetes.NewForConfig(c.RestConfig())
	require.NoError(t, err)
	w.nodes, err = Start(w.ctx(), c, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, w.nodes.Close()) })
	return w
}

func (w *world) ctx() context.Context {
	ctx, cancel := context.WithTimeout(w.t.Context(), limit)
	w.t.Cleanup(cancel)
	return ctx
}

// create makes count pods, called prefix-0 and so on, by creators at once.
func (w *world) create(prefix string, count, creators int, change func(*corev1.PodSpec)) {
	w.t.Helper()
	names := make(chan string)
	var all sync.WaitGroup
	ctx := w.ctx()
	for range creators {
		all.Go(func() {
			for name := range names {
				pod := &corev1.Pod{
					ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"set": prefix}},
					Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "none"}}},
				}
				if change != nil {
					change(&pod.Spec)
				}
				if _, err := w.client.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{}); err != nil {
					w.t.Errorf("create %s: %v", name, err)
				}
			}
		})
	}
	for i := range count {
		names <- fmt.Sprintf("%s-%d", prefix, i)
	}
	close(names)
	all.Wait()
}

// ready waits until count pods of a set are ready and returns them.
func (w *world) ready(prefix string, count int) (pods []corev1.Pod) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		list, err := w.client.CoreV1().Pods("default").List(w.t.Context(), metav1.ListOptions{LabelSelector: "set=" + prefix})
		if err != nil {
			return false
		}
		pods = pods[:0]
		for _, p := range list.Items {
			if has(p.Status.Conditions, corev1.PodReady, corev1.ConditionTrue) {
				pods = append(pods, p)
			}
		}
		return len(pods) == count
	}, limit, 50*time.Millisecond, "%d pods called %s-... should be ready", count, prefix)
	return pods
}

func has(conditions []corev1.PodCondition, t corev1.PodConditionType, s corev1.ConditionStatus) bool {
	for _, c := range conditions {
		if c.Type == t {
			return c.Status == s
		}
	}
	return false
}

func (w *world) delete(name string) {
	w.t.Helper()
	pods := w.client.CoreV1().Pods("default")
	require.NoError(w.t, pods.Delete(w.ctx(), name, metav1.DeleteOptions{}))
	require.Eventually(w.t, func() bool {
		_, err := pods.Get(w.t.Context(), name, metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}, limit, 10*time.Millisecond, "%s should be gone", name)
}

// addresses requires that pods have distinct ones in the range.
func (w *world) addresses(pods []corev1.Pod) map[netip.Addr]string {
	w.t.Helper()
	at := map[netip.Addr]string{}
	for _, p := range pods {
		ip, err := netip.ParseAddr(p.Status.PodIP)
		require.NoError(w.t, err)
		require.True(w.t, w.nodes.PodCIDR().Contains(ip), "%v is outside of %v", ip, w.nodes.PodCIDR())
		require.Empty(w.t, at[ip], "%v is the address of %s too", ip, p.Name)
		at[ip] = p.Name
	}
	return at
}

func (w *world) get(url string, protocols *http.Protocols) (*http.Response, string, error) {
	transport := &http.Transport{DisableKeepAlives: true, Protocols: protocols}
	defer transport.CloseIdleConnections()
	r, err := http.NewRequestWithContext(w.ctx(), http.MethodGet, url, http.NoBody)
	require.NoError(w.t, err)
	resp, err := transport.RoundTrip(r)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp, string(body), err
}

func TestNodes(t *testing.T) {
	w := newWorld(t, devcluster.Start(t, devcluster.Options{}), Options{Nodes: 4})
	for _, test := range []struct {
		name  string
		judge func(w *world)
	}{
		{"PodsAreReadyAtAddressesOfTheirOwnOnAllNodes", podsAreReadyAtAddressesOfTheirOwnOnAllNodes},
		{"ServerSaysWhichAddressWasReached", serverSaysWhichAddressWasReached},
		{"AddressOfADeletedPodIsALaterPods", addressOfADeletedPodIsALaterPods},
		{"CordonedNodeGetsNoPods", cordonedNodeGetsNoPods},
		{"ClosedNodesLeaveNothingRunning", closedNodesLeaveNothingRunning},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.judge(&world{t: t, nodes: w.nodes, client: w.client})
		})
	}
}

// How long it takes until 1,000 pods, made by 16 creators, are ready.
func BenchmarkPodsBecomeReady(b *testing.B) {
	w := newWorld(b, devcluster.Start(b, devcluster.Options{}), Options{Nodes: 10})
	for i := 0; b.Loop(); i++ {
		set := fmt.Sprint("many-", i)
		began := time.Now()
		w.create(set, 1000, 16, nil)
		b.ReportMetric(time.Since(began).Seconds(), "s-created")
		w.addresses(w.ready(set, 1000))
	}
}

func podsAreReadyAtAddressesOfTheirOwnOnAllNodes(w *world) {
	w.create("many", 200, 16, nil)
	pods := w.ready("many", 200)
	w.addresses(pods)
	on := map[string]int{}
	for _, p := range pods {
		on[p.Spec.NodeName]++
	}
	require.Equal(w.t, map[string]int{"node-0": 50, "node-1": 50, "node-2": 50, "node-3": 50}, on)
}

func serverSaysWhichAddressWasReached(w *world) {
	w.create("server", 3, 1, nil)
	url := func(host string) string { return fmt.Sprintf("http://%s:%d/any/path", host, w.nodes.Port()) }
	http2 := new(http.Protocols)
	http2.SetUnencryptedHTTP2(true)
	for _, p := range w.ready("server", 3) {
		for major, protocols := range map[int]*http.Protocols{1: nil, 2: http2} {
			resp, body, err := w.get(url(p.Status.PodIP), protocols)
			require.NoError(w.t, err)
			require.Equal(w.t, major, resp.ProtoMajor)
			require.Equal(w.t, p.Status.PodIP, body)
		}
	}
	for _, foreign := range []string{"127.0.0.1", w.nodes.PodCIDR().Addr().Prev().String()} {
		_, _, err := w.get(url(foreign), nil)
		require.Error(w.t, err, "%s is no pod's address", foreign)
	}
}

func addressOfADeletedPodIsALaterPods(w *world) {
	w.create("mortal", 1, 1, nil)
	address := w.ready("mortal", 1)[0].Status.PodIP
	w.delete("mortal-0")
	// The nodes may hear of the deletion after us, and of the next pods before.
	for i := 0; ; i++ {
		require.Less(w.t, i, 100, "%s does not answer for a pod any more", address)
		heir := fmt.Sprint("heir-", i)
		w.create(heir, 1, 1, nil)
		if w.ready(heir, 1)[0].Status.PodIP == address {
			return
		}
	}
}

func cordonedNodeGetsNoPods(w *world) {
	cordon := func(value bool) {
		patch := fmt.Sprintf(`{"spec":{"unschedulable":%v}}`, value)
		_, err := w.client.CoreV1().Nodes().Patch(w.ctx(), "node-1", types.MergePatchType, []byte(patch),
			metav1.PatchOptions{})
		require.NoError(w.t, err)
	}
	cordon(true)
	// The scheduler, which sees nodes and pods by two watches, knows of the cordon
	// when a pod for this node alone has no place.
	waiting := ""
	for i := 0; waiting == ""; i++ {
		require.Less(w.t, i, 100, "a cordoned node gets pods")
		set := fmt.Sprint("probe-", i)
		w.create(set, 1, 1, func(s *corev1.PodSpec) { s.NodeSelector = map[string]string{corev1.LabelHostname: "node-1"} })
		require.Eventually(w.t, func() bool {
			p, err := w.client.CoreV1().Pods("default").Get(w.t.Context(), set+"-0", metav1.GetOptions{})
			if err != nil {
				return false
			}
			if has(p.Status.Conditions, corev1.PodScheduled, corev1.ConditionFalse) {
				waiting = set
			}
			return waiting != "" || p.Spec.NodeName != ""
		}, limit, 10*time.Millisecond, "a pod is placed or not")
	}
	w.create("elsewhere", 30, 4, nil)
	for _, p := range w.ready("elsewhere", 30) {
		require.NotEqual(w.t, "node-1", p.Spec.NodeName)
	}
	cordon(false)
	require.Equal(w.t, "node-1", w.ready(waiting, 1)[0].Spec.NodeName)
}

func closedNodesLeaveNothingRunning(w *world) {
	idle, err := net.Dial("tcp", netip.AddrPortFrom(w.nodes.PodCIDR().Addr().Next(), w.nodes.Port()).String())
	require.NoError(w.t, err)
	defer idle.Close()
	require.NoError(w.t, w.nodes.Close())
	require.NoError(w.t, w.nodes.Close())
	require.NoError(w.t, idle.SetReadDeadline(time.Now().Add(limit)))
	_, err = idle.Read(make([]byte, 1))
	require.Error(w.t, err)
	require.NotErrorIs(w.t, err, os.ErrDeadlineExceeded, "a connection without a request is closed too")
	l, err := net.Listen("tcp4", fmt.Sprint(":", w.nodes.Port()))
	require.NoError(w.t, err, "the port is free")
	require.NoError(w.t, l.Close())
}

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	_, err := Start(t.Context(), new(devcluster.Cluster), Options{})
	require.ErrorContains(t, err, "Options.Nodes is required")
}
