package pods

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// The agent in a pod: an init container copies its program into a volume, which the first container
// mounts, and whose command the agent becomes.
const (
	agentName     = "berth-agent" // of the installed program, the volume and the init container
	agentInImage  = "agent"       // the program in its image
	agentDir      = "/berth"
	agentProgram  = agentDir + "/" + agentName
	agentListen   = "--listen=:"
	agentNewFiles = "--new-files="
)

// CheckAgent returns nil, or an error that wraps ErrAgent and lists what keeps the agent out of the pods of a
// pool that asks for one.
func CheckAgent(pool *v1alpha1.SandboxPool, settings Settings) error {
	a := pool.Spec.AgentEnabled()
	if a == nil {
		return nil
	}
	var refused []string
	refuse := func(is bool, format string, args ...any) {
		if is {
			refused = append(refused, fmt.Sprintf(format, args...))
		}
	}
	spec := &pool.Spec.Template.Spec
	refuse(settings.AgentKey == "", "spec.agent: the allocators have no key for it; start them with --access-key-file")
	refuse(a.Image == "" && settings.AgentImage == "",
		"spec.agent.image: must be set, because the allocators have no --agent-image")
	refuse(spec.OS != nil && spec.OS.Name != corev1.Linux, "spec.template.spec.os: the agent runs on Linux only")
	for i, v := range spec.Volumes {
		refuse(v.Name == agentName, "spec.template.spec.volumes[%d].name: %s is that of the agent's volume", i, v.Name)
	}
	for i, c := range spec.InitContainers {
		refuse(c.Name == agentName, "spec.template.spec.initContainers[%d].name: %s is that of the agent's", i, c.Name)
	}
	if len(spec.Containers) > 0 { // the API server refuses a pod without one
		const at = "spec.template.spec.containers[0]"
		c := &spec.Containers[0]
		refuse(len(c.Command) == 0 && len(c.Args) > 0, at+".args: the agent cannot start the entrypoint of the image, "+
			"because it is not known; set command, or remove args to run the agent alone")
		for i, m := range c.VolumeMounts {
			below := path.Clean(m.MountPath)
			refuse(below == agentDir || strings.HasPrefix(below, agentDir+"/"),
				at+".volumeMounts[%d].mountPath: %s is the agent's", i, agentDir)
		}
		for i, e := range c.Env {
			refuse(e.Name == initbox.PublicKeyEnv || e.Name == egressEnv, at+".env[%d]: %s is the agent's", i, e.Name)
		}
	}
	if len(refused) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrAgent, strings.Join(refused, "; "))
}

// ErrAgent is wrapped by the errors of CheckAgent.
var ErrAgent = errors.New("no room for the agent")

// agentImage is the image that has the agent's program.
func agentImage(pool *v1alpha1.SandboxPool, settings Settings) string {
	if a := pool.Spec.AgentEnabled(); a != nil && a.Image != "" {
		return a.Image
	}
	return settings.AgentImage
}

// addAgent puts the agent into a pod. The init container has the resources and the security context of the
// first container: so it needs no more than the pod does, and a namespace that accepts one accepts the
// other.
func addAgent(spec *corev1.PodSpec, a *v1alpha1.PoolAgent, image string, settings Settings) {
	if len(spec.Containers) == 0 {
		return // the API server refuses such a pod
	}
	c := &spec.Containers[0]
	mount := corev1.VolumeMount{Name: agentName, MountPath: agentDir}
	spec.Volumes = append(spec.Volumes, corev1.Volume{
		Name: agentName, VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}},
	})
	// It is the first, so that init containers of the template find the agent installed.
	spec.InitContainers = slices.Insert(spec.InitContainers, 0, corev1.Container{
		Name: agentName, Image: image, Command: []string{agentInImage, "install", agentDir},
		Resources: *c.Resources.DeepCopy(), SecurityContext: c.SecurityContext.DeepCopy(), VolumeMounts: []corev1.VolumeMount{mount},
	})
	mount.ReadOnly = true
	c.VolumeMounts = append(c.VolumeMounts, mount)
	c.Env = append(c.Env, corev1.EnvVar{Name: initbox.PublicKeyEnv, Value: settings.AgentKey})
	run := []string{agentProgram, "run", agentListen + strconv.Itoa(int(a.Port))}
	if a.NewFiles == v1alpha1.NewFilesAnywhere {
		run = append(run, agentNewFiles+string(a.NewFiles))
	}
	if len(c.Command) > 0 {
		run = append(append(run, "--"), c.Command...)
	}
	c.Command = run
	if c.ReadinessProbe == nil {
		c.ReadinessProbe = &corev1.Probe{
			ProbeHandler:  corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/health", Port: intstr.FromInt32(a.Port)}},
			PeriodSeconds: 1,
		}
	}
}

// agentPort returns the port of the agent in a pod, 0: it has none. The pod says it in the command of its first
// container, which cannot be changed. The pool may ask for another agent by now.
func agentPort(p *corev1.Pod) uint16 {
	if len(p.Spec.Containers) == 0 {
		return 0
	}
	run := p.Spec.Containers[0].Command
	if len(run) < 3 || run[0] != agentProgram {
		return 0
	}
	port, err := strconv.ParseUint(strings.TrimPrefix(run[2], agentListen), 10, 16)
	if err != nil {
		return 0
	}
	return uint16(port)
}
