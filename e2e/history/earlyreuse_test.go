package history

import (
	"net/http"
	"testing"
	"time"
)

func TestAddressReusedTooEarlyIsFound(t *testing.T) {
	early := func(e *Event) { e.Ended = 14800 * time.Millisecond }
	timed := claim(7, "k1", "a", "pod-a")
	timed.Timeout = 5 * time.Second
	cases{
		"after a release":  {change(claim(16, "k3", "c", "pod-c"), early), []string{"too early"}},
		"after a deletion": {change(claim(16, "k4", "d", "pod-d"), early), []string{"too early"}},
		"after the end that was asked for": {
			append(change(release(10, "a", 0),
				func(e *Event) { e.Code, e.Began = http.StatusServiceUnavailable, 30*time.Second }), timed),
			[]string{"too early"},
		},
		"while the sandbox before it lived": {without(deletion(10, "pod-b", "uid-b")), []string{"too early"}},
	}.judge(t)
}

func TestEndWithoutAKnownCauseIsNoViolation(t *testing.T) {
	all := without(deletion(10, "pod-b", "uid-b"))
	for i := range all {
		if all[i].Kind == Record && all[i].Sandbox == "b" {
			all[i].Reason = "AddressShared"
		}
	}
	cases{"shared address": {all, nil}}.judge(t)
}
