package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func (e *env) patchPool(name, patch string) {
	e.t.Helper()
	require.NoError(e.t,
		e.clients.Berth.Patch(types.MergePatchType).Namespace(e.site.namespace()).Resource("sandboxpools").Name(name).
			Body([]byte(patch)).Do(e.t.Context()).Error())
}

func TestPoolFollowsItsChangedSpec(t *testing.T) {
	e := start(t, 2)
	s := e.claim()
	settled := func(warm int32) func() error {
		return func() error {
			if got := e.readPool(e.pool).Status; got.Warm != warm || got.Pending != 0 || got.Claimed != 1 {
				return fmt.Errorf("not settled: %+v", got)
			}
			return nil
		}
	}
	e.eventually(settled(2))
	e.patchPool(e.pool, `{"spec":{"warm":4}}`)
	e.eventually(settled(4))
	// As an autoscaler does: it asks for the pods that are counted, and writes their number.
	scale := e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxpools").Name(e.pool).SubResource("scale")
	raw, err := scale.DoRaw(e.t.Context())
	require.NoError(e.t, err)
	var scaled autoscalingv1.Scale
	require.NoError(e.t, json.Unmarshal(raw, &scaled))
	require.EqualValues(e.t, 4, scaled.Status.Replicas)
	require.Equal(e.t, "berth.sh/pool="+e.pool+",berth.sh/phase=warm", scaled.Status.Selector)
	require.NoError(e.t, e.clients.Berth.Patch(types.MergePatchType).Namespace(e.site.namespace()).
		Resource("sandboxpools").Name(e.pool).SubResource("scale").Body([]byte(`{"spec":{"replicas":1}}`)).
		Do(e.t.Context()).Error())
	e.eventually(settled(1))
	e.eventually(func() error {
		if n := len(e.pods(nil)); n != 2 {
			return fmt.Errorf("%d pods, expected the claimed and a warm one", n)
		}
		return nil
	})

	// Other labels are written to the warm pod, another template replaces it, and both leave the sandbox alone.
	warm := func() []corev1.Pod { return e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseWarm}) }
	before := warm()
	relabel := func(template string, labelled func(map[string]string) bool) {
		e.patchPool(e.pool, `{"spec":{"template":{"metadata":`+template+`}}}`)
		e.eventually(func() error {
			if now := warm(); len(now) != 1 || now[0].UID != before[0].UID || !labelled(now[0].Labels) {
				return fmt.Errorf("%d warm pods, not with the labels of the template", len(now))
			}
			return nil
		})
	}
	relabel(`{"labels":{"generation":"2"}}`, func(l map[string]string) bool { return l["generation"] == "2" })
	relabel(`{"labels":null}`, func(l map[string]string) bool { _, has := l["generation"]; return !has })
	e.patchPool(e.pool, `{"spec":{"template":{"metadata":{"annotations":{"kubectl.kubernetes.io/restartedAt":"now"}}}}}`)
	e.eventually(func() error {
		if now := warm(); len(now) != 1 || now[0].UID == before[0].UID {
			return fmt.Errorf("%d warm pods, not all new", len(now))
		}
		return nil
	})
	for _, p := range e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseClaimed}) {
		require.NotContains(e.t, p.Annotations, "kubectl.kubernetes.io/restartedAt")
		require.NotContains(e.t, p.Annotations, v1alpha1.AnnotationMetadata)
	}
	e.reaches(e.client(), s)

	// An empty pool says so, and when to come back.
	e.patchPool(e.pool, `{"spec":{"warm":0}}`)
	e.eventually(settled(0))
	a := e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`","waitTimeout":0}`)
	require.Equal(t, http.StatusTooManyRequests, a.code, a.body)
	require.Equal(t, "pool_empty", string(a.refusal(t).Reason))
	require.Equal(t, "1", a.header.Get("Retry-After"))

	// Deleting the pool ends what it holds.
	require.NoError(t, e.deletePool(t.Context(), e.pool))
	e.eventually(func() error {
		get := e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxpools").Name(e.pool)
		err := get.Do(t.Context()).Error()
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return errors.New("the pool is still there")
	})
	require.Empty(t, e.pods(nil))
	e.gone(e.client(), s)
	a = e.api(http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`"}`)
	require.Equal(t, http.StatusNotFound, a.code, a.body)
	require.Equal(t, "pool_not_found", string(a.refusal(t).Reason))
}

