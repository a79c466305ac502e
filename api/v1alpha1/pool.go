package v1alpha1

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// SandboxPool keeps pods warm, so that a claim is answered from a queue and not
// by starting a pod.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:subresource:scale:specpath=.spec.warm,statuspath=.status.warm,selectorpath=.status.selector
// +kubebuilder:resource:path=sandboxpools,singular=sandboxpool,shortName=sbp,categories=berth
// +kubebuilder:printcolumn:name="Desired",type=integer,JSONPath=`.spec.warm`,description="Pods that the pool keeps warm"
// +kubebuilder:printcolumn:name="Warm",type=integer,JSONPath=`.status.warm`,description="Pods that can be claimed now"
// +kubebuilder:printcolumn:name="Pending",type=integer,JSONPath=`.status.pending`,description="Pods that are not ready yet"
// +kubebuilder:printcolumn:name="Claimed",type=integer,JSONPath=`.status.claimed`,description="Live sandboxes"
// +kubebuilder:printcolumn:name="Waiting",type=integer,JSONPath=`.status.waiting`,description="Claims that wait for a pod"
// +kubebuilder:printcolumn:name="Ready",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].status`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].reason`,description="Why the pool lacks warm pods"
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
// +kubebuilder:printcolumn:name="Releasing",type=integer,JSONPath=`.status.releasing`,priority=1,description="Pods of released sandboxes"
// +kubebuilder:printcolumn:name="Outdated",type=integer,JSONPath=`.status.outdated`,priority=1,description="Idle pods of an older template"
// +kubebuilder:printcolumn:name="Max",type=integer,JSONPath=`.spec.maxPods`,priority=1,description="The most pods of any kind"
// +kubebuilder:printcolumn:name="Message",type=string,JSONPath=`.status.conditions[?(@.type=="Ready")].message`,priority=1
// +kubebuilder:validation:XValidation:rule="size(self.metadata.name) <= 40",message="metadata.name: at most 40 characters, because pod names are made from it"
type SandboxPool struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxPoolSpec `json:"spec"`
	// +optional
	Status SandboxPoolStatus `json:"status,omitempty"`
}

