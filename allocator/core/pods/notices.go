package pods

// Notice is something that the caller acts on: a Disturbed, a Failed, a Warmed or an Unblocked.
type Notice interface{ notice() }

type (
	// Disturbed: a pod in use was observed, something about its address, node or pool has changed, or it is gone.
	Disturbed struct{ Pod *Pod }
	// Failed: an idle pod is replaced. Early: it counts for the back-off of its pool, because it has ended before it
	// was warm, or by itself within StableAfter of that.
	Failed struct {
		Pod         *Pod
		Reason, Why string
		Early       bool
	}
	// Warmed: a pod became warm for the first time.
	Warmed struct{ Pod *Pod }
	// Unblocked: the intent to delete every idle pod that the requests of a sandbox may have reached is durable.
	Unblocked struct{ Sandbox string }
)

func (Disturbed) notice() {}
func (Failed) notice()    {}
func (Warmed) notice()    {}
func (Unblocked) notice() {}