func TestBadPoolIsRefusedNamingItsField(t *testing.T) {
	e := start(t, 0)
	for name, c := range map[string]struct {
		change func(*v1alpha1.SandboxPool)
		want   string
	}{
		"negative warm":    {func(p *v1alpha1.SandboxPool) { p.Spec.Warm = -1 }, "spec.warm"},
		"port above 65535": {func(p *v1alpha1.SandboxPool) { p.Spec.DefaultPort = 65536 }, "spec.defaultPort"},
		"fewer pods than warm": {func(p *v1alpha1.SandboxPool) {
			one := int32(1)
			p.Spec.Warm, p.Spec.MaxPods = 2, &one
		}, "spec.maxPods"},
		"maxWarm below warm": {func(p *v1alpha1.SandboxPool) {
			p.Spec.Warm, p.Spec.MaxWarm = 2, new(int32(1))
		}, "spec.maxWarm: must be at least spec.warm"},
		"maxWarm above maxPods": {func(p *v1alpha1.SandboxPool) {
			p.Spec.MaxWarm, p.Spec.MaxPods = new(int32(3)), new(int32(2))
		}, "spec.maxWarm: must be at most spec.maxPods"},
		"open port 0":           {func(p *v1alpha1.SandboxPool) { p.Spec.Ports = []int32{8080, 0} }, "spec.ports[1]"},
		"open port above 65535": {func(p *v1alpha1.SandboxPool) { p.Spec.Ports = []int32{65536, 8080} }, "spec.ports[0]"},
		"open port twice":       {func(p *v1alpha1.SandboxPool) { p.Spec.Ports = []int32{8080, 22, 8080} }, "spec.ports[2]"},
		"too many open ports": {func(p *v1alpha1.SandboxPool) {
			for port := range int32(65) {
				p.Spec.Ports = append(p.Spec.Ports, 8080+port)
			}
		}, "spec.ports"},
		"default port not open": {func(p *v1alpha1.SandboxPool) { p.Spec.Ports = []int32{22, 443} },
			"spec.ports: must contain spec.defaultPort"},
		"default port not set and not open": {func(p *v1alpha1.SandboxPool) {
			p.Spec.DefaultPort, p.Spec.Ports = 0, []int32{22}
		}, "spec.ports: must contain spec.defaultPort"},
		"host network":  {func(p *v1alpha1.SandboxPool) { p.Spec.Template.Spec.HostNetwork = true }, "hostNetwork"},
		"name too long": {func(p *v1alpha1.SandboxPool) { p.Name = strings.Repeat("x", 41) }, "metadata.name"},
	} {
		t.Run(name, func(t *testing.T) {
			p := e.newPool(e.pool+"-bad", 1)
			c.change(p)
			err := e.clients.Berth.Post().Namespace(e.site.namespace()).Resource("sandboxpools").Body(p).Do(t.Context()).Error()
			require.ErrorContains(t, err, c.want)
		})
	}

	// What the API server cannot refuse stands in a condition.
	for name, c := range map[string]struct {
		change func(*corev1.PodSpec)
		reason string
		want   string
	}{
		"host-port": {func(s *corev1.PodSpec) {
			s.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080, HostPort: 8080}}
		}, v1alpha1.PoolPodSecurity, "hostPort"},
		"privileged": {func(s *corev1.PodSpec) {
			yes := true
			s.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		}, v1alpha1.PoolPodSecurity, "privileged"},
		"host-path": {func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "root",
				VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}, v1alpha1.PoolPodSecurity, "hostPath"},
		"token": {func(s *corev1.PodSpec) { yes := true; s.AutomountServiceAccountToken = &yes }, v1alpha1.PoolPodSecurity,
			"automountServiceAccountToken"},
		"bad-name": {func(s *corev1.PodSpec) { s.Containers[0].Name = "Not A Name" }, v1alpha1.PoolCreateFailed,
			"spec.containers[0].name"},
	} {
		t.Run(name, func(t *testing.T) {
			p := e.newPool(e.pool+"-"+name, 1)
			c.change(&p.Spec.Template.Spec)
			e.createPool(p)
			e.eventually(func() error {
				for _, got := range e.readPool(p.Name).Status.Conditions {
					if got.Type == v1alpha1.PoolDegraded && got.Reason == c.reason && strings.Contains(got.Message, c.want) {
						return nil
					}
				}
				return fmt.Errorf("conditions: %+v", e.readPool(p.Name).Status.Conditions)
			})
			pods, err := e.clients.Kubernetes.CoreV1().Pods(p.Namespace).List(t.Context(),
				metav1.ListOptions{LabelSelector: v1alpha1.LabelPool + "=" + p.Name})
			require.NoError(t, err)
			require.Empty(t, pods.Items)
		})
	}
}

