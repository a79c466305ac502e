package history

import (
	"testing"
	"time"
)

func TestRequestThatWasReceivedTwiceIsFound(t *testing.T) {
	cases{
		"by a second pod":       {add(received(2.05, "r1", "a", "pod-b", "uid-b")), []string{"wrong pod", "twice"}},
		"again by the same pod": {add(received(2.05, "r1", "a", "pod-a", "uid-a")), []string{"twice"}},
	}.judge(t)
}

func TestUnmatchedReceiptsAndAnswersAreFound(t *testing.T) {
	cases{
		"a pod received what was not sent": {add(received(3, "x", "a", "pod-a", "uid-a")), []string{"unmatched"}},
		"a pod received a request before it was sent": {
			change(received(2, "r1", "a", "pod-a", "uid-a"), func(e *Event) { e.Began = time.Second }),
			[]string{"unmatched"},
		},
		"a pod received a request for another sandbox": {
			change(request(2, "r1", "a", "uid-a"), func(e *Event) { e.Sandbox, e.PodUID = "b", "" }),
			[]string{"unmatched"},
		},
		"a client was answered and no pod had its request": {
			without(received(2, "r1", "a", "pod-a", "uid-a")),
			[]string{"unmatched"},
		},
	}.judge(t)
}
