package history

import "testing"

func TestWhatExistsTwiceInTrafficIsFound(t *testing.T) {
	cases{
		"one pod, two sandboxes on record": {add(record("f", "pod-a", "uid-a", "127.0.0.1", "")), []string{"double"}},
		"one sandbox, two pods on record":  {add(record("e", "pod-f", "uid-f", "127.0.0.4", "")), []string{"double"}},
		"one claim, two sandboxes": {
			change(claim(16, "k4", "d", "pod-d"), func(e *Event) { e.Claim = "k3" }),
			[]string{"double"},
		},
		"two claims, one sandbox": {add(claim(17, "k5", "c", "pod-c")), []string{"double"}},
	}.judge(t)
}

func TestWhatExistsTwiceForCallersIsFound(t *testing.T) {
	stories{
		"one pod, two sandboxes": {"double: pod",
			func(s *story) { s.claims("d", "", "id-d", "pod-a"); s.live("id-d", "pod-a", "d") }},
		"one pod, one sandbox after another": {"double: pod",
			func(s *story) { s.claims("d", "", "id-d", "pod-b"); s.live("id-d", "pod-b", "d") }},
		"one ID for two claims": {"several claims", func(s *story) { s.claims("d", "", "id-a", "pod-a") }},
		"one ID for two keys":   {"several claims", func(s *story) { s.claims("d", "key-d", "id-a", "pod-a") }},
		"one key, two IDs": {"several sandboxes",
			func(s *story) { s.claims("a", "key-a", "id-d", "pod-d"); s.live("id-d", "pod-d", "a") }},
		"one key, one ID answered, another live": {"double: sandbox id-d is live for claim a",
			func(s *story) { s.live("id-d", "pod-d", "a") }},
		"one key, an ID and another that is gone": {"double", func(s *story) { s.gone("a", "key-a", "id-b") }},
		"two sandboxes in the list on one pod":    {"both live on pod", func(s *story) { s.lists("id-d", "pod-a", "a") }},
	}.judge(t)
}

func TestSandboxOfAnotherClaimIsFound(t *testing.T) {
	stories{
		"another claim's sandbox": {"made for claim", func(s *story) {
			s.claims("d", "", "id-d", "pod-d")
			s.events[len(s.events)-1].Owner = "a"
			s.live("id-d", "pod-d", "a")
		}},
	}.judge(t)
}