func TestPoolOfFailingPodsSaysWhyAndWaits(t *testing.T) {
	e := start(t, 1)
	p := e.newPool(e.pool+"-ends", 3)
	p.Spec.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	p.Spec.Template.Spec.Containers[0].ReadinessProbe = nil
	p.Spec.Template.Spec.Containers[0].Args = append(p.Spec.Template.Spec.Containers[0].Args, "--no-such-flag")
	e.createPool(p)
	var said string
	e.eventually(func() error {
		c := meta.FindStatusCondition(e.readPool(p.Name).Status.Conditions, v1alpha1.PoolDegraded)
		if c == nil || c.Reason != core.PodFailed || !strings.Contains(c.Message, "exit code") {
			return fmt.Errorf("condition: %+v", c)
		}
		said = c.Message
		return nil
	})
	e.eventually(func() error {
		events, err := e.clients.Kubernetes.CoreV1().Events(p.Namespace).List(t.Context(),
			metav1.ListOptions{FieldSelector: "reason=Failed,involvedObject.kind=SandboxPool,involvedObject.name=" + p.Name})
		if err != nil || len(events.Items) == 1 {
			return err
		}
		return fmt.Errorf("%d events, after %q", len(events.Items), said)
	})
	// Another pool does not notice.
	e.reaches(e.client(), e.claim())
}

func TestBadClaimsAreRefused(t *testing.T) {
	e := start(t, 1)
	namespace := e.site.namespace()
	for _, c := range []struct {
		body   string
		code   int
		reason string
		want   string
	}{
		{`{`, 400, "bad_request", "JSON"},
		{`{}`, 400, "bad_request", "templateID"},
		{`{"templateID":"nosuch"}`, 404, "pool_not_found", "nosuch"},
		{`{"templateID":"nosuch/` + e.pool + `"}`, 404, "pool_not_found", "nosuch/" + e.pool},
		{`{"templateID":"/` + e.pool + `"}`, 404, "pool_not_found", e.pool},
		{`{"templateID":"` + namespace + `/"}`, 404, "pool_not_found", namespace},
		{`{"templateID":"` + namespace + `/` + namespace + `/` + e.pool + `"}`, 404, "pool_not_found", e.pool},
		{`{"templateID":"` + e.pool + `","timeout":0}`, 400, "bad_request", "timeout"},
		{`{"templateID":"` + e.pool + `","metadata":{"a":1}}`, 400, "bad_request", "metadata"},
		{`{"templateID":"` + e.pool + `","envVars":{"A":"b"}}`, 501, "not_implemented", "envVars"},
	} {
		a := e.api(http.MethodPost, "/sandboxes", c.body)
		require.Equal(t, c.code, a.code, "%s: %s", c.body, a.body)
		refusal := a.refusal(t)
		require.Equal(t, c.reason, string(refusal.Reason))
		require.Contains(t, refusal.Message, c.want)
	}
	require.Equal(t, int32(1), e.readPool(e.pool).Status.Warm, "no refused claim took a pod")
	s, _ := e.claimOf(namespace+"/"+e.pool, `"timeout":60`)
	require.Equal(t, e.pool, s.TemplateID)
	e.release(s.SandboxID)
}

