package v1alpha1

// Labels on the pods of a pool.
const (
	// LabelPool is the name of the pool that owns the pod. NetworkPolicies select the
	// pods of pools by it. The allocator goes by the owner reference, and puts the label
	// back when it was changed.
	LabelPool = "berth.sh/pool"
	// LabelTemplate is a hash of the template the pod was made from.
	LabelTemplate = "berth.sh/template"
	// LabelEgress is EgressByGateway if the pod reaches the egress gateway only, and missing otherwise. NetworkPolicies
	// select the pods by it. The allocator knows a pod from the pod's spec, puts the label back on one with a sandbox
	// when it was removed, and does not hand out one without it.
	LabelEgress     = "berth.sh/egress"
	EgressByGateway = "gateway"
	// LabelPhase is one of the Phase constants. It follows what the allocator has
	// on record and is for people: nothing depends on it, but that a pod which is
	// not marked as warm and on no record is never handed out.
	LabelPhase = "berth.sh/phase"
	// LabelSandbox is the sandbox ID, from the claim on, for people.
	LabelSandbox = "berth.sh/sandbox"
)

// Annotations on the pods of a pool that recycles them.
const (
	// AnnotationLife is the number of sandboxes' lives that the pod has had before this one. A change of it by
	// anyone restarts all containers, and ends the sandbox in the pod.
	AnnotationLife = "berth.sh/life"
	// AnnotationEnded has the IDs of the containers of the life before. The pod is ready when none of them is
	// left.
	AnnotationEnded = "berth.sh/ended-containers"
)

// AnnotationMetadata of a pod says which labels and annotations it has from its template: a hash, and their keys. A
// pod without it has none.
const AnnotationMetadata = "berth.sh/template-metadata"

// AnnotationCPURequest of a pod is the CPU request of its first container while its sandbox is awake. A pod without it
// keeps its request while its sandbox sleeps.
const AnnotationCPURequest = "berth.sh/cpu-request"

// Finalizers of the allocator.
const (
	// PoolFinalizer keeps a deleted pool until its pods are gone.
	PoolFinalizer = "berth.sh/pool"
	// SandboxFinalizer keeps a deleted Sandbox object until the sandbox has ended.
	SandboxFinalizer = "berth.sh/sandbox"
)

// Values of LabelPhase.
const (
	PhaseWarm     = "warm"
	PhaseClaimed  = "claimed"
	PhaseReleased = "released"
)
