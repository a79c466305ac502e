package chaos

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// story is a history and a world that a case tells, call after call.
type story struct {
	history
	w world
}

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func (s *story) do(e event) {
	s.add(e)
	s.events[len(s.events)-1].At = epoch
}

// claims tells of a claim that was answered with a sandbox on a pod.
func (s *story) claims(caller, key, id, pod string) {
	s.do(event{Op: opClaim, Caller: caller, Key: key, Code: http.StatusCreated, ID: id, Pod: pod, For: caller, EndAt: epoch.Add(time.Hour)})
}

func (s *story) releases(id string, code int, reason apierror.Reason) {
	s.do(event{Op: opRelease, ID: id, Code: code, Reason: string(reason)})
}

func (s *story) reads(id string, code int) { s.do(event{Op: opRead, ID: id, Code: code}) }

// pod adds a pod that is ready.
func (s *story) pod(name string) {
	s.w.Pods = append(s.w.Pods, corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name)},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	})
}

// record adds a Sandbox object.
func (s *story) record(id, pod string, phase v1alpha1.SandboxPhase) {
	s.w.Records = append(s.w.Records, v1alpha1.Sandbox{
		ObjectMeta: metav1.ObjectMeta{Name: id},
		Spec:       v1alpha1.SandboxSpec{PodName: pod, PodUID: "uid-" + pod},
		Status:     v1alpha1.SandboxStatus{Phase: phase},
	})
}

// live adds all that a live sandbox has.
func (s *story) live(id, pod, caller string) {
	s.pod(pod)
	s.record(id, pod, v1alpha1.SandboxRunning)
	s.lists(id, pod, caller)
	s.w.Read[id] = http.StatusOK
}

func (s *story) lists(id, pod, caller string) {
	s.w.Listed = append(s.w.Listed, rest.Sandbox{SandboxID: id, PodName: pod, Metadata: map[string]string{callerField: caller}})
	s.w.Pool.Status.Claimed++
}

// over adds what is left of a sandbox.
func (s *story) over(id, pod string) {
	s.record(id, pod, v1alpha1.SandboxEnded)
	s.w.Read[id] = http.StatusNotFound
}

// newStory begins with what is all right: a has a sandbox, under a key, b has had
// one, c got no answer and may ask again, and there is a warm pod.
func newStory() *story {
	s := &story{w: world{At: epoch, Read: map[string]int{}}}
	s.w.Pool.Spec.Warm, s.w.Pool.Status.Warm = 1, 1
	s.pod("warm")
	s.claims("a", "key-a", "id-a", "pod-a")
	s.live("id-a", "pod-a", "a")
	s.claims("b", "", "id-b", "pod-b")
	s.reads("id-b", http.StatusOK)
	s.releases("id-b", http.StatusNoContent, "")
	s.reads("id-b", http.StatusNotFound)
	s.over("id-b", "pod-b")
	s.do(event{Op: opClaim, Caller: "c", Key: "key-c", Error: "no answer"})
	s.live("id-c", "pod-c", "c")
	return s
}

func TestCheckerHasNothingAgainstWhatIsRight(t *testing.T) {
	for name, tell := range map[string]func(*story){
		"nothing more":                  func(*story) {},
		"a key is used again":           func(s *story) { s.claims("a", "key-a", "id-a", "pod-a") },
		"a key of what was released":    func(s *story) { s.releases("id-a", 204, ""); s.gone("a", "key-a", "id-a"); s.endA() },
		"released twice, first unknown": func(s *story) { s.releases("id-a", 0, ""); s.releases("id-a", 404, apierror.SandboxGone); s.endA() },
		"its pod was deleted":           func(s *story) { s.deletePod("pod-a"); s.reads("id-a", 404); s.endA() },
		"its time is over":              func(s *story) { s.events[0].EndAt = epoch; s.reads("id-a", 404); s.endA() },
		"its pod is on its way out": func(s *story) {
			s.releases("id-a", 204, "")
			s.endA()
			s.w.Records[0].Status.Phase = v1alpha1.SandboxStopping
			s.pod("pod-a")
		},
		"answered as they came": func(s *story) { s.arrivals = []string{"a", "b"} },
		"a read that was under way as it": func(s *story) {
			began := s.events[1].Began
			s.do(event{Op: opRead, ID: "id-b", Code: 200, Began: began})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			tell(s)
			require.Empty(t, check(s.events, s.arrivals, s.w))
		})
	}
}

func (s *story) gone(caller, key, id string) {
	s.do(event{Op: opClaim, Caller: caller, Key: key, ID: id, Code: http.StatusGone})
}

func (s *story) deletePod(name string) {
	s.do(event{Op: opDeletePod, Pod: name, PodUID: "uid-" + name})
}

// endA makes an end of the first sandbox in the world.
func (s *story) endA() {
	s.w.Records[0].Status.Phase = v1alpha1.SandboxEnded
	s.w.Listed, s.w.Pods = s.w.Listed[1:], append(s.w.Pods[:1:1], s.w.Pods[2:]...)
	s.w.Pool.Status.Claimed--
	s.w.Read["id-a"] = http.StatusNotFound
}

func TestCheckerFindsWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		want string
		tell func(*story)
	}{
		"one pod, two sandboxes":                  {"double: pod", func(s *story) { s.claims("d", "", "id-d", "pod-a"); s.live("id-d", "pod-a", "d") }},
		"one pod, one sandbox after another":      {"double: pod", func(s *story) { s.claims("d", "", "id-d", "pod-b"); s.live("id-d", "pod-b", "d") }},
		"one ID for two claims":                   {"several claims", func(s *story) { s.claims("d", "", "id-a", "pod-a") }},
		"one ID for two keys":                     {"several claims", func(s *story) { s.claims("d", "key-d", "id-a", "pod-a") }},
		"one key, two IDs":                        {"several sandboxes", func(s *story) { s.claims("a", "key-a", "id-d", "pod-d"); s.live("id-d", "pod-d", "a") }},
		"one key, one ID answered, another live":  {"double: sandbox id-d is live for claim a", func(s *story) { s.live("id-d", "pod-d", "a") }},
		"one key, an ID and another that is gone": {"double", func(s *story) { s.gone("a", "key-a", "id-b") }},
		"somebody else's sandbox": {"double", func(s *story) {
			s.claims("d", "", "id-d", "pod-d")
			s.events[len(s.events)-1].For = "a"
			s.live("id-d", "pod-d", "a")
		}},
		"answered on another pod": {"double", func(s *story) { s.events[0].Pod = "warm" }},

		"a sandbox that is gone":                        {"lost: sandbox id-a, answered to a, is not there in the end", func(s *story) { s.endA() }},
		"not in the list":                               {"lost: sandbox id-a, answered to a, is not in the list", func(s *story) { s.w.Listed = s.w.Listed[1:] }},
		"no object":                                     {"has no Sandbox object", func(s *story) { s.w.Records = s.w.Records[1:] }},
		"an object that says otherwise":                 {"lost", func(s *story) { s.w.Records[0].Status.Phase = v1alpha1.SandboxStopping }},
		"no pod":                                        {"has lost its pod", func(s *story) { s.w.Pods = append(s.w.Pods[:1:1], s.w.Pods[2:]...) }},
		"not found for a moment":                        {"was not found", func(s *story) { s.reads("id-a", 404) }},
		"not there to be released":                      {"was not there to be released", func(s *story) { s.releases("id-a", 404, apierror.SandboxGone); s.endA() }},
		"forgotten after its release":                   {"was not there to be released", func(s *story) { s.releases("id-b", 404, apierror.SandboxNotFound) }},
		"a key whose sandbox is said to be gone":        {"lost", func(s *story) { s.gone("a", "key-a", "id-a") }},
		"a pod that was deleted after it was not found": {"was not found", func(s *story) { s.reads("id-a", 404); s.deletePod("pod-a"); s.endA() }},

		"a sandbox that nobody claimed": {"nobody has claimed it", func(s *story) { s.live("id-d", "pod-d", "d") }},
		"a claim without a key and an answer": {"never heard of it", func(s *story) {
			s.do(event{Op: opClaim, Caller: "d", Error: "no answer"})
			s.live("id-d", "pod-d", "d")
		}},
		"a pod that holds nothing":                 {"neither warm nor", func(s *story) { s.pod("idle"); s.w.Pods[len(s.w.Pods)-1].Status.Conditions = nil }},
		"a warm pod too many":                      {"2 pods are warm", func(s *story) { s.pod("idle") }},
		"a warm pod too few":                       {"0 pods are warm", func(s *story) { s.w.Pods = s.w.Pods[1:] }},
		"a pod of what has ended":                  {"is still there", func(s *story) { s.pod("pod-b") }},
		"counted wrong":                            {"the pool's status says", func(s *story) { s.w.Pool.Status.Claimed++ }},
		"an object without a sandbox":              {"is not in the list", func(s *story) { s.record("id-d", "pod-d", v1alpha1.SandboxRunning) }},
		"a pod was deleted, and its sandbox lives": {"leaked: sandbox id-a", func(s *story) { s.deletePod("pod-a") }},
		"its time is over, and it lives":           {"leaked: sandbox id-a", func(s *story) { s.events[0].EndAt = epoch }},

		"released, and seen live":         {"back", func(s *story) { s.reads("id-b", 200) }},
		"released, and live in the end":   {"back", func(s *story) { s.w.Read["id-b"] = 200 }},
		"released, and listed":            {"back", func(s *story) { s.lists("id-b", "pod-b", "b") }},
		"released, and its key claims it": {"back", func(s *story) { s.releases("id-a", 204, ""); s.claims("a", "key-a", "id-a", "pod-a"); s.endA() }},

		"answered before one that came first": {"order", func(s *story) { s.arrivals = []string{"b", "a"} }},
		"waits for ever":                      {"never answered", func(s *story) { s.arrivals = []string{"a", "d"} }},
		"the allocator failed":                {"refused", func(s *story) { s.do(event{Op: opClaim, Caller: "d", Code: 500}) }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			c.tell(s)
			wrong := check(s.events, s.arrivals, s.w)
			require.NotEmpty(t, wrong)
			for _, w := range wrong {
				t.Log(w)
			}
			require.Condition(t, func() bool {
				for _, w := range wrong {
					if strings.Contains(w, c.want) {
						return true
					}
				}
				return false
			}, "%q expected in %q", c.want, wrong)
		})
	}
}