// SandboxPoolSpec is what the pool's owner asks for.
//
// +kubebuilder:validation:XValidation:rule="!has(self.maxPods) || self.maxPods >= self.warm",message="spec.maxPods: must be at least spec.warm"
// +kubebuilder:validation:XValidation:rule="!has(self.maxWarm) || self.maxWarm >= self.warm",message="spec.maxWarm: must be at least spec.warm"
// +kubebuilder:validation:XValidation:rule="!has(self.maxWarm) || !has(self.maxPods) || self.maxPods >= self.maxWarm",message="spec.maxWarm: must be at most spec.maxPods"
// +kubebuilder:validation:XValidation:rule="!has(self.ports) || size(self.ports) == 0 || self.defaultPort in self.ports",message="spec.ports: must contain spec.defaultPort, which is 8080 if it is not set; add it, or set spec.defaultPort to one of them"
// +kubebuilder:validation:XValidation:rule="!has(self.idleTimeoutSeconds) || self.idleTimeoutSeconds == 0 || self.idleTimeoutSeconds >= 5",message="spec.idleTimeoutSeconds: must be 0, for no idle timeout, or at least 5: an admitted request may take so long to connect to its pod"
// +kubebuilder:validation:XValidation:rule="!has(self.readyWithinSeconds) || self.readyWithinSeconds == 0 || self.readyWithinSeconds >= 10",message="spec.readyWithinSeconds: must be 0, for no bound, or at least 10: a node takes seconds to start a pod, and a pool that does not wait for its pods never fills"
// +kubebuilder:validation:XValidation:rule="!has(self.busyProbe) || has(self.maxLifetimeSeconds)",message="spec.busyProbe: needs spec.maxLifetimeSeconds, because a sandbox that always says that it is busy would never end; set it"
// +kubebuilder:validation:XValidation:rule="!has(self.agent) || !self.agent.enabled || self.agent.busy != 'Commands' || has(self.maxLifetimeSeconds)",message="spec.agent.busy: Commands needs spec.maxLifetimeSeconds, because a sandbox whose command never ends would never end; set it"
// +kubebuilder:validation:XValidation:rule="!has(self.agent) || !self.agent.enabled || self.agent.busy != 'Commands' || !has(self.busyProbe)",message="spec.agent.busy: Commands is a busyProbe that the agent answers; remove spec.busyProbe, or set busy to None"
// +kubebuilder:validation:XValidation:rule="!has(self.agent) || !self.agent.enabled || self.onRestart == 'Release'",message="spec.agent: needs spec.onRestart Release, because an agent that starts again is not configured for its sandbox any more"
// +kubebuilder:validation:XValidation:rule="self.onIdle != 'Sleep' && self.onTimeout != 'Sleep' || has(self.agent) && self.agent.enabled",message="spec.onIdle, spec.onTimeout: Sleep needs spec.agent, which stops the processes; enable it, or set Release"
// +kubebuilder:validation:XValidation:rule="!has(self.stopAfter) || has(self.agent) && self.agent.enabled",message="spec.stopAfter: needs spec.agent, which archives the files; enable it, or leave stopAfter out"
// +kubebuilder:validation:XValidation:rule="!has(self.maxAsleep) || has(self.agent) && self.agent.enabled",message="spec.maxAsleep: needs spec.agent, which archives the files; enable it, or leave maxAsleep out"
// +kubebuilder:validation:XValidation:rule="!has(self.reuse) || self.reuse != 'Recycle' || self.onRestart == 'Release'",message="spec.reuse: Recycle needs spec.onRestart Release, because a restart ends the life of a pod"
type SandboxPoolSpec struct {
	// warm is how many ready pods without a sandbox the pool keeps. In addition it makes a pod for
	// each waiting claim that finds none. With 0 every claim waits for its pod to start, and a
	// claim without waitTimeout gets 429 pool_empty.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	Warm int32 `json:"warm"`

	// maxWarm lets the pool keep up to so many warm pods when claims come faster. It keeps as many
	// as were claimed within one pod start in the busiest moment of the last 15 minutes, at least
	// warm. The start time is measured. Default: the pool keeps warm. With an autoscaler that
	// writes warm, through the scale subresource, leave it out: warm must not exceed it.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	MaxWarm *int32 `json:"maxWarm,omitempty"`

	// maxPods bounds all pods of the pool: pending, warm, claimed and releasing. Default: no
	// bound.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	MaxPods *int32 `json:"maxPods,omitempty"`

	// maxSurge bounds the pods of the pool that start at the same time: that are created and not ready
	// yet. It spares the nodes and the registry when many pods are missing, or when a change of the
	// template replaces them. Default: 10 at first, and up to twice as many in each round of starts while
	// pods start as fast as the first ones. In any case the first pods after a failed creation are created
	// one by one.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=10000
	MaxSurge *int32 `json:"maxSurge,omitempty"`

	// maxUnavailable is how many of the warm pods may be missing while a change of the template
	// replaces them. Default: 0: a pod is deleted when its replacement is ready. Where maxPods leaves
	// no room for a replacement, one pod at a time is deleted before.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=10000
	// +optional
	MaxUnavailable int32 `json:"maxUnavailable,omitempty"`

	// paused keeps the pool from creating, replacing and deleting idle pods. Claims get the warm pods
	// that are left. Pods of a template that is not allowed are deleted nevertheless.
	// +optional
	Paused bool `json:"paused,omitempty"`

	// readyWithinSeconds is how long, in seconds, a pod may take from when a node got it until it is
	// ready, or be not ready later on. After that the pool replaces it, and its condition Degraded says
	// why. A pod that no node has waits. At least 10. Default: 600. 0: no bound.
	// +kubebuilder:default=600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=86400
	// +optional
	ReadyWithinSeconds *int32 `json:"readyWithinSeconds,omitempty"`

	// deletionPolicy says what the deletion of the pool does to its sandboxes. Delete: they are
	// released, with reason PoolDeleted. Orphan: they go on until they end. In both cases claims are
	// refused, idle pods are deleted, and the object of the pool stays until its last pod is gone. It
	// can be changed while the pool is being deleted. Default: Delete.
	// +kubebuilder:default=Delete
	// +optional
	DeletionPolicy DeletionPolicy `json:"deletionPolicy,omitempty"`

	// defaultPort is the port that a host without one, <sandbox id>.<domain>, means. Default:
	// 8080.
	// +kubebuilder:default=8080
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	DefaultPort int32 `json:"defaultPort,omitempty"`

	// ports are the ports of sandboxes that can be reached through the gateway. They must
	// contain defaultPort. Default: all ports. A request for another port is answered 403. A
	// change also applies to live sandboxes; open requests continue.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	Ports []int32 `json:"ports,omitempty"`

	// access says who may send requests to the sandboxes of the pool. Default: public. public: every client that has
	// the ID of the sandbox. token: a client with the token of the sandbox, which the answer to the
	// claim has, or with a link to it. team: a client with a link to it, which only callers of its
	// team can make; there is no token. Others are answered 403.
	//
	// A claim may ask for a stricter access (public, token, team, in that order), and not for a
	// weaker one. The access is fixed for a sandbox when it is claimed.
	// +kubebuilder:default=public
	// +optional
	Access Access `json:"access,omitempty"`

	// postStart is an HTTP request that the allocator sends to each pod that becomes a sandbox,
	// before other requests can reach it. The claim is answered when it has succeeded, or with a
	// sandbox in the phase starting when waitTimeout is over. Default: none.
	// +optional
	PostStart *PostStartHook `json:"postStart,omitempty"`

	// holdSeconds is how long, in seconds, a request waits for a sandbox in the phase starting.
	// After that it is answered 503. Default: 30. 0: it does not wait.
	// +kubebuilder:default=30
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=30
	// +optional
	HoldSeconds *int32 `json:"holdSeconds,omitempty"`

	// onRestart says what happens to a sandbox when a container of its pod restarts. The
	// container has lost its memory and the files outside of volumes. Release: the sandbox is
	// released, with reason UnexpectedRestart. Keep: it stays. Default: Release.
	// +kubebuilder:default=Release
	// +optional
	OnRestart OnRestart `json:"onRestart,omitempty"`

	// reuse says what becomes of the pod of a released sandbox, once no request can reach it. Never: it is
	// deleted. Recycle: all of its containers are restarted, init containers included, and it becomes warm
	// again, if the pool has fewer warm pods than it should have; else it is deleted. It is also deleted when it
	// was changed, evicted or moved meanwhile, or when the kubelet does not report the restart of every
	// container in time. Default: Never.
	//
	// Recycle needs Kubernetes 1.36 and the allocators' --agent-image. It adds an init container and a sidecar
	// to the pods, and takes the capability NET_RAW from all containers. The page docs/recycle.md lists what a
	// recycled pod keeps. A change replaces idle pods.
	// +kubebuilder:default=Never
	// +optional
	Reuse Reuse `json:"reuse,omitempty"`

	// acceptVolumes: pods are recycled although their volumes keep what earlier sandboxes have written.
	// It has a meaning for reuse Recycle only, which otherwise refuses a template with a volume that
	// containers can write. Volumes that other pods can mount are refused in any case.
	// +optional
	AcceptVolumes bool `json:"acceptVolumes,omitempty"`

	// snapshot says which files of a sandbox a snapshot and a stop keep, and how many. Both need spec.agent, and the
	// allocators' --snapshots. A change applies to later snapshots and stops, and to what is made from earlier ones.
	// +optional
	Snapshot *PoolSnapshot `json:"snapshot,omitempty"`

	// acceptPause says what becomes of a claim that asks to be paused at its timeout (autoPause, which E2B's
	// SDKs send for onTimeout "pause"), in a pool whose sandboxes cannot sleep, such as one without spec.agent. Never: the
	// claim is answered 501. End: the claim is accepted, and the sandbox is released at its timeout all the same. Its
	// memory and its files are lost then, although the client may expect to find them again. Default: Never. A change
	// applies to later claims.
	// +kubebuilder:default=Never
	// +optional
	AcceptPause AcceptPause `json:"acceptPause,omitempty"`

	// onIdle says what happens to a sandbox after its idle timeout. Release: it is released. Sleep: its processes are
	// stopped, and it keeps its pod, its memory and its files. A request, or a call, wakes it. Default: Release. A claim
	// can set its own (onIdle). A change applies to later claims.
	//
	// Sleep needs spec.agent, one container alone, and no liveness or startup probe but one that the agent answers.
	// Idle means that nothing comes in: a program that waits for an answer from elsewhere is idle too, unless a busyProbe
	// says otherwise.
	// +kubebuilder:default=Release
	// +optional
	OnIdle OnEnd `json:"onIdle,omitempty"`

	// onTimeout says what happens to a sandbox at its timeout, as onIdle does for its idle timeout. A sandbox that is
	// asleep has no timeout; the wake gives it one again. maxLifetimeSeconds ends it in any case. Default: Release. A claim
	// can set its own (onTimeout, or autoPause of E2B).
	// +kubebuilder:default=Release
	// +optional
	OnTimeout OnEnd `json:"onTimeout,omitempty"`

	// wakeOnTraffic says whether a request wakes a sandbox that fell asleep at its timeout or by a call. One that fell
	// asleep because it was idle is woken in any case. Default: false. A claim can set its own (wakeOnTraffic, or
	// autoResume of E2B).
	// +optional
	WakeOnTraffic bool `json:"wakeOnTraffic,omitempty"`

	// stopAfter is how long a sandbox is asleep until it is stopped, such as 10m: the files below spec.snapshot.paths are
	// archived in the object store of the allocators, and its pod is deleted. A wake binds another pod of the pool to it,
	// with these files, and without its processes and its memory. From 1s to 8760h (365 days). Default: never. A claim can
	// set its own (stopAfter, or autoPauseMemory of E2B). A change applies to later claims.
	//
	// It needs the allocators' --snapshots, and what onIdle Sleep needs.
	// +kubebuilder:validation:Type=string
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:XValidation:rule="duration(self) >= duration('1s') && duration(self) <= duration('8760h')",message="spec.stopAfter: must be 1s to 8760h, or be left out"
	// +optional
	StopAfter *metav1.Duration `json:"stopAfter,omitempty"`

	// maxAsleep bounds how many sandboxes of the pool are asleep. When it is exceeded, some of them are stopped as after
	// stopAfter, until it is not: of the team that has the most asleep in this pool, the one that has slept for longest.
	// Sandboxes without a team count as one team. It may stop any sandbox of the pool, also one whose claim or pool has no
	// stopAfter. A change applies to the sandboxes that are asleep. Default: no bound.
	//
	// It needs the allocators' --snapshots, and what onIdle Sleep needs.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=100000
	// +optional
	MaxAsleep *int32 `json:"maxAsleep,omitempty"`

	// idleTimeoutSeconds is the time without activity, in seconds, after which a sandbox is
	// released, with reason IdleTimeout: 5 to 31,536,000 (365 days), or 0 for never. Default: 3600. A
	// claim can set its own (idleTimeout). A change applies to later claims. The field activity
	// says what counts as activity.
	//
	// The earliest of three ends releases a sandbox: its timeout, this one, and
	// maxLifetimeSeconds.
	// +kubebuilder:default=3600
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=31536000
	// +optional
	IdleTimeoutSeconds *int32 `json:"idleTimeoutSeconds,omitempty"`

	// activity says whether an open connection keeps a sandbox from being idle. Requests: each
	// request, stream or WebSocket does while it is open, even without traffic. Bytes: a
	// connection does while at least minBytesPerMinute move over it. Default: Requests.
	//
	// Both count the arrival of a request, a keep-alive call, a call that moves the end, and a
	// busyProbe that is answered 200. With Bytes a request whose answer takes longer than the idle
	// timeout is cut off when the sandbox is released, and an idle timeout below 60 seconds counts
	// as 60. A claim can set its own (activity). A change applies to later claims.
	// +kubebuilder:default=Requests
	// +optional
	Activity Activity `json:"activity,omitempty"`

	// minBytesPerMinute is how many bytes, in both directions together, must move over a
	// connection in a minute so that it counts with the activity Bytes. It has no effect with
	// Requests. Default: 1024. The pings of a WebSocket are some tens of bytes a minute. A claim
	// can set its own (minBytesPerMinute).
	// +kubebuilder:default=1024
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1073741824
	// +optional
	MinBytesPerMinute *int32 `json:"minBytesPerMinute,omitempty"`

	// busyProbe lets a sandbox say that it works although it receives no requests. It needs
	// maxLifetimeSeconds. A change also applies to live sandboxes that were claimed with
	// maxLifetimeSeconds. Default: none.
	// +optional
	BusyProbe *BusyProbe `json:"busyProbe,omitempty"`

	// maxLifetimeSeconds is the time from the claim, in seconds, after which a sandbox is
	// released, in use or not, with reason MaxLifetime: 1 to 31,536,000 (365 days). No call moves
	// this end. A change applies to later claims. Default: no bound.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=31536000
	// +optional
	MaxLifetimeSeconds *int32 `json:"maxLifetimeSeconds,omitempty"`

	// startupTimeoutSeconds is the time from the claim, in seconds, that a sandbox of a pool with
	// a postStart hook may be in the phase starting. After that it is released, with reason
	// StartupTimeout. Default: 120. The hook has a time limit of its own; this one also counts the
	// time in which no allocator leads.
	// +kubebuilder:default=120
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=3600
	// +optional
	StartupTimeoutSeconds *int32 `json:"startupTimeoutSeconds,omitempty"`

	// records says what the records of ended sandboxes keep. A change also applies to live sandboxes.
	// +optional
	Records *PoolRecords `json:"records,omitempty"`

	// Agent, if enabled, puts Berth's agent into the first container of the pods: the program through which
	// E2B's SDKs run commands and move files, and which takes the envVars, secrets and files of a claim. A
	// change replaces idle pods.
	// +optional
	Agent *PoolAgent `json:"agent,omitempty"`

	// Egress is what may leave the pods. Absent: what the network of the cluster lets through. A change of mode replaces
	// idle pods, and sandboxes keep that of their pod. A change of the rules counts at once, also for sandboxes.
	// +optional
	Egress *PoolEgress `json:"egress,omitempty"`

	// EnvdVersion is the version of the agent that E2B's SDKs find in the pods of this pool. They
	// derive from it which features they use. Absent: that of Berth's agent, or 0.1.0 without one.
	// +kubebuilder:validation:MaxLength=32
	// +kubebuilder:validation:Pattern=`^v?(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})$`
	// +optional
	EnvdVersion string `json:"envdVersion,omitempty"`

	// template is the pod to run. A change replaces idle pods. Its labels and annotations are copied to the
	// pods; keys below berth.sh/ are the allocator's own and are left out. A change of labels and annotations
	// alone is written to idle pods and replaces none. Sandboxes keep theirs. A change of annotations of
	// Kubernetes itself, with a key below kubernetes.io/ or k8s.io/ or a subdomain, replaces idle pods.
	// A pod is handed out once it is Ready, so containers should have a
	// readiness probe.
	//
	// After a deletion by another client than the allocator, a drain and an eviction
	// among them, a pod goes on serving for 6 s, while its sandbox is released: every
	// container that may listen gets a preStop sleep of that time, or keeps its own if
	// that is longer, and terminationGracePeriodSeconds becomes longer by as much. A
	// template with another preStop action (exec, httpGet) is not accepted: containers
	// clean up on SIGTERM. The sleep also comes before the end of a container whose
	// liveness or startup probe failed. The allocator's own deletions cut it to 1 s.
	Template PodTemplate `json:"template"`
}

