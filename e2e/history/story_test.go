package history

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// story is what callers do, call after call, and what there is at the end.
type story struct {
	clock                 time.Duration
	events                []Event
	records, listed, pods []Event
	final                 map[string]int
	counts                Counts
}

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func (s *story) do(e Event) {
	if e.Began == 0 {
		s.clock++
		e.Began = s.clock
	}
	s.clock++
	e.Ended, e.Wall = s.clock, epoch
	s.events = append(s.events, e)
}

// all is the history.
func (s *story) all() []Event {
	all := append([]Event(nil), s.events...)
	for _, more := range [][]Event{s.records, s.listed, s.pods} {
		all = append(all, more...)
	}
	for id, code := range s.final {
		all = append(all, Event{Kind: Final, Sandbox: id, Code: code})
	}
	return append(all, Event{Kind: Pool, Wall: epoch, Counts: &s.counts})
}

// claims adds a claim that was answered with a sandbox on a pod.
func (s *story) claims(name, key, id, pod string) {
	s.do(Event{Kind: Claim, Claim: name, Key: key, Code: http.StatusCreated, Sandbox: id, Pod: pod, Owner: name,
		EndAt: epoch.Add(time.Hour)})
}

func (s *story) releases(id string, code int, reason apierror.Reason) {
	s.do(Event{Kind: Release, Sandbox: id, Code: code, Reason: string(reason)})
}

func (s *story) reads(id string, code int) { s.do(Event{Kind: Read, Sandbox: id, Code: code}) }

// gone adds a claim that was answered that its sandbox is gone.
func (s *story) gone(name, key, id string) {
	s.do(Event{Kind: Claim, Claim: name, Key: key, Sandbox: id, Code: http.StatusGone})
}

func (s *story) deletePod(name string) { s.do(Event{Kind: Delete, Pod: name, PodUID: "uid-" + name}) }

func (s *story) waits(names ...string) {
	for _, name := range names {
		s.do(Event{Kind: Waiting, Claim: name})
	}
}

// pod adds a pod that is ready.
func (s *story) pod(name string) {
	s.pods = append(s.pods, Event{Kind: Pod, Pod: name, PodUID: "uid-" + name, Ready: true})
}

// record adds a Sandbox object.
func (s *story) record(id, pod string, phase v1alpha1.SandboxPhase) {
	s.records = append(s.records, Event{Kind: Record, Sandbox: id, Pod: pod, PodUID: "uid-" + pod, Phase: string(phase)})
}

// live adds all that a live sandbox has.
func (s *story) live(id, pod, owner string) {
	s.pod(pod)
	s.record(id, pod, v1alpha1.SandboxRunning)
	s.lists(id, pod, owner)
	s.final[id] = http.StatusOK
}

func (s *story) lists(id, pod, owner string) {
	s.listed = append(s.listed, Event{Kind: Listed, Sandbox: id, Pod: pod, Owner: owner})
	s.counts.Claimed++
}

// over adds the record of a sandbox that is over.
func (s *story) over(id, pod string) {
	s.record(id, pod, v1alpha1.SandboxEnded)
	s.final[id] = http.StatusNotFound
}

// endA ends the first sandbox, without a cause.
func (s *story) endA() {
	s.records[0].Phase = string(v1alpha1.SandboxEnded)
	s.listed, s.pods = s.listed[1:], append(s.pods[:1:1], s.pods[2:]...)
	s.counts.Claimed--
	s.final["id-a"] = http.StatusNotFound
}

// newStory is a history without violations: a has a sandbox under a key, b has released one, c got
// no answer and can ask again, and there is a warm pod.
func newStory() *story {
	s := &story{final: map[string]int{}, counts: Counts{Wanted: 1, Warm: 1}}
	s.do(Event{Kind: Run, Settings: &Settings{Suite: Chaos}})
	s.pod("warm")
	s.claims("a", "key-a", "id-a", "pod-a")
	s.live("id-a", "pod-a", "a")
	s.claims("b", "", "id-b", "pod-b")
	s.reads("id-b", http.StatusOK)
	s.releases("id-b", http.StatusNoContent, "")
	s.reads("id-b", http.StatusNotFound)
	s.over("id-b", "pod-b")
	s.do(Event{Kind: Claim, Claim: "c", Key: "key-c", Error: "no answer"})
	s.live("id-c", "pod-c", "c")
	return s
}

// stories are what happens after newStory, and a part of the violation that is found.
type stories map[string]struct {
	want string
	tell func(*story)
}

func (c stories) judge(t *testing.T) {
	t.Helper()
	for name, test := range c {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			test.tell(s)
			all, err := New(s.all()).Violations()
			require.NoError(t, err)
			var texts []string
			for _, v := range all {
				texts = append(texts, v.String())
			}
			require.Contains(t, strings.Join(texts, "\n"), test.want)
		})
	}
}

func TestRightStoriesHaveNoViolation(t *testing.T) {
	for name, tell := range map[string]func(*story){
		"nothing more":        func(*story) {},
		"a key is used again": func(s *story) { s.claims("a", "key-a", "id-a", "pod-a") },
		"a key of what was released": func(s *story) {
			s.releases("id-a", 204, "")
			s.gone("a", "key-a", "id-a")
			s.endA()
		},
		"released twice, first unknown": func(s *story) {
			s.releases("id-a", 0, "")
			s.releases("id-a", 404, apierror.SandboxGone)
			s.endA()
		},
		"its pod was deleted": func(s *story) { s.deletePod("pod-a"); s.reads("id-a", 404); s.endA() },
		"its time is over":    func(s *story) { s.events[1].EndAt = epoch; s.reads("id-a", 404); s.endA() },
		"its pod is ending": func(s *story) {
			s.releases("id-a", 204, "")
			s.endA()
			s.records[0].Phase = string(v1alpha1.SandboxReleased)
			s.pod("pod-a")
		},
		"answered in the order of arrival": func(s *story) { s.waits("a", "b") },
		"a read that began before the release": func(s *story) {
			s.do(Event{Kind: Read, Sandbox: "id-b", Code: 200, Began: s.events[2].Began})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStory()
			tell(s)
			all, err := New(s.all()).Violations()
			require.NoError(t, err)
			require.Empty(t, all)
		})
	}
}
