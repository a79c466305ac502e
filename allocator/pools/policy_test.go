package pools_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

func policy(t *testing.T, name string) pools.Policy {
	t.Helper()
	p, err := pools.NewPolicy(name)
	require.NoError(t, err)
	return p
}

func yes() *bool { v := true; return &v }
func no() *bool  { v := false; return &v }

// container is one that asks for something.
func container(name string, of corev1.Container) corev1.Container {
	of.Name, of.Image = name, "none"
	return of
}

func privileged() *corev1.SecurityContext { return &corev1.SecurityContext{Privileged: yes()} }

// projected adds a projected volume of one source.
func projected(p *v1alpha1.SandboxPool, source corev1.VolumeProjection) {
	p.Spec.Template.Spec.Volumes = append(p.Spec.Template.Spec.Volumes, corev1.Volume{
		Name: "credentials", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
			{DownwardAPI: &corev1.DownwardAPIProjection{}}, source,
		}}},
	})
}

// tooMuch is what templates may not ask for, and the words that name it.
func tooMuch() map[string]struct {
	ask  func(*v1alpha1.SandboxPool, *corev1.PodSpec)
	says []string
} {
	type pool = v1alpha1.SandboxPool
	type spec = corev1.PodSpec
	unconfined := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeUnconfined}
	return map[string]struct {
		ask  func(*pool, *spec)
		says []string
	}{
		"hostNetwork": {func(_ *pool, s *spec) { s.HostNetwork = true }, []string{"host namespaces", "hostNetwork=true"}},
		"hostPID":     {func(_ *pool, s *spec) { s.HostPID = true }, []string{"host namespaces", "hostPID=true"}},
		"hostIPC":     {func(_ *pool, s *spec) { s.HostIPC = true }, []string{"host namespaces", "hostIPC=true"}},
		"hostPort": {func(_ *pool, s *spec) {
			s.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 80, HostPort: 8443}}
		}, []string{"hostPort", "8443", `"sandbox"`}},
		"privileged container": {func(_ *pool, s *spec) { s.Containers[0].SecurityContext = privileged() }, []string{"privileged", `"sandbox"`}},
		"privileged second container": {func(_ *pool, s *spec) {
			s.Containers = append(s.Containers, container("helper", corev1.Container{SecurityContext: privileged()}))
		}, []string{"privileged", `"helper"`}},
		"privileged init container": {func(_ *pool, s *spec) {
			s.InitContainers = []corev1.Container{container("first", corev1.Container{SecurityContext: privileged()})}
		}, []string{"privileged", `"first"`}},
		"privileged ephemeral container": {func(_ *pool, s *spec) {
			s.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "debug", SecurityContext: privileged()}}}
		}, []string{"privileged", `"debug"`}},
		"hostPath": {func(_ *pool, s *spec) {
			s.Volumes = []corev1.Volume{{Name: "node", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/"}}}}
		}, []string{"hostPath volumes", `"node"`}},
		"added capability": {func(_ *pool, s *spec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"SYS_ADMIN"}}}
		}, []string{"capabilities", "SYS_ADMIN", `"sandbox"`}},
		"unconfined seccomp of the pod": {func(_ *pool, s *spec) {
			s.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: unconfined}
		}, []string{"seccompProfile", "Unconfined"}},
		"unconfined seccomp of a container": {func(_ *pool, s *spec) {
			s.Containers[0].SecurityContext = &corev1.SecurityContext{SeccompProfile: unconfined}
		}, []string{"seccompProfile", "Unconfined", `"sandbox"`}},
		"unconfined AppArmor, by the annotation of old": {func(p *pool, _ *spec) {
			p.Spec.Template.Metadata.Annotations = map[string]string{"container.apparmor.security.beta.kubernetes.io/sandbox": "unconfined"}
		}, []string{"apparmor", "unconfined"}},
		"unmasked /proc": {func(_ *pool, s *spec) {
			unmasked := corev1.UnmaskedProcMount
			s.Containers[0].SecurityContext = &corev1.SecurityContext{ProcMount: &unmasked}
		}, []string{"procMount", `"sandbox"`}},
		"a sysctl that is not safe": {func(_ *pool, s *spec) {
			s.SecurityContext = &corev1.PodSecurityContext{Sysctls: []corev1.Sysctl{{Name: "kernel.msgmax", Value: "1"}}}
		}, []string{"sysctls", "kernel.msgmax"}},
		"the host of a Windows node": {func(_ *pool, s *spec) {
			s.OS = &corev1.PodOS{Name: corev1.Windows}
			s.SecurityContext = &corev1.PodSecurityContext{WindowsOptions: &corev1.WindowsSecurityContextOptions{HostProcess: yes()}}
		}, []string{"hostProcess"}},
		// The kubelet sends probes: they would reach what a sandbox must not.
		"a probe of another host": {func(_ *pool, s *spec) {
			s.Containers[0].ReadinessProbe.HTTPGet = &corev1.HTTPGetAction{Host: "169.254.169.254", Port: intstr.FromInt32(80)}
		}, []string{"probe", "169.254.169.254", `"sandbox"`}},
		"automountServiceAccountToken": {func(_ *pool, s *spec) { s.AutomountServiceAccountToken = yes() }, []string{"service account token", "automountServiceAccountToken"}},
		"projected token": {func(p *pool, _ *spec) {
			projected(p, corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}})
		}, []string{"service account token", `"credentials"`}},
		"projected pod certificate": {func(p *pool, _ *spec) {
			projected(p, corev1.VolumeProjection{PodCertificate: &corev1.PodCertificateProjection{SignerName: "kubernetes.io/kube-apiserver-client-pod", KeyType: "ED25519"}})
		}, []string{"pod certificate", `"credentials"`}},
	}
}

