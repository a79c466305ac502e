package core

import (
	"testing"
	"time"
)

// Routers that others have found dead: see SessionDead.

var (
	hereGateway  = Gateway{1}
	otherGateway = Gateway{2}
)

// reported has a released sandbox. Its fence waits for r. q is of the same gateway, x of another one.
func reported(t *testing.T) (*sim, Sandbox) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(SessionJoined{Session: "r", Stream: 1, Gateway: hereGateway})
	s.step(SessionJoined{Session: "q", Stream: 2, Gateway: hereGateway})
	s.step(SessionJoined{Session: "x", Stream: 3, Gateway: otherGateway})
	sb := s.claim()
	s.release(sb.ID)
	for stream, session := range map[uint64]string{2: "q", 3: "x"} {
		s.ack(session, stream, 3)
	}
	return s, sb
}

func (s *sim) waitsForR(want bool) {
	s.t.Helper()
	if f := s.fence(); (len(f.Waiting) == 1) != want {
		s.t.Errorf("it waits for %+v", f.Waiting)
	}
}

// Invariant: I3
func TestRouterOfAnotherGatewayFindsNoneDead(t *testing.T) {
	s, sb := reported(t)
	s.step(SessionLeft{Session: "r", Stream: 1})
	for _, shown := range []Gateway{otherGateway, {}} {
		s.step(SessionDead{Session: "r", By: "x", Gateway: shown})
		none[Write](s)
		s.waitsForR(true)
	}
	// Nor may it speak for that router, whose ID it may have learned.
	s.step(SessionJoined{Session: "r", Stream: 4, Gateway: otherGateway})
	if e := one[CloseStream](s); e != (CloseStream{Stream: 4}) {
		t.Errorf("%+v", e)
	}
	none[SendSnapshot](s)
	s.step(SessionGoodbye{Session: "r", Stream: 4, Gateway: otherGateway})
	none[Write](s)
	s.waitsForR(true)
	s.step(SessionDead{Session: "r", By: "q", Gateway: hereGateway})
	s.waitsForR(false)
	s.between(s.deletedAfter(sb.Pod, never), window)
}

// The report may come before the end of the stream, which takes another way.
// Invariant: I3
func TestConnectedRouterIsFoundDeadWhenItsStreamEnds(t *testing.T) {
	s, _ := reported(t)
	s.step(SessionDead{Session: "r", By: "q", Gateway: hereGateway})
	none[Write](s)
	s.step(SessionPing{Session: "q", Stream: 2, Nonce: 7})
	if p := one[SendPong](s); p != (SendPong{Stream: 2, Nonce: 7, Keep: true}) {
		t.Errorf("%+v: the leader may end before it acts on the report", p)
	}
	s.waitsForR(true)
	s.slow = true
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.waitsForR(false)
	s.step(SessionPing{Session: "q", Stream: 2, Nonce: 8})
	none[SendPong](s)
	s.written()
	if p := one[SendPong](s); p != (SendPong{Stream: 2, Nonce: 8}) {
		t.Errorf("%+v", p)
	}
}

// Invariant: I3
func TestRouterThatIsHeardAgainWasNotFoundDead(t *testing.T) {
	for name, lives := range map[string]func(*sim) uint64{
		"it pings": func(s *sim) uint64 {
			s.pass(declareAfter + time.Second)
			s.step(SessionPing{Session: "r", Stream: 1, Nonce: 1})
			return 1
		},
		"it joins": func(s *sim) uint64 {
			s.step(SessionJoined{Session: "r", Stream: 9, Gateway: hereGateway})
			return 9
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := reported(t)
			s.step(SessionDead{Session: "r", By: "q", Gateway: hereGateway})
			stream := lives(s)
			s.step(SessionLeft{Session: "r", Stream: stream})
			s.waitsForR(true)
			s.step(SessionPing{Session: "q", Stream: 2, Nonce: 7})
			if p := one[SendPong](s); p.Keep {
				t.Errorf("%+v", p)
			}
		})
	}
}

// Invariant: I3
func TestNextLeaderKnowsTheGatewaysOfRouters(t *testing.T) {
	s := newSim(t)
	s.recover(nil, nil)
	s.slow = true
	s.step(SessionJoined{Session: "r", Stream: 1, Gateway: hereGateway})
	fact := one[Write](s).Facts[0]
	next := newSimAt(t, 2, start)
	next.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), fact, Fact{Revision: Revision{Term: 1, Counter: 9}, Subject: &SessionFact{ID: "early"}})
	next.release("x")
	for _, session := range []string{"r", "early"} { // the last one is of an earlier version
		next.step(SessionDead{Session: session, By: "q", Gateway: otherGateway})
	}
	next.waitsForR(true)
	next.step(SessionDead{Session: "r", By: "q", Gateway: hereGateway})
	next.waitsForR(false)
}

// An earlier version has journaled no gateways.
// Invariant: I3
func TestReturningRouterHasItsGatewayJournaled(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(0)}, []Pod{warmPod("a-1")}, on("a-1", "x"), Fact{Revision: Revision{Term: 1, Counter: 7}, Subject: &SessionFact{ID: "r", From: "10.0.0.1"}})
	s.slow = true
	for stream := range uint64(2) { // it tries again at once
		s.step(SessionJoined{Session: "r", Stream: 1 + stream, Gateway: hereGateway})
		if e := one[CloseStream](s); e != (CloseStream{Stream: 1 + stream}) {
			t.Errorf("%+v", e)
		}
		if stream == 0 {
			if f := one[Write](s).Facts; len(f) != 1 || sessionOf(f[0]).Gateway != hereGateway || sessionOf(f[0]).From != "10.0.0.1" {
				t.Errorf("written %+v", f)
			}
		}
	}
	s.slow = false
	s.written()
	s.step(SessionJoined{Session: "r", Stream: 3, Gateway: hereGateway})
	one[SendSnapshot](s)
	s.step(SessionLeft{Session: "r", Stream: 3})
	s.release("x")
	s.step(SessionDead{Session: "r", By: "q", Gateway: otherGateway})
	s.waitsForR(true)
	s.step(SessionDead{Session: "r", By: "q", Gateway: hereGateway})
	s.waitsForR(false)
}

// Invariant: I3
func TestNoRouterEndsTheSessionOfAnEarlierJournal(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")}, earlierFact())
	s.step(SessionJoined{Session: "r", Stream: 1})
	earlier := sessionOf(earlierFact()).ID
	for _, ev := range []Event{
		SessionDead{Session: earlier, By: "r"}, SessionGoodbye{Session: earlier, Stream: 1},
		SessionJoined{Session: earlier, Stream: 2}, SessionGoodbye{Session: earlier, Stream: 2},
	} {
		s.step(ev)
		if s.core.View().Quarantine() == 0 {
			t.Fatalf("%+v ended the quarantine", ev)
		}
	}
}
