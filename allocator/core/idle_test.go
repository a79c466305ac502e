package core

import (
	"fmt"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/idle"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/api/activity"
)

// idleFor is the idle timeout of the sandboxes of these tests.
const idleFor = 10 * time.Second

func idlePool(warm int) Pool {
	return changed(specA(warm), func(p *Pool) { p.IdleTimeout = idleFor })
}

// idleSim has a pool with an idle timeout and routers that have reported.
func idleSim(t *testing.T, warm int, routers ...string) *sim {
	t.Helper()
	s := newSim(t)
	var pods []Pod
	for i := range warm {
		pods = append(pods, warmPod(fmt.Sprintf("a-%d", i+1)))
	}
	s.recover([]Pool{idlePool(warm)}, pods)
	for i, r := range routers {
		s.joinAndReport(r, uint64(i+1))
	}
	return s
}

func (s *sim) joinAndReport(session string, stream uint64, activities ...Activity) {
	s.t.Helper()
	s.step(SessionJoined{Session: session, Stream: stream})
	one[SendSnapshot](s)
	s.step(Report{Stream: stream, Activities: activities, Gateway: "envoy of " + session})
}

// looks has a router report a look that has just begun, after the pong to nonce.
func (s *sim) looks(session string, stream, nonce uint64, activities ...Activity) {
	s.t.Helper()
	s.looksAt("envoy of "+session, stream, nonce, activities...)
}

func (s *sim) looksAt(envoy string, stream, nonce uint64, activities ...Activity) {
	s.t.Helper()
	s.step(Report{Stream: stream, Activities: activities, Gateway: envoy, Nonce: nonce})
}

// everySandbox and only choose what Activities lists.
func everySandbox(*Sandbox) bool { return true }

func only(id string) func(*Sandbox) bool { return func(s *Sandbox) bool { return s.ID == id } }

// activities lists the activity of at most so many live sandboxes that keep selects.
func (s *sim) activities(keep func(*Sandbox) bool, most int) []ActivityStatus {
	return s.core.View().Activities(sandboxes.Everything(), Mark{}, keep, most, math.MaxInt).List
}

// asks returns the only question of the last step, which every stream was asked.
func (s *sim) asks(streams ...uint64) SendQuiesce {
	s.t.Helper()
	all := of[SendQuiesce](s.effects)
	var got []uint64
	for _, q := range all {
		got = append(got, q.Stream)
		if q.Number != all[0].Number || !slices.Equal(q.Questions, all[0].Questions) {
			s.t.Fatalf("%+v and %+v", q, all[0])
		}
	}
	if !slices.Equal(got, streams) {
		s.t.Fatalf("streams %v were asked, expected %v", got, streams)
	}
	return all[0]
}

// says has a router answer.
func (s *sim) says(q SendQuiesce, stream uint64, activities ...Activity) {
	s.t.Helper()
	s.step(Quiesced{Stream: stream, Number: q.Number, Activities: activities})
}

// ids are those that a question is about.
func ids(q SendQuiesce) (list []string) {
	for _, question := range q.Questions {
		list = append(list, question.ID)
	}
	return list
}

func (s *sim) resumed(streams ...uint64) {
	s.t.Helper()
	var got []uint64
	for _, r := range of[SendResume](s.effects) {
		got = append(got, r.Stream)
	}
	if !slices.Equal(got, streams) {
		s.t.Fatalf("streams %v were sent a resume, expected %v", got, streams)
	}
	none[SandboxReleased](s)
}

