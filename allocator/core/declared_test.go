package core

import (
	"fmt"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// declareAfter is the default of Config.DeclareAfter.
const declareAfter = 10 * time.Second

func (s *sim) fence() FenceStatus {
	s.t.Helper()
	list, others := s.core.View().Fences(10)
	if len(list) != 1 || others != 0 {
		s.t.Fatalf("fences %+v and %d others", list, others)
	}
	return list[0]
}

func (s *sim) declare(session string) []Effect {
	s.t.Helper()
	return s.step(DeclareDead{Token: 7, Session: session, By: "ops", Reason: "its node burnt"})
}

// silent has a released sandbox. Its fence waits for a router that was not heard for a while.
func silent(t *testing.T) (*sim, Sandbox) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.release(sb.ID)
	s.pass(declareAfter)
	return s, sb
}

func TestFencesListSessionsTheyWaitFor(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(SessionJoined{Session: "r1", Stream: 1, From: "10.1.0.1"})
	s.join("r2", 2)
	s.join("r3", 3)
	sb := s.claim()
	s.ack("r1", 1, 2)
	s.step(SessionLeft{Session: "r2", Stream: 2})
	s.release(sb.ID)
	s.ack("r3", 3, 3)
	s.pass(4 * time.Second)
	s.step(SessionPing{Session: "r1", Stream: 1, Nonce: 1})
	s.pass(time.Second)
	f := s.fence()
	if f.Sandbox.ID != sb.ID || f.Sandbox.Reason != fact.ReasonKilled || f.Sandbox.ReleasedAt.IsZero() || f.Sandbox.Pod != sb.Pod || f.Window != 0 || len(f.Waiting) != 2 || f.Others != 0 {
		t.Fatalf("fence %+v", f)
	}
	if got, want := f.Waiting[0], (Awaited{SessionStatus{ID: "r1", From: "10.1.0.1", Connected: true, Heard: true, Silence: time.Second, Sent: 3, Acked: 2, Expires: expiry - time.Second}, 3}); got != want {
		t.Errorf("%+v, expected %+v", got, want)
	}
	if got, want := f.Waiting[1], (Awaited{SessionStatus{ID: "r2", Heard: true, Silence: 5 * time.Second, Expires: expiry - 5*time.Second}, 0}); got != want {
		t.Errorf("%+v, expected %+v", got, want)
	}
	sessions, others := s.core.View().Sessions(2)
	if len(sessions) != 2 || others != 1 || sessions[0].ID != "r1" || sessions[0].Fences != 1 || sessions[1].ID != "r2" || sessions[1].Fences != 1 {
		t.Errorf("sessions %+v and %d others", sessions, others)
	}
	s.ack("r1", 1, 3)
	s.step(SessionGoodbye{Session: "r2"})
	s.pass(time.Second)
	if f := s.fence(); len(f.Waiting) != 0 || f.Window != window-time.Second {
		t.Errorf("fence %+v", f)
	}
	s.pass(window)
	if list, others := s.core.View().Fences(10); len(list)+others != 0 {
		t.Errorf("fences %+v and %d others", list, others)
	}
}

func TestRouterOfEarlierTermIsShownAsNotHeard(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, released("a-1", "x"), Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r", From: "10.1.0.1"}})
	s.pass(time.Second)
	if got, want := s.fence().Waiting[0].SessionStatus, (SessionStatus{ID: "r", From: "10.1.0.1", Expires: lease + expiry - time.Second}); got != want {
		t.Errorf("%+v, expected %+v", got, want)
	}
	s.join("r", 1)
	if got := s.fence().Waiting[0]; !got.Heard || !got.Connected || got.Needed != 1 || got.Sent != 1 || got.Acked != 0 {
		t.Errorf("%+v", got)
	}
}

func TestListsOfFencesAndSessionsAreBounded(t *testing.T) {
	s := newSim(t)
	var pods []Pod
	for i := range 5 {
		pods = append(pods, warmPod(fmt.Sprintf("a-%d", i+1)))
	}
	s.recover([]Pool{specA(5)}, pods)
	for i := range maxAwaited + 3 {
		s.join(fmt.Sprintf("r%02d", i), uint64(i+1))
	}
	var ids []string
	for range pods {
		ids = append(ids, s.claim().ID)
	}
	for _, id := range ids {
		s.release(id)
	}
	list, others := s.core.View().Fences(2)
	if len(list) != 2 || others != 3 || list[0].Sandbox.ID != ids[0] || list[1].Sandbox.ID != ids[1] {
		t.Errorf("%d others than %+v", others, list)
	}
	if f := list[0]; len(f.Waiting) != maxAwaited || f.Others != 3 || f.Waiting[0].ID != "r00" || f.Waiting[1].ID != "r01" {
		t.Errorf("%+v", f)
	}
}

