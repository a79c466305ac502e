package history

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"
)

// Verdict is what a history comes down to.
type Verdict struct {
	// Mismatches are what must never be, each with the word for it first.
	Mismatches []string
	// Requests were sent, Received were received by pods, and Outcomes are what
	// clients saw: by a sandbox's status, the reason that Berth gave, or "no answer".
	Requests, Received int
	Outcomes           map[string]int
	// What are requests by kind.
	What map[string]int
	// Claims were answered with a sandbox. Sandboxes are on record.
	Claims, Sandboxes int
	// Acknowledged releases had no router outstanding.
	Releases, Acknowledged int
	// Reuses are how often an address had another sandbox.
	Reuses int
	// After are requests that were sent when their sandbox was gone for every router.
	// Tempted are those for a sandbox that was over while another one lived at its
	// address: a route that was kept would have taken them to the wrong pod.
	After, Tempted int
	// Strays are requests that reached a pod which was nobody's and never became
	// anybody's: it had the address of a pod that the soak had deleted by force.
	Strays int
	// Faults by what was done, and Failed: what could not be.
	Faults, Failed map[string]int
	// Stalled are the pauses of an Envoy that took longer than the stall budget:
	// the soak means to make none, because Berth assumes that there is none.
	Stalled int
}

// String is the summary that people read.
func (v Verdict) String() string {
	var b strings.Builder
	counts := func(m map[string]int) string {
		var all []string
		for _, k := range slices.Sorted(maps.Keys(m)) {
			all = append(all, fmt.Sprintf("%s %d", k, m[k]))
		}
		return strings.Join(all, ", ")
	}
	fmt.Fprintf(&b, "requests    %d: %s\n", v.Requests, counts(v.What))
	fmt.Fprintf(&b, "outcomes    %s\n", counts(v.Outcomes))
	fmt.Fprintf(&b, "received    %d by pods\n", v.Received)
	fmt.Fprintf(&b, "sandboxes   %d, %d of them answered; %d released, %d acknowledged by all routers\n", v.Sandboxes, v.Claims, v.Releases, v.Acknowledged)
	fmt.Fprintf(&b, "addresses   %d times used again\n", v.Reuses)
	fmt.Fprintf(&b, "temptation  %d requests when their sandbox was gone, %d while another one was at its address\n", v.After, v.Tempted)
	fmt.Fprintf(&b, "strays      %d requests to pods that were never given to anybody\n", v.Strays)
	fmt.Fprintf(&b, "faults      %s\n", counts(v.Faults))
	if len(v.Failed) > 0 {
		fmt.Fprintf(&b, "not done    %s\n", counts(v.Failed))
	}
	if v.Stalled > 0 {
		fmt.Fprintf(&b, "STALLED     an Envoy stood still for longer than the stall budget, %d times: beyond what Berth assumes\n", v.Stalled)
	}
	fmt.Fprintf(&b, "mismatches  %d", len(v.Mismatches))
	return b.String()
}

// fate is what is known of one sandbox.
type fate struct {
	id       string
	record   *Event
	claim    *Event // the first answer that names it
	endFrom  time.Duration
	ends     bool // something has, or may have, ended it; not before endFrom
	gone     bool // for every router, from goneFrom on
	goneFrom time.Duration
}

type judge struct {
	run       Event
	v         Verdict
	sandboxes map[string]*fate
	holder    map[string]string // sandbox by pod's UID
	requests  map[string]*Event
	received  map[string][]*Event // by request
}

// Judge judges a history as Read returns it.
func Judge(events []Event) Verdict {
	j := &judge{
		run: events[0], sandboxes: map[string]*fate{}, holder: map[string]string{}, requests: map[string]*Event{}, received: map[string][]*Event{},
		v: Verdict{Outcomes: map[string]int{}, What: map[string]int{}, Faults: map[string]int{}, Failed: map[string]int{}},
	}
	j.bindings(events)
	j.ends(events)
	for i := range events {
		switch e := &events[i]; e.Kind {
		case Request:
			j.requests[e.Request] = e
		case Received:
			j.received[e.Request] = append(j.received[e.Request], e)
		}
	}
	for i := range events {
		switch e := &events[i]; e.Kind {
		case Request:
			j.request(e)
		case Received:
			j.receipt(e)
		case Fault:
			j.fault(e)
		}
	}
	j.addresses()
	return j.v
}

func (j *judge) wrong(word, format string, args ...any) {
	j.v.Mismatches = append(j.v.Mismatches, word+": "+fmt.Sprintf(format, args...))
}

func (j *judge) fate(id string) *fate {
	f := j.sandboxes[id]
	if f == nil {
		f = &fate{id: id}
		j.sandboxes[id] = f
	}
	return f
}

