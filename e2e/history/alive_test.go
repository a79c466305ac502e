package history

import (
	"testing"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestSandboxThatIsNotThereIsFound(t *testing.T) {
	stories{
		"it is gone": {"lost: sandbox id-a, answered to a, is not there in the end", func(s *story) { s.endA() }},
		"not in the list": {"lost: sandbox id-a, answered to a, is not in the list",
			func(s *story) { s.listed = s.listed[1:] }},
		"its object says otherwise": {"lost", func(s *story) { s.records[0].Phase = string(v1alpha1.SandboxReleased) }},
		"no pod":                    {"has lost its pod", func(s *story) { s.pods = append(s.pods[:1:1], s.pods[2:]...) }},
		"its pod is being deleted":  {"has lost its pod", func(s *story) { s.pods[1].Deleting = true }},
		"not found for a moment":    {"was not found", func(s *story) { s.reads("id-a", 404) }},
		"not there to be released": {"was not there to be released",
			func(s *story) { s.releases("id-a", 404, apierror.SandboxGone); s.endA() }},
		"forgotten after its release": {"was not there to be released",
			func(s *story) { s.releases("id-b", 404, apierror.SandboxNotFound) }},
		"its key is refused as gone": {"lost", func(s *story) { s.gone("a", "key-a", "id-a") }},
		"not found before the deletion": {"was not found",
			func(s *story) { s.reads("id-a", 404); s.deletePod("pod-a"); s.endA() }},
	}.judge(t)
}
