package processnode

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// The agent of Berth, as allocator/pods puts it into a pod. A process node has no volumes, so it does not run
// the init container that copies the program, and looks the program up under the name that it has in its
// image.
const (
	agentName    = "agent"
	agentDir     = "/berth"
	agentProgram = agentDir + "/berth-agent"
	agentListen  = "--listen=:"
)

// installsAgent reports whether an init container only copies the agent to where the pod starts it.
func installsAgent(c *corev1.Container) bool {
	return slices.Equal(c.Command, []string{agentName, "install", agentDir}) && len(c.Args) == 0
}

// commandOf returns the command line of a container. Pods share the ports of this machine, so an agent that
// would listen on all addresses listens on that of its pod.
func commandOf(c *corev1.Container, address netip.Addr) []string {
	command := slices.Concat(c.Command, c.Args)
	if command[0] != agentProgram {
		return command
	}
	command[0] = agentName
	for i, arg := range command {
		if port, ok := strings.CutPrefix(arg, agentListen); ok {
			command[i] = fmt.Sprintf("--listen=%s:%s", address, port)
			break
		}
	}
	return command
}