// PoolRecords says what the records of ended sandboxes keep.
type PoolRecords struct {
	// logLines is how many of the last lines of its log the record of a sandbox keeps that ended by itself or
	// failed: 0 to 100, and at most 8 KiB in all. They may have the sandbox's secrets, and everyone reads them
	// who may read its diagnostics or its Sandbox object. They are read once, when the release is durable, and
	// are missing if the node does not answer within 2 s. Default: 0.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	// +optional
	LogLines int32 `json:"logLines,omitempty"`
}

// PoolAgent is Berth's agent in the pods of a pool. An init container copies its program to
// /berth/berth-agent, and the first container of the template runs it. With a command it starts that
// command. Without a command and args it is the only program: the entrypoint of the image does not run,
// because it is not known. The agent runs as the user of the container.
//
// A pod takes a sandbox only when its agent has been configured for it. An agent that starts again is not,
// so onRestart must be Release.
//
// +kubebuilder:validation:XValidation:rule="!self.enabled || !has(self.image) || size(self.image) > 0",message="spec.agent.image: must not be empty; leave it out for the image of the allocators' --agent-image"
type PoolAgent struct {
	// Enabled: the pods have the agent.
	Enabled bool `json:"enabled"`
	// Port of the agent. It can be reached from outside also if ports does not list it. E2B's SDKs know no
	// other port than the default.
	// +kubebuilder:default=49983
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	Port int32 `json:"port,omitempty"`
	// Image has the agent's program. Absent: that of the allocators' --agent-image.
	// +optional
	Image string `json:"image,omitempty"`
	// Public: requests to the agent need no token, for SDKs that send none. Every client that may send
	// requests to the sandbox can run commands in it then.
	// +optional
	Public bool `json:"public,omitempty"`
	// Busy is what keeps a sandbox from being released for being idle, as a busyProbe that the agent answers.
	// Commands: a command or terminal that was started through the agent runs. It needs
	// maxLifetimeSeconds, as busyProbe does. None: nothing.
	// +kubebuilder:default=None
	// +optional
	Busy AgentBusy `json:"busy,omitempty"`
	// NewFiles is where uploads, and calls that make or move files, may make what is missing. UserRights: where the
	// user of the call may. Anywhere: also in directories of root, as E2B's agent does it; what is made belongs
	// to the user. It needs an agent that runs as root. No existing file or directory of another user is changed,
	// and no symbolic link is followed to such a directory.
	// +kubebuilder:default=UserRights
	// +optional
	NewFiles AgentNewFiles `json:"newFiles,omitempty"`
}

