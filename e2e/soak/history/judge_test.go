package history_test

import (
	"bytes"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/e2e/soak/history"
)

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

func claim(step float64, key, sandbox, pod string) history.Event {
	began, ended := at(step)
	return history.Event{Kind: history.Claim, Began: began, Ended: ended, Key: key, Code: http.StatusCreated, Sandbox: sandbox, Pod: pod}
}

func release(step float64, sandbox string, outstanding int) history.Event {
	began, ended := at(step)
	return history.Event{Kind: history.Release, Began: began, Ended: ended, Sandbox: sandbox, Code: http.StatusNoContent, Outstanding: outstanding}
}

func request(step float64, name, sandbox, uid string) history.Event {
	began, ended := at(step)
	return history.Event{Kind: history.Request, What: "get", Began: began, Ended: ended, Request: name, Sandbox: sandbox, Code: http.StatusOK, PodUID: uid}
}

func refused(step float64, name, sandbox, reason string) history.Event {
	e := request(step, name, sandbox, "")
	e.Code, e.Reason = http.StatusGone, reason
	return e
}

func received(step float64, name, sandbox, pod, uid string) history.Event {
	began, ended := at(step)
	return history.Event{Kind: history.Received, Began: (began + ended) / 2, Request: name, Sandbox: sandbox, Pod: pod, PodUID: uid}
}

func record(sandbox, pod, uid, address, reason string) history.Event {
	return history.Event{Kind: history.Record, Sandbox: sandbox, Pod: pod, PodUID: uid, Address: address, Reason: reason}
}

func deletion(step float64, pod, uid string) history.Event {
	began, ended := at(step)
	return history.Event{Kind: history.Delete, Began: began, Ended: ended, Pod: pod, PodUID: uid, What: "by force"}
}

// good is a history without fault: sandbox a is used and released, b loses its pod,
// c and d get their addresses.
func good() []history.Event {
	return []history.Event{
		{Kind: history.Run, Seed: 1, MaxStale: maxStale, Window: window, StallBudget: stallBudget},
		claim(1, "k1", "a", "pod-a"),
		claim(1, "k1", "a", "pod-a"), // asked again
		claim(1, "k2", "b", "pod-b"),
		request(2, "r1", "a", "uid-a"), received(2, "r1", "a", "pod-a", "uid-a"),
		request(2, "r2", "b", "uid-b"), received(2, "r2", "b", "pod-b", "uid-b"),
		{Kind: history.Request, What: "get", Began: 2 * time.Second, Ended: 3 * time.Second, Request: "r3", Sandbox: "a"}, // no answer
		received(2.5, "r3", "a", "pod-a", "uid-a"),
		release(10, "a", 0), deletion(10, "pod-b", "uid-b"),
		refused(11, "r4", "a", "sandbox_gone"), refused(11, "r5", "b", "sandbox_gone"),
		claim(16, "k3", "c", "pod-c"), claim(16, "k4", "d", "pod-d"),
		request(17, "r6", "c", "uid-c"), received(17, "r6", "c", "pod-c", "uid-c"),
		refused(17, "r7", "a", "sandbox_gone"), refused(17, "r8", "b", "sandbox_gone"),
		release(18, "d", 1),
		request(19, "r9", "d", "uid-d"), received(19, "r9", "d", "pod-d", "uid-d"), // by the one that is outstanding
		refused(30, "r10", "d", "sandbox_gone"),
		{Kind: history.Fault, What: "router-kill", Process: "router-0", Began: time.Second, Ended: 2 * time.Second},
		{Kind: history.Fault, What: "router-kill", Process: "router-0", Error: "cannot"},
		{Kind: history.Fault, What: history.EnvoyPaused, Process: "envoy-0", Began: time.Second, Ended: 2 * time.Second},
		record("a", "pod-a", "uid-a", "127.0.0.1", "Killed"), record("b", "pod-b", "uid-b", "127.0.0.2", "PodGone"),
		record("c", "pod-c", "uid-c", "127.0.0.1", ""), record("d", "pod-d", "uid-d", "127.0.0.2", "Killed"),
		record("e", "pod-e", "uid-e", "127.0.0.3", "Timeout"), // of a claim that nobody was answered
	}
}

func TestAGoodHistoryHasNoMismatchAndIsCounted(t *testing.T) {
	v := history.Judge(good())
	require.Empty(t, v.Mismatches)
	require.Equal(t, 10, v.Requests)
	require.Equal(t, 5, v.Received)
	require.Equal(t, map[string]int{"200": 4, "no answer": 1, "sandbox_gone": 5}, v.Outcomes)
	require.Equal(t, 5, v.Sandboxes)
	require.Equal(t, 5, v.Claims)
	require.Equal(t, 2, v.Releases)
	require.Equal(t, 1, v.Acknowledged)
	require.Equal(t, 2, v.Reuses)
	require.Equal(t, 3, v.After, "r4, r7 and r10")
	require.Equal(t, 2, v.Tempted, "r7 and r8")
	require.Equal(t, map[string]int{"router-kill": 1, history.EnvoyPaused: 1}, v.Faults)
	require.Equal(t, map[string]int{"router-kill": 1}, v.Failed)
	require.Zero(t, v.Stalled)
	require.Contains(t, v.String(), "mismatches  0")
}