// bindings finds out which pod each sandbox is.
func (j *judge) bindings(events []Event) {
	claimed := map[string]string{} // sandbox by key
	for i := range events {
		if e := &events[i]; e.Kind == Record {
			j.v.Sandboxes++
			f := j.fate(e.Sandbox)
			if f.record != nil {
				j.wrong("double", "sandbox %s is on record as pod %s (UID %s) and as pod %s (UID %s)", e.Sandbox, f.record.Pod, f.record.PodUID, e.Pod, e.PodUID)
			}
			f.record = e
			if other, held := j.holder[e.PodUID]; held {
				j.wrong("double", "pod %s (UID %s) is on record as sandboxes %s and %s", e.Pod, e.PodUID, other, e.Sandbox)
			}
			j.holder[e.PodUID] = e.Sandbox
		}
	}
	for i := range events {
		e := &events[i]
		if e.Kind != Claim || e.Code != http.StatusCreated {
			continue
		}
		j.v.Claims++
		f := j.fate(e.Sandbox)
		if other := claimed[e.Key]; other != "" && other != e.Sandbox {
			j.wrong("double", "claim %s was answered with sandboxes %s and %s", e.Key, other, e.Sandbox)
		}
		claimed[e.Key] = e.Sandbox
		switch {
		case f.record == nil:
			j.wrong("lost", "sandbox %s, claimed as %s, is not on record", e.Sandbox, e.Key)
		case f.record.Pod != e.Pod:
			j.wrong("lost", "sandbox %s was answered as pod %s, and its record names pod %s", e.Sandbox, e.Pod, f.record.Pod)
		}
		if f.claim == nil {
			f.claim = e
		} else if f.claim.Key != e.Key {
			j.wrong("double", "sandbox %s was answered to claims %s and %s", e.Sandbox, f.claim.Key, e.Key)
		}
	}
}

// ends finds out from when on each sandbox may be over, and from when on it is.
func (j *judge) ends(events []Event) {
	deleted := map[string]time.Duration{} // when first, by pod's UID
	for i := range events {
		if e := &events[i]; e.Kind == Delete {
			if at, known := deleted[e.PodUID]; !known || e.Began < at {
				deleted[e.PodUID] = e.Began
			}
		}
	}
	for i := range events {
		e := &events[i]
		f := j.sandboxes[e.Sandbox]
		if f != nil && e.Kind == Claim && e.Timeout > 0 {
			f.mayEnd(e.Began + e.Timeout)
		}
		if f == nil || e.Kind != Release {
			continue
		}
		f.mayEnd(e.Began)
		switch {
		case e.Code == http.StatusNoContent && e.Outstanding == 0:
			j.v.Acknowledged++
			f.isGone(e.Ended)
		case e.Code == http.StatusNoContent, e.Code == http.StatusNotFound && e.Reason == reasonGone:
			f.isGone(e.Ended + j.run.MaxStale)
		default:
			continue
		}
		j.v.Releases++
	}
	for _, f := range j.sandboxes {
		if f.record != nil {
			if at, known := deleted[f.record.PodUID]; known {
				f.mayEnd(at)
			}
		}
	}
}

// reasonGone is the word of api/apierror for a sandbox that was released.
const reasonGone = "sandbox_gone"

func (f *fate) mayEnd(at time.Duration) {
	if !f.ends || at < f.endFrom {
		f.ends, f.endFrom = true, at
	}
}

func (f *fate) isGone(at time.Duration) {
	if !f.gone || at < f.goneFrom {
		f.gone, f.goneFrom = true, at
	}
}

func (f *fate) overAt(at time.Duration) bool { return f.ends && f.endFrom <= at }

// request judges what a client saw.
func (j *judge) request(e *Event) {
	j.v.Requests++
	j.v.What[e.What]++
	served := e.Code != 0 && e.Reason == ""
	switch {
	case e.Code == 0:
		j.v.Outcomes["no answer"]++
	case served:
		j.v.Outcomes[fmt.Sprint(e.Code)]++
	default:
		j.v.Outcomes[e.Reason]++
	}
	receipts := j.received[e.Request]
	f := j.sandboxes[e.Sandbox]
	if len(receipts) > 1 {
		j.wrong("twice", "request %s for sandbox %s was received %d times: %s", e.Request, e.Sandbox, len(receipts), pods(receipts))
	}
	if served && len(receipts) == 0 {
		j.wrong("unheard of", "request %s for sandbox %s was answered %d by pod %q, and no pod has received it", e.Request, e.Sandbox, e.Code, e.PodUID)
	}
	if e.PodUID != "" && (f == nil || f.record == nil || f.record.PodUID != e.PodUID) && !j.stray(e.Ended, f, e.PodUID) {
		j.wrong("wrong pod", "request %s for sandbox %s (%s), sent at %v by %s, was answered by the pod of UID %s", e.Request, e.Sandbox, f.describe(), e.Began, e.Gateway, e.PodUID)
	}
	if f != nil && f.gone && e.Began > f.goneFrom {
		j.v.After++
		if served || len(receipts) > 0 {
			j.wrong("came back", "request %s for sandbox %s (%s), sent at %v by %s, %v after it was gone for every router, was answered %d and received by %s",
				e.Request, e.Sandbox, f.describe(), e.Began, e.Gateway, e.Began-f.goneFrom, e.Code, pods(receipts))
		}
	}
}