// PoolSnapshot says which files of a sandbox a snapshot keeps.
type PoolSnapshot struct {
	// Paths of directories and files, absolute and clean, none below another one, /dev, /proc or /sys. No part of a path
	// may be a symbolic link in the sandbox. A sandbox is made from a snapshot only if all paths of the snapshot are
	// among those. Default: the home of the agent's default user, /home/user in images that have that user.
	// +kubebuilder:validation:MaxItems=16
	// +kubebuilder:validation:items:MaxLength=512
	// +listType=set
	// +optional
	Paths []string `json:"paths,omitempty"`
	// MaxBytes bounds the files of a snapshot before compression, from 1Ki to 64Gi. Default: 1Gi.
	// +optional
	MaxBytes *resource.Quantity `json:"maxBytes,omitempty"`
	// MaxFiles bounds the files, directories and links of a snapshot.
	// +kubebuilder:default=100000
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=1000000
	// +optional
	MaxFiles int32 `json:"maxFiles,omitempty"`
}

// OnEnd says what happens to a sandbox when it is idle or at its timeout.
//
// +kubebuilder:validation:Enum=Release;Sleep
type OnEnd string

// What can happen.
const (
	OnEndRelease OnEnd = "Release"
	OnEndSleep   OnEnd = "Sleep"
)

