package v1alpha1

import metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

// Sandbox is the record of one sandbox. Its name is the sandbox ID. The
// allocator writes it when the change is in the journal. It outlives the pod, so that an ended
// sandbox is answered "gone" and not "unknown". Deleting it releases the sandbox:
// a finalizer keeps the object until the sandbox has ended, and ten minutes longer if
// it was claimed with an Idempotency-Key, which must not be free before. The end of its pool ends that wait.
//
// The whole object is the allocator's, its status too, and one conditional write
// moves it from one state to the next. So it has no status subresource. The schema
// refuses a write that a new leader could not read, and one that moves a sandbox to another
// pod or back to an earlier state, also from a deposed allocator.
//
// +kubebuilder:object:root=true
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.revision) || has(self.status) && has(self.status.revision)",message="status.revision: what an allocator has written cannot be taken away; delete the object to release the sandbox"
// +kubebuilder:validation:XValidation:rule="self.spec.podUID == oldSelf.spec.podUID || self.?status.?incarnation.orValue(0) > oldSelf.?status.?incarnation.orValue(0)",message="spec.podUID: only a sandbox that was stopped moves to another pod, with a higher status.incarnation"
// +kubebuilder:validation:XValidation:rule="self.spec.podIP == oldSelf.spec.podIP || !isIP(oldSelf.spec.podIP) || self.?status.?incarnation.orValue(0) > oldSelf.?status.?incarnation.orValue(0)",message="spec.podIP: only a sandbox that was stopped moves to another address, with a higher status.incarnation"
// +kubebuilder:validation:XValidation:rule="self.?status.?incarnation.orValue(0) >= oldSelf.?status.?incarnation.orValue(0)",message="status.incarnation: never goes back"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.status) || !has(oldSelf.status.revision) || !has(self.status) || !has(self.status.revision) || self.status.revision != oldSelf.status.revision || has(self.spec.networkAllow) == has(oldSelf.spec.networkAllow) && has(self.spec.networkDeny) == has(oldSelf.spec.networkDeny) && has(self.spec.networkHeaders) == has(oldSelf.spec.networkHeaders) && (!has(self.spec.networkHeaders) || self.spec.networkHeaders == oldSelf.spec.networkHeaders) && (!has(self.spec.networkAllow) || self.spec.networkAllow == oldSelf.spec.networkAllow) && (!has(self.spec.networkDeny) || self.spec.networkDeny == oldSelf.spec.networkDeny)",message="spec.networkAllow, spec.networkDeny, spec.networkHeaders: an allocator writes them, with a new status.revision; change them with PUT /sandboxes/{id}/network"
// +kubebuilder:resource:path=sandboxes,singular=sandbox,shortName=sb,categories=berth
// +kubebuilder:printcolumn:name="Pool",type=string,JSONPath=`.spec.pool`
// +kubebuilder:printcolumn:name="Pod",type=string,JSONPath=`.spec.podName`
// +kubebuilder:printcolumn:name="Phase",type=string,JSONPath=`.status.phase`
// +kubebuilder:printcolumn:name="Reason",type=string,JSONPath=`.status.reason`
// +kubebuilder:printcolumn:name="Team",type=string,JSONPath=`.spec.team`,priority=1
// +kubebuilder:printcolumn:name="User",type=string,JSONPath=`.spec.user`,priority=1
// +kubebuilder:printcolumn:name="Ends",type=string,JSONPath=`.spec.endAt`,priority=1
// +kubebuilder:printcolumn:name="Idle-Timeout",type=integer,JSONPath=`.spec.idleTimeoutSeconds`,priority=1,description="Seconds without activity after which it is released"
// +kubebuilder:printcolumn:name="Last-Active",type=date,JSONPath=`.status.lastActive`,priority=1,description="It was active then, or later"
// +kubebuilder:printcolumn:name="Released",type=date,JSONPath=`.status.releasedAt`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.spec.claimedAt`
type Sandbox struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec SandboxSpec `json:"spec"`
	// +optional
	Status SandboxStatus `json:"status,omitempty"`
}

