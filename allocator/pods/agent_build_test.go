package pods_test

import (
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func withAgent() pods.Settings {
	return pods.Settings{ServeOn: serveOn, AgentImage: "berth/agent:1", AgentKey: "public-key"}
}

// agentPool is a pool with an agent and one container, which edit may change.
func agentPool(edit func(*v1alpha1.SandboxPoolSpec, *corev1.Container)) *v1alpha1.SandboxPool {
	pool := poolOf(corev1.PodSpec{})
	pool.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: 49983}
	if edit != nil {
		edit(&pool.Spec, &pool.Spec.Template.Spec.Containers[0])
	}
	return pool
}

func TestAgentIsRefusedWithTheFieldAndTheReason(t *testing.T) {
	const first = "spec.template.spec.containers[0]"
	for want, c := range map[string]struct {
		edit     func(*v1alpha1.SandboxPoolSpec, *corev1.Container)
		settings func(*pods.Settings)
	}{
		"spec.agent: the allocators have no key for it; start them with --access-key-file": {
			settings: func(s *pods.Settings) { s.AgentKey = "" }},
		"spec.agent.image: must be set, because the allocators have no --agent-image": {
			settings: func(s *pods.Settings) { s.AgentImage = "" }},
		"spec.template.spec.os: the agent runs on Linux only": {
			edit: func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) {
				s.Template.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
			}},
		"spec.template.spec.volumes[1].name: berth-agent is that of the agent's volume": {
			edit: func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) {
				s.Template.Spec.Volumes = []corev1.Volume{{Name: "a"}, {Name: "berth-agent"}}
			}},
		"spec.template.spec.initContainers[0].name: berth-agent is that of the agent's": {
			edit: func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) {
				s.Template.Spec.InitContainers = []corev1.Container{{Name: "berth-agent"}}
			}},
		first + ".args: the agent cannot start the entrypoint of the image, because it is not known; " +
			"set command, or remove args to run the agent alone": {
			edit: func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) { c.Args = []string{"--serve"} }},
		first + ".volumeMounts[0].mountPath: /berth is the agent's": {
			edit: func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
				c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/x/../berth/"}}
			}},
		first + ".volumeMounts[1].mountPath: /berth is the agent's": {
			edit: func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
				c.VolumeMounts = []corev1.VolumeMount{{MountPath: "/berths"}, {MountPath: "/berth/data"}}
			}},
		first + ".env[0]: BERTH_ALLOCATOR_KEY is the agent's": {
			edit: func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
				c.Env = []corev1.EnvVar{{Name: initbox.PublicKeyEnv}}
			}},
	} {
		t.Run(want, func(t *testing.T) {
			pool, settings := agentPool(c.edit), withAgent()
			if c.settings != nil {
				c.settings(&settings)
			}
			err := pods.CheckAgent(pool, settings)
			require.ErrorIs(t, err, pods.ErrAgent)
			require.EqualError(t, err, pods.ErrAgent.Error()+": "+want)
			pool.Spec.Agent.Enabled = false
			require.NoError(t, pods.CheckAgent(pool, settings), "a pool without an agent")
		})
	}
	require.NoError(t, pods.CheckAgent(agentPool(nil), withAgent()))
	own := agentPool(func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) { s.Agent.Image = "own/agent:2" })
	require.NoError(t, pods.CheckAgent(own, pods.Settings{AgentKey: "public-key"}))
}

func TestEveryRefusalOfTheAgentIsListed(t *testing.T) {
	pool := agentPool(func(s *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
		s.Template.Spec.Volumes = []corev1.Volume{{Name: "berth-agent"}}
		c.Args = []string{"--serve"}
	})
	err := pods.CheckAgent(pool, pods.Settings{})
	for _, want := range []string{"--access-key-file", "spec.agent.image", "volumes[0]", "containers[0].args"} {
		require.ErrorContains(t, err, want)
	}
}

func TestAgentBecomesTheCommandOfTheFirstContainer(t *testing.T) {
	limits := corev1.ResourceRequirements{Limits: corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("64Mi")}}
	user, readOnly := int64(65532), true
	pool := agentPool(func(s *v1alpha1.SandboxPoolSpec, c *corev1.Container) {
		s.Agent.Port = 5000
		s.Template.Spec.InitContainers = []corev1.Container{{Name: "own"}}
		c.Command, c.Args, c.ImagePullPolicy = []string{"serve", "-v"}, []string{"8080"}, corev1.PullAlways
		c.Resources, c.SecurityContext = limits, &corev1.SecurityContext{RunAsUser: &user, ReadOnlyRootFilesystem: &readOnly}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"}}
		s.Template.Spec.Containers = []corev1.Container{*c, {Name: "sidecar"}}
	})
	before := pool.DeepCopy()
	spec := pods.Build(pool, "x", withAgent()).Spec
	require.Equal(t, before, pool, "the template is not changed")

	require.Len(t, spec.InitContainers, 2)
	install, first := spec.InitContainers[0], spec.Containers[0]
	require.Equal(t, corev1.Container{
		Name: "berth-agent", Image: "berth/agent:1", Command: []string{"agent", "install", "/berth"},
		Resources: limits, SecurityContext: first.SecurityContext,
		VolumeMounts: []corev1.VolumeMount{{Name: "berth-agent", MountPath: "/berth"}},
	}, install, "its pull policy is the default, because that of the first container is about another image")
	require.Equal(t, []corev1.Volume{{Name: "berth-agent",
		VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}, spec.Volumes)

	require.Equal(t, []string{"/berth/berth-agent", "run", "--listen=:5000", "--", "serve", "-v"}, first.Command)
	require.Equal(t, []string{"8080"}, first.Args)
	require.Equal(t, []corev1.VolumeMount{{Name: "tmp", MountPath: "/tmp"},
		{Name: "berth-agent", MountPath: "/berth", ReadOnly: true}}, first.VolumeMounts)
	require.Equal(t, []corev1.EnvVar{{Name: initbox.PublicKeyEnv, Value: "public-key"}}, first.Env)
	require.Empty(t, spec.Containers[1].VolumeMounts, "the agent is in the first container only")

	pool.Spec.Template.Spec.Containers[0].Command, pool.Spec.Template.Spec.Containers[0].Args = nil, nil
	pool.Spec.Agent.Image, pool.Spec.Agent.NewFiles = "own/agent:2", v1alpha1.NewFilesAnywhere
	spec = pods.Build(pool, "x", withAgent()).Spec
	require.Equal(t, "own/agent:2", spec.InitContainers[0].Image)
	require.Equal(t, []string{"/berth/berth-agent", "run", "--listen=:5000", "--new-files=Anywhere"}, spec.Containers[0].Command,
		"the agent alone")
}