// AcceptPause says what becomes of a claim that asks to be paused at its timeout.
//
// +kubebuilder:validation:Enum=Never;End
type AcceptPause string

// What can become of it.
const (
	PauseRefused AcceptPause = "Never"
	PauseEnds    AcceptPause = "End"
)

// PoolEgress says what may leave the pods of a pool. Both the pool and the claim must allow a destination.
type PoolEgress struct {
	// Mode None: the network of the cluster says what may leave. Gateway: the pods reach the egress gateway and nothing
	// else, not even DNS, and it lets requests of HTTP and tunnels through by the rules of the pool and of the claim. It
	// needs an agent.
	// +kubebuilder:default=None
	// +optional
	Mode EgressMode `json:"mode,omitempty"`
	// Allow is what may be reached although deny has it: host names, "*.example.com" for the names below one, IP
	// addresses, CIDRs, and 0.0.0.0/0 for all of them.
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=1024
	// +listType=set
	// +optional
	Allow []string `json:"allow,omitempty"`
	// Deny is what may not be reached unless allow has it: IP addresses and CIDRs. 0.0.0.0/0: nothing but allow.
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=1024
	// +listType=set
	// +optional
	Deny []string `json:"deny,omitempty"`
	// Ports that may be reached. Absent: 80 and 443.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Minimum=1
	// +kubebuilder:validation:items:Maximum=65535
	// +listType=set
	// +optional
	Ports []int32 `json:"ports,omitempty"`
	// Credentials are headers that the gateway sets on requests to a host. Their values never enter the pod. A credential
	// lets no host be reached.
	// +kubebuilder:validation:MaxItems=16
	// +listType=atomic
	// +optional
	Credentials []EgressCredential `json:"credentials,omitempty"`
}

