package pods

import (
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func recyclingPool(change func(*v1alpha1.SandboxPoolSpec)) *v1alpha1.SandboxPool {
	pool := &v1alpha1.SandboxPool{Spec: v1alpha1.SandboxPoolSpec{
		Reuse: v1alpha1.ReuseRecycle,
		Template: v1alpha1.PodTemplate{Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{{Name: "prepare"}}, Containers: []corev1.Container{{Name: "sandbox"}},
		}},
	}}
	if change != nil {
		change(&pool.Spec)
	}
	return pool
}

// secondLife is a pod whose containers were all restarted after its first life, as a kubelet reports it.
func secondLife() *corev1.Pod {
	p := Build(recyclingPool(nil), "p", Settings{AgentImage: "agent"})
	p.UID, p.Generation = types.UID("uid"), 1
	p.Annotations[v1alpha1.AnnotationLife] = "1"
	p.Annotations[v1alpha1.AnnotationEnded] = "c://1,c://2,c://3,c://4"
	p.Status.PodIP, p.Status.Phase = "10.0.0.1", corev1.PodRunning
	at := metav1.NewTime(time.Unix(1000, 0))
	ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{FinishedAt: at, Message: "1"}}
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: at}}
	p.Status.InitContainerStatuses = []corev1.ContainerStatus{
		{Name: cleanName, ContainerID: "c://5", State: ended, Ready: true}, {Name: awaitName, ContainerID: "c://6", State: running, Ready: true},
		{Name: "prepare", ContainerID: "c://7", State: ended, Ready: true},
	}
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "sandbox", ContainerID: "c://8", State: running, Ready: true, RestartCount: 1}}
	p.Status.Conditions = []corev1.PodCondition{
		{Type: corev1.PodReady, Status: corev1.ConditionTrue}, {Type: corev1.AllContainersRestarting, Status: corev1.ConditionFalse},
	}
	return p
}

// Invariant: I3, I5
func TestOnlyRestartOfEveryContainerIsProof(t *testing.T) {
	init := func(p *corev1.Pod) []corev1.ContainerStatus { return p.Status.InitContainerStatuses }
	for name, change := range map[string]func(*corev1.Pod){
		"":                                     func(*corev1.Pod) {},
		"the container is that of the sandbox": func(p *corev1.Pod) { p.Status.ContainerStatuses[0].ContainerID = "c://4" },
		"the sidecar is":                       func(p *corev1.Pod) { init(p)[1].ContainerID = "c://2" },
		"an init container has not run again":  func(p *corev1.Pod) { init(p)[2].ContainerID = "c://3" },
		"a container is not there yet":         func(p *corev1.Pod) { p.Status.ContainerStatuses[0].ContainerID = "" },
		"it was not cleaned":                   func(p *corev1.Pod) { init(p)[0].State.Terminated.ExitCode = 1 },
		"it was cleaned for another life":      func(p *corev1.Pod) { init(p)[0].State.Terminated.Message = "0" },
		"another client begins a life":         func(p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationLife] = "2" },
		"it is being cleaned":                  func(p *corev1.Pod) { init(p)[0].State = corev1.ContainerState{} },
		"the kubelet is about to restart all":  func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionTrue },
		"the kubelet may be about to do so":    func(p *corev1.Pod) { p.Status.Conditions[1].Status = corev1.ConditionUnknown },
		"it has started before the pod was cleaned": func(p *corev1.Pod) {
			p.Status.ContainerStatuses[0].State.Running.StartedAt = metav1.NewTime(time.Unix(999, 0))
		},
		"the containers before are not known": func(p *corev1.Pod) { delete(p.Annotations, v1alpha1.AnnotationEnded) },
		"an ephemeral container was added": func(p *corev1.Pod) {
			p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			p := secondLife()
			change(p)
			for _, p := range []*corev1.Pod{p, slim(p)} {
				seen := observe(p, zap.NewNop())
				require.Equal(t, KeyOf(p), seen.Key)
				require.Equal(t, name == "", seen.Ready)
				require.Equal(t, name != "", seen.Recycling)
				require.True(t, seen.Recyclable)
			}
		})
	}
}

func TestFailureOfALaterLifeSaysWhy(t *testing.T) {
	for _, life := range []string{"0", "1"} {
		p := secondLife()
		p.Annotations[v1alpha1.AnnotationLife] = life
		p.Status.Conditions[0].Status = corev1.ConditionFalse
		p.Status.ContainerStatuses[0].Ready = false
		p.Status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
		seen := observe(slim(p), zap.NewNop())
		require.False(t, seen.Ready || seen.Recycling)
		require.Equal(t, core.PodCrashLoop, seen.Reason)
		require.Contains(t, seen.Why, "container sandbox: CrashLoopBackOff")
	}
}

