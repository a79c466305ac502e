// Package processnode is a Kubernetes node without containers. It registers a Node
// object and runs the command of each pod bound to it as a local process. Each pod has
// an address of its own in 127.0.0.0/8. The node reports the pods' status as a kubelet
// 1.36 with containerd would.
//
// # Guarantees
//
//   - A client of the API server cannot tell a process node from a kubelet by the
//     order, the states, the reasons and the counts of the supported fields. Package
//     conformance judges that. It runs unchanged on a real kubelet.
//   - A pod's address becomes free when no process of the pod is left. It then goes
//     to the next pod, while the old pod's object may still name it. A pod that has
//     ended keeps its object and loses its address.
//   - A pod that asks for an unsupported field is refused before its container starts:
//     phase Failed, reason ProcessNodeUnsupported, and a message that names every such
//     field.
//   - Containers never outlive this process (package proc).
//
// # Supported
//
//   - One container with a command, and restart policies Always, with the crash
//     back-off, and Never.
//   - Pod phases and conditions, container states, restart counts and exit codes.
//   - Readiness probes by httpGet with a path and a number as port.
//   - preStop sleep within the grace period, SIGTERM, SIGKILL at its end.
//   - Graceful and forced deletion, and eviction through the API.
//   - Environment variables with fieldRef.
//   - What Berth adds to pods that it recycles: a change of the annotation berth.sh/life has all containers
//     killed and started again, with new IDs. What these containers of Berth clean does not exist here.
//   - The agent of Berth. The init container that installs it does not run: the program agent is
//     looked up like a command without a slash, and listens on the pod's address only.
//
// As in a kubelet, neither a shorter grace period nor a forced deletion affects a
// stop that is under way. A forced deletion deletes the object while the container
// still runs.
//
// # Not supported
//
// The function unsupported has the list of what is refused.
//
// Accepted without effect:
//
//   - The image. A command without a slash is looked up in Options.Path and then in
//     this process's PATH.
//   - securityContext, resources (a status shows them as allocated), container ports and the service account.
//   - emptyDir volumes and service account tokens, which are not mounted. A pod has a
//     working directory of its own, which a restart of the container keeps.
//
// Different from a kubelet:
//
//   - Processes share this machine's files, users, process table and network. A
//     server that listens on all addresses takes the port from every other pod.
//   - A command is not process 1, so SIGTERM ends it unless it handles the signal
//     (exit code 143). In a container it would live on to the end of its grace
//     period (137).
//   - Events, logs, exec and port-forward through the API do not exist.
//   - A cluster's node controller marks the pods of a silent node as not ready after
//     some 40 s and deletes them after some minutes. On a devcluster they stay.
//   - Starts take milliseconds and do not fail under load.
//   - While the API server does not answer, a pod waits up to 10 s for it at each
//     change of its status.
//
// # Misuse
//
// A process that leaves its process group (setsid) is not stopped with its pod and
// may keep the address busy. Two nodes whose Addresses overlap assign the same
// address twice. A node that runs again under its name does not know that the
// containers of its earlier run have ended: it starts them as if for the first time.
package processnode
