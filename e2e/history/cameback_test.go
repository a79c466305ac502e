package history

import (
	"net/http"
	"testing"
	"time"
)

func TestRequestAfterTheSandboxWasGoneIsFound(t *testing.T) {
	cases{
		"its own pod received it": {add(received(11, "r4", "a", "pod-a", "uid-a")), []string{"came back"}},
		"a stray received it":     {add(received(11, "r4", "a", "pod-x", "uid-x")), []string{"came back"}},
		"its client was answered": {
			add(request(12, "x", "a", "uid-a"), received(12, "x", "a", "pod-a", "uid-a")),
			[]string{"came back"},
		},
		"the outstanding routers were stale": {add(received(30, "r10", "d", "pod-d", "uid-d")), []string{"came back"}},
		"the release was answered with gone": {
			add(Event{Kind: Release, Began: 18 * time.Second, Ended: 18 * time.Second, Sandbox: "c", Code: http.StatusNotFound,
				Reason: "sandbox_gone"},
				request(23, "x", "c", "uid-c"), received(23, "x", "c", "pod-c", "uid-c")),
			[]string{"came back"},
		},
		"it was sent before the release was answered": {
			add(request(10.05, "x", "a", "uid-a"), received(10.3, "x", "a", "pod-a", "uid-a")),
			nil,
		},
	}.judge(t)
}
