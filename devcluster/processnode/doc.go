// Package processnode is a Kubernetes node without containers: it registers a
// Node object and runs the commands of the pods bound to it as local processes,
// each pod on an address of its own in 127.0.0.0/8, and reports about them as a
// kubelet 1.36 with containerd would.
//
// # What holds
//
//   - Who watches the API server cannot tell it from a kubelet by order, states,
//     reasons and counts of what is imitated. The conformance package is the
//     judge; it runs unchanged on a real kubelet.
//   - A pod's address is free again when no process of the pod is left, and then
//     at once: it goes to the next pod, while the old pod's object may still be
//     there and name it. Pods that ended keep their object and lose their address.
//   - Nothing that cannot be imitated is left out silently: the pod is Failed,
//     reason ProcessNodeUnsupported, and the message names the fields.
//   - Containers never outlive this process (package proc).
//
// # What is imitated
//
// Pod phases and conditions; container states with restart counts and exit
// codes; init containers one after the other; restart policies and the crash
// back-off; readiness, liveness and startup probes (httpGet, tcpSocket, exec);
// preStop hooks (sleep, exec, httpGet) inside the grace period; SIGTERM, rest of
// the grace period, SIGKILL; graceful and forced deletion; eviction through the
// API and, by Node.Evict, under node pressure; activeDeadlineSeconds; the
// environment with $(VAR) and fieldRef; a restarted node, which finds its pods'
// containers dead, starts them again and gives them new addresses.
//
// RunScheduler binds pods where no kube-scheduler runs.
//
// # What is not
//
//   - No image is run. A container must name its command; a command without a
//     slash is looked up in Options.Path and then in this process's PATH.
//     Containers without one wait with CreateContainerConfigError.
//   - No isolation. Processes share this machine's files, users, process table
//     and network; they reach each other's addresses and could bind them. A
//     server that listens on all addresses takes the port from every other pod.
//     securityContext, resources, ports and the service account are ignored.
//   - emptyDir volumes and service account tokens are accepted and not mounted.
//     A container's working directory is its own and empty at each start;
//     workingDir counts only if that directory exists here.
//   - Sidecars, ephemeral containers, postStart hooks, gRPC probes, other
//     volumes, host namespaces and ports, envFrom, variables from Secrets and
//     ConfigMaps: refused.
//   - No events, no logs through the API, no exec, no port-forward, no
//     termination messages, no image pulls and their states.
//   - Liveness kills hold up only their own container here, not its neighbours'
//     restarts too.
//   - A deletion grace period that is shortened later is honoured at once. A
//     kubelet 1.36 finishes the stop that is under way first, so there a
//     container may run on long after a forced deletion removed its pod.
//
// # What breaks it
//
// A process that leaves its process group (setsid) is not stopped with its pod
// and may keep the address busy. Two nodes whose Addresses overlap hand out the
// same address twice. Stopping the node is a power cut for its pods: what they
// had running is found dead (exit code 255, reason Unknown) by the next run.
package processnode
