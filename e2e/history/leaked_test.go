package history

import (
	"testing"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestLeakedSandboxesAndPodsAreFound(t *testing.T) {
	stories{
		"a sandbox without a claim": {"no caller has claimed it", func(s *story) { s.live("id-d", "pod-d", "d") }},
		"a claim without a key and an answer": {"was never answered", func(s *story) {
			s.do(Event{Kind: Claim, Claim: "d", Error: "no answer"})
			s.live("id-d", "pod-d", "d")
		}},
		"a pod that holds nothing": {"neither warm nor",
			func(s *story) { s.pod("idle"); s.pods[len(s.pods)-1].Ready = false }},
		"a warm pod too many":       {"2 pods are warm", func(s *story) { s.pod("idle") }},
		"a warm pod too few":        {"0 pods are warm", func(s *story) { s.pods = s.pods[1:] }},
		"a pod of an ended sandbox": {"is still there", func(s *story) { s.pod("pod-b") }},
		"counted wrong":             {"the pool's status says", func(s *story) { s.counts.Claimed++ }},
		"an object without a sandbox": {"is not in the list",
			func(s *story) { s.record("id-d", "pod-d", v1alpha1.SandboxRunning) }},
		"in the list, and not in its object": {"in the list, and its object",
			func(s *story) { s.records[2].Phase = string(v1alpha1.SandboxEnded) }},
		"its pod was deleted, and it lives":    {"leaked: sandbox id-a", func(s *story) { s.deletePod("pod-a") }},
		"its time is over, and it lives":       {"leaked: sandbox id-a", func(s *story) { s.events[1].EndAt = epoch }},
		"it is over, and its object is not":    {"its object says", func(s *story) { s.deletePod("pod-a") }},
		"it has ended, and its pod is running": {"its pod pod-b is there", func(s *story) { s.pod("pod-b") }},
	}.judge(t)
}
