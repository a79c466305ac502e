package history

import (
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// cases are histories, and the kinds of violation that all judges of their suite find.
type cases map[string]struct {
	events []Event
	want   []string
}

// judge runs cases, each with its lines in two orders: the order has no meaning.
func (c cases) judge(t *testing.T) {
	t.Helper()
	for name, test := range c {
		t.Run(name, func(t *testing.T) {
			shuffled := slices.Clone(test.events)
			rand.New(rand.NewPCG(1, 2)).Shuffle(len(shuffled)-1, func(i, k int) {
				shuffled[i+1], shuffled[k+1] = shuffled[k+1], shuffled[i+1]
			})
			for _, events := range [][]Event{test.events, shuffled} {
				all, err := New(events).Violations()
				require.NoError(t, err)
				var words, texts []string
				for _, v := range all {
					words, texts = append(words, v.What), append(texts, v.String())
				}
				require.ElementsMatch(t, test.want, words, "%s", strings.Join(texts, "\n"))
			}
		})
	}
}

const (
	maxStale    = 4 * time.Second
	window      = 5 * time.Second
	stallBudget = 3 * time.Second
)

// at is the middle of a step; what happens in a step begins 100 ms before it and ends
// 100 ms after it. Steps are seconds.
func at(step float64) (began, ended time.Duration) {
	middle := time.Duration(step * float64(time.Second))
	return middle - 100*time.Millisecond, middle + 100*time.Millisecond
}

func claim(step float64, name, sandbox, pod string) Event {
	began, ended := at(step)
	return Event{Kind: Claim, Began: began, Ended: ended, Claim: name, Code: http.StatusCreated, Sandbox: sandbox,
		Pod: pod}
}

func release(step float64, sandbox string, outstanding int) Event {
	began, ended := at(step)
	return Event{Kind: Release, Began: began, Ended: ended, Sandbox: sandbox, Code: http.StatusNoContent,
		Outstanding: outstanding}
}

func request(step float64, name, sandbox, uid string) Event {
	began, ended := at(step)
	return Event{Kind: Request, What: "get", Began: began, Ended: ended, Request: name, Sandbox: sandbox,
		Code: http.StatusOK, PodUID: uid}
}

func refused(step float64, name, sandbox, reason string) Event {
	e := request(step, name, sandbox, "")
	e.Code, e.Reason = http.StatusGone, reason
	return e
}

func received(step float64, name, sandbox, pod, uid string) Event {
	began, ended := at(step)
	return Event{Kind: Received, Began: (began + ended) / 2, Request: name, Sandbox: sandbox, Pod: pod, PodUID: uid}
}

func record(sandbox, pod, uid, address, reason string) Event {
	return Event{Kind: Record, Sandbox: sandbox, Pod: pod, PodUID: uid, Address: address, Reason: reason}
}

func deletion(step float64, pod, uid string) Event {
	began, ended := at(step)
	return Event{Kind: Delete, Began: began, Ended: ended, Pod: pod, PodUID: uid, What: "by force"}
}

// settings are those of all good soaks: one pointer, so that events can be compared.
var settings = &Settings{Suite: Soak, Seed: 1, MaxStale: maxStale, Window: window, StallBudget: stallBudget}

// good is a history without violation: sandbox a is used and released, b loses its pod,
// c and d get their addresses.
func good() []Event {
	return []Event{
		{Kind: Run, Settings: settings},
		claim(1, "k1", "a", "pod-a"),
		claim(1, "k1", "a", "pod-a"), // asked again
		claim(1, "k2", "b", "pod-b"),
		request(2, "r1", "a", "uid-a"), received(2, "r1", "a", "pod-a", "uid-a"),
		request(2, "r2", "b", "uid-b"), received(2, "r2", "b", "pod-b", "uid-b"),
		{Kind: Request, What: "get", Began: 2 * time.Second, Ended: 3 * time.Second, Request: "r3",
			Sandbox: "a"}, // no answer
		received(2.5, "r3", "a", "pod-a", "uid-a"),
		release(10, "a", 0), deletion(10, "pod-b", "uid-b"),
		refused(11, "r4", "a", "sandbox_gone"), refused(11, "r5", "b", "sandbox_gone"),
		claim(16, "k3", "c", "pod-c"), claim(16, "k4", "d", "pod-d"),
		request(17, "r6", "c", "uid-c"), received(17, "r6", "c", "pod-c", "uid-c"),
		refused(17, "r7", "a", "sandbox_gone"), refused(17, "r8", "b", "sandbox_gone"),
		release(18, "d", 1),
		request(19, "r9", "d", "uid-d"), received(19, "r9", "d", "pod-d", "uid-d"), // by the router that is outstanding
		refused(30, "r10", "d", "sandbox_gone"),
		{Kind: Fault, What: "router-kill", Process: "router-0", Began: time.Second, Ended: 2 * time.Second},
		{Kind: Fault, What: "router-kill", Process: "router-0", Error: "cannot"},
		{Kind: Fault, What: EnvoyPaused, Process: "envoy-0", Began: time.Second, Ended: 2 * time.Second},
		record("a", "pod-a", "uid-a", "127.0.0.1", "Killed"), record("b", "pod-b", "uid-b", "127.0.0.2", "PodDeleted"),
		record("c", "pod-c", "uid-c", "127.0.0.1", ""), record("d", "pod-d", "uid-d", "127.0.0.2", "Killed"),
		record("e", "pod-e", "uid-e", "127.0.0.3", "EndTime"), // of a claim without an answer
	}
}

// index is the place of an event in the good history.
func index(like Event) int {
	i := slices.Index(good(), like)
	if i < 0 {
		panic("the good history has no such event")
	}
	return i
}

// change returns the good history after f has changed the event that is like the given one.
func change(like Event, f func(*Event)) []Event {
	all := good()
	f(&all[index(like)])
	return all
}

// add returns the good history with more events.
func add(more ...Event) []Event { return append(good(), more...) }

// without returns the good history without one event.
func without(like Event) []Event {
	i := index(like)
	return slices.Delete(good(), i, i+1)
}

func TestGoodTrafficHasNoViolationAndIsCounted(t *testing.T) {
	h := New(good())
	all, err := h.Violations()
	require.NoError(t, err)
	require.Empty(t, all)
	c := Count(h)
	require.Equal(t, map[string]int{Answered: 4, "no answer": 1, "410 sandbox_gone": 5}, c[Requests])
	require.Equal(t, map[string]int{"get": 10}, c[Sent])
	require.Equal(t, 5, c.Total(Receipts))
	require.Equal(t, 5, c.Total(Records))
	require.Equal(t, 5, c.Total(Claims))
	require.Equal(t, map[string]int{Acknowledged: 1, Outstanding: 1}, c[Releases])
	require.Equal(t, 2, c.Total(Reuses))
	require.Equal(t, 3, c.Total(After), "r4, r7 and r10")
	require.Equal(t, 2, c.Total(Tempted), "r7 and r8")
	require.Zero(t, c.Total(Strays))
	require.Equal(t, map[string]int{"router-kill": 1, EnvoyPaused: 1}, c[Faults])
	require.Equal(t, map[string]int{"router-kill": 1}, c[FailedFaults])
	require.Zero(t, c.Total(Stalled))
	require.Contains(t, c.String(), "sent: 10, get 10\n")
}

func TestPauseBeyondTheStallBudgetIsReported(t *testing.T) {
	c := Count(New(add(Event{Kind: Fault, What: EnvoyPaused + "-and-kill", Began: time.Second,
		Ended: time.Second + stallBudget + 1})))
	require.Equal(t, 1, c.Total(Stalled))
}

func TestUnknownSuiteIsAnErrorNotAVerdict(t *testing.T) {
	_, err := New([]Event{{Kind: Run, Settings: &Settings{Suite: "other"}}}).Violations()
	require.Error(t, err)
}
