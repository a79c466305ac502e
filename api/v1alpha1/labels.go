package v1alpha1

// Labels on the pods of a pool.
const (
	// LabelPool is the name of the pool that owns the pod. NetworkPolicies select the
	// pods of pools by it. The allocator goes by the owner reference, and puts the label
	// back when it was changed.
	LabelPool = "berth.sh/pool"
	// LabelTemplate is a hash of the template the pod was made from.
	LabelTemplate = "berth.sh/template"
	// LabelPhase is one of the Phase constants. It follows what the allocator has
	// on record and is for people: nothing depends on it, but that a pod which is
	// not marked as warm and on no record is never handed out.
	LabelPhase = "berth.sh/phase"
	// LabelSandbox is the sandbox ID, from the claim on, for people.
	LabelSandbox = "berth.sh/sandbox"
)

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
