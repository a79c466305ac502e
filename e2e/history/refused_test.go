package history

import "testing"

func TestAnswersThatNoCallerMustGetAreFound(t *testing.T) {
	stories{
		"claim":   {"refused: claim", func(s *story) { s.do(Event{Kind: Claim, Claim: "d", Code: 500}) }},
		"read":    {"refused: read", func(s *story) { s.reads("id-a", 410) }},
		"release": {"refused: release", func(s *story) { s.releases("id-b", 409, "") }},
	}.judge(t)
}