// What keeps a pool empty stands in its condition, in the words of the part that refuses.
func TestPoolQuotesQuotaAndScheduler(t *testing.T) {
	e := start(t, 0)
	degraded := func(pool, reason, words string) {
		t.Helper()
		e.eventually(func() error {
			status := e.readPool(pool).Status
			for _, kind := range []string{v1alpha1.PoolReady, v1alpha1.PoolDegraded, v1alpha1.PoolProgressing} {
				c := meta.FindStatusCondition(status.Conditions, kind)
				if c == nil || c.Reason != reason || !strings.Contains(c.Message, words) {
					return fmt.Errorf("%s: %+v", kind, c)
				}
			}
			return nil
		})
	}
	healthy := func(pool string, warm int32) {
		t.Helper()
		e.eventually(func() error {
			s := e.readPool(pool).Status
			if !meta.IsStatusConditionFalse(s.Conditions, v1alpha1.PoolDegraded) || s.Warm != warm {
				return fmt.Errorf("status: %+v", s)
			}
			return nil
		})
	}

	// A quota for the pods of one priority class, so that it holds for this pool alone.
	quotas := e.clients.Kubernetes.CoreV1().ResourceQuotas(e.site.namespace())
	name := e.pool + "-quota"
	_, err := e.clients.Kubernetes.SchedulingV1().PriorityClasses().Create(t.Context(),
		&schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: 1}, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = e.clients.Kubernetes.SchedulingV1().PriorityClasses().Delete(context.Background(), name, metav1.DeleteOptions{})
		_ = quotas.Delete(context.Background(), name, metav1.DeleteOptions{})
	})
	none := corev1.ResourceList{corev1.ResourcePods: resource.MustParse("0")}
	_, err = quotas.Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.ResourceQuotaSpec{Hard: none, ScopeSelector: &corev1.ScopeSelector{
			MatchExpressions: []corev1.ScopedResourceSelectorRequirement{
				{ScopeName: corev1.ResourceQuotaScopePriorityClass, Operator: corev1.ScopeSelectorOpIn, Values: []string{name}},
			}}},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	p := e.newPool(name, 3)
	p.Spec.Template.Spec.PriorityClassName = name
	// The API server applies a quota once it has watched its status.
	e.eventually(func() error {
		quota, err := quotas.Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if quota.Status.Hard == nil { // kube-controller-manager writes it, which devcluster does not have
			quota.Status = corev1.ResourceQuotaStatus{Hard: none, Used: none}
			if _, err := quotas.UpdateStatus(t.Context(), quota, metav1.UpdateOptions{}); err != nil {
				return err
			}
		}
		_, err = e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Create(t.Context(),
			&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: p.Spec.Template.Spec},
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil {
			return errors.New("a pod is accepted in spite of the quota")
		}
		if !strings.Contains(err.Error(), "exceeded quota: "+name) {
			return err
		}
		return nil
	})
	e.createPool(p)
	degraded(name, v1alpha1.PoolQuotaExceeded, "exceeded quota: "+name)
	require.Empty(t, e.pods(map[string]string{v1alpha1.LabelPool: name}))
	require.NoError(t, quotas.Delete(t.Context(), name, metav1.DeleteOptions{}))
	healthy(name, 3)

	name = e.pool + "-nowhere"
	p = e.newPool(name, 1)
	p.Spec.Template.Spec.NodeSelector = map[string]string{"no-such": "node"}
	e.createPool(p)
	degraded(name, core.PodUnschedulable, "nodes are available") // devcluster and kube-scheduler word the rest differently
	e.patchPool(name, `{"spec":{"template":{"spec":{"nodeSelector":null}}}}`)
	healthy(name, 1)
}
