package core

import (
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

func TestSnapshotHoldsOnlyRunningSandboxes(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(4)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3"), warmPod("a-4")})
	s.join("r", 9)
	s.claim()
	releasing, released := s.claim(), s.claim()
	s.release(released.ID)
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait}) // not durable yet
	s.step(Release{Scope: everyTeam, ID: releasing.ID, Reason: fact.ReasonKilled})
	s.step(SessionJoined{Session: "r", Stream: 1})
	var got []string
	for _, r := range one[SendSnapshot](s).Routes {
		got = append(got, r.ID)
	}
	slices.Sort(got)
	if !slices.Equal(got, []string{"term1-id1", "term1-id2"}) {
		t.Errorf("snapshot with %v", got)
	}
}

func TestResolveAnswersRunningGoneAndUnknown(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(2)}, []Pod{warmPod("a-1"), warmPod("a-2")})
	s.join("r", 1)
	running, released := s.claim(), s.claim()
	s.release(released.ID)
	for id, want := range map[string]SendResolved{
		running.ID: {Stream: 1, ID: running.ID, Sandbox: &running}, "x": {Stream: 1, ID: "x"},
		released.ID: {Stream: 1, ID: released.ID, Gone: true, End: End{Reason: fact.ReasonKilled, At: s.now.Wall}},
	} {
		s.step(Resolve{Session: "r", Stream: 1, ID: id})
		if got := one[SendResolved](s); !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v, expected %+v", id, got, want)
		}
	}
	s.step(Resolve{Session: "r", Stream: 9, ID: "x"})
	none[SendResolved](s)
}

// The ID of a private sandbox opens nothing, so it must not tell how the sandbox ended either.
//
// Invariant: P15
func TestEndsAreSentForPublicSandboxesOnly(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(3)}, []Pod{warmPod("a-1"), warmPod("a-2"), warmPod("a-3")})
	s.join("r", 1)
	for _, access := range []Access{AccessPublic, AccessToken, AccessTeam} {
		s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Binding: Binding{Access: access}})
		id := one[Claimed](s).Sandbox.ID
		want := End{}
		if access == AccessPublic {
			want = End{Reason: fact.ReasonKilled, At: s.now.Wall}
		}
		s.release(id)
		if got := one[SendRelease](s); !slices.Equal(got.IDs, []string{id}) || !slices.Equal(got.Ends, []End{want}) {
			t.Errorf("%v: %+v, want %+v", access, got, want)
		}
		s.step(Resolve{Session: "r", Stream: 1, ID: id})
		if got := one[SendResolved](s); !got.Gone || got.End != want {
			t.Errorf("%v: %+v, want %+v", access, got, want)
		}
	}
}

func TestResolveOfStartingSandboxNamesTheHold(t *testing.T) {
	s := newSim(t)
	pool := specA(1)
	pool.PostStart, pool.Hold = true, 7*time.Second
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	id := one[StartSandbox](s).Sandbox.ID
	s.step(Resolve{Session: "r", Stream: 1, ID: id})
	if e := one[SendResolved](s); !e.Starting || e.Hold != 7*time.Second || e.Sandbox != nil {
		t.Errorf("resolved %+v", e)
	}
	s.step(Started{ID: id, OK: true})
	one[SendRoute](s) // without being asked again
}

// Gone is final for a router. So it is not sent before the release is durable, because the next
// leader may not know of the release.
func TestResolveNeverAnswersGoneBeforeDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	sb := one[StartSandbox](s).Sandbox
	s.slow = true
	s.step(Release{Scope: everyTeam, Token: 2, ID: sb.ID, Reason: fact.ReasonKilled}) // handed to the writer
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); r.Gone || !r.Starting {
		t.Errorf("resolved %+v", r)
	}
	s.written()
	s.step(Resolve{Session: "r", Stream: 1, ID: sb.ID})
	if r := one[SendResolved](s); !r.Gone {
		t.Errorf("resolved %+v", r)
	}
}