// SandboxSpec is what was fixed by the claim, the end, which a call can move, and the pod, which is another one after a
// stop.
type SandboxSpec struct {
	// pool is the one that the pod was taken from, in the same namespace.
	// +kubebuilder:validation:MinLength=1
	Pool string `json:"pool"`
	// podName is the pod that holds, or held, the sandbox. A sandbox that is stopped has none: it is the former one.
	// +kubebuilder:validation:MinLength=1
	PodName string `json:"podName"`
	// podUID is the UID of that pod.
	// +kubebuilder:validation:MinLength=1
	PodUID string `json:"podUID"`
	// podIP is the address requests are, or were, routed to.
	// +kubebuilder:validation:MaxLength=45
	// +kubebuilder:validation:XValidation:rule="isIP(self)",message="spec.podIP: not an address"
	PodIP string `json:"podIP"`
	// claimedAt is when the claim was committed, by the allocator's clock.
	ClaimedAt metav1.MicroTime `json:"claimedAt"`
	// endAt is when the sandbox is released at the latest, in use or not, unless a call moves it.
	// Absent: never.
	// +optional
	EndAt *metav1.MicroTime `json:"endAt,omitempty"`
	// lifetimeEnd is when the sandbox is released at the latest by the pool's maxLifetimeSeconds.
	// No call moves it. Absent: never.
	// +optional
	LifetimeEnd *metav1.MicroTime `json:"lifetimeEnd,omitempty"`
	// startBy is when the sandbox is released if it is still starting, by the pool's
	// startupTimeoutSeconds. Absent: never.
	// +optional
	StartBy *metav1.MicroTime `json:"startBy,omitempty"`
	// idleTimeoutSeconds is the time without activity, in seconds, after which it is released.
	// Absent: never.
	// +kubebuilder:validation:Minimum=1
	// +optional
	IdleTimeoutSeconds int32 `json:"idleTimeoutSeconds,omitempty"`
	// lifetimeSeconds is the timeout that the claim asked for. A wake by a request sets the end anew by it. Absent: none.
	// +kubebuilder:validation:Minimum=1
	// +optional
	LifetimeSeconds int32 `json:"lifetimeSeconds,omitempty"`
	// onIdle and onTimeout say what happens after its idle timeout and at its end. Absent: Release.
	// +optional
	OnIdle OnEnd `json:"onIdle,omitempty"`
	// +optional
	OnTimeout OnEnd `json:"onTimeout,omitempty"`
	// wakeOnTraffic: a request wakes it, whatever it fell asleep for.
	// +optional
	WakeOnTraffic bool `json:"wakeOnTraffic,omitempty"`
	// stopAfterSeconds is how long it is asleep until it is stopped: its files are archived and its pod is deleted.
	// Absent: it is not.
	// +kubebuilder:validation:Minimum=1
	// +optional
	StopAfterSeconds int32 `json:"stopAfterSeconds,omitempty"`
	// minBytesPerMinute: an open connection is activity only while so many bytes a minute move
	// over it. Absent: every open connection is activity.
	// +kubebuilder:validation:Minimum=1
	// +optional
	MinBytesPerMinute int64 `json:"minBytesPerMinute,omitempty"`
	// defaultPort is the pool's at the time of the claim. Requests go by what the pool says now.
	// +optional
	DefaultPort int32 `json:"defaultPort,omitempty"`
	// ports are the pool's at the time of the claim. Requests go by what the pool says now.
	// +optional
	// +listType=set
	Ports []int32 `json:"ports,omitempty"`
	// access says who may send requests to it: see the pool's spec.access. Absent: public.
	// +optional
	Access Access `json:"access,omitempty"`
	// maskHost is the Host header that the pod sees; ${PORT} stands for the port of the request.
	// Absent: that of the request.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	MaskHost string `json:"maskHost,omitempty"`
	// httpsPorts are the ports to which the gateway speaks TLS.
	// +kubebuilder:validation:MaxItems=64
	// +optional
	// +listType=set
	HTTPSPorts []int32 `json:"httpsPorts,omitempty"`
	// agentPort is the port of the agent in the pod; absent: there is none. agentPublic: requests to it
	// need no token. agentEgress: what leaves the pod goes through an egress gateway. What the claim gave to the agent is
	// not in here.
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=65535
	// +optional
	AgentPort int32 `json:"agentPort,omitempty"`
	// +optional
	AgentPublic bool `json:"agentPublic,omitempty"`
	// +optional
	AgentEgress bool `json:"agentEgress,omitempty"`
	// networkAllow and networkDeny are what its claim lets it reach, within what its pool does. A call replaces them, and
	// an edit of the object is refused. Both absent: everything.
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=1024
	// +listType=atomic
	// +optional
	NetworkAllow []string `json:"networkAllow,omitempty"`
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:MaxLength=1024
	// +listType=atomic
	// +optional
	NetworkDeny []string `json:"networkDeny,omitempty"`
	// networkHeaders are the headers that the egress gateway sets for it, sealed with a key that only the allocators have.
	// +kubebuilder:validation:MaxLength=16384
	// +optional
	NetworkHeaders []byte `json:"networkHeaders,omitempty"`
	// restarts is how often containers of the pod had started again before the
	// claim.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Restarts int32 `json:"restarts,omitempty"`
	// metadata is the caller's, at most 2 KB, and not interpreted.
	// +optional
	Metadata map[string]string `json:"metadata,omitempty"`
	// team is that of the API key that claimed it.
	// +optional
	Team string `json:"team,omitempty"`
	// user is whom it was claimed for, as the caller said.
	// +optional
	User string `json:"user,omitempty"`
	// idempotencyKey is that of the claim. A claim of the team with the same key and body gets
	// this sandbox.
	// +optional
	IdempotencyKey string `json:"idempotencyKey,omitempty"`
	// requestHash is the SHA-256 of the body of the claim, in hexadecimal.
	// +kubebuilder:validation:Pattern=`^([0-9a-f]{64})?$`
	// +optional
	RequestHash string `json:"requestHash,omitempty"`
	// batch is the ID of the batch that it was claimed with: sandboxes that one
	// call has claimed have the same.
	// +optional
	Batch string `json:"batch,omitempty"`
	// workload is what its pod ran when it was claimed. Absent: not known, because the allocator ended
	// before it wrote this object, and the pod was gone when the next one began to lead.
	// +optional
	Workload *Workload `json:"workload,omitempty"`
}

