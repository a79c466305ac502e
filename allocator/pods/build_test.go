package pods_test

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// serveOn is for how long the pods of these tests go on.
const serveOn = 6 * time.Second

// sleeps is the lifecycle of a container that does nothing but sleep at its end.
func sleeps(seconds int64) *corev1.Lifecycle {
	return &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: seconds}}}
}

// sleeping is spec with what every pod gets when its template says nothing of its
// end.
func sleeping(spec corev1.PodSpec) corev1.PodSpec {
	grace := int64(30 + 6)
	spec.TerminationGracePeriodSeconds = &grace
	spec.Containers[0].Lifecycle = sleeps(6)
	return spec
}

// poolOf is a pool with a template.
func poolOf(spec corev1.PodSpec) *v1alpha1.SandboxPool {
	spec.Containers = []corev1.Container{{Name: "sandbox", Image: "none"}}
	return &v1alpha1.SandboxPool{
		ObjectMeta: metav1.ObjectMeta{Namespace: "sandboxes", Name: "pool", UID: "pool-uid"},
		Spec:       v1alpha1.SandboxPoolSpec{Template: v1alpha1.PodTemplate{Spec: spec}},
	}
}

func TestBuildFillsInDefaultsForUntrustedCode(t *testing.T) {
	no := false
	for name, c := range map[string]struct{ template, want corev1.PodSpec }{
		"nothing is said": {
			corev1.PodSpec{},
			corev1.PodSpec{
				AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
				SecurityContext: &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			},
		},
		"a security context without a profile": {
			corev1.PodSpec{SecurityContext: &corev1.PodSecurityContext{RunAsUser: new(int64)}},
			corev1.PodSpec{
				AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
				SecurityContext: &corev1.PodSecurityContext{RunAsUser: new(int64), SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			},
		},
		"Linux": {
			corev1.PodSpec{OS: &corev1.PodOS{Name: corev1.Linux}},
			corev1.PodSpec{
				OS: &corev1.PodOS{Name: corev1.Linux}, AutomountServiceAccountToken: &no, EnableServiceLinks: &no,
				SecurityContext: &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}},
			},
		},
		"Windows has no seccomp, and the API server refuses a profile": {
			corev1.PodSpec{OS: &corev1.PodOS{Name: corev1.Windows}},
			corev1.PodSpec{OS: &corev1.PodOS{Name: corev1.Windows}, AutomountServiceAccountToken: &no, EnableServiceLinks: &no},
		},
	} {
		t.Run(name, func(t *testing.T) {
			pool := poolOf(c.template)
			before := pool.DeepCopy()
			c.want.Containers = pool.DeepCopy().Spec.Template.Spec.Containers
			require.Equal(t, sleeping(c.want), pods.Build(pool, "pool-1", pods.Settings{ServeOn: serveOn}).Spec)
			require.Equal(t, before, pool, "the pool was changed")
		})
	}
}

func TestBuildKeepsWhatTheTemplateSays(t *testing.T) {
	yes, class, profile := true, "gvisor", "profiles/sandbox.json"
	pool := poolOf(corev1.PodSpec{
		AutomountServiceAccountToken: &yes, EnableServiceLinks: &yes, RuntimeClassName: &class, ServiceAccountName: "somebody",
		SecurityContext: &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: &profile}},
	})
	require.Equal(t, sleeping(pool.DeepCopy().Spec.Template.Spec), pods.Build(pool, "pool-1", pods.Settings{ServeOn: serveOn}).Spec)
}

func TestBuildAddsLabelsAndOwnerToTheTemplate(t *testing.T) {
	pool := poolOf(corev1.PodSpec{})
	pool.Spec.Template.Metadata = v1alpha1.PodTemplateMetadata{
		Labels:      map[string]string{"app": "x", v1alpha1.LabelPhase: v1alpha1.PhaseClaimed, v1alpha1.LabelPool: "other", v1alpha1.LabelSandbox: "x"},
		Annotations: map[string]string{"note": "y", "berth.sh/anything": "x"},
	}
	before := pool.DeepCopy()
	p := pods.Build(pool, "pool-1", pods.Settings{ServeOn: serveOn})
	require.Equal(t, before, pool, "the pool was changed")
	require.Equal(t, "sandboxes", p.Namespace)
	require.Equal(t, "pool-1", p.Name)
	require.Equal(t, map[string]string{
		"app": "x", v1alpha1.LabelPool: "pool", v1alpha1.LabelPhase: v1alpha1.PhaseWarm, v1alpha1.LabelTemplate: pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}),
	}, p.Labels)
	require.Equal(t, map[string]string{"note": "y", v1alpha1.AnnotationMetadata: pods.Metadata(pool)}, p.Annotations)
	require.Regexp(t, "^[0-9a-f]{12};app;note$", pods.Metadata(pool))
	require.Len(t, p.OwnerReferences, 1)
	require.EqualValues(t, "pool-uid", p.OwnerReferences[0].UID)
}

func TestTemplateHashDependsOnTheTemplateAlone(t *testing.T) {
	pool := poolOf(corev1.PodSpec{})
	hash := pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn})
	pool.Spec.Warm, pool.Generation, pool.Name = 7, 3, "other"
	require.Equal(t, hash, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}))
	pool.Spec.Template.Metadata = v1alpha1.PodTemplateMetadata{
		Labels: map[string]string{"app": "x", "app.kubernetes.io/name": "x"}, Annotations: map[string]string{"example.com/notkubernetes.io": "x"},
	}
	require.Equal(t, hash, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}), "idle pods get these later on")
	for _, key := range []string{"kubernetes.io/x", "kubectl.kubernetes.io/restartedAt", "x.k8s.io/y"} {
		pool.Spec.Template.Metadata.Annotations = map[string]string{key: "x"}
		require.NotEqual(t, hash, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}), key)
		require.NotContains(t, pods.Metadata(pool), key)
	}
	pool = poolOf(corev1.PodSpec{HostPID: true})
	require.NotEqual(t, hash, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}))
	require.NotEqual(t, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}), pods.TemplateHash(pool, pods.Settings{ServeOn: 2 * serveOn}), "the sleep has changed")
	require.LessOrEqual(t, len(hash), 63, "it is a label's value")
}

// Pods made by an earlier version are replaced because the hash counts what Build
// makes: a change of that counts buildVersion up too, and changes both lines here.
func TestTemplateHashChangesWithServeOn(t *testing.T) {
	pool := poolOf(corev1.PodSpec{})
	made, err := json.Marshal(pods.Build(pool, "pool-1", pods.Settings{ServeOn: serveOn}).Spec)
	require.NoError(t, err)
	require.JSONEq(t, `{
		"automountServiceAccountToken": false, "enableServiceLinks": false, "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
		"terminationGracePeriodSeconds": 36,
		"containers": [{"name": "sandbox", "image": "none", "resources": {}, "lifecycle": {"preStop": {"sleep": {"seconds": 6}}}}]
	}`, string(made))
	require.Equal(t, "fb09abb9774a", pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}))
}
