package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// ---- Sandbox objects that people delete

func TestSandboxIsReleasedWhenItsObjectIsDeleted(t *testing.T) {
	for name, ev := range map[string]Event{
		"deleted": ObjectSeen{ID: "term1-id1", Revision: Revision{Term: 1, Counter: 1}, Deleting: true},
		"gone":    ObjectGone{ID: "term1-id1"},
	} {
		s := newSim(t)
		s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
		s.step(ObjectGone{ID: "term1-id1"}) // of another owner
		s.claim()
		s.step(ObjectSeen{ID: "term1-id1", Revision: Revision{Term: 1, Counter: 1}})
		none[SandboxReleased](s)
		s.step(ev)
		if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonObjectDeleted {
			t.Errorf("%s: released %+v", name, r)
		}
		if records := of[WriteObject](s.effects); len(records) == 0 || records[len(records)-1].Sandbox.Phase != Released {
			t.Errorf("%s: recorded %+v", name, records)
		}
	}
}

func TestObjectOfLiveSandboxIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	sb := s.claim()
	s.release(sb.ID)
	s.step(PodGone{sb.Pod})
	s.step(ObjectGone{ID: sb.ID}) // its fence is not complete
	if r := one[WriteObject](s); r.Sandbox.Phase != Released {
		t.Errorf("recorded %+v", r)
	}
	s.record(s.pass(window))
	s.step(ObjectGone{ID: sb.ID})
	none[WriteObject](s)
	// A leader that was deposed long ago wrote it once more.
	s.step(ObjectSeen{ID: sb.ID, Revision: Revision{Term: 1, Counter: 1}})
	if f := one[DeleteObject](s); f.ID != sb.ID {
		t.Errorf("forgotten %+v", f)
	}
}

// The deletion of the object of a sandbox must not make its key free: the object
// stays until the key holds no longer.
func TestDeletedObjectStaysWhileItsKeyHolds(t *testing.T) {
	b := Binding{Team: "t", IdempotencyKey: "k"}
	deleting := func(s Sandbox) ObjectSeen {
		return ObjectSeen{ID: s.ID, Pool: poolA, Revision: s.Revision, Deleting: true}
	}
	for name, c := range map[string]struct{ live, ended, late bool }{
		"while it runs":                 {live: true},
		"after it has ended":            {ended: true},
		"after the key holds no longer": {late: true},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Binding: b, Wait: wait})
			sb := one[Claimed](s).Sandbox
			s.record(s.effects)
			if c.live {
				s.record(s.step(deleting(sb)))
			} else {
				s.record(s.step(Release{Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled}))
			}
			s.deletedAfter(sb.Pod, never)
			s.record(s.step(PodGone{sb.Pod}))
			sb, _ = s.core.View().Sandbox(sb.ID)
			if sb.Phase != Ended {
				t.Fatalf("it is %+v", sb)
			}
			if c.ended {
				s.step(deleting(sb))
				none[DeleteObject](s)
			}
			s.pass(10*time.Minute - never)
			none[DeleteObject](s)
			if next := newSimAt(t, 2, s.now); true { // what is left is enough for it
				next.recoverState(State{Pools: []Pool{specA(1)}, Pods: []Pod{warmPod("a-2")}, Nodes: []string{"n1"}, Objects: []Sandbox{sb}})
				next.step(Claim{Token: 1, Pool: poolA, Binding: b, Wait: wait})
				if r := one[ClaimRefused](next); r.Why != KeyEnded || r.Sandbox.ID != sb.ID {
					t.Errorf("refused %+v", r)
				}
				next.step(deleting(sb))
				none[DeleteObject](next)
				next.pass(never)
				if f := one[DeleteObject](next); f.ID != sb.ID {
					t.Errorf("forgotten %+v", f)
				}
			}
			if s.pass(never); c.late {
				none[DeleteObject](s)
				s.step(deleting(sb))
			}
			if f := one[DeleteObject](s); f.ID != sb.ID {
				t.Errorf("forgotten %+v", f)
			}
			s.step(ObjectGone{sb.ID})
			none[WriteObject](s)
		})
	}
}

// Otherwise the CRD could not be deleted within the time for which a key holds.
func TestDeletedPoolLetsGoOfDeletedObjects(t *testing.T) {
	for name, first := range map[string]bool{"object first": true, "pool first": false} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}, Wait: wait})
			sb, replacement := one[Claimed](s).Sandbox, one[CreatePod](s)
			s.record(s.effects)
			s.record(s.step(Release{Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled}))
			s.deletedAfter(sb.Pod, never)
			s.record(s.step(PodGone{sb.Pod}))
			sb, _ = s.core.View().Sandbox(sb.ID)
			seen := ObjectSeen{ID: sb.ID, Pool: poolA, Revision: sb.Revision, Deleting: true}
			deleted := specA(0)
			deleted.Deleting = true
			if first {
				s.step(seen)
				none[DeleteObject](s)
				s.step(PoolSeen{deleted})
				s.step(CreateFailed{Pool: poolA, Name: replacement.Name})
			} else {
				s.step(PoolSeen{deleted})
				s.step(CreateFailed{Pool: poolA, Name: replacement.Name})
				s.step(PoolGone{Key: poolA})
				none[DeleteObject](s)
				s.step(seen)
			}
			if f := one[DeleteObject](s); f.ID != sb.ID {
				t.Errorf("forgotten %+v", f)
			}
			s.step(PoolSeen{specA(0)}) // another pool of the name, before the deletion is observed
			s.step(ObjectGone{sb.ID})
			none[WriteObject](s)
			s.step(Claim{Token: 2, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: "k"}, Wait: wait})
			if r := one[ClaimRefused](s); r.Why != KeyEnded {
				t.Errorf("refused %+v", r)
			}
		})
	}
}

