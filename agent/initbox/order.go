package initbox

import (
	"encoding/json"
	"errors"
	"fmt"
)

const (
	// SleepPath is that of the call of the agent that takes an order.
	SleepPath = "/sleep"
	// MaxSealedOrder bounds the box of an Order or a FilesOrder in bytes: escaping makes six bytes of one at most.
	MaxSealedOrder = 6*(maxID+maxPaths*maxFilesPath) + 1<<10
)

// Kind is what an Order asks for.
type Kind string

// The kinds of orders. Package agent/freeze says what each does.
const (
	Freeze Kind = "freeze"
	Keep   Kind = "keep"
	Thaw   Kind = "thaw"
)

// Order has an agent stop the processes of its sandbox, keep them so, or continue them.
type Order struct {
	// SandboxID is the sandbox that the agent was configured for.
	SandboxID string `json:"sandboxID"`
	Kind      Kind   `json:"kind"`
	// Term and Counter are the revision of the fact that the order follows from. Of two orders for a sandbox the
	// one with the higher Term is newer, then the one with the higher Counter.
	Term    uint64 `json:"term"`
	Counter uint64 `json:"counter"`
}

// Check returns an error that names the first field that no agent accepts.
func (o *Order) Check() error {
	switch {
	case o.SandboxID == "":
		return errors.New("sandboxID: must be set")
	case o.Kind != Freeze && o.Kind != Keep && o.Kind != Thaw:
		return errors.New("kind: must be freeze, keep or thaw")
	case o.Term == 0:
		return errors.New("term: must be set")
	}
	return text("sandboxID", o.SandboxID, maxID)
}

// SealOrder returns the box of o. The error is that of o.Check.
func (p *Peer) SealOrder(o *Order) ([]byte, error) { return p.sealOrder(o) }

func (p *Peer) sealOrder(o interface{ Check() error }) ([]byte, error) {
	if err := o.Check(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("initbox: %w", err)
	}
	return seal(text, &p.orders), nil
}

// OpenOrder returns the order in a box. The error is ErrVersion, ErrSealed, or says what is wrong with the order.
func (k *Keys) OpenOrder(sealed []byte) (*Order, error) {
	o := new(Order)
	if err := open(sealed, MaxSealedOrder, &k.orders, "order", o); err != nil {
		return nil, err
	}
	return o, nil
}

// Obeyed is the JSON body of the answer to an order that was obeyed.
type Obeyed struct {
	// Processes is how many were stopped or continued, TookMS the time for it in milliseconds.
	Processes int   `json:"processes"`
	TookMS    int64 `json:"took_ms"`
}

// Reason says why an order was not obeyed.
type Reason string

// Reasons why processes were not stopped.
const (
	NotPermitted Reason = "not_permitted"
	StillRuns    Reason = "still_runs"
	TooFast      Reason = "too_fast"
	Ending       Reason = "ending"
	NotVisible   Reason = "not_visible"
)

// Refusal is why an agent has not stopped the processes. All of them run again. It is in the JSON body of the answer.
type Refusal struct {
	Reason Reason `json:"reason"`
	// PID and UID are those of the process, for NotPermitted and StillRuns.
	PID int    `json:"pid,omitempty"`
	UID uint32 `json:"uid,omitempty"`
}

// Error is for people. It has nothing in it that the sandbox has chosen but two numbers.
func (r *Refusal) Error() string {
	switch r.Reason {
	case NotPermitted:
		return fmt.Sprintf("process %d of user %d cannot be stopped, because the agent has no right to signal it: "+
			"run the container as root, or no program as another user", r.PID, r.UID)
	case StillRuns:
		return fmt.Sprintf("process %d of user %d does not stop", r.PID, r.UID)
	case TooFast:
		return "processes start and end faster than they can be stopped"
	case Ending:
		return "the container was told to end"
	case NotVisible:
		return "the agent cannot read the processes in /proc"
	}
	return "the agent could not stop all processes"
}
