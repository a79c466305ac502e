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
// API and, by Node.Evict, under node pressure; activeDeadlineSeconds; readiness
// gates; the environment with $(VAR) and fieldRef; a restarted node, which finds
// its pods' containers dead, starts them again and gives them new addresses; by
// Node.LoseSandbox, a pod that moves to another address while it lives.
//
// A kubelet is deaf while it stops containers of a pod, and so is a process node:
// a stop under way is never cut short, neither by a shorter grace period nor by a
// forced deletion, which takes the object away and leaves the containers at work;
// and a deletion waits for a liveness kill, after which the killed container is
// started once more.
//
// RunScheduler binds pods where no kube-scheduler runs.
//
// # What is not
//
//   - No image is run. A container must name its command; a command without a
//     slash is looked up in Options.Path and then in this process's PATH.
//     Containers without one wait with CreateContainerConfigError.
//   - A command is not process 1 of anything, so SIGTERM ends it unless it takes
//     care of the signal (exit code 143). In a container it would live on to the
//     end of its grace period (137).
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
//   - Nobody watches the nodes: a cluster's node controller calls the pods of a
//     silent node not ready after some 40 s (Ready alone, not ContainersReady),
//     and deletes them after some minutes. Here they stay as they are.
//   - Starts take milliseconds, not tenths of a second, and never fail for the
//     machine's sake. A runtime under load fails one now and then (StartError,
//     exit code 128), and the container is started again.
//
// # What breaks it
//
// A process that leaves its process group (setsid) is not stopped with its pod
// and may keep the address busy. Two nodes whose Addresses overlap hand out the
// same address twice. Stopping the node is a power cut for its pods: what they
// had running is found dead (exit code 255, reason Unknown) by the next run.
package processnode