func TestRefusedTemplateFieldIsNamed(t *testing.T) {
	for name, c := range tooMuch() {
		t.Run(name, func(t *testing.T) {
			pool := stack.DemoPool("default", "pool", 1)
			c.ask(pool, &pool.Spec.Template.Spec)
			before := pool.DeepCopy()
			err := policy(t, pools.PolicyBaseline).Check(pool)
			require.ErrorContains(t, err, "spec.template: ")
			require.ErrorContains(t, err, "--pod-security=privileged", "what to do about it")
			for _, says := range c.says {
				require.ErrorContains(t, err, says)
			}
			require.NoError(t, policy(t, pools.PolicyPrivileged).Check(pool))
			require.Equal(t, before, pool, "the pool was changed")
		})
	}
}

// Not a matter of security: no policy lets it pass.
func TestEveryPolicyRefusesPreStopActionsButSleep(t *testing.T) {
	pool := stack.DemoPool("default", "pool", 1)
	container := &pool.Spec.Template.Spec.Containers[0]
	container.Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"true"}}}}
	for _, name := range []string{pools.PolicyBaseline, pools.PolicyPrivileged} {
		err := policy(t, name).Check(pool)
		require.ErrorIs(t, err, pods.ErrPreStop)
		require.ErrorContains(t, err, "spec.template.spec.containers[0].lifecycle.preStop.exec: ")
		require.NotContains(t, err.Error(), "--pod-security", "no way out")
	}
	container.SecurityContext = privileged()
	err := policy(t, pools.PolicyBaseline).Check(pool)
	require.ErrorContains(t, err, "preStop.exec", "both are named")
	require.ErrorContains(t, err, "privileged")
	container.SecurityContext, container.Lifecycle.PreStop = nil, &corev1.LifecycleHandler{Sleep: &corev1.SleepAction{Seconds: 1}}
	require.NoError(t, policy(t, pools.PolicyBaseline).Check(pool))
}

func TestOneErrorNamesEveryRefusedField(t *testing.T) {
	pool := stack.DemoPool("default", "pool", 1)
	spec := &pool.Spec.Template.Spec
	spec.HostPID, spec.AutomountServiceAccountToken = true, yes()
	spec.Containers[0].SecurityContext = privileged()
	projected(pool, corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}})
	err := policy(t, pools.PolicyBaseline).Check(pool)
	for _, says := range []string{"hostPID", "privileged", "automountServiceAccountToken", `"credentials"`} {
		require.ErrorContains(t, err, says)
	}
}