// Invariant: I4
func TestSilentSandboxIsReleasedWhenAllRoutersAnswered(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	sb := s.claim()
	if sb.IdleTimeout != idleFor {
		t.Fatalf("claimed with %+v", sb.Binding)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	q := s.asks(1, 2)
	none[SandboxReleased](s)
	s.says(q, 1)
	none[SandboxReleased](s)
	s.says(q, 2, Activity{ID: sb.ID, Age: idleFor})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonIdleTimeout {
		t.Errorf("released: %+v", r.Sandbox)
	}
	none[SendResume](s)
	if releases := of[SendRelease](s.effects); len(releases) != 2 {
		t.Errorf("sent %+v", releases)
	}
}

func TestSandboxWithoutIdleTimeoutIsNeverAsked(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	s.claim()
	for range 20 {
		s.ping("r", 1)
		s.pass(30 * time.Second)
		none[SendQuiesce](s)
	}
}

func (s *sim) ping(session string, stream uint64) {
	s.t.Helper()
	s.step(SessionPing{Session: session, Stream: stream, Nonce: 1})
}

// Use that one router knows of, shorter ago than the idle timeout, ends the round for all.
// Invariant: I4
func TestUseAtOneRouterKeepsTheSandbox(t *testing.T) {
	for name, c := range map[string]struct {
		activity Activity
		again    time.Duration // until it is asked again
	}{
		"in use":                {Activity{}, idleFor},
		"used a moment ago":     {Activity{Age: time.Second}, idleFor - time.Second},
		"used just long enough": {Activity{Age: idleFor - time.Millisecond}, time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			c.activity.ID = s.claim().ID
			s.pass(idleFor)
			q := s.asks(1, 2)
			s.says(q, 1, c.activity)
			s.says(q, 2)
			s.resumed(1, 2)
			s.pass(c.again - time.Millisecond)
			none[SendQuiesce](s)
			s.pass(time.Millisecond)
			s.asks(1, 2)
		})
	}
}

func TestOpenRequestDelaysTheQuestion(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor - time.Second)
	s.looks("r", 1, 0, Activity{ID: sb.ID, Open: 1, Kind: activity.Open}, Activity{Open: 1})
	if list := s.activities(everySandbox, 1); !slices.Equal(list[0].Asks, []string{"r"}) || list[0].Age != 0 || list[0].Kind != activity.Open || list[0].Router != "r" || list[0].Open != 1 {
		t.Errorf("shown as %+v", list)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	q := s.asks(1)
	if !slices.Equal(q.Questions, []Question{{ID: sb.ID}}) {
		t.Errorf("asked: %+v", q)
	}
	s.says(q, 1, Activity{ID: sb.ID, Open: 1})
	s.resumed(1)
}

// A router whose Envoy does not answer cannot tell what is open. It is not asked again before its
// look has succeeded.
// Invariant: I4
func TestBlindRouterBlocksTheQuestion(t *testing.T) {
	for name, blind := range map[string]func(s *sim){
		"by itself": func(s *sim) {
			s.step(Report{Stream: 2, Blind: "the look timed out"})
			s.pass(idleFor)
			none[SendQuiesce](s)
		},
		"when asked": func(s *sim) {
			s.pass(idleFor)
			q := s.asks(1, 2)
			s.step(Quiesced{Stream: 2, Number: q.Number, Blind: "the look timed out"})
			s.resumed(1, 2)
			s.says(q, 1)
			none[SandboxReleased](s)
		},
		"by its silence": func(s *sim) {
			s.pass(idleFor)
			s.says(s.asks(1, 2), 1)
			s.pass(idle.AnswerWait)
			s.resumed(1, 2)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			sb := s.claim()
			blind(s)
			for range 20 {
				s.ping("q", 1)
				s.ping("r", 2)
				s.pass(idleFor)
				none[SendQuiesce](s)
				s.step(Report{Stream: 2, Activities: []Activity{{ID: "other"}}}) // a part of a report
			}
			if list := s.activities(only(sb.ID), 1); !slices.Equal(list[0].Awaits, []string{"r"}) {
				t.Errorf("shown as %+v", list)
			}
			s.looks("r", 2, 0)
			s.pass(idle.AskAgain)
			q := s.asks(1, 2)
			s.says(q, 1)
			s.says(q, 2)
			one[SandboxReleased](s)
		})
	}
}

// Bytes are counted by the minute: a shorter idle timeout counts as one.
func TestBytesAreJudgedOverAtLeastOneMinute(t *testing.T) {
	for name, c := range map[string]struct {
		pool, counts time.Duration
	}{"shorter": {idleFor, time.Minute}, "longer": {2 * time.Minute, 2 * time.Minute}} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(idlePool(1), func(p *Pool) { p.IdleTimeout, p.MinBytes = c.pool, 2048 })}, []Pod{warmPod("a-1")})
			s.joinAndReport("r", 1)
			sb := s.claim()
			for passed := time.Duration(0); passed < c.counts-time.Second; passed += time.Second {
				s.ping("r", 1)
				s.pass(time.Second)
				none[SendQuiesce](s)
			}
			s.pass(time.Second)
			q := s.asks(1)
			s.says(q, 1, Activity{ID: sb.ID, Age: c.counts, Open: 1})
			one[SandboxReleased](s)
		})
	}
}