func TestEveryKindOfMismatchIsFound(t *testing.T) {
	// change returns the good history with the event that is like the given one, but for
	// what f does to it.
	change := func(like history.Event, f func(*history.Event)) []history.Event {
		all := good()
		i := slices.Index(all, like)
		require.GreaterOrEqual(t, i, 0)
		f(&all[i])
		return all
	}
	add := func(more ...history.Event) []history.Event { return append(good(), more...) }
	without := func(like history.Event) []history.Event {
		all := good()
		i := slices.Index(all, like)
		require.GreaterOrEqual(t, i, 0)
		return slices.Delete(all, i, i+1)
	}
	for name, test := range map[string]struct {
		events []history.Event
		want   []string
	}{
		"a pod received what is another one's": {
			change(received(2.5, "r3", "a", "pod-a", "uid-a"), func(e *history.Event) { e.Pod, e.PodUID = "pod-b", "uid-b" }),
			[]string{"wrong pod"},
		},
		"a pod received what is of the sandbox before it at its address": {
			add(received(17, "r7", "a", "pod-c", "uid-c")),
			[]string{"wrong pod", "came back"},
		},
		"a pod received what is of a sandbox that has no record": {
			add(request(3, "x", "nobody", ""), received(3, "x", "nobody", "pod-a", "uid-a")),
			[]string{"wrong pod"},
		},
		"a pod of the same name that is another one, and nobody's": {
			change(received(2, "r2", "b", "pod-b", "uid-b"), func(e *history.Event) { e.PodUID = "uid-other" }),
			[]string{"wrong pod"},
		},
		"a pod that is another one's only later": {
			add(request(10.3, "x", "b", "uid-d"), received(10.3, "x", "b", "pod-d", "uid-d")),
			[]string{"wrong pod", "wrong pod"},
		},
		"a pod that is nobody's, of a sandbox that is gone for every router": {
			add(received(11, "r4", "a", "pod-x", "uid-x")),
			[]string{"came back"},
		},
		"a client was answered by another pod": {
			change(request(2, "r1", "a", "uid-a"), func(e *history.Event) { e.PodUID = "uid-b" }),
			[]string{"wrong pod"},
		},
		"a retry reached a second pod": {
			add(received(2.05, "r1", "a", "pod-b", "uid-b")),
			[]string{"wrong pod", "twice"},
		},
		"a retry reached the same pod again": {
			add(received(2.05, "r1", "a", "pod-a", "uid-a")),
			[]string{"twice"},
		},
		"its own pod received a request after the release was acknowledged": {
			add(received(11, "r4", "a", "pod-a", "uid-a")),
			[]string{"came back"},
		},
		"a client was answered after the release was acknowledged": {
			add(request(12, "x", "a", "uid-a"), received(12, "x", "a", "pod-a", "uid-a")),
			[]string{"came back"},
		},
		"its own pod received a request when the routers that were outstanding were stale": {
			add(received(30, "r10", "d", "pod-d", "uid-d")),
			[]string{"came back"},
		},
		"and when a release was answered with gone": {
			add(history.Event{Kind: history.Release, Began: 18 * time.Second, Ended: 18 * time.Second, Sandbox: "c", Code: http.StatusNotFound, Reason: "sandbox_gone"},
				request(23, "x", "c", "uid-c"), received(23, "x", "c", "pod-c", "uid-c")),
			[]string{"came back"},
		},
		"an address had another sandbox before the window after a release had passed": {
			change(claim(16, "k3", "c", "pod-c"), func(e *history.Event) { e.Ended = 14800 * time.Millisecond }),
			[]string{"too early"},
		},
		"and after a deletion": {
			change(claim(16, "k4", "d", "pod-d"), func(e *history.Event) { e.Ended = 14800 * time.Millisecond }),
			[]string{"too early"},
		},
		"and after the end that was asked for": {
			append(change(release(10, "a", 0), func(e *history.Event) { e.Code = http.StatusServiceUnavailable; e.Began = 30 * time.Second }),
				func() history.Event {
					e := claim(7, "k1", "a", "pod-a")
					e.Timeout = 5 * time.Second
					return e
				}()),
			[]string{"too early"},
		},
		"an address had another sandbox while the first one lived": {
			without(deletion(10, "pod-b", "uid-b")),
			[]string{"too early"},
		},
		"a pod was given away twice": {
			add(record("f", "pod-a", "uid-a", "127.0.0.1", "")),
			[]string{"double"},
		},
		"a sandbox is on record as two pods": {
			add(record("e", "pod-f", "uid-f", "127.0.0.4", "")),
			[]string{"double"},
		},
		"a claim was answered with two sandboxes": {
			change(claim(16, "k4", "d", "pod-d"), func(e *history.Event) { e.Key = "k3" }),
			[]string{"double"},
		},
		"a sandbox was answered to two claims": {
			add(claim(17, "k5", "c", "pod-c")),
			[]string{"double"},
		},
		"an answered sandbox has no record": {
			add(claim(17, "k5", "f", "pod-f")),
			[]string{"lost"},
		},
		"an answered sandbox is on record as another pod": {
			change(claim(16, "k3", "c", "pod-c"), func(e *history.Event) { e.Pod = "pod-x" }),
			[]string{"lost"},
		},
		"a pod received what nobody has sent": {
			add(received(3, "x", "a", "pod-a", "uid-a")),
			[]string{"unheard of"},
		},
		"a pod received a request before it was sent": {
			change(received(2, "r1", "a", "pod-a", "uid-a"), func(e *history.Event) { e.Began = time.Second }),
			[]string{"unheard of"},
		},
		"a pod received a request that was for another sandbox": {
			change(request(2, "r1", "a", "uid-a"), func(e *history.Event) { e.Sandbox, e.PodUID = "b", "" }),
			[]string{"unheard of"},
		},
		"a client was answered and no pod had its request": {
			without(received(2, "r1", "a", "pod-a", "uid-a")),
			[]string{"unheard of"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			v := history.Judge(test.events)
			var words []string
			for _, m := range v.Mismatches {
				word, _, _ := strings.Cut(m, ":")
				words = append(words, word)
			}
			require.ElementsMatch(t, test.want, words, "%s", strings.Join(v.Mismatches, "\n"))
			require.Contains(t, v.String(), "mismatches  ")
		})
	}
}

