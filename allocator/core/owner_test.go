package core

import (
	"testing"
)

// ---- whose a pod is

func orphaned(p *Pod)    { p.Pool = "" }
func mislabelled(p *Pod) { p.Mislabelled = true }

func TestRemovedPoolLabelIsRestored(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("a-0"), mislabelled), warmPod("a-1")})
	if l := one[LabelPod](s); l != (LabelPod{Pod: key("a-0"), Pool: "a", Restored: true}) {
		t.Errorf("label %+v", l)
	}
	one[DeletePod](s) // one is too many, labelled or not
	given := s.claim()
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { mislabelled(p); p.Used = true })})
	if l := one[LabelPod](s); l != (LabelPod{Pod: key("a-1"), Pool: "a", ID: given.ID, Restored: true}) {
		t.Errorf("label %+v", l)
	}
	none[SandboxReleased](s)
	s.release(given.ID)
	s.step(PodSeen{with(warmPod("a-1"), mislabelled)})
	if l := one[LabelPod](s); l != (LabelPod{Pod: key("a-1"), Pool: "a", ID: given.ID, Released: true, Restored: true}) {
		t.Errorf("label %+v", l)
	}
	s.pass(window)
	if d := one[DeletePod](s); d.Pod != key("a-1") {
		t.Errorf("deleted %+v", d)
	}
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { mislabelled(p); p.Deleting = true })})
	none[LabelPod](s) // it goes
}

func TestPodWithoutOwnerIsIgnoredUnlessOnRecord(t *testing.T) {
	s := newSimAt(t, 2, start)
	discarded := Fact{Revision: Revision{Term: 1, Counter: 9}, Subject: &RetirementFact{Pod: key("a-8")}}
	s.recover([]Pool{specA(1)}, []Pod{with(warmPod("foreign"), orphaned), with(warmPod("a-9"), orphaned), with(warmPod("a-8"), orphaned)}, on("a-9", "x"), discarded)
	if d := one[DeletePod](s); d.Pod != key("a-8") {
		t.Errorf("deleted %+v, expected the one on record only", d)
	}
	none[SandboxReleased](s)
	one[CreatePod](s) // the foreign one does not count
	if sb, _ := s.core.View().Sandbox("x"); sb.Phase != Running {
		t.Errorf("sandbox %+v", sb)
	}
	s.release("x")
	s.pass(window + lease + maxStale + maxStale/50) // routers of the last term
	if d := one[DeletePod](s); d.Pod != key("a-9") {
		t.Errorf("deleted %+v", d)
	}
	s.step(PodGone{key("a-8")})
	s.step(PodGone{key("a-9")})
	s.step(PodGone{key("foreign")})
	if s.core.pools.Len() != 1 {
		t.Errorf("pools %v", s.core.pools.Sorted())
	}
}

// The next leader would not find it.
func TestIdlePodWhoseOwnerWasTakenIsDeleted(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(PodSeen{with(warmPod("a-1"), orphaned)})
	if d := one[DeletePod](s); d.Pod != key("a-1") {
		t.Errorf("deleted %+v", d)
	}
	one[CreatePod](s)
}
