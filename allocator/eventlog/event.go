package eventlog

import (
	"math"
	"strconv"
	"time"

	"github.com/google/uuid"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Type is the kind of an event, as E2B names it.
type Type string

// The types of events. The last three are known and never occur.
const (
	Created      Type = "sandbox.lifecycle.created"
	Updated      Type = "sandbox.lifecycle.updated"
	Killed       Type = "sandbox.lifecycle.killed"
	Paused       Type = "sandbox.lifecycle.paused"
	Resumed      Type = "sandbox.lifecycle.resumed"
	Checkpointed Type = "sandbox.lifecycle.checkpointed"
)

// Version and Category are those of every event, as E2B has them.
const (
	Version  = "v2"
	Category = "lifecycle"
)

// labels are the words of E2B's first version of events.
var labels = map[Type]string{Created: "create", Updated: "update", Killed: "kill"}

// Event is what happened to a sandbox, as a segment stores it. Times are in microseconds since 1970, 0 for none.
type Event struct {
	// Number counts the events of the log. The segment has it.
	Number  uint64 `json:"-"`
	Type    Type   `json:"t"`
	At      int64  `json:"at"`
	Sandbox string `json:"s"`
	Pool    string `json:"p"`
	// Build is the UID of the pool.
	Build    string            `json:"b,omitempty"`
	Team     string            `json:"tm,omitempty"`
	Metadata map[string]string `json:"m,omitempty"`
	// End is when the sandbox ends, of a created or updated one.
	End int64 `json:"e,omitempty"`
	// Reason, Started, CPUs and MemoryMB are of a killed one.
	Reason   string `json:"r,omitempty"`
	Started  int64  `json:"st,omitempty"`
	CPUs     int    `json:"c,omitempty"`
	MemoryMB int    `json:"mb,omitempty"`
}

// namespace of the IDs, chosen at random once.
var namespace = uuid.MustParse("5c1b6c0e-7b0f-4d52-9e0a-6f2c8e8a3d17")

// ID is the same for the same event under every leader.
func (e *Event) ID() string {
	name := e.Sandbox + "/" + string(e.Type)
	if e.Type == Updated {
		name += "/" + strconv.FormatInt(e.End, 10)
	}
	return uuid.NewSHA1(namespace, []byte(name)).String()
}

// Time is when it happened, by the wall clock of the leader.
func (e *Event) Time() time.Time { return time.UnixMicro(e.At).UTC() }

// Label is E2B's older word for the type.
func (e *Event) Label() string { return labels[e.Type] }

// Data returns the details of the event.
func (e *Event) Data() openapi.LifecycleEventData {
	d := openapi.LifecycleEventData{SandboxMetadata: e.Metadata}
	switch {
	case e.Type == Killed:
		d.Reason = &e.Reason
		d.Execution = &openapi.LifecycleExecution{
			StartedAt: time.UnixMicro(e.Started).UTC(), VcpuCount: e.CPUs, MemoryMb: e.MemoryMB, ExecutionTime: max(0, e.At-e.Started) / 1000,
		}
	case e.Type == Updated && e.End != 0:
		end := time.UnixMicro(e.End).UTC()
		d.SetTimeout = &end
	}
	return d
}

// known is what the log has told of a sandbox.
type known struct {
	id, team string
	end      int64
	killed   bool
	// events is how many events of it the log has.
	events int
}

// derive returns the events that a state adds to what is told of its sandbox; k is nil if nothing is. dropped: its
// created event would be older than the log. at is when the state was seen.
func derive(s *fact.Sandbox, k *known, dropped bool, at time.Time, build string) (events []Event) {
	base := Event{Sandbox: s.ID, Pool: s.Pool.Name, Build: build, Team: s.Team, Metadata: s.Metadata}
	switch e := base; {
	case k == nil && !dropped:
		e.Type, e.At, e.End = Created, micros(s.ClaimedAt), micros(s.EndAt)
		events = append(events, e)
	case s.Phase < fact.Released && (k == nil || !k.killed && k.end != micros(s.EndAt)):
		e.Type, e.At, e.End = Updated, micros(at), micros(s.EndAt)
		events = append(events, e)
	}
	if s.Phase >= fact.Released && (k == nil || !k.killed) {
		e := base
		e.Type, e.At, e.Reason, e.Started = Killed, micros(s.ReleasedAt), s.Reason, micros(s.StartedAt)
		if e.Started == 0 {
			e.Started = micros(s.ClaimedAt)
		}
		if w := s.Workload; w != nil {
			e.CPUs, e.MemoryMB = wholes(w.Limits.CPU, 1), wholes(w.Limits.Memory, 1<<20)
		}
		events = append(events, e)
	}
	return events
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}

// wholes rounds a quantity up to whole units; 0 for none.
func wholes(text string, unit float64) int {
	q, err := resource.ParseQuantity(text)
	if err != nil {
		return 0
	}
	return int(math.Ceil(q.AsApproximateFloat64() / unit))
}
