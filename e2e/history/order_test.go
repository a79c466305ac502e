package history

import "testing"

func TestClaimsAnsweredOutOfOrderAreFound(t *testing.T) {
	stories{
		"answered before the first one": {"order: claim a came after b", func(s *story) { s.waits("b", "a") }},
		"never answered":                {"never answered", func(s *story) { s.waits("a", "d") }},
	}.judge(t)
}
