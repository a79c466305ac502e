package chaos

import (
	"fmt"
	"maps"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// world is what there is when nothing moves any more.
type world struct {
	// At is before all of it was read.
	At     time.Time
	Pool   v1alpha1.SandboxPool
	Listed []rest.Sandbox
	// Read is the status of GET /sandboxes/{id} for each ID that was answered.
	Read    map[string]int
	Records []v1alpha1.Sandbox
	Pods    []corev1.Pod
}

// check judges a history and the world after it. It returns what is wrong, each
// with the word that says how.
func check(events []event, arrivals []string, w world) []string {
	c := &checker{
		events: events, w: w,
		answers: map[string][]event{}, sandboxes: map[string]*fate{},
		records: map[string]v1alpha1.Sandbox{}, listed: map[string]rest.Sandbox{}, pods: map[string]corev1.Pod{},
	}
	for _, r := range w.Records {
		c.records[r.Name] = r
	}
	for _, s := range w.Listed {
		c.listed[s.SandboxID] = s
	}
	for _, p := range w.Pods {
		c.pods[string(p.UID)] = p
	}
	c.fold()
	c.codes()
	c.double()
	for _, id := range slices.Sorted(maps.Keys(c.sandboxes)) {
		c.live(c.sandboxes[id])
	}
	c.leaked()
	c.order(arrivals)
	return c.wrong
}

// fate is what a history says of one answered sandbox.
type fate struct {
	event   // its first answer
	callers map[string]bool
	// askedAt is when somebody first asked for its release, releasedAt when that
	// was first confirmed, deletedAt when its pod was first deleted by hand. 0:
	// never.
	askedAt, releasedAt, deletedAt uint64
}

// overBy reports whether it may have been gone for a reason when something that
// was seen then ended: nothing excuses what was seen before it began.
func (f *fate) overBy(ended uint64, at time.Time) bool {
	began := func(place uint64) bool { return place != 0 && place < ended }
	return began(f.askedAt) || began(f.deletedAt) || !f.EndAt.IsZero() && !at.Before(f.EndAt)
}

type checker struct {
	events    []event
	w         world
	answers   map[string][]event // of claims that got a sandbox, by caller
	sandboxes map[string]*fate   // by ID
	records   map[string]v1alpha1.Sandbox
	listed    map[string]rest.Sandbox
	pods      map[string]corev1.Pod // by UID
	wrong     []string
}

func (c *checker) is(what, format string, args ...any) {
	c.wrong = append(c.wrong, what+": "+fmt.Sprintf(format, args...))
}

// first sets at to the earlier one of itself and place.
func first(at *uint64, place uint64) {
	if *at == 0 || place < *at {
		*at = place
	}
}

// fold sorts the history by sandbox.
func (c *checker) fold() {
	for _, e := range c.events {
		if e.Op == opClaim && e.Code == http.StatusCreated {
			c.answers[e.Caller] = append(c.answers[e.Caller], e)
			f := c.sandboxes[e.ID]
			if f == nil {
				f = &fate{event: e, callers: map[string]bool{}}
				c.sandboxes[e.ID] = f
			}
			f.callers[e.Caller] = true
		}
	}
	deleted := map[string]uint64{} // by UID
	for _, e := range c.events {
		switch f := c.sandboxes[e.ID]; {
		case e.Op == opDeletePod:
			at := deleted[e.PodUID]
			first(&at, e.Began)
			deleted[e.PodUID] = at
		case e.Op == opRelease && f != nil:
			first(&f.askedAt, e.Began)
			if e.Code == http.StatusNoContent {
				first(&f.releasedAt, e.Ended)
			}
		}
	}
	for id, f := range c.sandboxes {
		f.deletedAt = deleted[c.records[id].Spec.PodUID]
	}
}

// codes finds answers that no caller should get, whatever happens to allocators.
func (c *checker) codes() {
	answers := map[op][]int{
		opClaim:   {http.StatusCreated, http.StatusGone, http.StatusTooManyRequests},
		opRead:    {http.StatusOK, http.StatusNotFound},
		opRelease: {http.StatusNoContent, http.StatusNotFound},
	}
	for _, e := range c.events {
		known, call := answers[e.Op]
		switch {
		case !call || e.Code == 0 || e.Code == http.StatusServiceUnavailable || slices.Contains(known, e.Code):
		default:
			c.is("refused", "%s of %s%s at %d was answered %d: %s", e.Op, e.Caller, e.ID, e.Ended, e.Code, e.Error)
		}
	}
}

// double finds what one only may have and two do.
func (c *checker) double() {
	for _, caller := range slices.Sorted(maps.Keys(c.answers)) {
		ids := map[string]bool{}
		for _, e := range c.answers[caller] {
			ids[e.ID] = true
			if e.For != e.Caller {
				c.is("double", "claim %s was answered with sandbox %s, which was claimed by %q", caller, e.ID, e.For)
			}
		}
		if len(ids) > 1 {
			c.is("double", "claim %s was answered with several sandboxes: %v", caller, slices.Sorted(maps.Keys(ids)))
		}
	}
	for _, id := range slices.Sorted(maps.Keys(c.sandboxes)) {
		if f := c.sandboxes[id]; len(f.callers) > 1 {
			c.is("double", "sandbox %s was answered for several claims: %v", id, slices.Sorted(maps.Keys(f.callers)))
		}
	}
	holder := map[string]string{} // by UID: a pod never holds a second one, however late
	for _, r := range c.w.Records {
		if other, held := holder[r.Spec.PodUID]; held {
			c.is("double", "pod %s (UID %s) holds or held sandboxes %s and %s", r.Spec.PodName, r.Spec.PodUID, other, r.Name)
		}
		holder[r.Spec.PodUID] = r.Name
	}
	shown := map[string]string{} // by name: of pods that are there at one time
	for _, s := range c.w.Listed {
		if other, held := shown[s.PodName]; held {
			c.is("double", "sandboxes %s and %s are both live on pod %s", other, s.SandboxID, s.PodName)
		}
		shown[s.PodName] = s.SandboxID
	}
}

// live judges one answered sandbox: it is live until it is over, and then it is
// gone for good.
func (c *checker) live(f *fate) {
	record, recorded := c.records[f.ID]
	_, listed := c.listed[f.ID]
	if !recorded {
		c.is("lost", "sandbox %s, answered to %s, has no Sandbox object", f.ID, f.Caller)
	} else if record.Spec.PodName != f.Pod {
		c.is("double", "sandbox %s was answered on pod %s, and its object says %s", f.ID, f.Pod, record.Spec.PodName)
	}
	for _, e := range c.events {
		switch {
		case e.Op == opClaim && f.callers[e.Caller]:
			c.claimedAgain(f, e)
		case e.ID != f.ID:
		case e.Op == opRead && e.Code == http.StatusOK && f.releasedAt != 0 && e.Began > f.releasedAt:
			c.is("back", "sandbox %s was seen live at %d, after its release had been confirmed at %d", f.ID, e.Began, f.releasedAt)
		case e.Op == opRead && e.Code == http.StatusNotFound && !f.overBy(e.Ended, e.At):
			c.is("lost", "sandbox %s, answered to %s, was not found at %d: %s", f.ID, f.Caller, e.Ended, e.Reason)
		case e.Op == opRelease && e.Code == http.StatusNotFound && (e.Reason == string(apierror.SandboxNotFound) || !c.goneBefore(f, e)):
			c.is("lost", "sandbox %s, answered to %s, was not there to be released at %d: %s", f.ID, f.Caller, e.Ended, e.Reason)
		}
	}
	if !f.overBy(c.end(), c.w.At) {
		c.stillThere(f, record, listed)
		return
	}
	if listed || c.w.Read[f.ID] == http.StatusOK {
		what := "leaked"
		if f.releasedAt != 0 {
			what = "back"
		}
		c.is(what, "sandbox %s, answered to %s, is over (released at %d, pod deleted at %d, end %v), and still live", f.ID, f.Caller, f.releasedAt, f.deletedAt, f.EndAt)
	}
	if recorded && record.Status.Phase == v1alpha1.SandboxRunning {
		c.is("leaked", "sandbox %s is over, and its object says %s", f.ID, record.Status.Phase)
	}
	if _, there := c.pods[record.Spec.PodUID]; recorded && there && record.Status.Phase == v1alpha1.SandboxEnded {
		c.is("leaked", "sandbox %s has ended, and its pod %s is there", f.ID, record.Spec.PodName)
	}
}

// end is after everything in the history.
func (c *checker) end() uint64 { return c.events[len(c.events)-1].Ended + 1 }

// claimedAgain judges what else the claim that got f was answered.
func (c *checker) claimedAgain(f *fate, e event) {
	switch e.Code {
	case http.StatusCreated:
		if f.releasedAt != 0 && e.Began > f.releasedAt {
			c.is("back", "claim %s was answered with sandbox %s at %d, after its release had been confirmed at %d", e.Caller, e.ID, e.Ended, f.releasedAt)
		}
	case http.StatusGone:
		if e.ID != f.ID {
			c.is("double", "claim %s was answered with sandbox %s, and then that %s is gone", e.Caller, f.ID, e.ID)
		}
		if !f.overBy(e.Ended, e.At) {
			c.is("lost", "claim %s was answered with sandbox %s, and at %d that it is gone: %s", e.Caller, f.ID, e.Ended, e.Error)
		}
	}
}

// goneBefore reports whether a release that found nothing has an excuse: its
// sandbox was over, or another try to release it had begun.
func (c *checker) goneBefore(f *fate, e event) bool {
	if f.askedAt != 0 && f.askedAt < e.Began {
		return true
	}
	return f.deletedAt != 0 && f.deletedAt < e.Ended || !f.EndAt.IsZero() && !e.At.Before(f.EndAt)
}

func (c *checker) stillThere(f *fate, record v1alpha1.Sandbox, listed bool) {
	if code := c.w.Read[f.ID]; code != http.StatusOK {
		c.is("lost", "sandbox %s, answered to %s, is not there in the end: %d", f.ID, f.Caller, code)
	}
	if !listed {
		c.is("lost", "sandbox %s, answered to %s, is not in the list", f.ID, f.Caller)
	}
	if record.Status.Phase != v1alpha1.SandboxRunning {
		c.is("lost", "sandbox %s, answered to %s, is %q in its object: %s", f.ID, f.Caller, record.Status.Phase, record.Status.Reason)
	}
	if pod, there := c.pods[record.Spec.PodUID]; !there || pod.DeletionTimestamp != nil {
		c.is("lost", "sandbox %s, answered to %s, has lost its pod %s", f.ID, f.Caller, f.Pod)
	}
}

// leaked finds sandboxes that nobody has, and pods that hold nothing.
func (c *checker) leaked() {
	keys := map[string]string{} // of those who asked
	for _, e := range c.events {
		if e.Op == opClaim {
			keys[e.Caller] = e.Key
		}
	}
	for _, s := range c.w.Listed {
		caller := s.Metadata[callerField]
		key, asked := keys[caller]
		_, answered := c.sandboxes[s.SandboxID]
		switch {
		case !asked:
			c.is("leaked", "sandbox %s is live, and nobody has claimed it: %v", s.SandboxID, s.Metadata)
		case answered:
		case key == "":
			c.is("leaked", "sandbox %s is live, and %s, who has no key, never heard of it", s.SandboxID, caller)
		case len(c.answers[caller]) > 0:
			c.is("double", "sandbox %s is live for claim %s, which was answered with %s", s.SandboxID, caller, c.answers[caller][0].ID)
		}
		if r, ok := c.records[s.SandboxID]; !ok || r.Status.Phase != v1alpha1.SandboxRunning {
			c.is("lost", "sandbox %s is in the list, and its object says %q", s.SandboxID, r.Status.Phase)
		}
	}
	holder := map[string]string{} // by UID
	for _, r := range c.w.Records {
		holder[r.Spec.PodUID] = r.Name
		if _, ok := c.listed[r.Name]; !ok && r.Status.Phase == v1alpha1.SandboxRunning {
			c.is("leaked", "the object of sandbox %s says %s, and it is not in the list", r.Name, r.Status.Phase)
		}
	}
	warm := int32(0)
	for _, p := range c.w.Pods {
		id, held := holder[string(p.UID)]
		_, listed := c.listed[id]
		switch {
		case held && (listed || c.records[id].Status.Phase == v1alpha1.SandboxStopping): // in use, or on its way out
		case held:
			c.is("leaked", "pod %s held sandbox %s, which is %s, and is still there", p.Name, id, c.records[id].Status.Phase)
		case p.DeletionTimestamp == nil && ready(p):
			warm++
		default:
			c.is("leaked", "pod %s is neither warm nor a sandbox's", p.Name)
		}
	}
	status, asked := c.w.Pool.Status, c.w.Pool.Spec.Warm
	if warm != status.Warm || warm != asked {
		c.is("leaked", "%d pods are warm, the pool's status says %d, and it asks for %d", warm, status.Warm, asked)
	}
	if int(status.Claimed) != len(c.w.Listed) {
		c.is("leaked", "%d sandboxes are listed, and the pool's status says %d", len(c.w.Listed), status.Claimed)
	}
}

func ready(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// order judges whether those who waited were answered as they had come.
func (c *checker) order(arrivals []string) {
	var before event
	for _, caller := range arrivals {
		if len(c.answers[caller]) == 0 {
			c.is("order", "%s has waited and was never answered", caller)
			continue
		}
		e := c.answers[caller][0]
		if e.Ended < before.Ended {
			c.is("order", "%s came after %s and was answered before it", caller, before.Caller)
		}
		before = e
	}
}