func TestChangedPodCannotBeRecycled(t *testing.T) {
	p := secondLife()
	p.Generation = 2 // resized, another image, an ephemeral container
	require.False(t, observe(slim(p), zap.NewNop()).Recyclable)
	for _, life := range []string{"", "-1", "01", "x", "0"} { // the last one has gone back
		p := secondLife()
		p.Annotations[v1alpha1.AnnotationLife] = life
		seen := observe(slim(p), zap.NewNop())
		require.True(t, seen.Used)
		require.Equal(t, life == "0", seen.Recyclable)
	}
	p = secondLife()
	p.Annotations[v1alpha1.AnnotationMetadata] = "hash;app;"
	require.Equal(t, observe(p, zap.NewNop()), observe(slim(p), zap.NewNop()))
	require.Equal(t, "hash;app;", observe(slim(p), zap.NewNop()).Metadata)
	delete(p.Annotations, v1alpha1.AnnotationLife)
	require.True(t, observe(slim(p), zap.NewNop()).Used)
}

func TestTemplateThatKeepsStateIsNotRecycled(t *testing.T) {
	yes := true
	settings := Settings{AgentImage: "agent"}
	require.NoError(t, CheckRecycle(recyclingPool(nil), settings))
	require.ErrorIs(t, CheckRecycle(recyclingPool(nil), Settings{}), ErrRecycle)
	for words, change := range map[string]func(*v1alpha1.SandboxPoolSpec){
		"the volume data keeps": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
		},
		"is that of a volume of Berth": func(s *v1alpha1.SandboxPoolSpec) {
			s.AcceptVolumes = true
			s.Template.Spec.Volumes = []corev1.Volume{{Name: savedName}}
		},
		"is a volume of Berth": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: savedName}}
		},
		"other pods may mount the volume": func(s *v1alpha1.SandboxPoolSpec) {
			s.AcceptVolumes = true
			s.Template.Spec.Volumes = []corev1.Volume{{Name: "data", VolumeSource: corev1.VolumeSource{
				PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"},
			}}}
		},
		"containers[0].securityContext.procMount": func(s *v1alpha1.SandboxPoolSpec) {
			unmasked, no := corev1.UnmaskedProcMount, false
			s.Template.Spec.HostUsers = &no
			s.Template.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{ProcMount: &unmasked}
		},
		"spec.securityContext.seccompProfile": func(s *v1alpha1.SandboxPoolSpec) {
			own := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost}
			s.Template.Spec.SecurityContext = &corev1.PodSecurityContext{SeccompProfile: own}
		},
		"initContainers[0].securityContext.seccompProfile": func(s *v1alpha1.SandboxPoolSpec) {
			own := &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeLocalhost}
			s.Template.Spec.InitContainers[0].SecurityContext = &corev1.SecurityContext{SeccompProfile: own}
		},
		"shareProcessNamespace":        func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.ShareProcessNamespace = &yes },
		"automountServiceAccountToken": func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.AutomountServiceAccountToken = &yes },
		"runtimeClassName":             func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.RuntimeClassName = new(string) },
		"restartPolicy":                func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.RestartPolicy = corev1.RestartPolicyNever },
		"projected: the credential": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Volumes = []corev1.Volume{{Name: "token", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				Sources: []corev1.VolumeProjection{{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{}}},
			}}}}
		},
		"projected: the credential of a pod": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Volumes = []corev1.Volume{{Name: "certificate", VolumeSource: corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{
				Sources: []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{}}, {PodCertificate: &corev1.PodCertificateProjection{}}},
			}}}}
		},
		"devices are not cleaned: example.com/gpu": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Containers[0].Resources.Limits = corev1.ResourceList{"example.com/gpu": resource.MustParse("1")}
		},
		"resourceClaims: devices are not cleaned": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "gpu"}}
		},
		"containers[0].volumeDevices: devices are not cleaned": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Containers[0].VolumeDevices = []corev1.VolumeDevice{{Name: "disk"}}
		},
		"spec.os: only Linux": func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.OS = &corev1.PodOS{Name: corev1.Windows} },
		"spec.containers[0].restartPolicy": func(s *v1alpha1.SandboxPoolSpec) {
			never := corev1.ContainerRestartPolicyNever
			s.Template.Spec.Containers[0].RestartPolicy = &never
		},
		"berth-life is a volume of Berth": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: lifeVolume}}
		},
		agentName + " is a volume of Berth": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.InitContainers[0].VolumeMounts = []corev1.VolumeMount{{Name: agentName}}
		},
		"restartPolicyRules": func(s *v1alpha1.SandboxPoolSpec) {
			s.Template.Spec.InitContainers[0].RestartPolicyRules = []corev1.ContainerRestartRule{{}}
		},
		"is that of a container": func(s *v1alpha1.SandboxPoolSpec) { s.Template.Spec.InitContainers[0].Name = cleanName },
	} {
		require.ErrorContains(t, CheckRecycle(recyclingPool(change), settings), words)
	}
	require.NoError(t, CheckRecycle(recyclingPool(func(s *v1alpha1.SandboxPoolSpec) {
		s.AcceptVolumes = true
		s.Template.Spec.Volumes = []corev1.Volume{
			{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
			{Name: "own", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
		}
	}), settings))
}

func TestCleanerIsRootUnlessOneUserHasThePod(t *testing.T) {
	users := func(pod, init, main int64) func(*v1alpha1.SandboxPoolSpec) {
		return func(s *v1alpha1.SandboxPoolSpec) {
			if pod >= 0 {
				s.Template.Spec.SecurityContext = &corev1.PodSecurityContext{RunAsUser: &pod}
			}
			for c, user := range map[*corev1.Container]*int64{&s.Template.Spec.InitContainers[0]: &init, &s.Template.Spec.Containers[0]: &main} {
				if *user >= 0 {
					c.SecurityContext = &corev1.SecurityContext{RunAsUser: user}
				}
			}
		}
	}
	for name, c := range map[string]struct {
		change func(*v1alpha1.SandboxPoolSpec)
		user   int64
	}{
		"the images decide":  {nil, 0},
		"one for the pod":    {users(1000, -1, -1), 1000},
		"one for each":       {users(-1, 1000, 1000), 1000},
		"others in each":     {users(-1, 1000, 1001), 0},
		"root in one":        {users(1000, 0, -1), 0},
		"one image decides":  {users(-1, -1, 1000), 0},
		"the last decides":   {users(-1, 1000, -1), 0},
		"one is like others": {users(1000, -1, 1000), 1000},
	} {
		t.Run(name, func(t *testing.T) {
			p := Build(recyclingPool(c.change), "p", Settings{AgentImage: "agent"})
			clean := p.Spec.InitContainers[0].SecurityContext
			require.Equal(t, c.user, *clean.RunAsUser)
			require.Equal(t, c.user != 0, *clean.RunAsNonRoot)
			require.Contains(t, clean.Capabilities.Drop, corev1.Capability("ALL"))
			for _, c := range append(p.Spec.InitContainers[2:], p.Spec.Containers...) {
				require.Equal(t, []corev1.Capability{netRaw}, c.SecurityContext.Capabilities.Drop)
			}
		})
	}
}

func TestPodThatAdmissionHasChangedIsNotRecycled(t *testing.T) {
	build := func() *corev1.Pod { return Build(recyclingPool(nil), "p", Settings{AgentImage: "agent"}) }
	yes := true
	for name, change := range map[string]func(*corev1.Pod){
		"": func(p *corev1.Pod) {
			p.Annotations["other"], p.Spec.Containers[0].Image, p.Spec.NodeName = "x", "registry.example.com/x", "node"
		},
		"a container": func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "proxy"})
		},
		"an init container": func(p *corev1.Pod) {
			p.Spec.InitContainers = append([]corev1.Container{{Name: "first"}}, p.Spec.InitContainers...)
		},
		"another order": func(p *corev1.Pod) { slices.Reverse(p.Spec.InitContainers) },
		"a volume":      func(p *corev1.Pod) { p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "more"}) },
		"a mount":       func(p *corev1.Pod) { p.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: savedName}} },
		"privileges":    func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.Privileged = &yes },
		"a capability": func(p *corev1.Pod) {
			p.Spec.Containers[0].SecurityContext.Capabilities.Add = []corev1.Capability{netRaw}
		},
		"raw packets":          func(p *corev1.Pod) { p.Spec.Containers[0].SecurityContext.Capabilities.Drop = nil },
		"a runtime":            func(p *corev1.Pod) { p.Spec.RuntimeClassName = new(string) },
		"the node's network":   func(p *corev1.Pod) { p.Spec.HostNetwork = true },
		"the node's processes": func(p *corev1.Pod) { p.Spec.HostPID = true },
		"the node's IPC":       func(p *corev1.Pod) { p.Spec.HostIPC = true },
		"one PID space":        func(p *corev1.Pod) { p.Spec.ShareProcessNamespace = &yes },
		"another version":      func(p *corev1.Pod) { p.Labels[v1alpha1.LabelTemplate] = "other" },
	} {
		t.Run(name, func(t *testing.T) {
			p := build()
			change(p)
			require.Equal(t, name == "", asBuilt(p, build()))
		})
	}
	old := build()
	old.Spec.InitContainers[1].RestartPolicyRules = nil // an API server that does not know the rule
	seen := observe(old, zap.NewNop())
	require.False(t, seen.Recyclable || seen.Recycling || seen.Used)
	require.Equal(t, seen.Key.Whole(), seen.Key)
}