// Invariant: I3, P9
func TestDurableDeclarationEndsTheWaitForRouter(t *testing.T) {
	s, sb := silent(t)
	s.slow = true
	s.declare("r")
	if f := one[Write](s).Facts; len(f) != 1 || sessionOf(f[0]).ID != "r" || !sessionOf(f[0]).Left || *sessionOf(f[0]).Declared != (Declaration{By: "ops", Reason: "its node burnt", At: s.now.Wall}) {
		t.Errorf("written %+v", f)
	}
	none[DeadDeclared](s)
	none[SessionDeclaredDead](s)
	s.pass(2 * window)
	none[DeletePod](s)
	if f := s.fence(); len(f.Waiting) != 1 {
		t.Fatalf("it is waited for no more, and that is not durable: %+v", f)
	}
	s.step(DeclareDead{Token: 8, Session: "r"}) // two callers, one fact
	none[DeadDeclared](s)
	s.written()
	none[Write](s)
	if e := one[SessionDeclaredDead](s); e.Session != "r" || e.Fences != 1 || e.Declaration.By != "ops" || e.Declaration.Reason != "its node burnt" {
		t.Errorf("%+v", e)
	}
	if answers := of[DeadDeclared](s.effects); len(answers) != 2 || answers[0] != (DeadDeclared{Token: 7, Status: DeclareOK, Fences: 1}) || answers[1] != (DeadDeclared{Token: 8, Status: DeclareOK, Fences: 1}) {
		t.Errorf("answers %+v", answers)
	}
	if after := s.deletedAfter(sb.Pod, never); after != window {
		t.Errorf("deleted %v after that, expected the window, %v", after, window)
	}
	s.declare("r") // the first answer was lost
	if a := one[DeadDeclared](s); a.Status != DeclareOK || a.Fences != 1 {
		t.Errorf("answer %+v", a)
	}
}

// Invariant: P9
func TestConnectedRouterIsNotDeclaredDead(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.release(sb.ID)
	refused := func(want DeadDeclared) {
		t.Helper()
		s.declare("r")
		if a := one[DeadDeclared](s); a != want {
			t.Errorf("answer %+v, expected %+v", a, want)
		}
		none[Write](s)
		none[SessionDeclaredDead](s)
	}
	s.pass(maxStale / 2) // its pings do not arrive, but its stream is there
	refused(DeadDeclared{Token: 7, Status: DeclareConnected})
	s.step(SessionPing{Session: "r", Stream: 1})
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.pass(declareAfter - time.Second)
	refused(DeadDeclared{Token: 7, Status: DeclareHeard, Wait: time.Second})
	s.step(DeclareDead{Token: 7, Session: "unknown"})
	if a := one[DeadDeclared](s); a.Status != DeclareUnknown {
		t.Errorf("answer %+v", a)
	}
	s.pass(time.Second)
	s.declare("r")
	if a := one[DeadDeclared](s); a.Status != DeclareOK {
		t.Errorf("answer %+v", a)
	}

	// When a leader begins no router is connected, and the last leader may have heard them.
	s = newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, released("a-1", "x"), Fact{Revision: Revision{Term: 1, Counter: 1}, Subject: &SessionFact{ID: "r"}})
	refused(DeadDeclared{Token: 7, Status: DeclareHeard, Wait: lease + declareAfter})
	s.pass(lease + declareAfter)
	s.declare("r")
	if a := one[DeadDeclared](s); a.Status != DeclareOK || a.Fences != 1 {
		t.Errorf("answer %+v", a)
	}
}

// It lives, and an operator was wrong.
// Invariant: P9
func TestDeclaredDeadRouterMustChangeItsID(t *testing.T) {
	s, sb := silent(t)
	s.declare("r")
	turnedAway := func(stream uint64) {
		t.Helper()
		s.step(SessionJoined{Session: "r", Stream: stream})
		if e := one[CloseStream](s); e != (CloseStream{Stream: stream, Banned: true}) {
			t.Errorf("%+v", e)
		}
		s.step(SessionPing{Session: "r", Stream: stream, Nonce: 1})
		none[SendPong](s)
		s.step(Resolve{Session: "r", Stream: stream, ID: sb.ID})
		none[SendResolved](s)
		s.ack("r", stream, 1)
		s.step(SessionLeft{Session: "r", Stream: stream})
		none[Write](s)
	}
	turnedAway(2)
	s.join("r-2", 3) // under another name it may
	s.pass(maxStale)
	turnedAway(4)
	s.pass(maxStale / 50) // from now on nothing that it knew is fresh
	if settled := of[Settle](s.effects); len(settled) == 0 || settled[0].Thing != SessionID("r") {
		t.Errorf("settled %+v", settled)
	}
	s.join("r", 5)
}

