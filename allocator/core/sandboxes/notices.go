package sandboxes

// Notice is something that the caller acts on.
type Notice interface{ notice() }

type (
	// Started: a sandbox runs. Routers get its route, and callers their answers.
	Started struct{ Sandbox *Sandbox }
	// Routed: the route of a sandbox that ran before has changed, or may not be known to routers.
	Routed struct{ Sandbox *Sandbox }
	// Closed: a sandbox is about to sleep. Routers must forget its route. Tired: its end has come, and it is to sleep
	// then.
	Closed struct{ Sandbox *Sandbox }
	Tired  struct{ Sandbox *Sandbox }
	// Ruled: the new rules of a sandbox, which a call has asked for, are durable. Egress routers must get them.
	Ruled struct {
		Sandbox *Sandbox
		Token   uint64
	}
	// Turned: that a sandbox is asleep, or is to wake, is durable.
	Turned struct{ Sandbox *Sandbox }
	// Rising: a sandbox that is stopped is to run again. It needs a pod.
	Rising struct{ Sandbox *Sandbox }
	// Doomed: a sandbox that is stopped is to end, and a claim has bound it to a pod.
	Doomed struct{ Sandbox *Sandbox }
	// Released: the release of a sandbox is durable.
	Released struct{ Sandbox *Sandbox }
)

func (Started) notice()  {}
func (Routed) notice()   {}
func (Released) notice() {}
func (Turned) notice()   {}
func (Rising) notice()   {}
func (Doomed) notice()   {}
func (Closed) notice()   {}
func (Tired) notice()    {}
func (Ruled) notice()    {}