func TestReadinessProbeOfTheTemplateWinsOverTheAgents(t *testing.T) {
	probe := pods.Build(agentPool(nil), "x", withAgent()).Spec.Containers[0].ReadinessProbe
	require.Equal(t, &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(49983)}, probe.HTTPGet)
	require.EqualValues(t, 1, probe.PeriodSeconds)
	own := &corev1.Probe{ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(80)}}}
	pool := agentPool(func(_ *v1alpha1.SandboxPoolSpec, c *corev1.Container) { c.ReadinessProbe = own })
	require.Equal(t, own, pods.Build(pool, "x", withAgent()).Spec.Containers[0].ReadinessProbe)
}

func TestIdlePodsAreReplacedWhenTheAgentChanges(t *testing.T) {
	hash := func(edit func(*v1alpha1.SandboxPoolSpec, *pods.Settings)) string {
		pool, settings := agentPool(nil), withAgent()
		if edit != nil {
			edit(&pool.Spec, &settings)
		}
		return pods.TemplateHash(pool, settings)
	}
	seen := map[string]string{hash(nil): "as it is"}
	require.Contains(t, seen, hash(func(s *v1alpha1.SandboxPoolSpec, _ *pods.Settings) { s.Agent.NewFiles = v1alpha1.NewFilesUserRights }),
		"pods of before the field stay")
	for what, edit := range map[string]func(*v1alpha1.SandboxPoolSpec, *pods.Settings){
		"off":        func(s *v1alpha1.SandboxPoolSpec, _ *pods.Settings) { s.Agent.Enabled = false },
		"port":       func(s *v1alpha1.SandboxPoolSpec, _ *pods.Settings) { s.Agent.Port = 1 },
		"new files":  func(s *v1alpha1.SandboxPoolSpec, _ *pods.Settings) { s.Agent.NewFiles = v1alpha1.NewFilesAnywhere },
		"own image":  func(s *v1alpha1.SandboxPoolSpec, _ *pods.Settings) { s.Agent.Image = "own" },
		"image":      func(_ *v1alpha1.SandboxPoolSpec, s *pods.Settings) { s.AgentImage = "berth/agent:2" },
		"public key": func(_ *v1alpha1.SandboxPoolSpec, s *pods.Settings) { s.AgentKey = "another" },
	} {
		h := hash(edit)
		require.Empty(t, seen[h], what)
		seen[h] = what
	}
	pool := agentPool(func(s *v1alpha1.SandboxPoolSpec, _ *corev1.Container) { s.Agent = nil })
	require.Equal(t, pods.TemplateHash(pool, pods.Settings{ServeOn: serveOn}), pods.TemplateHash(pool, withAgent()),
		"pods without an agent stay")
}

// The restricted standard allows the pod with the agent if it allows the pod without one.
func TestRestrictedNamespaceAcceptsPodsWithAgents(t *testing.T) {
	f := setUp(t)
	namespace, err := f.clients.Kubernetes.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
		GenerateName: "restricted-", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "restricted"},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
	yes, no, user := true, false, int64(65532)
	strict := &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
		Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
	inPod := &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &user}
	inContainer := strict.DeepCopy()
	inContainer.RunAsNonRoot, inContainer.RunAsUser = &yes, &user
	for name, c := range map[string]struct {
		pod       *corev1.PodSecurityContext
		container *corev1.SecurityContext
		refused   string
	}{
		"user of the pod":       {pod: inPod, container: strict},
		"user of the container": {container: inContainer},
		"no context":            {refused: `violates PodSecurity "restricted:latest"`}, // else this test would show nothing
	} {
		t.Run(name, func(t *testing.T) {
			pool := agentPool(func(s *v1alpha1.SandboxPoolSpec, container *corev1.Container) {
				s.Template.Spec.SecurityContext, container.SecurityContext = c.pod, c.container
			})
			pool.Namespace, pool.UID = namespace.Name, "pool-uid"
			_, err := f.clients.Kubernetes.CoreV1().Pods(pool.Namespace).Create(t.Context(), pods.Build(pool, "x", withAgent()),
				metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
			if c.refused == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.refused)
			}
		})
	}
}