func TestClaimSetsItsOwnIdleTimeout(t *testing.T) {
	for name, c := range map[string]struct{ asked, got time.Duration }{"its own": {5 * time.Second, 5 * time.Second}, "none": {0, 0}} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "r")
			s.step(Claim{Token: 1, Pool: poolA, Wait: wait, IdleTimeout: &c.asked})
			if sb := one[Claimed](s).Sandbox; sb.IdleTimeout != c.got {
				t.Errorf("claimed with %+v", sb.Binding)
			}
		})
	}
}

// A look may miss a request that was admitted less than a connect window before.
func TestIdleTimeoutIsNotShorterThanConnectWindow(t *testing.T) {
	s := newSim(t)
	s.cfg.ConnectWindow = idleFor + time.Second
	s.restart()
	s.recover([]Pool{idlePool(1)}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	s.claim()
	s.pass(idleFor + 999*time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

func TestReportOfUseDelaysTheQuestion(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(8 * time.Second)
	s.step(Report{Stream: 1, Activities: []Activity{{ID: sb.ID, Age: time.Second}}})
	s.pass(idleFor - time.Second - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

func TestLateAnswerKeepsTheSandbox(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	sb := s.claim()
	s.pass(idleFor)
	q := s.asks(1, 2)
	s.says(q, 1)
	s.pass(idle.AnswerWait - time.Millisecond)
	none[SendResume](s)
	s.pass(time.Millisecond)
	s.resumed(1, 2)
	s.says(q, 2) // late, but it does answer
	none[SandboxReleased](s)
	s.pass(idle.MaxPause)
	q = s.asks(1, 2)
	s.now.Boot += idle.AnswerWait + time.Millisecond // the answer is there before the tick
	s.says(q, 1)
	s.says(q, 2)
	none[SandboxReleased](s)
	if got, _ := s.core.View().Sandbox(sb.ID); got.Phase != Running {
		t.Errorf("%+v", got)
	}
}

// A sandbox is not released while a router that cannot be asked may serve it.
// Invariant: I4
func TestRouterThatCannotBeAskedKeepsItsSandboxes(t *testing.T) {
	joined := func(s *sim) { s.step(SessionJoined{Session: "r", Stream: 9}) }
	for name, leave := range map[string]func(s *sim){
		"not connected":    func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}) },
		"has not reported": func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}); joined(s) },
		"of an older version": func(s *sim) {
			s.step(SessionJoined{Session: "r", Stream: 9})
			s.step(Report{Stream: 9})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 2, "q", "r")
			sb := s.claim()
			leave(s)
			later := s.claim() // r knows this one only if it is connected
			s.pass(idleFor)
			if q := of[SendQuiesce](s.effects); name == "not connected" {
				if len(q) != 1 || !slices.Equal(ids(q[0]), []string{later.ID}) {
					t.Fatalf("asked: %+v", q)
				}
				s.says(q[0], 1)
				if r := one[SandboxReleased](s); r.Sandbox.ID != later.ID {
					t.Fatalf("released %+v", r)
				}
			} else if len(q) > 0 {
				t.Fatalf("asked: %+v", q)
			}
			if list := s.activities(only(sb.ID), 1); len(list) != 1 || !slices.Equal(list[0].Awaits, []string{"r"}) || list[0].In != 0 {
				t.Errorf("shown as %+v", list)
			}
			// As soon as it can be asked, it is.
			s.step(SessionJoined{Session: "r", Stream: 10})
			none[SendQuiesce](s)
			s.step(Report{Stream: 10, Blind: "no look yet"})
			none[SendQuiesce](s)
			s.looks("r", 10, 0)
			s.pass(idle.AskAgain)
			s.asks(1, 10)
		})
	}
}
