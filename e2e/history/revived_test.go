package history

import "testing"

func TestReleasedSandboxThatIsSeenAgainIsFound(t *testing.T) {
	stories{
		"read":              {"back: sandbox id-b was seen live", func(s *story) { s.reads("id-b", 200) }},
		"live at the end":   {"back: sandbox id-b", func(s *story) { s.final["id-b"] = 200 }},
		"listed at the end": {"back: sandbox id-b", func(s *story) { s.lists("id-b", "pod-b", "b") }},
		"claimed by its key": {"back: claim a",
			func(s *story) { s.releases("id-a", 204, ""); s.claims("a", "key-a", "id-a", "pod-a"); s.endA() }},
	}.judge(t)
}
