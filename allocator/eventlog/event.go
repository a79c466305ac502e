package eventlog

import (
	"cmp"
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

// The types of events. The last one is known and never occurs.
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
var labels = map[Type]string{Created: "create", Updated: "update", Killed: "kill", Paused: "pause", Resumed: "resume"}

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
	// End is when the sandbox ends, of a created, updated or resumed one.
	End int64 `json:"e,omitempty"`
	// Paused is when the sandbox fell asleep that is resumed.
	Paused int64 `json:"pa,omitempty"`
	// Reason is of a killed one.
	Reason string `json:"r,omitempty"`
	// Started, CPUs and MemoryMB are of a paused or killed one. It has run since Started.
	Started  int64 `json:"st,omitempty"`
	CPUs     int   `json:"c,omitempty"`
	MemoryMB int   `json:"mb,omitempty"`
}

// namespace of the IDs, chosen at random once.
var namespace = uuid.MustParse("5c1b6c0e-7b0f-4d52-9e0a-6f2c8e8a3d17")

// ID is the same for the same event under every leader.
func (e *Event) ID() string {
	name := e.Sandbox + "/" + string(e.Type)
	switch e.Type {
	case Updated:
		name += "/" + strconv.FormatInt(e.End, 10)
	case Paused:
		name += "/" + strconv.FormatInt(e.At, 10)
	case Resumed:
		name += "/" + strconv.FormatInt(e.Paused, 10)
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
	if e.Type == Killed {
		d.Reason = &e.Reason
	}
	switch {
	case e.Type == Killed || e.Type == Paused:
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
	// asleep is when the pause was that no resume has followed, 0: there is none. woken is when the last resume was.
	asleep, woken int64
	// events is how many events of it the log has.
	events int
}

// derive returns the events that a state adds to what is told of its sandbox; k is nil if nothing is. dropped: its
// created event would be older than the log. at is when the state was seen.
func derive(s *fact.Sandbox, k *known, dropped bool, at time.Time, build string) (events []Event) {
	var now known // what is told, with these events
	if k != nil {
		now = *k
	}
	if now.killed {
		return nil
	}
	tell := func(kind Type, at int64, set func(*Event)) {
		e := Event{Type: kind, At: at, Sandbox: s.ID, Pool: s.Pool.Name, Build: build, Team: s.Team, Metadata: s.Metadata}
		set(&e)
		now.note(&e)
		events = append(events, e)
	}
	ends := func(e *Event) { e.End = micros(s.EndAt) }
	ran := func(e *Event) {
		switch e.Started = cmp.Or(now.woken, micros(s.StartedAt), micros(s.ClaimedAt)); {
		case now.asleep != 0: // it has not run since its pause, which has told how it ran
			e.Started = e.At
		case e.Started > e.At: // the clocks of two leaders differ
			e.Started = e.At
		}
		if w := s.Workload; w != nil {
			e.CPUs, e.MemoryMB = wholes(w.Limits.CPU, 1), wholes(w.Limits.Memory, 1<<20)
		}
	}
	live, asleep := s.Phase < fact.Released, micros(s.AsleepAt)
	if k == nil && !dropped {
		tell(Created, micros(s.ClaimedAt), ends)
	}
	if now.asleep != 0 && now.asleep != asleep && (live || asleep != 0) {
		woke := micros(at)
		if asleep != 0 { // and sleeps again
			woke = min(woke, asleep)
		}
		tell(Resumed, woke, func(e *Event) { e.End, e.Paused = micros(s.EndAt), now.asleep })
	}
	switch {
	case asleep != 0 && now.asleep != asleep:
		tell(Paused, asleep, ran)
	case live && asleep == 0 && (k == nil && dropped || now.end != micros(s.EndAt)): // one that is asleep has no end
		tell(Updated, micros(at), ends)
	}
	if !live {
		tell(Killed, micros(s.ReleasedAt), func(e *Event) { e.Reason = s.Reason; ran(e) })
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