func TestLateObjectOfDeposedLeaderIsDeleted(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover(nil, nil)
	s.step(ObjectSeen{ID: "x", Pool: poolA, Revision: Revision{Term: 2, Counter: 1}})
	none[DeleteObject](s)
	s.step(ObjectSeen{ID: "made-by-hand", Pool: poolA})
	none[DeleteObject](s)
	s.step(ObjectSeen{ID: "x", Pool: poolA, Revision: Revision{Term: 1, Counter: 9}})
	if f := one[DeleteObject](s); f.ID != "x" {
		t.Errorf("forgotten %+v", f)
	}
}

// ---- clocks

func TestWallClockStepReleasesNothingEarly(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Hour, Wait: wait})
	one[Claimed](s)
	s.now.Wall = s.now.Wall.Add(2 * time.Hour)
	s.pass(50 * time.Millisecond)
	none[SandboxReleased](s)
	s.now.Wall = s.now.Wall.Add(-4 * time.Hour)
	s.pass(time.Hour)
	one[SandboxReleased](s)
}

func TestWallClockStepDoesNotKeepRecords(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded = 1
	s.restart()
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	end := func(token uint64) {
		s.step(Claim{Token: token, Pool: poolA, Binding: Binding{Team: "t", IdempotencyKey: string(rune('a' + token))}, Wait: wait})
		c := one[Claimed](s)
		s.record(s.effects)
		s.release(c.Sandbox.ID)
		s.deletedAfter(c.Sandbox.Pod, never)
		s.record(s.step(PodGone{c.Sandbox.Pod}))
	}
	s.now.Wall = s.now.Wall.Add(365 * 24 * time.Hour)
	end(1)
	s.now.Wall = s.now.Wall.Add(-365 * 24 * time.Hour)
	for token := uint64(2); token <= 4; token++ {
		end(token)
	}
	s.pass(25 * time.Hour)
	s.pass(time.Second)
	if s.core.sandboxes.Len() > 1 {
		t.Errorf("%d records are left a day later", s.core.sandboxes.Len())
	}
	for sb := range s.core.sandboxes.All() {
		id := sb.ID
		if s.core.claims.Keeps(id) {
			t.Errorf("the key of %s is left a day later", id)
		}
	}
}

// ---- what is forgotten

// The journal keeps what nothing has overwritten yet, for days where few claims
// come.
func TestForgottenRecordStaysGoneUnderNewLeader(t *testing.T) {
	s := newSimAt(t, 2, start)
	old := released("a-1", "old")
	sandboxOf(old).ReleasedAt = start.Wall.Add(-3 * 24 * time.Hour) // KeepEndedFor is 24 h
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-2")}, old)
	none[WriteObject](s)
	one[Settle](s)
}

func TestUnwrittenRecordDoesNotKeepOthers(t *testing.T) {
	s := newSim(t)
	s.cfg.KeepEnded = 1
	s.restart()
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	for n := range uint64(4) {
		written := func(effects []Effect) {
			if n > 0 { // the API server refuses the first one's, for ever
				s.record(effects)
			}
		}
		written(s.step(Claim{Token: n, Pool: poolA, Wait: wait}))
		c := s.core.sandboxes.Live().Of(sandboxes.Everything())[0].Sandbox
		written(s.step(Release{Scope: everyTeam, ID: c.ID, Reason: fact.ReasonKilled}))
		s.deletedAfter(c.Pod, never)
		written(s.step(PodGone{c.Pod}))
	}
	s.pass(25 * time.Hour)
	if n := s.core.sandboxes.Len(); n > 1 {
		t.Errorf("%d records a day later; one cannot be written", n)
	}
}

// ---- objects that people change

func TestReplacedObjectIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	c := s.claim()
	s.step(ObjectSeen{ID: c.ID, Pool: poolA}) // its status is gone
	if r := one[WriteObject](s); r.Sandbox.ID != c.ID {
		t.Errorf("recorded %+v", r)
	}
}

func TestObjectDeletedBeforeItsEndIsWrittenAgain(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	c := one[Claimed](s)
	s.step(ObjectSeen{ID: c.Sandbox.ID, Pool: poolA, Revision: c.Sandbox.Revision})
	s.step(ObjectGone{ID: c.Sandbox.ID})
	if len(of[WriteObject](s.effects)) == 0 {
		t.Errorf("%s is not written again", c.Sandbox.ID)
	}
}