// Workload is what runs in a pod.
type Workload struct {
	// images are those of the containers, at most 16.
	// +optional
	// +listType=atomic
	Images []string `json:"images,omitempty"`
	// requests are the sums over the containers.
	// +optional
	Requests WorkloadResources `json:"requests,omitzero"`
	// limits are the sums over the containers. One that a container does not have is absent.
	// +optional
	Limits WorkloadResources `json:"limits,omitzero"`
}

// WorkloadResources are quantities, such as 500m and 1Gi.
type WorkloadResources struct {
	// +optional
	CPU string `json:"cpu,omitempty"`
	// +optional
	Memory string `json:"memory,omitempty"`
}

// SandboxPhase is where a sandbox is in its life.
//
// +kubebuilder:validation:Enum=starting;running;fallingAsleep;asleep;waking;stopped;released;ended
type SandboxPhase string

// The phases a Sandbox object can show.
const (
	// SandboxStarting: claimed, and the pool's postStart hook has not been
	// answered yet.
	SandboxStarting SandboxPhase = "starting"
	// SandboxRunning: requests are routed to the pod.
	SandboxRunning SandboxPhase = "running"
	// SandboxFallingAsleep: no router has its route, and its processes may be stopped.
	SandboxFallingAsleep SandboxPhase = "fallingAsleep"
	// SandboxAsleep: its processes are stopped.
	SandboxAsleep SandboxPhase = "asleep"
	// SandboxWaking: its processes may be stopped, and are continued.
	SandboxWaking SandboxPhase = "waking"
	// SandboxStopped: its files are in status.archive, and it has no pod. The pod that the spec names was its last one.
	SandboxStopped SandboxPhase = "stopped"
	// SandboxReleased: released; no new request is admitted, the pod still stands.
	SandboxReleased SandboxPhase = "released"
	// SandboxEnded: released, the pod is gone, and no router can send anything to
	// where it was.
	SandboxEnded SandboxPhase = "ended"
)

