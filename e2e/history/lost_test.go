package history

import "testing"

func TestAnsweredSandboxWithoutRecordIsFound(t *testing.T) {
	cases{
		"no record": {add(claim(17, "k5", "f", "pod-f")), []string{"lost"}},
		"another pod on record": {
			change(claim(16, "k3", "c", "pod-c"), func(e *Event) { e.Pod = "pod-x" }),
			[]string{"lost"},
		},
	}.judge(t)
	stories{
		"no object": {"has no Sandbox object", func(s *story) { s.records = s.records[1:] }},
		"answered on another pod": {"lost: sandbox id-a was answered as pod warm",
			func(s *story) { s.events[1].Pod = "warm" }},
	}.judge(t)
}