func TestOrdinaryTemplatesAreAccepted(t *testing.T) {
	for name, ask := range map[string]func(*corev1.PodSpec){
		"the demo's": func(*corev1.PodSpec) {},
		"one of the standard Restricted": func(s *corev1.PodSpec) {
			user := int64(65532)
			s.ServiceAccountName, s.AutomountServiceAccountToken = "berth-sandbox", no()
			s.SecurityContext = &corev1.PodSecurityContext{
				RunAsNonRoot: yes(), RunAsUser: &user, SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
			}
			s.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080}}
			s.Containers[0].SecurityContext = &corev1.SecurityContext{
				AllowPrivilegeEscalation: no(), ReadOnlyRootFilesystem: yes(), Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
			}
			s.Volumes = []corev1.Volume{{Name: "tmp", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		},
		"root, and a default capability": func(s *corev1.PodSpec) {
			root := int64(0)
			s.Containers[0].SecurityContext = &corev1.SecurityContext{RunAsUser: &root, Capabilities: &corev1.Capabilities{Add: []corev1.Capability{"CHOWN"}}}
		},
		"a runtime class": func(s *corev1.PodSpec) { name := "gvisor"; s.RuntimeClassName = &name },
		"a profile of the operator's": func(s *corev1.PodSpec) {
			profile := "profiles/sandbox.json"
			s.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost, LocalhostProfile: &profile}}
		},
		"no credential among what is projected": func(s *corev1.PodSpec) {
			s.Volumes = []corev1.Volume{{Name: "about", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{
				{DownwardAPI: &corev1.DownwardAPIProjection{}}, {ConfigMap: &corev1.ConfigMapProjection{}},
			}}}}}
		},
		"Windows": func(s *corev1.PodSpec) { s.OS = &corev1.PodOS{Name: corev1.Windows} },
	} {
		t.Run(name, func(t *testing.T) {
			pool := stack.DemoPool("default", "pool", 1)
			ask(&pool.Spec.Template.Spec)
			require.NoError(t, policy(t, pools.PolicyBaseline).Check(pool))
			require.NoError(t, policy(t, pools.PolicyPrivileged).Check(pool))
		})
	}
}

// What is judged is the pod that is made: a template that leaves everything open
// is safe because of what Build fills in.
func TestPodsOfAcceptedTemplatesHaveSeccompAndNoToken(t *testing.T) {
	pool := stack.DemoPool("default", "pool", 1)
	require.NoError(t, policy(t, pools.PolicyBaseline).Check(pool))
	made := pods.Build(pool, "pool-1", pods.Settings{ServeOn: time.Second})
	require.False(t, *made.Spec.AutomountServiceAccountToken)
	require.Equal(t, corev1.SeccompProfileTypeRuntimeDefault, made.Spec.SecurityContext.SeccompProfile.Type)
}

func TestZeroPolicyRefusesEveryPool(t *testing.T) {
	for _, name := range []string{"", "Baseline", "restricted", "none"} {
		_, err := pools.NewPolicy(name)
		require.ErrorContains(t, err, "baseline or privileged", name)
	}
	require.Error(t, pools.Policy{}.Check(stack.DemoPool("default", "pool", 1)), "the zero Policy")
}

// Invariant: P14
func TestPoolsMayNotBypassSchedulerOrSystemPriority(t *testing.T) {
	type spec = corev1.PodSpec
	high := int32(2_000_000_000)
	for want, change := range map[string]func(*spec){
		"spec.nodeName":            func(s *spec) { s.NodeName = "node-1" },
		"spec.priorityClassName":   func(s *spec) { s.PriorityClassName = "system-cluster-critical" },
		"\"system-node-critical\"": func(s *spec) { s.PriorityClassName = "system-node-critical" },
		"spec.priority must":       func(s *spec) { s.Priority = &high },
		"spec.tolerations[1] must": func(s *spec) {
			s.Tolerations = []corev1.Toleration{{Key: "sandboxes", Operator: corev1.TolerationOpExists}, {Operator: corev1.TolerationOpExists}}
		},
		"spec.tolerations[0].key": func(s *spec) {
			s.Tolerations = []corev1.Toleration{{Key: "node-role.kubernetes.io/control-plane", Operator: corev1.TolerationOpExists}}
		},
		"": func(s *spec) { // what an operator may offer
			s.PriorityClassName, s.SchedulerName = "sandboxes", "another-scheduler"
			s.NodeSelector = map[string]string{"sandboxes": "yes"}
			s.Tolerations = []corev1.Toleration{{Key: "sandboxes", Operator: corev1.TolerationOpExists}}
		},
	} {
		t.Run(want, func(t *testing.T) {
			pool := stack.DemoPool("default", "python", 1)
			change(&pool.Spec.Template.Spec)
			err := policy(t, pools.PolicyBaseline).Check(pool)
			require.NoError(t, policy(t, pools.PolicyPrivileged).Check(pool))
			if want == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, want)
		})
	}
}
