package pods_test

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func cpu(text string) corev1.ResourceList {
	return corev1.ResourceList{corev1.ResourceCPU: resource.MustParse(text)}
}

// Invariant: P29
func TestResizeChangesTheVersionThatWasSeen(t *testing.T) {
	f := setUp(t)
	f.pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
	f.pool.Spec.Reuse = v1alpha1.ReuseRecycle
	f.pool.Spec.Template.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: cpu("500m"), Limits: cpu("2")}
	create := func() core.Pod {
		require.NoError(t, f.writer.Create(t.Context(), f.pool, core.CreatePod{Name: "p"}))
		return f.sink.take()[0].(core.PodSeen).Pod
	}
	seen := create()
	require.Equal(t, "500m", seen.CPURequest)
	require.False(t, seen.Lowered)
	require.True(t, seen.Recyclable)
	resize := func(version string, lower bool) (corev1.ResourceList, error) {
		t.Helper()
		err := f.writer.Resize(t.Context(), core.ResizePod{Pod: seen.Key, Version: version, Lower: lower, CPURequest: "500m"})
		return f.get("p").Spec.Containers[0].Resources.Requests, err
	}
	now, err := resize("1", true) // an old version
	require.NoError(t, err)
	require.Equal(t, cpu("500m"), now)
	now, err = resize(seen.Version, true)
	require.NoError(t, err)
	require.Equal(t, cpu("20m"), now)

	low := pods.Observe(f.get("p"))
	require.True(t, low.Lowered)
	require.Equal(t, "500m", low.CPURequest)
	require.False(t, low.Recyclable, "its spec is not that of a new pod")
	require.Equal(t, "500m", low.Workload.Requests.CPU)
	_, err = resize(seen.Version, false)
	require.NoError(t, err)
	require.True(t, pods.Observe(f.get("p")).Lowered, "it has changed since")
	f.faults.drop.Store(1)
	_, err = resize(low.Version, false)
	require.Error(t, err)
	now, err = resize(low.Version, false)
	require.NoError(t, err)
	require.Equal(t, cpu("500m"), now)
	require.False(t, pods.Observe(f.get("p")).Lowered)

	gone := core.PodKey{Namespace: "default", Name: "gone"}
	require.NoError(t, f.writer.Resize(t.Context(), core.ResizePod{Pod: gone, Version: "1", CPURequest: "1"}))
}

func TestOnlyPodsThatMayBeResizedSaySo(t *testing.T) {
	memory := func(l corev1.ResourceList) corev1.ResourceList {
		l[corev1.ResourceMemory] = resource.MustParse("64Mi")
		return l
	}
	restart := []corev1.ContainerResizePolicy{{ResourceName: corev1.ResourceCPU, RestartPolicy: corev1.RestartContainer}}
	for name, c := range map[string]struct {
		resources corev1.ResourceRequirements
		policy    []corev1.ContainerResizePolicy
		noAgent   bool
		want      string
	}{
		"a request":                        {resources: corev1.ResourceRequirements{Requests: cpu("1500m")}, want: "1500m"},
		"no request":                       {},
		"less than what is left asleep":    {resources: corev1.ResourceRequirements{Requests: cpu("10m")}},
		"a request of nothing":             {resources: corev1.ResourceRequirements{Requests: cpu("0")}},
		"only a limit":                     {resources: corev1.ResourceRequirements{Limits: cpu("1")}},
		"Guaranteed":                       {resources: corev1.ResourceRequirements{Requests: memory(cpu("1")), Limits: memory(cpu("1"))}},
		"Guaranteed but for memory":        {resources: corev1.ResourceRequirements{Requests: cpu("1"), Limits: cpu("1")}, want: "1"},
		"a restart by a change of its CPU": {resources: corev1.ResourceRequirements{Requests: cpu("1")}, policy: restart},
		"no agent":                         {resources: corev1.ResourceRequirements{Requests: cpu("1")}, noAgent: true},
	} {
		t.Run(name, func(t *testing.T) {
			pool := &v1alpha1.SandboxPool{Spec: v1alpha1.SandboxPoolSpec{Agent: &v1alpha1.PoolAgent{Enabled: true, Port: 49983}}}
			if c.noAgent {
				pool.Spec.Agent = nil
			}
			pool.Spec.Template.Spec.Containers = []corev1.Container{{Name: "sandbox", Image: "i", Resources: c.resources, ResizePolicy: c.policy}}
			p := pods.Build(pool, "p", pods.Settings{AgentImage: "agent", AsleepCPU: resource.MustParse("20m")})
			require.Equal(t, c.want, p.Annotations[v1alpha1.AnnotationCPURequest])
			if c.want != "" { // the node counts the larger one
				require.Equal(t, "20m", p.Spec.InitContainers[0].Resources.Requests.Cpu().String())
			} else if !c.noAgent {
				require.Equal(t, c.resources, p.Spec.InitContainers[0].Resources)
			}
		})
	}
}

// A cluster may refuse small requests.
func TestRefusedLoweringIsLeftAndRefusedRaiseRepeated(t *testing.T) {
	f := setUp(t)
	f.pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
	f.pool.Spec.Template.Spec.Containers[0].Resources = corev1.ResourceRequirements{Requests: cpu("500m")}
	require.NoError(t, f.writer.Create(t.Context(), f.pool, core.CreatePod{Name: "p"}))
	seen := f.sink.take()[0].(core.PodSeen).Pod
	ranges := f.clients.Kubernetes.CoreV1().LimitRanges("default")
	_, err := ranges.Create(t.Context(), &corev1.LimitRange{
		ObjectMeta: metav1.ObjectMeta{Name: "cpu"},
		Spec: corev1.LimitRangeSpec{Limits: []corev1.LimitRangeItem{{
			Type: corev1.LimitTypePod, Min: cpu("100m"), Max: cpu("1"),
		}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	// The API server learns of a change of it a moment later.
	awaitLimits := func(ctx context.Context, forbidden bool) {
		require.Eventually(t, func() bool {
			_, err := f.clients.Kubernetes.CoreV1().Pods("default").Create(ctx, &corev1.Pod{
				ObjectMeta: metav1.ObjectMeta{Name: "probe"},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "c", Image: "i"}}},
			}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
			return forbidden == apierrors.IsForbidden(err)
		}, time.Minute, 10*time.Millisecond)
	}
	awaitLimits(t.Context(), true)
	t.Cleanup(func() { // for the tests that follow
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(t, ranges.Delete(ctx, "cpu", metav1.DeleteOptions{}))
		awaitLimits(ctx, false)
	})
	for _, lower := range []bool{true, false} {
		e := core.ResizePod{Pod: seen.Key, Version: seen.Version, Lower: lower, CPURequest: "2"}
		err := f.writer.Resize(t.Context(), e)
		if lower {
			require.NoError(t, err)
		} else {
			require.True(t, apierrors.IsForbidden(err), "%v", err)
		}
		require.Equal(t, cpu("500m"), f.get("p").Spec.Containers[0].Resources.Requests)
	}
}