func TestWhatTheHistoryCannotKnowIsNoMismatch(t *testing.T) {
	all := good()
	// Ended by something that is not the soak's doing, so nobody knows when it began.
	i := slices.Index(all, deletion(10, "pod-b", "uid-b"))
	all = slices.Delete(all, i, i+1)
	i = slices.Index(all, record("b", "pod-b", "uid-b", "127.0.0.2", "PodGone"))
	all[i].Reason = "AddressShared"
	require.Empty(t, history.Judge(all).Mismatches)

	// A pod that is nobody's has the address of one that was deleted by force.
	v := history.Judge(append(good(), request(10.3, "x", "b", "uid-x"), received(10.3, "x", "b", "pod-x", "uid-x")))
	require.Empty(t, v.Mismatches)
	require.Equal(t, 1, v.Strays)

	// Sent before the answer to the release was there.
	all = good()
	e := request(10.05, "x", "a", "uid-a")
	require.Empty(t, history.Judge(append(all, e, received(10.3, "x", "a", "pod-a", "uid-a"))).Mismatches)
}

func TestAPauseBeyondTheStallBudgetIsSaid(t *testing.T) {
	v := history.Judge(append(good(), history.Event{Kind: history.Fault, What: history.EnvoyPaused + "-and-kill", Began: time.Second, Ended: time.Second + stallBudget + 1}))
	require.Equal(t, 1, v.Stalled)
	require.Contains(t, v.String(), "STALLED")
}

// The order of the lines is that in which they were written and means nothing.
func TestTheVerdictIsThatOfTheFileInAnyOrder(t *testing.T) {
	all := good()
	bad := append(good(), received(17, "r7", "a", "pod-c", "uid-c"))
	random := rand.New(rand.NewPCG(1, 2))
	random.Shuffle(len(bad)-1, func(i, k int) { bad[i+1], bad[k+1] = bad[k+1], bad[i+1] })
	var file bytes.Buffer
	w := history.NewWriter(&file)
	for _, e := range bad {
		w.Add(e)
	}
	require.NoError(t, w.Flush())
	read, err := history.Read(&file)
	require.NoError(t, err)
	require.Equal(t, bad, read)
	v := history.Judge(read)
	require.Len(t, v.Mismatches, 2)
	v.Mismatches = nil
	want := history.Judge(all)
	want.Received++
	require.Equal(t, want, v)
}

func TestAFileThatIsNotAHistoryIsRefused(t *testing.T) {
	for name, text := range map[string]string{"empty": "", "no run first": `{"kind":"claim"}`, "no JSON": `{"kind":"run"}` + "\nx"} {
		_, err := history.Read(strings.NewReader(text))
		require.Error(t, err, name)
	}
}