// EgressCredential is a header that the egress gateway sets on requests to one host. A program in the sandbox asks
// http://<host>/ or http://<host>:<port>/, and the gateway speaks TLS to that host. The header replaces one of the same name.
type EgressCredential struct {
	// Host is the full name of the host, without a wildcard. Its certificate must be valid for it.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=1024
	Host string `json:"host"`
	// Port is that of the host.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +kubebuilder:default=443
	// +optional
	Port int32 `json:"port,omitempty"`
	// Header is its name, such as Authorization.
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=128
	Header string `json:"header"`
	// Secret has the whole value of the header. It is a Secret of type berth.sh/egress-credential in the namespace of the
	// API keys. A request is refused while it is not there.
	Secret EgressSecretKey `json:"secret"`
}

// EgressSecretKey is a key of a Secret.
type EgressSecretKey struct {
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Name string `json:"name"`
	// +kubebuilder:validation:MinLength=1
	// +kubebuilder:validation:MaxLength=253
	Key string `json:"key"`
}

// EgressMode says what decides what may leave the pods of a pool.
//
// +kubebuilder:validation:Enum=None;Gateway
type EgressMode string

// The modes of egress.
const (
	EgressNone    EgressMode = "None"
	EgressGateway EgressMode = "Gateway"
)

// EgressEnabled returns the egress rules of a pool whose mode is Gateway; nil: it has another one.
func (s *SandboxPoolSpec) EgressEnabled() *PoolEgress {
	if s.Egress == nil || s.Egress.Mode != EgressGateway {
		return nil
	}
	return s.Egress
}

// AgentNewFiles is where the agent makes files for a user.
//
// +kubebuilder:validation:Enum=UserRights;Anywhere
type AgentNewFiles string

// Where the agent can make files for a user.
const (
	NewFilesUserRights AgentNewFiles = "UserRights"
	NewFilesAnywhere   AgentNewFiles = "Anywhere"
)

// AgentBusy is what the agent counts as work.
//
// +kubebuilder:validation:Enum=None;Commands
type AgentBusy string

// What the agent can count as work.
const (
	BusyNone     AgentBusy = "None"
	BusyCommands AgentBusy = "Commands"
)

// AgentEnabled returns the agent of the pods, nil if they have none.
func (s *SandboxPoolSpec) AgentEnabled() *PoolAgent {
	if s.Agent == nil || !s.Agent.Enabled {
		return nil
	}
	return s.Agent
}