// SandboxStatus is where the sandbox is in its life.
//
// +kubebuilder:validation:XValidation:rule="has(self.revision) == has(self.phase)",message="status: revision and phase are written together"
// +kubebuilder:validation:XValidation:rule="!has(self.revision) || int(self.revision.split('.')[0]) <= 9007199254740992",message="status.revision: the term must be 9007199254740992 at most"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.revision) || !has(self.revision) || self == oldSelf || int(self.revision.split('.')[0]) > int(oldSelf.revision.split('.')[0]) || int(self.revision.split('.')[0]) == int(oldSelf.revision.split('.')[0]) && int(self.revision.split('.')[1]) > int(oldSelf.revision.split('.')[1])",message="status.revision: only a later state overwrites one"
// +kubebuilder:validation:XValidation:rule="!has(oldSelf.lastActive) || has(self.lastActive) && self.lastActive >= oldSelf.lastActive",message="status.lastActive: never goes back"
type SandboxStatus struct {
	// phase is starting, running, fallingAsleep, asleep, waking, stopped, released or ended.
	// +optional
	Phase SandboxPhase `json:"phase,omitempty"`
	// reason why the sandbox was released: Killed, IdleTimeout, EndTime, OOMKilled and so on.
	// docs/reference/reasons.md explains all of them.
	// +optional
	Reason string `json:"reason,omitempty"`
	// message has details of the reason, such as the words of the kubelet.
	// +kubebuilder:validation:MaxLength=1024
	// +optional
	Message string `json:"message,omitempty"`
	// exitCode is that of the container whose end is the reason.
	// +optional
	ExitCode *int32 `json:"exitCode,omitempty"`
	// logLines are the last lines of its log, if the pool's spec.records asks for them and it ended by itself
	// or failed. The sandbox has written them: they may have its secrets.
	// +kubebuilder:validation:MaxItems=100
	// +kubebuilder:validation:items:MaxLength=8192
	// +optional
	// +listType=atomic
	LogLines []string `json:"logLines,omitempty"`
	// startedAt is when it began to run.
	// +optional
	StartedAt *metav1.MicroTime `json:"startedAt,omitempty"`
	// releasedAt is when the release was committed. The pod may still exist then; the phase says so.
	// +optional
	ReleasedAt *metav1.MicroTime `json:"releasedAt,omitempty"`
	// asleepAt is when it fell asleep, also if it was stopped since. Absent: it is awake.
	// +optional
	AsleepAt *metav1.MicroTime `json:"asleepAt,omitempty"`
	// wakeable: a request may wake it.
	// +optional
	Wakeable bool `json:"wakeable,omitempty"`
	// incarnation is how often it was stopped before it got its pod.
	// +kubebuilder:validation:Minimum=0
	// +optional
	Incarnation int32 `json:"incarnation,omitempty"`
	// archive names, in the object store of the allocators, the files that it is to get, or that its pod was
	// given. Absent: it was never stopped.
	// +kubebuilder:validation:MaxLength=253
	// +optional
	Archive string `json:"archive,omitempty"`
	// lastActive: the sandbox was active then, or later. It is written while the
	// sandbox has an idle timeout, at most once a minute, and goes forwards only; "berth
	// last-active" is more precise.
	// +optional
	LastActive *metav1.MicroTime `json:"lastActive,omitempty"`
	// revision orders the allocator's writes: term, then a counter in the term.
	// A lower one never overwrites a higher one.
	// +kubebuilder:validation:MaxLength=37
	// +kubebuilder:validation:Pattern=`^[0-9]{1,18}\.[0-9]{1,18}$`
	// +optional
	Revision string `json:"revision,omitempty"`
}

// SandboxList is a list of Sandbox.
//
// +kubebuilder:object:root=true
type SandboxList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []Sandbox `json:"items"`
}
