package history

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestWrongPodIsFoundByReceiptsAndAnswers(t *testing.T) {
	cases{
		"it holds another sandbox": {
			change(received(2.5, "r3", "a", "pod-a", "uid-a"), func(e *Event) { e.Pod, e.PodUID = "pod-b", "uid-b" }),
			[]string{"wrong pod"},
		},
		"it holds the next sandbox at the address": {
			add(received(17, "r7", "a", "pod-c", "uid-c")),
			[]string{"wrong pod", "came back"},
		},
		"the sandbox has no record": {
			add(request(3, "x", "unclaimed", ""), received(3, "x", "unclaimed", "pod-a", "uid-a")),
			[]string{"wrong pod"},
		},
		"it has the right name and never held a sandbox": {
			change(received(2, "r2", "b", "pod-b", "uid-b"), func(e *Event) { e.PodUID = "uid-other" }),
			[]string{"wrong pod"},
		},
		"it holds another sandbox only later": {
			add(request(10.3, "x", "b", "uid-d"), received(10.3, "x", "b", "pod-d", "uid-d")),
			[]string{"wrong pod", "wrong pod"},
		},
		"a client was answered by another pod": {
			change(request(2, "r1", "a", "uid-a"), func(e *Event) { e.PodUID = "uid-b" }),
			[]string{"wrong pod"},
		},
	}.judge(t)
}

func TestPodWithoutAnySandboxIsAStray(t *testing.T) {
	// It has the address of a pod that was deleted by force.
	events := add(request(10.3, "x", "b", "uid-x"), received(10.3, "x", "b", "pod-x", "uid-x"))
	cases{"stray": {events, nil}}.judge(t)
	require.Equal(t, 1, Count(New(events)).Total(Strays))
}

func TestWithoutRecordsTheClaimNamesThePod(t *testing.T) {
	routing := &Settings{Suite: Routing}
	right := Event{Kind: Request, Request: "1", Sandbox: "a", Pod: "pod-a", Code: 200}
	wrong := right
	wrong.Pod = "pod-b"
	cases{
		"the right pod": {[]Event{{Kind: Run, Settings: routing}, claim(1, "k", "a", "pod-a"), right}, nil},
		"a wrong pod":   {[]Event{{Kind: Run, Settings: routing}, claim(1, "k", "a", "pod-a"), wrong}, []string{"wrong pod"}},
	}.judge(t)
}