// PostStartHook is an HTTP request to a pod that has become a sandbox: POST, with
// a JSON object that has sandboxID, pool, metadata and user. Any 2xx answer is
// success, any other failure. It is sent again, until TimeoutSeconds have passed,
// while the pod cannot be connected to, and again by the next leader if this one
// ends meanwhile: so it may come more than once for a sandbox.
type PostStartHook struct {
	// port of the pod. Default: spec.defaultPort.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port,omitempty"`
	// path of the request, which begins with a slash. Default: /.
	// +kubebuilder:default=/
	// +kubebuilder:validation:Pattern=`^/[!-~]*$`
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`
	// timeoutSeconds is how long, in seconds, the hook may take with all attempts. Default: 10.
	// +kubebuilder:default=10
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=120
	TimeoutSeconds int32 `json:"timeoutSeconds,omitempty"`
	// failurePolicy says what a failure means. Fail: the sandbox is released, and the claim is
	// answered with an error. Ignore: the sandbox runs. Default: Fail.
	// +kubebuilder:default=Fail
	FailurePolicy FailurePolicy `json:"failurePolicy,omitempty"`
}

// Access says who may send requests to a sandbox.
//
// +kubebuilder:validation:Enum=public;token;team
type Access string

// The kinds of access.
const (
	AccessPublic Access = "public"
	AccessToken  Access = "token"
	AccessTeam   Access = "team"
)

// OnRestart is what a restart of a container means for its sandbox.
//
// +kubebuilder:validation:Enum=Release;Keep
type OnRestart string

// What a restart of a container can mean.
const (
	ReleaseOnRestart OnRestart = "Release"
	KeepOnRestart    OnRestart = "Keep"
)

// DeletionPolicy is what the deletion of a pool does to its sandboxes.
//
// +kubebuilder:validation:Enum=Delete;Orphan
type DeletionPolicy string

// What the deletion of a pool can do to its sandboxes.
const (
	DeleteSandboxes DeletionPolicy = "Delete"
	OrphanSandboxes DeletionPolicy = "Orphan"
)

// Reuse is what becomes of the pod of a released sandbox.
//
// +kubebuilder:validation:Enum=Never;Recycle
type Reuse string

// What can become of the pod of a released sandbox.
const (
	ReuseNever   Reuse = "Never"
	ReuseRecycle Reuse = "Recycle"
)

// Activity is what keeps a sandbox from being idle.
//
// +kubebuilder:validation:Enum=Requests;Bytes
type Activity string

// What can count as activity.
const (
	// ActivityRequests: requests and connections that are open, silent or not.
	ActivityRequests Activity = "Requests"
	// ActivityBytes: of open connections only the bytes that move over them.
	ActivityBytes Activity = "Bytes"
)

// BusyProbe is an HTTP GET request to the pod of a sandbox that is about to be released
// for being idle, and to no other. It is made by a gateway, without credentials, and has
// to be answered within 200 ms. 200: the sandbox is busy, which counts as activity, so
// that the next probe follows one idle timeout later. 204: it is not. Anything else
// (another status, a redirect, no answer, no connection) is a failure: the sandbox stays,
// and the probe is repeated after a second. The third failure in a row counts as not
// busy. A body is not read.
type BusyProbe struct {
	// Port of the pod. It need not be one of spec.ports.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	Port int32 `json:"port"`
	// path of the request, which begins with a slash. Default: /.
	// +kubebuilder:default=/
	// +kubebuilder:validation:Pattern=`^/[!-~]*$`
	// +kubebuilder:validation:MaxLength=1024
	Path string `json:"path,omitempty"`
}

// FailurePolicy is what the failure of a hook means.
//
// +kubebuilder:validation:Enum=Fail;Ignore
type FailurePolicy string

// The failure policies.
const (
	Fail   FailurePolicy = "Fail"
	Ignore FailurePolicy = "Ignore"
)

// PodTemplate is a pod to be made: labels, annotations, spec.
type PodTemplate struct {
	// +optional
	Metadata PodTemplateMetadata `json:"metadata,omitempty"`
	// +kubebuilder:validation:XValidation:rule="!has(self.hostNetwork) || !self.hostNetwork",message="spec.template.spec.hostNetwork: must be false, because a sandbox needs an address of its own",fieldPath=".hostNetwork"
	Spec corev1.PodSpec `json:"spec"`
}

// PodTemplateMetadata is the part of a pod's metadata that a template can set.
type PodTemplateMetadata struct {
	// +optional
	Labels map[string]string `json:"labels,omitempty"`
	// +optional
	Annotations map[string]string `json:"annotations,omitempty"`
}

// Condition types of a SandboxPool.
const (
	// PoolReady becomes True when the pool has as many warm pods as it asks for. It stays True
	// while the spec stays as it is and a warm pod is left. The reason is Warm, or why pods are
	// missing: that of Degraded, Paused, MaxPods or Filling.
	PoolReady = "Ready"
	// PoolProgressing is True while the pool creates, replaces or deletes pods: reasons Filling,
	// RollingOut, Shrinking and Draining. Else the reason is Settled or Paused, or that of Degraded if
	// pods are missing.
	PoolProgressing = "Progressing"
	// PoolDegraded is True while something keeps the pool from what it asks for. The message quotes
	// the API server, the scheduler or the kubelet. Reasons:
	//   - PodSecurity, PreStop, Agent, Recycle, Sleep, Stop, Egress: no pod is made from the template, because it asks for
	//     more than the allocator's --pod-security allows, has a preStop action other than sleep, leaves no
	//     room for the agent, is for pods that cannot be recycled, is for sandboxes that cannot sleep
	//     although onIdle, onTimeout or stopAfter says so, has stopAfter although the allocators have no object store, or has
	//     an egress mode or rules that cannot be;
	//   - EgressNotEnforced: the network lets pods that are to reach the egress gateway only reach more, so none is ready;
	//   - QuotaExceeded, CreateFailed: the API server refused the last pod;
	//   - Unschedulable, ImagePullFailed, StartFailed, CrashLoop, OOMKilled, Failed, Evicted, Preempted,
	//     NodeLost, Deleted, NeverReady: pods do not become ready, or end before they can be used:
	//     before they were ready, or within 10 s of that. The replacements of pods that end are then made
	//     after a pause, of 1 s at first, twice as long each time, 60 s at most;
	//   - NodesUnusable: idle pods are on nodes that are cordoned or not ready, and their replacements
	//     are missing;
	//   - Fenced: maxPods leaves no room beside released pods that wait for a router that has gone;
	//   - Quarantine: the journal was begun anew, and pods are kept back.
	// Pods that were claimed are replaced at once, also when their sandboxes end soon.
	PoolDegraded = "Degraded"
)

// Reasons of the conditions, beside those of pods.
const (
	PoolWarm           = "Warm"
	PoolFilling        = "Filling"
	PoolMaxPods        = "MaxPods"
	PoolRollingOut     = "RollingOut"
	PoolShrinking      = "Shrinking"
	PoolDraining       = "Draining"
	PoolSettled        = "Settled"
	PoolPaused         = "Paused"
	PoolHealthy        = "Healthy"
	PoolPodSecurity    = "PodSecurity"
	PoolPreStop        = "PreStop"
	PoolAgentRefused   = "Agent"
	PoolRecycleRefused = "Recycle"
	PoolSleepRefused   = "Sleep"
	PoolStopRefused    = "Stop"
	PoolEgressRefused  = "Egress"
	// PoolEgressNotEnforced: pods that are to reach the egress gateway only reach more.
	PoolEgressNotEnforced = "EgressNotEnforced"
	PoolQuotaExceeded     = "QuotaExceeded"
	PoolCreateFailed      = "CreateFailed"
	PoolNodesUnusable     = "NodesUnusable"
	PoolSyncFailed        = "SyncFailed"
	PoolFenced            = "Fenced"
	PoolQuarantine        = "Quarantine"
	PoolWithheld          = "Withheld"
)

// TemplateRefused reports whether the conditions say that no pod is made from the template.
func (s *SandboxPoolStatus) TemplateRefused() bool {
	for _, c := range s.Conditions {
		if c.Type == PoolDegraded && c.Status == metav1.ConditionTrue {
			switch c.Reason {
			case PoolPodSecurity, PoolPreStop, PoolAgentRefused, PoolRecycleRefused, PoolSleepRefused, PoolStopRefused, PoolEgressRefused:
				return true
			}
		}
	}
	return false
}

// SandboxPoolStatus is what the allocator last saw.
type SandboxPoolStatus struct {
	// observedGeneration is the generation of the spec that these counts belong to.
	// +optional
	ObservedGeneration int64 `json:"observedGeneration,omitempty"`
	// warm is the number of pods that can be claimed now.
	// +optional
	Warm int32 `json:"warm"`
	// pending is the number of pods that are not ready yet.
	// +optional
	Pending int32 `json:"pending"`
	// claimed is the number of live sandboxes.
	// +optional
	Claimed int32 `json:"claimed"`
	// releasing is the number of pods whose sandboxes are released. They are deleted when no
	// router sends requests to them any more.
	// +optional
	Releasing int32 `json:"releasing"`
	// waiting is the number of claims that wait for a pod.
	// +optional
	Waiting int32 `json:"waiting"`
	// outdated is the number of idle pods that were made from an older template.
	// +optional
	Outdated int32 `json:"outdated"`
	// selector selects the pods that the scale subresource counts: the warm ones. Autoscalers ask for it.
	// +optional
	Selector string `json:"selector,omitempty"`
	// lastFailure is the last idle pod that ended by itself, was deleted by another client, or was not
	// ready in time.
	// +optional
	LastFailure *PodFailure `json:"lastFailure,omitempty"`
	// conditions are Ready, Progressing and Degraded.
	// +optional
	// +listType=map
	// +listMapKey=type
	Conditions []metav1.Condition `json:"conditions,omitempty"`
}

// PodFailure says why the pool has replaced a pod.
type PodFailure struct {
	Pod string `json:"pod"`
	// Reason is one of those of the condition Degraded.
	Reason  string `json:"reason"`
	Message string `json:"message,omitempty"`
	// Time is when the leader saw it.
	Time metav1.Time `json:"time"`
}

// SandboxPoolList is a list of SandboxPool.
//
// +kubebuilder:object:root=true
type SandboxPoolList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []SandboxPool `json:"items"`
}
