package history

import (
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const (
	idle    = 3 * time.Second
	boot    = time.Hour
	tenMin  = 10 * time.Minute
	address = "127.1.0.1"
)

var wall = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// step is a moment of the run, in seconds.
func step(s float64) time.Duration { return boot + time.Duration(math.Round(s*1000))*time.Millisecond }

func claimed(at float64, id string) Event {
	return Event{Kind: Claim, Claim: id, Began: step(at), Ended: step(at + 0.1), Sandbox: id, Code: http.StatusCreated,
		IdleTimeout: idle}
}

func had(from, to float64, name, id string) Event {
	return Event{Kind: Received, Began: step(from), Ended: step(to), Request: name, Sandbox: id, Address: address,
		What: "short"}
}

// asked is a request as its client saw it, answered by the pod.
func asked(from, to float64, name, id string) Event {
	return Event{
		Kind: Request, Began: step(from), Ended: step(to), Request: name, Sandbox: id, Gateway: "gateway-0", What: "short",
		Code: http.StatusOK, Address: address, Answered: id,
	}
}

func turnedAway(from, to float64, name, id string, code int, reason string) Event {
	e := asked(from, to, name, id)
	e.Code, e.Reason, e.Address, e.Answered = code, reason, "", ""
	return e
}

// reapedAt is the record of a release for being idle, by a clock that is off.
func reapedAt(at float64, offset time.Duration, id string) Event {
	return Event{
		Kind: Record, Sandbox: id, Address: address, IdleTimeout: idle, Reason: "IdleTimeout",
		Released: wall.Add(step(at) - boot + offset),
	}
}

func fault(from, to float64) Event {
	return Event{Kind: Fault, What: "router-kill", Process: "gateway-0", Began: step(from), Ended: step(to)}
}

// used has a sandbox that is used twice, near its deadline, and is released at 8 s.
func used(more ...Event) []Event {
	return append([]Event{
		{Kind: Run, Began: boot, Wall: wall, Settings: &Settings{
			Suite: Reaping, Seed: 1, Offsets: []time.Duration{tenMin, -tenMin}, Settle: 5 * time.Second, Guard: time.Minute,
		}},
		claimed(0, "a"),
		asked(1, 1.2, "1", "a"), had(1.05, 1.1, "1", "a"),
		asked(4, 4.2, "2", "a"), had(4.05, 4.1, "2", "a"),
		turnedAway(8.05, 8.1, "3", "a", http.StatusGone, "sandbox_gone"),
		reapedAt(8, tenMin, "a"),
		{Kind: Clock, Began: step(9), Wall: wall.Add(9*time.Second + time.Millisecond)},
	}, more...)
}

// Places in what used returns.
const (
	firstUse    = 1
	secondAsked = 4
	secondHad   = 5
	itsRecord   = 7
)

// with replaces event i of used.
func with(i int, e Event) []Event {
	all := used()
	all[i] = e
	return all
}

func TestReapsAreCountedByWhatHappenedNearThem(t *testing.T) {
	h := New(used())
	c := Count(h)
	require.Equal(t, 1, c.Total(Claims))
	require.Equal(t, map[string]int{Quiet: 1}, c[Reaps])
	require.Equal(t, map[string]int{Answered: 1}, c[NearDeadline], "the second, at 4 s: the first one's use ended at 1.1 s")
	require.Equal(t, map[string]int{"410 sandbox_gone": 1}, c[NearReap])
	require.Equal(t, map[string]int{Answered: 2, "410 sandbox_gone": 1}, c[Requests])
	require.Equal(t, map[string]int{"less than 1s": 1}, c[Late])
	require.Contains(t, c.String(), "reaps: 1, quiet 1\n")

	c = Count(New(used(fault(2, 2.1))))
	require.Equal(t, map[string]int{Troubled: 1}, c[Reaps])
	require.Empty(t, c[Late])
	require.Equal(t, map[string]int{"router-kill": 1}, c[Faults])
}

func TestReapOfAUsedSandboxIsFound(t *testing.T) {
	keptAlive := Event{Kind: KeepAlive, Began: step(5.5), Ended: step(5.6), Sandbox: "a", Code: http.StatusNoContent}
	refusedToKeep := keptAlive
	refusedToKeep.Code = http.StatusServiceUnavailable
	early := used()[:firstUse+1]
	twice := []string{"false reap", "false reap"} // by the record, and by the client that was answered that it is gone
	cases{
		"used and silent":                     {used(), nil},
		"the timeout after its last use":      {append(with(itsRecord, reapedAt(7.1, tenMin, "a")), fault(7, 7)), nil},
		"a moment earlier":                    {with(itsRecord, reapedAt(7.099, tenMin, "a")), []string{"false reap"}},
		"by the other clock":                  {with(itsRecord, reapedAt(8, -tenMin, "a")), nil},
		"a moment earlier by the other clock": {with(itsRecord, reapedAt(7.099, -tenMin, "a")), []string{"false reap"}},
		"a request is in progress":            {used(had(4.5, 8.2, "9", "a")), twice},
		"a request ended a moment ago":        {used(had(4.5, 7.9, "9", "a")), twice},
		"a long request ended in time":        {used(had(1.5, 5, "9", "a")), nil},
		"a request after the reap":            {used(had(8.01, 8.02, "9", "a")), []string{"after the reap", "false reap"}},
		"a request of the next sandbox there": {used(claimed(20, "b"), had(21, 21.1, "9", "b"), reapedAt(30, tenMin, "b")),
			nil},
		"a keep-alive":                      {used(keptAlive), twice},
		"a keep-alive that was refused":     {used(refusedToKeep), nil},
		"claimed less than the timeout ago": {append(early[:2:2], reapedAt(2.9, tenMin, "a")), []string{"false reap"}},
		"never used":                        {append(early[:2:2], reapedAt(3, tenMin, "a")), nil},
		"answered that it is gone, before it is": {used(turnedAway(6, 6.1, "9", "a", http.StatusGone, "sandbox_gone")),
			[]string{"false reap"}},
	}.judge(t)
}

func TestSilentSandboxThatStaysIsFound(t *testing.T) {
	killed := reapedAt(8, tenMin, "a")
	killed.Reason = "Killed"
	abandoned := reapedAt(8, tenMin, "a")
	abandoned.Reason = "Canceled"
	unanswered := abandoned
	unanswered.Sandbox = "b"
	live := reapedAt(8, tenMin, "a")
	live.Reason, live.Released = "", time.Time{}
	cases{
		"not released":                     {with(itsRecord, live), []string{"never reaped"}},
		"not released, and never answered": {used(Event{Kind: Record, Sandbox: "b"}), []string{"never reaped"}},
		"released, and never answered":     {used(reapedAt(9, -tenMin, "b")), nil},
		"released late":                    {with(itsRecord, reapedAt(7.2+60, tenMin, "a")), []string{"never reaped"}},
		"released late, after a fault":     {append(with(itsRecord, reapedAt(7.2+60, tenMin, "a")), fault(5, 9)), nil},
		"released late, a fault came later": {append(with(itsRecord, reapedAt(7.2+60, tenMin, "a")), fault(68, 69)),
			[]string{"never reaped"}},
		"no record":                     {used(claimed(5, "b")), []string{"lost"}},
		"released for another reason":   {with(itsRecord, killed), []string{"other reason"}},
		"given back although answered":  {with(itsRecord, abandoned), []string{"other reason"}},
		"given back and never answered": {used(unanswered), nil},
	}.judge(t)
}

func TestWrongAnswersToRequestsAreFound(t *testing.T) {
	other, misled := asked(4, 4.2, "2", "a"), asked(4, 4.2, "2", "a")
	other.Address, misled.Answered = "127.1.0.2", "b"
	strayed := had(4.05, 4.1, "2", "a")
	strayed.Address = "127.1.0.2"
	quiesced := turnedAway(2, 2.1, "9", "a", http.StatusServiceUnavailable, "sandbox_quiesced")
	cases{
		"another pod answers":          {with(secondAsked, other), []string{"wrong pod"}},
		"answered for another sandbox": {with(secondAsked, misled), []string{"wrong pod"}},
		"another pod receives it":      {with(secondHad, strayed), []string{"wrong pod"}},
		"unknown":                      {used(turnedAway(2, 2.1, "9", "a", http.StatusNotFound, "sandbox_not_found")), []string{"unknown"}},
		"an error":                     {used(quiesced), []string{"error"}},
		"an error after a fault":       {used(quiesced, fault(-3, -2.9)), nil},
		"an error long after a fault":  {used(quiesced, fault(-4, -3.1)), []string{"error"}},
		"no answer":                    {used(turnedAway(2, 2.1, "9", "a", 0, "")), []string{"error"}},
	}.judge(t)
}

func TestRequestIsNearOnlyItsOwnDeadline(t *testing.T) {
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
			r := turnedAway(c.began, 8.1, "9", "a", http.StatusServiceUnavailable, "sandbox_quiesced")
			want := 1
			if c.near {
				want = 2
			}
			require.Equal(t, want, Count(New(used(r, fault(0, 9)))).Total(NearDeadline))
		})
	}
	c := Count(New(used(had(1.3, 6, "9", "a"))))
	require.Zero(t, c.Total(NearDeadline), "something is in progress: it is far from idle")
}
