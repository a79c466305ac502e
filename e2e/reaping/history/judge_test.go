package history_test

import (
	"math"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/reaping/history"
)

const (
	idle    = 3 * time.Second
	settle  = 5 * time.Second
	guard   = time.Minute
	boot    = time.Hour
	tenMin  = 10 * time.Minute
	address = "127.1.0.1"
)

var wall = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func run() history.Run {
	return history.Run{Seed: 1, Boot: boot, Wall: wall, Offsets: []time.Duration{tenMin, -tenMin}, Settle: settle, Guard: guard}
}

// step is a moment of the run, in seconds.
func step(s float64) time.Duration { return boot + time.Duration(math.Round(s*1000))*time.Millisecond }

func claim(at float64, id string) history.Event {
	return history.Event{Kind: history.Claim, Began: step(at), Ended: step(at + 0.1), Sandbox: id, IdleTimeout: idle}
}

func received(from, to float64, name uint64, id string) history.Event {
	return history.Event{Kind: history.Received, Began: step(from), Ended: step(to), Request: name, Sandbox: id, Address: address, What: "short"}
}

// asked is a request as its client saw it, answered by the pod.
func asked(from, to float64, name uint64, id string) history.Event {
	return history.Event{
		Kind: history.Request, Began: step(from), Ended: step(to), Request: name, Sandbox: id, Gateway: "gateway-0", What: "short",
		Code: http.StatusOK, Address: address, Answered: id,
	}
}

func refused(from, to float64, name uint64, id string, code int, reason string) history.Event {
	e := asked(from, to, name, id)
	e.Code, e.Reason, e.Address, e.Answered = code, reason, "", ""
	return e
}

// record says that a sandbox was released at a moment, by a clock that is off.
func record(at float64, offset time.Duration, id string) history.Event {
	return history.Event{
		Kind: history.Record, Sandbox: id, Address: address, IdleTimeout: idle, Reason: history.Idle,
		Released: wall.Add(step(at) - boot + offset),
	}
}

func fault(from, to float64) history.Event {
	return history.Event{Kind: history.Fault, What: "router-kill", Process: "gateway-0", Began: step(from), Ended: step(to)}
}

// good has a sandbox that is used twice, near its deadline, and is released at 8 s.
func good() []history.Event {
	return []history.Event{
		claim(0, "a"),
		asked(1, 1.2, 1, "a"), received(1.05, 1.1, 1, "a"),
		asked(4, 4.2, 2, "a"), received(4.05, 4.1, 2, "a"),
		refused(8.05, 8.1, 3, "a", http.StatusGone, "sandbox_gone"),
		record(8, tenMin, "a"),
		{Kind: history.Clock, Began: step(9), Wall: wall.Add(9*time.Second + time.Millisecond)},
	}
}

func TestAHistoryWithoutFaultIsCounted(t *testing.T) {
	v := history.Judge(run(), good())
	require.Empty(t, v.Mismatches)
	require.Equal(t, 1, v.Claims)
	require.Equal(t, 1, v.Reaps)
	require.Zero(t, v.Troubled)
	require.Equal(t, map[string]int{"answered": 1}, v.Near, "the second, at 4 s: the first one's use ended at 1.1 s")
	require.Equal(t, map[string]int{"410 sandbox_gone": 1}, v.Verge)
	require.Equal(t, map[string]int{"answered": 2, "410 sandbox_gone": 1}, v.Requests)
	require.Equal(t, []time.Duration{900 * time.Millisecond}, v.Late)
	require.Equal(t, []time.Duration{time.Second}, v.Told)
	require.NotEmpty(t, v.String())

	v = history.Judge(run(), append(good(), fault(2, 2.1)))
	require.Empty(t, v.Mismatches)
	require.Equal(t, 1, v.Troubled)
	require.Empty(t, v.Late)
	require.Equal(t, map[string]int{"router-kill": 1}, v.Faults)
}

// with replaces event i of a good history, or adds to it.
func with(i int, e history.Event) []history.Event {
	all := good()
	all[i] = e
	return all
}