func pods(receipts []*Event) string {
	var all []string
	for _, r := range receipts {
		all = append(all, fmt.Sprintf("%s (UID %s) at %v", r.Pod, r.PodUID, r.Began))
	}
	return cmp.Or(strings.Join(all, ", "), "nobody")
}

func (f *fate) describe() string {
	if f == nil || f.record == nil {
		return "not on record"
	}
	return fmt.Sprintf("pod %s, UID %s, at %s, may be over from %v on", f.record.Pod, f.record.PodUID, f.record.Address, f.endFrom)
}

// receipt judges what a pod received.
func (j *judge) receipt(e *Event) {
	j.v.Received++
	switch f := j.sandboxes[e.Sandbox]; {
	case f != nil && f.record != nil && f.record.PodUID == e.PodUID:
	case j.stray(e.Began, f, e.PodUID):
		j.v.Strays++
	default:
		j.wrong("wrong pod", "pod %s (UID %s) received request %s at %v, which is for sandbox %s (%s)", e.Pod, e.PodUID, e.Request, e.Began, e.Sandbox, f.describe())
	}
	if r := j.requests[e.Request]; r == nil || r.Sandbox != e.Sandbox || r.Began > e.Began {
		j.wrong("unheard of", "pod %s (UID %s) received request %q at %v for sandbox %s, and nobody had sent that", e.Pod, e.PodUID, e.Request, e.Began, e.Sandbox)
	}
}

// stray reports whether a pod that was reached at some time for a sandbox that it does
// not hold is nobody's, and the sandbox may have been over by then.
func (j *judge) stray(at time.Duration, f *fate, uid string) bool {
	_, held := j.holder[uid]
	return !held && f != nil && f.record != nil && f.overAt(at)
}

func (j *judge) fault(e *Event) {
	if e.Error != "" {
		j.v.Failed[e.What]++
		return
	}
	j.v.Faults[e.What]++
	if strings.HasPrefix(e.What, EnvoyPaused) && e.Ended-e.Began > j.run.StallBudget {
		j.v.Stalled++
	}
}

// EnvoyPaused begins What of faults in which an Envoy stands still, from Began at the
// latest until Ended at the earliest.
const EnvoyPaused = "envoy-pause"

// known are reasons whose cause is in the history, so that it is known from when on
// a sandbox may have been over.
var known = []string{"", "Killed", "Timeout", "PodDeleted", "PodGone"}

// addresses judges when addresses were used again.
func (j *judge) addresses() {
	at := map[string][]*fate{} // in the order of the claims' answers
	for _, f := range j.sandboxes {
		if f.record != nil && f.claim != nil {
			at[f.record.Address] = append(at[f.record.Address], f)
		}
	}
	for _, address := range slices.Sorted(maps.Keys(at)) {
		all := at[address]
		slices.SortFunc(all, func(a, b *fate) int { return cmp.Compare(a.claim.Ended, b.claim.Ended) })
		for i, later := range all {
			if i > 0 {
				j.v.Reuses++
			}
			for _, earlier := range all[:i] {
				switch {
				case !slices.Contains(known, earlier.record.Reason):
				case !earlier.ends:
					j.wrong("too early", "sandbox %s got address %s at %v, and nothing has ended sandbox %s there", later.id, address, later.claim.Ended, earlier.id)
				case later.claim.Ended < earlier.endFrom+j.run.Window:
					j.wrong("too early", "sandbox %s got address %s at %v, %v after the first that can have ended sandbox %s there (%s); the window is %v",
						later.id, address, later.claim.Ended, later.claim.Ended-earlier.endFrom, earlier.id, earlier.record.Reason, j.run.Window)
				}
			}
		}
	}
	for _, e := range j.requests {
		f := j.sandboxes[e.Sandbox]
		if f == nil || f.record == nil || !f.overAt(e.Began) {
			continue
		}
		for _, other := range at[f.record.Address] {
			if other != f && other.claim.Ended <= e.Began && !other.overAt(e.Began) {
				j.v.Tempted++
				break
			}
		}
	}
}
