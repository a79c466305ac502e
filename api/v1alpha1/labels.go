package v1alpha1

// Labels and annotations on the pods of a pool. The allocator's conditional
// writes test them, so nobody else may change them.
const (
	// LabelPool is the pool's name.
	LabelPool = "berth.sh/pool"
	// LabelPhase is one of the Phase constants.
	LabelPhase = "berth.sh/phase"
	// LabelSandbox is the sandbox ID, from the claim on.
	LabelSandbox = "berth.sh/sandbox"
	// LabelTemplate is a hash of the template the pod was made from.
	LabelTemplate = "berth.sh/template"
	// AnnotationBinding is the claim, as JSON: who holds the pod and until when.
	AnnotationBinding = "berth.sh/binding"
	// AnnotationRelease is the release, as JSON: why and when.
	AnnotationRelease = "berth.sh/release"
	// PoolFinalizer keeps a deleted pool until its pods are gone.
	PoolFinalizer = "berth.sh/pool"
)

// Values of LabelPhase.
const (
	PhaseWarm     = "warm"
	PhaseClaimed  = "claimed"
	PhaseReleased = "released"
)