func TestEachMismatchIsFound(t *testing.T) {
	other := asked(4, 4.2, 2, "a")
	other.Address = "127.1.0.2"
	misled := asked(4, 4.2, 2, "a")
	misled.Answered = "b"
	strayed := received(4.05, 4.1, 2, "a")
	strayed.Address = "127.1.0.2"
	killed := record(8, tenMin, "a")
	killed.Reason = "Killed"
	abandoned := record(8, tenMin, "a")
	abandoned.Reason = "Abandoned"
	abandonedOther := abandoned
	abandonedOther.Sandbox = "b"
	unreleased := record(8, tenMin, "a")
	unreleased.Reason, unreleased.Released = "", time.Time{}
	keptAlive := history.Event{Kind: history.KeepAlive, Began: step(5.5), Ended: step(5.6), Sandbox: "a", Code: http.StatusNoContent}
	refusedToKeep := keptAlive
	refusedToKeep.Code = http.StatusServiceUnavailable
	for name, c := range map[string]struct {
		events []history.Event
		want   []string // their first words; none: nothing is wrong
	}{
		"released the timeout after its last use":        {append(with(6, record(7.1, tenMin, "a")), fault(7, 7)), nil},
		"released a moment earlier":                      {with(6, record(7.099, tenMin, "a")), []string{"false reap"}},
		"the other clock":                                {with(6, record(8, -tenMin, "a")), nil},
		"a moment earlier by the other clock":            {with(6, record(7.099, -tenMin, "a")), []string{"false reap"}},
		"a clock that nobody has":                        {with(6, record(8, tenMin+time.Minute, "a")), []string{"never reaped"}},
		"before its claim by every clock":                {with(6, record(-1, -tenMin, "a")), []string{"clock"}},
		"something is in progress":                       {append(good(), received(4.5, 8.2, 9, "a")), []string{"false reap", "false reap"}},
		"something ended a moment ago":                   {append(good(), received(4.5, 7.9, 9, "a")), []string{"false reap", "false reap"}},
		"something long ended in time":                   {append(good(), received(1.5, 5, 9, "a")), nil},
		"its pod has a request after the verdict":        {append(good(), received(8.01, 8.02, 9, "a")), []string{"after the verdict", "false reap"}},
		"a request of another sandbox there":             {append(good(), claim(20, "b"), received(21, 21.1, 9, "b"), record(30, tenMin, "b")), nil},
		"a keep-alive":                                   {append(good(), keptAlive), []string{"false reap", "false reap"}},
		"a keep-alive that was refused":                  {append(good(), refusedToKeep), nil},
		"claimed less than the timeout ago":              {[]history.Event{claim(0, "a"), record(2.9, tenMin, "a")}, []string{"false reap"}},
		"never used":                                     {[]history.Event{claim(0, "a"), record(3, tenMin, "a")}, nil},
		"told that it is gone too early, for the record": {append(good(), refused(6, 6.1, 9, "a", http.StatusGone, "sandbox_gone")), []string{"false reap"}},
		"another pod answers":                            {with(3, other), []string{"wrong pod"}},
		"answered for another sandbox":                   {with(3, misled), []string{"wrong pod"}},
		"another pod has it":                             {with(4, strayed), []string{"wrong pod"}},
		"no record":                                      {append(good(), claim(5, "b")), []string{"lost"}},
		"released for another reason":                    {with(6, killed), []string{"other reason"}},
		"given back although it was answered":            {with(6, abandoned), []string{"other reason"}},
		"given back and never answered":                  {append(good(), abandonedOther), nil},
		"not released":                                   {with(6, unreleased), []string{"never reaped"}},
		"not released, and nobody knows of it":           {append(good(), history.Event{Kind: history.Record, Sandbox: "b"}), []string{"never reaped"}},
		"released, and nobody knows of it":               {append(good(), record(9, -tenMin, "b")), nil},
		"released late":                                  {with(6, record(7.2+60, tenMin, "a")), []string{"never reaped"}},
		"released late, after a fault":                   {append(with(6, record(7.2+60, tenMin, "a")), fault(5, 9)), nil},
		"released late, a fault came later":              {append(with(6, record(7.2+60, tenMin, "a")), fault(68, 69)), []string{"never reaped"}},
		"unknown":                                        {append(good(), refused(2, 2.1, 9, "a", http.StatusNotFound, "sandbox_not_found")), []string{"unknown"}},
		"an error":                                       {append(good(), refused(2, 2.1, 9, "a", http.StatusServiceUnavailable, "sandbox_quiesced")), []string{"error"}},
		"an error after a fault":                         {append(good(), refused(2, 2.1, 9, "a", http.StatusServiceUnavailable, "sandbox_quiesced"), fault(-3, -2.9)), nil},
		"an error long after a fault":                    {append(good(), refused(2, 2.1, 9, "a", http.StatusServiceUnavailable, "sandbox_quiesced"), fault(-4, -3.1)), []string{"error"}},
		"no answer":                                      {append(good(), refused(2, 2.1, 9, "a", 0, "")), []string{"error"}},
		"the machine's clock was set":                    {append(good(), history.Event{Kind: history.Clock, Began: step(9), Wall: wall.Add(9*time.Second + 21*time.Millisecond)}), []string{"clock"}},
	} {
		t.Run(name, func(t *testing.T) {
			// The order in which things were written down says nothing.
			for _, order := range []func([]history.Event){func([]history.Event) {}, slices.Reverse[[]history.Event]} {
				events := slices.Clone(c.events)
				order(events)
				v := history.Judge(run(), events)
				require.Len(t, v.Mismatches, len(c.want), "%q", v.Mismatches)
				got := slices.Sorted(slices.Values(v.Mismatches))
				for i, want := range slices.Sorted(slices.Values(c.want)) {
					require.Regexp(t, "^"+want+":", got[i])
				}
			}
		})
	}
}

func TestARequestIsNearOnlyItsOwnDeadline(t *testing.T) {
	for name, c := range map[string]struct {
		began float64
		near  bool
	}{
		"long before":   {6.8, false},
		"before":        {6.95, true},
		"after":         {7.25, true},
		"long after":    {7.35, false},
		"in between":    {5, false},
		"its first use": {0.5, false},
	} {
		t.Run(name, func(t *testing.T) {
			v := history.Judge(run(), append(good(), refused(c.began, 8.1, 9, "a", http.StatusServiceUnavailable, "sandbox_quiesced"), fault(0, 9)))
			want := 1
			if c.near {
				want = 2
			}
			require.Equal(t, want, history.Total(v.Near))
		})
	}
	v := history.Judge(run(), append(good(), received(1.3, 6, 9, "a")))
	require.Zero(t, history.Total(v.Near), "something is in progress: it is far from idle")
}
