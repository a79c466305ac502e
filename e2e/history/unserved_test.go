package history

import (
	"net/http"
	"testing"
)

func TestRequestThatFailsWithoutACauseIsFound(t *testing.T) {
	events := func(more ...Event) []Event {
		return append([]Event{{Kind: Run, Settings: &Settings{Suite: Routing}}, claim(1, "k", "a", "pod-a"),
			claim(1, "l", "b", "pod-b"), release(10, "a", 0)}, more...)
	}
	answer := func(step float64, id, pod string, code int) Event {
		e := request(step, "x", id, "")
		e.Pod, e.Code = pod, code
		if code >= http.StatusBadRequest {
			e.Reason = "some_reason"
		}
		return e
	}
	failed := answer(5, "a", "", 0)
	failed.Error = "connection reset"
	cases{
		"served":                             {events(answer(5, "a", "pod-a", http.StatusOK)), nil},
		"gone after the release":             {events(answer(11, "a", "", http.StatusGone)), nil},
		"gone while it was released":         {events(answer(10, "a", "", http.StatusGone)), nil},
		"its pod went while it was underway": {events(answer(10, "a", "", http.StatusBadGateway)), nil},
		"no answer":                          {events(failed), []string{"unserved"}},
		"gone and never released":            {events(answer(5, "b", "", http.StatusGone)), []string{"unserved"}},
		"502 without a release":              {events(answer(5, "b", "", http.StatusBadGateway)), []string{"unserved"}},
		"502 after the release":              {events(answer(11, "a", "", http.StatusBadGateway)), []string{"unserved"}},
		"503":                                {events(answer(5, "a", "", http.StatusServiceUnavailable)), []string{"unserved"}},
		"served after the release":           {events(answer(11, "a", "pod-a", http.StatusOK)), []string{"came back"}},
	}.judge(t)
}