// Invariant: P9
func TestNextLeaderKnowsWhichRoutersAreBanned(t *testing.T) {
	s, _ := silent(t)
	s.slow = true
	s.declare("r")
	fact := one[Write](s).Facts[0]
	s.written()
	none[Settle](s)
	s = newSimAt(t, 2, start)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, released("a-1", "x"), fact)
	none[Settle](s)
	if f := s.fence(); len(f.Waiting) > 0 {
		t.Errorf("it is waited for: %+v", f)
	}
	s.step(SessionJoined{Session: "r", Stream: 1})
	if e := one[CloseStream](s); !e.Banned {
		t.Errorf("%+v", e)
	}
	s.pass(2 * maxStale)
	if e := one[Settle](s); e.Thing != SessionID("r") || e.Revision != fact.Revision {
		t.Errorf("settled %+v", e)
	}
}

func TestReturningRouterWithdrawsItsDeclaration(t *testing.T) {
	s, sb := silent(t)
	s.slow = true
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	s.step(DeclareDead{Token: 6, Session: "unknown"})
	s.core.outbox.Commit(s.now.Boot, &RetirementFact{Pod: key("a-9")}, true, func(Revision, time.Duration) {})
	s.core.outbox.Flush(s.now.Boot) // something else is being written
	s.declare("r")
	s.step(SessionJoined{Session: "r", Stream: 2})
	if a := one[DeadDeclared](s); a != (DeadDeclared{Token: 7, Status: DeclareConnected}) {
		t.Errorf("answer %+v", a)
	}
	if e := one[SendSnapshot](s); e.Stream != 2 {
		t.Errorf("snapshot %+v", e)
	}
	s.step(WriterReady{})
	none[Write](s)
	if f := s.fence(); len(f.Waiting) != 1 {
		t.Errorf("%s is not waited for: %+v", sb.ID, f)
	}
}

// Once it is handed to the writer, the outcome is awaited.
func TestReturnDuringWriteOfDeclarationIsRefused(t *testing.T) {
	s, _ := silent(t)
	s.slow = true
	s.declare("r")
	s.step(SessionJoined{Session: "r", Stream: 2})
	if e := one[CloseStream](s); e != (CloseStream{Stream: 2}) {
		t.Errorf("%+v", e)
	}
	none[SendSnapshot](s)
	s.written()
	one[SessionDeclaredDead](s)
	s.step(SessionJoined{Session: "r", Stream: 3})
	if e := one[CloseStream](s); e != (CloseStream{Stream: 3, Banned: true}) {
		t.Errorf("%+v", e)
	}
}

func TestRouterEndsOtherwiseWhileDeclarationIsWritten(t *testing.T) {
	for name, ends := range map[string]func(*sim){
		"goodbye": func(s *sim) { s.step(SessionGoodbye{Session: "r"}) },
		"dead":    func(s *sim) { s.step(SessionDead{Session: "r"}) },
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := silent(t)
			s.slow = true
			s.declare("r")
			ends(s)
			s.slow = false
			s.written()
			s.writeAll()
			if a := one[DeadDeclared](s); a.Status != DeclareOK {
				t.Errorf("answer %+v", a)
			}
			none[SessionDeclaredDead](s) // nothing hung on it
			if n := len(of[Settle](s.effects)); n != 1 {
				t.Errorf("settled %d times", n)
			}
			s.settles(1)
			s.join("r", 9) // a router that was proven dead is not banned
		})
	}
}

func TestDeclaredSessionDoesNotExpireAsWell(t *testing.T) {
	s, _ := silent(t)
	s.slow = true
	s.declare("r")
	s.pass(2 * maxStale)
	s.written()
	one[SessionDeclaredDead](s)
	none[Write](s)
}

// What was handed to the writer before its router left says nothing of the session that has
// begun since, under the same name.
func TestOldDeclarationDoesNotEndNewSession(t *testing.T) {
	s, _ := silent(t)
	s.slow = true
	s.declare("r")
	if write := s.step(SessionGoodbye{Session: "r"}); len(of[Write](write)) > 0 {
		t.Fatalf("written %+v", write)
	}
	s.step(SessionJoined{Session: "r", Stream: 2})
	none[CloseStream](s)
	s.written() // the declaration
	if a := one[DeadDeclared](s); a.Status != DeclareOK || a.Fences != 0 {
		t.Errorf("answer %+v", a)
	}
	none[SessionDeclaredDead](s)
	none[CloseStream](s)
	facts := one[Write](s).Facts
	if len(facts) < 2 || !sessionOf(facts[len(facts)-2]).Left || sessionOf(facts[len(facts)-1]).ID != "r" || sessionOf(facts[len(facts)-1]).Left {
		t.Errorf("written %+v", facts)
	}
	s.written() // that the one has left, and the other has joined
	if e := one[SendSnapshot](s); e.Stream != 2 {
		t.Errorf("snapshot %+v", e)
	}
	if sessions, _ := s.core.View().Sessions(10); len(sessions) != 1 || !sessions[0].Connected {
		t.Errorf("sessions %+v", sessions)
	}
	s.step(SessionPing{Session: "r", Stream: 2, Nonce: 1})
	one[SendPong](s)
}
