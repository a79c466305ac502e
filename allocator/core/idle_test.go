package core

import (
	"github.com/berth-sandbox/berth/allocator/core/idle"

	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"

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
		s.t.Fatalf("streams %v were told to go on, expected %v", got, streams)
	}
	none[SandboxReleased](s)
}

// Invariant: I4
func TestSilenceIsReleasedWhenEveryRouterHasSaidSo(t *testing.T) {
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
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonIdle {
		t.Errorf("released: %+v", r.Sandbox)
	}
	none[SendResume](s)
	if releases := of[SendRelease](s.effects); len(releases) != 2 {
		t.Errorf("told %+v", releases)
	}
}

func TestASandboxWithoutATimeoutIsNeverAskedAbout(t *testing.T) {
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

// Whatever a router says but that there was no use for the idle timeout, all go on.
// Invariant: I4
func TestOneRouterThatKnowsOfUseIsEnough(t *testing.T) {
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

// A router that has lost the route knows only the address, and a new router knows no route
// at all when it looks for the first time.
func TestAnOpenAddressIsUseOfItsSandbox(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor - time.Second)
	s.looks("r", 1, 0, Activity{Addr: sb.IP, Open: 1, Kind: activity.Open}, Activity{Addr: address(7), Open: 1})
	if list, _ := s.core.Activities(everySandbox, 1); !slices.Equal(list[0].Asks, []string{"r"}) || list[0].Age != 0 || list[0].Kind != activity.Open || list[0].Router != "r" || list[0].Open != 1 {
		t.Errorf("shown as %+v", list)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	q := s.asks(1)
	if q.Questions[0] != (Question{ID: sb.ID, IP: sb.IP}) {
		t.Errorf("asked: %+v", q)
	}
	s.says(q, 1, Activity{Addr: sb.IP, Open: 1})
	s.resumed(1)
}

// A router that does not know the route does not know that bytes count, and an open
// connection over which nothing moves must not keep its sandbox.
func TestAnOpenAddressIsNoUseWhereBytesCount(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(idlePool(1), func(p *Pool) { p.IdleTimeout, p.MinBytes = time.Minute, 1024 })}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	for range 59 {
		s.ping("r", 1)
		s.pass(time.Second)
		s.looks("r", 1, 0, Activity{Addr: sb.IP, Open: 1, Kind: activity.Open})
		none[SendQuiesce](s)
	}
	s.pass(time.Second)
	s.says(s.asks(1), 1, Activity{ID: sb.ID, Addr: sb.IP, Kind: activity.Bytes}) // it has read the kernel for the first time
	s.resumed(1)
}

// It cannot tell what is open: its Envoy does not answer. It is not asked again before
// its look has succeeded.
// Invariant: I4
func TestARouterThatCannotTellIsNotAsked(t *testing.T) {
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
			if list, _ := s.core.Activities(only(sb.ID), 1); !slices.Equal(list[0].Awaits, []string{"r"}) {
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
func TestBytesAreJudgedOverAMinuteAtLeast(t *testing.T) {
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
			if q.Questions[0] != (Question{ID: sb.ID, IP: sb.IP, MinBytes: 2048}) {
				t.Errorf("asked: %+v", q)
			}
			s.says(q, 1, Activity{ID: sb.ID, Age: c.counts, Open: 1})
			one[SandboxReleased](s)
		})
	}
}

func TestAClaimSaysWhatItsIdleTimeoutIs(t *testing.T) {
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

// A look may miss what was admitted less than a window before.
func TestAnIdleTimeoutIsNeverShorterThanTheWindow(t *testing.T) {
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

func TestReportsPutTheQuestionOff(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(8 * time.Second)
	s.step(Report{Stream: 1, Activities: []Activity{{ID: sb.ID, Age: time.Second}}})
	s.pass(idleFor - time.Second - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

func TestWhoDoesNotAnswerInTimeKeepsTheSandbox(t *testing.T) {
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
	if got, _ := s.core.Sandbox(sb.ID); got.Phase != Running {
		t.Errorf("%+v", got)
	}
}

// What a session could serve is not released while it may serve it.
// Invariant: I4
func TestWhoCannotBeAskedKeepsWhatItCouldServe(t *testing.T) {
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
			later := s.claim() // which it knows only if it is connected
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
			if list, _ := s.core.Activities(only(sb.ID), 1); len(list) != 1 || !slices.Equal(list[0].Awaits, []string{"r"}) || list[0].In != 0 {
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

// expiry is how long a router is waited for that was heard just now.
const expiry = maxStale + maxStale/100

// What a router leaves open goes on at its Envoy. It counts as in use until another router
// has looked at that Envoy, or the one that has ended would have been waited for.
// Invariant: I4
func TestTheEndOfARouterBlocksWhatItMayHaveLeftOpen(t *testing.T) {
	goodbye := SessionGoodbye{Session: "r", Stream: 2, Looked: true}
	for name, c := range map[string]struct {
		end             func(s *sim, sb Sandbox)
		next            string        // the Envoy that q looks at two seconds after the end
		until, otherFor time.Duration // until when they count as in use, from the end
	}{
		"a Goodbye with something open": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "", expiry, 0},
		"the next router has looked": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "envoy of r", 2 * time.Second, 0},
		"at another Envoy": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(goodbye)
		}, "another", expiry, 0},
		"a Goodbye with nothing open": {func(s *sim, sb Sandbox) {
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.looks("r", 2, 0)
			s.step(goodbye)
		}, "", 0, 0},
		"a Goodbye without a look": {func(s *sim, _ Sandbox) {
			s.step(SessionGoodbye{Session: "r"})
		}, "", expiry, expiry},
		"a Goodbye that could not tell": {func(s *sim, _ Sandbox) {
			s.step(Report{Stream: 2, Blind: "the look timed out"})
			s.step(goodbye)
		}, "envoy of r", 2 * time.Second, 2 * time.Second},
		"a Goodbye without connection": {func(s *sim, _ Sandbox) {
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.step(goodbye)
		}, "", expiry, expiry},
		"found dead": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
		}, "", expiry, expiry},
		"found dead, and looked after": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
		}, "envoy of r", 2 * time.Second, 2 * time.Second},
		"found dead beside an Envoy that was replaced": {func(s *sim, _ Sandbox) {
			s.step(SessionDead{Session: "r", By: "q"})
		}, "another process", expiry, expiry},
		"declared dead, with its Envoy": {func(s *sim, _ Sandbox) {
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.pass(s.core.cfg.DeclareAfter)
			s.step(DeclareDead{Token: 1, Session: "r"})
		}, "", 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 2, "q", "r")
			one, other := s.claim(), s.claim()
			s.pass(idleFor - 2*time.Second)
			for _, b := range []Sandbox{one, other} {
				s.looks("q", 1, 0, Activity{ID: b.ID})
			}
			s.ping("r", 2)
			c.end(s, one)
			began := s.now.Boot
			want := map[string]time.Duration{one.ID: c.until + idleFor, other.ID: c.otherFor + idleFor}
			nonce := uint64(10)
			for released := 0; released < 2; {
				nonce++
				s.step(SessionPing{Session: "q", Stream: 1, Nonce: nonce})
				if s.now.Boot == began+2*time.Second && c.next != "" {
					s.looksAt(c.next, 1, nonce)
				}
				s.pass(time.Second)
				for _, q := range of[SendQuiesce](s.effects) {
					s.says(q, 1)
					for _, r := range of[SandboxReleased](s.effects) {
						released++
						after := s.now.Boot - began
						if w := want[r.Sandbox.ID]; after < w || after > w+2*time.Second {
							t.Errorf("%s was released %v after the end, expected %v", r.Sandbox.ID, after, w)
						}
					}
				}
				if s.now.Boot-began > 3*maxStale+2*idleFor {
					t.Fatal("not all were released")
				}
			}
		})
	}
}

// The router that ends knows only the address, and not that bytes count.
func TestAnAddressLeftOpenBlocksASandboxWhoseBytesCount(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(idlePool(1), func(p *Pool) { p.IdleTimeout, p.MinBytes = time.Minute, 1024 })}, []Pod{warmPod("a-1")})
	s.joinAndReport("q", 1)
	s.joinAndReport("r", 2)
	sb := s.claim()
	s.looks("r", 2, 0, Activity{Addr: sb.IP, Open: 1, Kind: activity.Open})
	s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
	if list, _ := s.core.Activities(everySandbox, 1); !slices.Equal(list[0].Awaits, []string{"r"}) {
		t.Errorf("shown as %+v", list)
	}
}

// A router that has joined as it ended says all in one: the report is complete, and the
// look is its last one.
func TestALastLookCountsAlsoOnANewStream(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	s.claim()
	s.step(SessionLeft{Session: "r", Stream: 2})
	s.joinAndReport("r", 3)
	s.step(SessionGoodbye{Session: "r", Stream: 3, Looked: true})
	if n := s.core.idle.Leftovers(); n > 0 {
		t.Errorf("%d routers have left something open", n)
	}
}

// A look that began before the end was known shows what was open when the router was
// still there.
// Invariant: I4
func TestOnlyALookThatBeginsAfterTheEndCounts(t *testing.T) {
	for name, c := range map[string]struct {
		nonce uint64
		asked bool
	}{"before": {5, false}, "not known": {99, false}, "after": {6, true}} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			sb := s.claim()
			s.step(SessionPing{Session: "q", Stream: 1, Nonce: 5})
			s.pass(idleFor - time.Second)
			s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
			s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
			s.pass(time.Millisecond)
			s.step(SessionPing{Session: "q", Stream: 1, Nonce: 6})
			s.looksAt("envoy of r", 1, c.nonce)
			s.pass(idleFor)
			if asked := len(of[SendQuiesce](s.effects)) > 0; asked != c.asked {
				t.Errorf("asked: %v", asked)
			}
		})
	}
}

// The look shows that it goes on: the router that has looked knows of it from then on.
func TestWhatTheNextLookShowsOpenGoesOn(t *testing.T) {
	s := idleSim(t, 1, "q", "r")
	sb := s.claim()
	s.looks("r", 2, 0, Activity{ID: sb.ID, Open: 1})
	s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true})
	s.pass(time.Second)
	s.step(SessionPing{Session: "q", Stream: 1, Nonce: 6})
	s.looksAt("envoy of r", 1, 6, Activity{Addr: sb.IP, Open: 1, Kind: activity.Open})
	if list, _ := s.core.Activities(everySandbox, 1); list[0].Age != 0 || list[0].Kind != activity.Open || len(list[0].Awaits) > 0 {
		t.Errorf("shown as %+v", list)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

// A leader that stood still may take routers for gone that were there, and what is open
// through them for over. They come back, and have to wait until that is durable.
func TestARouterThatIsNotDurableYetMayHaveMuchToTell(t *testing.T) {
	for name, c := range map[string]func(s *sim){
		"it waits": func(*sim) {},
		"it is cut off": func(s *sim) {
			s.step(SessionLeft{Session: "r", Stream: 2})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "r")
			sb := s.claim()
			s.now.Boot += maxStale + maxStale/100 + time.Millisecond
			s.step(Tick{})
			if len(s.core.members.All()) > 0 {
				t.Fatal("it has not expired")
			}
			s.pass(idleFor - standsAfter/2)
			s.slow = true
			s.step(SessionJoined{Session: "r", Stream: 2})
			none[SendSnapshot](s)
			c(s)
			for range 9 { // after that the journal stands still, which is another reason
				s.pass(standsAfter / 10)
				none[SendQuiesce](s)
				if got, _ := s.core.Sandbox(sb.ID); got.Phase != Running {
					t.Fatalf("it is on its way to being released: %+v", got)
				}
			}
			if name != "it waits" {
				return
			}
			s.written()
			s.step(Report{Stream: 2, Activities: []Activity{{ID: sb.ID, Age: time.Second}}, Gateway: "e"})
			s.pass(idleFor - time.Second)
			s.asks(2)
		})
	}
}

// It may be a router that had expired, with something open.
// Invariant: I4
func TestWhoJoinsWithinARoundEndsItThoughItIsNotDurable(t *testing.T) {
	s := idleSim(t, 1, "q")
	for range 4 { // more than max-stale after the recovery
		s.ping("q", 1)
		s.pass(maxStale / 2)
	}
	s.ping("q", 1)
	s.claim()
	s.pass(idleFor)
	q := s.asks(1)
	s.slow = true
	s.step(SessionJoined{Session: "new", Stream: 9})
	s.says(q, 1)
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			if f.Sandbox != nil {
				t.Errorf("released without its word: %+v", f.Sandbox)
			}
		}
	}
	s.effects = append(s.effects, s.written()...)
	for _, w := range of[Write](s.effects) {
		for _, f := range w.Facts {
			if f.Sandbox != nil {
				t.Errorf("released without its word: %v %v", f.Sandbox.Phase, f.Sandbox.Reason)
			}
		}
	}
}

// Invariant: I4
func TestWhoeverComesOrGoesEndsTheRound(t *testing.T) {
	for name, c := range map[string]struct {
		do      func(s *sim)
		resumed []uint64
	}{
		"a new router":     {func(s *sim) { s.step(SessionJoined{Session: "new", Stream: 9}) }, []uint64{1, 2}},
		"one leaves":       {func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}) }, []uint64{1}},
		"one comes back":   {func(s *sim) { s.step(SessionJoined{Session: "r", Stream: 9}) }, []uint64{1}},
		"one says Goodbye": {func(s *sim) { s.step(SessionGoodbye{Session: "r", Stream: 2, Looked: true}) }, []uint64{1}},
	} {
		for _, answered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, having answered: %v", name, answered), func(t *testing.T) {
				s := idleSim(t, 1, "q", "r")
				s.claim()
				s.pass(idleFor)
				q := s.asks(1, 2)
				if answered {
					s.says(q, 2)
				}
				c.do(s)
				s.resumed(c.resumed...)
				s.says(q, 1)
				none[SandboxReleased](s)
			})
		}
	}
}

// From the verdict on nobody is told of the sandbox: whoever joins then was not asked.
func TestNobodyIsToldOfASandboxWhoseReleaseIsOnItsWay(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor)
	q := s.asks(1)
	s.slow = true
	s.says(q, 1)
	if f := s.given(); f.Phase != Released || f.Reason != ReasonIdle {
		t.Fatalf("written: %+v", f)
	}
	s.step(SessionJoined{Session: "r", Stream: 2})
	if snapshot := one[SendSnapshot](s); len(snapshot.Routes) > 0 {
		t.Errorf("told: %+v", snapshot)
	}
	s.step(Resolve{Session: "r", Stream: 2, ID: sb.ID})
	if r := one[SendResolved](s); r.Sandbox != nil || r.Gone || !r.Starting || r.Hold != reapHold {
		t.Errorf("told: %+v", r)
	}
	s.written()
	one[SandboxReleased](s)
}

func TestNothingIsAskedWhileTheJournalStandsStill(t *testing.T) {
	s := idleSim(t, 2, "r")
	s.claim()
	s.slow = true
	s.pass(idleFor - 2*time.Second)
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.given()
	s.pass(3 * time.Second)
	none[SendQuiesce](s)
	s.written()
	s.pass(time.Millisecond)
	s.asks(1)
}

func TestARoundIsBounded(t *testing.T) {
	s := newSim(t)
	const all = idle.MaxRound + 10
	var facts []Fact
	var pods []Pod
	for i := range all {
		f := on("a-1", fmt.Sprintf("id%04d", i))
		name := fmt.Sprintf("a-%d", i)
		f.Sandbox.Pod, f.Sandbox.IdleTimeout = key(name), idleFor
		f.Sandbox.IP = address(i)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{idlePool(0)}, pods, append(facts, Fact{Session: "r"})...)
	s.joinAndReport("r", 1)
	s.pass(time.Millisecond)
	q := s.asks(1)
	s.says(q, 1)
	released := len(of[SandboxReleased](s.effects))
	s.pass(time.Millisecond)
	if rest := s.asks(1); len(q.Questions) != idle.MaxRound || len(rest.Questions) != all-idle.MaxRound || released != idle.MaxRound {
		t.Errorf("asked about %d and %d, released %d", len(q.Questions), len(rest.Questions), released)
	}
}

func TestADryRunReleasesNothing(t *testing.T) {
	s := newSim(t)
	s.cfg.DryRun = true
	s.restart()
	s.recover([]Pool{idlePool(1)}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	s.pass(idleFor)
	s.says(s.asks(1), 1)
	s.resumed(1)
	if w := one[WouldReap](s); w.Sandbox.ID != sb.ID || w.Idle != idleFor {
		t.Errorf("%+v", w)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
}

// ---- what looks cost

// Two looks of 100 ms in four seconds are five percent.
func TestRoundsAreFartherApartWhenLooksAreSlow(t *testing.T) {
	s := idleSim(t, 2, "r")
	first := s.claim()
	s.pass(time.Second)
	s.claim()
	s.step(Report{Stream: 1, Gateway: "e", Took: 100 * time.Millisecond})
	s.pass(idleFor - time.Second)
	q := s.asks(1)
	s.says(q, 1)
	if r := one[SandboxReleased](s); r.Sandbox.ID != first.ID {
		t.Errorf("released %+v", r)
	}
	for range 39 {
		s.pass(100 * time.Millisecond)
		none[SendQuiesce](s)
	}
	s.pass(100 * time.Millisecond)
	s.asks(1)
}

// ---- pods that say that they are busy

func probeSim(t *testing.T, warm int, routers ...string) *sim {
	t.Helper()
	s := newSim(t)
	var pods []Pod
	for i := range warm {
		name := fmt.Sprintf("a-%d", i+1)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP = key(name), address(i) }))
	}
	s.recover([]Pool{changed(idlePool(warm), func(p *Pool) {
		p.BusyProbe, p.MaxLifetime = BusyProbe{Port: 9000, Path: "/busy"}, 24*time.Hour
	})}, pods)
	for i, r := range routers {
		s.joinAndReport(r, uint64(i+1))
	}
	return s
}

// answers has a router say whether a pod is busy.
func (s *sim) answers(p SendProbe, busy bool) {
	s.t.Helper()
	s.step(Probed{Stream: p.Stream, ID: p.ID, Busy: busy})
	s.step(Tick{})
}

// Invariant: I4
func TestAPodThatIsBusyIsInUse(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	sb := s.claim()
	for range 3 {
		s.pass(idleFor)
		p := one[SendProbe](s)
		if p.ID != sb.ID || p.To != netip.AddrPortFrom(sb.IP, 9000) || p.Path != "/busy" {
			t.Errorf("asked: %+v", p)
		}
		none[SendQuiesce](s)
		s.answers(p, true)
		none[SendQuiesce](s)
		if list, _ := s.core.Activities(everySandbox, 1); list[0].Kind != activity.Busy || list[0].Age != 0 || list[0].In != idleFor {
			t.Errorf("shown as %+v", list)
		}
		s.ping("q", 1)
		s.ping("r", 2)
	}
}

// A round may be long in coming, for example while the journal does not answer.
func TestAPodIsProbedAgainBeforeALateRound(t *testing.T) {
	s := probeSim(t, 2, "r")
	s.claim()
	s.pass(idleFor - 2*time.Second)
	s.slow = true
	s.step(Claim{Token: 7, Pool: poolA, Wait: wait})
	s.given()
	s.pass(2 * time.Second)
	p := one[SendProbe](s)
	s.answers(p, false)
	for range 12 {
		s.ping("r", 1)
		s.pass(5 * time.Second)
		none[SendQuiesce](s)
	}
	s.written()
	s.pass(time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	p = one[SendProbe](s)
	s.answers(p, false)
	s.asks(1)
}

// It would never end if it always said that it is busy.
func TestASandboxWithoutALongestLifeIsNotProbed(t *testing.T) {
	s := idleSim(t, 1, "r")
	s.claim()
	s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) {
		p.BusyProbe, p.MaxLifetime = BusyProbe{Port: 9000, Path: "/busy"}, 24*time.Hour
	})})
	s.pass(idleFor)
	none[SendProbe](s)
	s.says(s.asks(1), 1)
	one[SandboxReleased](s)
}

func TestAPodThatIsNotBusyIsAskedAboutAtOnce(t *testing.T) {
	s := probeSim(t, 1, "r")
	s.claim()
	s.pass(idleFor)
	s.answers(one[SendProbe](s), false)
	s.says(s.asks(1), 1)
	one[SandboxReleased](s)
}

// The router has ended, its answer is lost, or it has too many probes under way: that says
// nothing of the pod.
func TestAProbeWithoutAnAnswerIsMadeByTheNextRouter(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	s.claim()
	s.pass(idleFor)
	first := one[SendProbe](s)
	for range 3 {
		s.pass(idle.ProbeWait - time.Millisecond)
		none[SendProbe](s)
		none[SendQuiesce](s)
		s.pass(time.Millisecond)
		second := one[SendProbe](s)
		if second.Stream == first.Stream {
			t.Errorf("stream %d was asked twice", first.Stream)
		}
		s.answers(first, false) // late
		none[SendQuiesce](s)
		s.ping("q", 1)
		s.ping("r", 2)
		first = second
	}
}

// What a pod has said counts for the round that follows, and not when a router is back
// hours later.
func TestAPodIsProbedAgainWhenItCouldNotBeAskedAbout(t *testing.T) {
	s := probeSim(t, 1, "q", "r")
	s.claim()
	s.step(Report{Stream: 2, Blind: "the look timed out"})
	for range 30 {
		s.ping("q", 1)
		s.ping("r", 2)
		s.pass(idleFor)
		none[SendProbe](s)
		none[SendQuiesce](s)
	}
	s.looks("r", 2, 0)
	s.pass(idle.AskAgain)
	p := one[SendProbe](s)
	s.step(Report{Stream: 2, Blind: "the look timed out"})
	s.answers(p, false)
	none[SendQuiesce](s)
	s.looks("r", 2, 0)
	s.pass(idle.AskAgain)
	one[SendProbe](s)
}

func TestProbesAreBoundedAndEveryPodGetsItsTurn(t *testing.T) {
	const all = idle.MaxProbes + 10
	s := probeSim(t, all, "r")
	for range all {
		s.claim()
	}
	s.pass(idleFor)
	first := of[SendProbe](s.effects)
	if len(first) != idle.MaxProbes {
		t.Fatalf("%d at once", len(first))
	}
	for _, p := range first {
		s.step(Probed{Stream: p.Stream, ID: p.ID, Busy: true})
	}
	s.pass(idle.AskAgain)
	if rest := of[SendProbe](s.effects); len(rest) != all-idle.MaxProbes {
		t.Errorf("then %d", len(rest))
	}
}

func TestWithoutARouterNoPodIsTakenForIdle(t *testing.T) {
	s := probeSim(t, 1)
	s.claim()
	for range 20 {
		s.pass(idleFor)
		none[SandboxReleased](s)
	}
	s.joinAndReport("r", 1)
	s.pass(idle.AskAgain)
	one[SendProbe](s)
}

// ---- the ends of a life

func TestTheEarliestEndWins(t *testing.T) {
	for name, c := range map[string]struct {
		change   func(*Pool)
		lifetime time.Duration
		want     string
		after    time.Duration
	}{
		"end time":         {func(p *Pool) { p.MaxLifetime, p.IdleTimeout = time.Hour, time.Hour }, time.Minute, ReasonTimeout, time.Minute},
		"maximal lifetime": {func(p *Pool) { p.MaxLifetime, p.IdleTimeout = 30*time.Second, time.Hour }, time.Minute, ReasonMaxLifetime, 30 * time.Second},
		"idle":             {func(p *Pool) { p.MaxLifetime = time.Hour }, time.Hour, ReasonIdle, idleFor},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSim(t)
			s.recover([]Pool{changed(idlePool(1), c.change)}, []Pod{warmPod("a-1")})
			s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: c.lifetime})
			sb := one[Claimed](s).Sandbox
			list, _ := s.core.Activities(only(sb.ID), 1)
			if len(list) != 1 || list[0].Next != c.want || list[0].In != c.after {
				t.Errorf("shown as %+v", list)
			}
			s.pass(c.after - time.Millisecond)
			none[SandboxReleased](s)
			s.pass(time.Millisecond)
			if r := one[SandboxReleased](s); r.Sandbox.Reason != c.want {
				t.Errorf("released for %s", r.Sandbox.Reason)
			}
		})
	}
}

func TestASandboxThatDoesNotStartIsReleased(t *testing.T) {
	s := newSim(t)
	pool := changed(specA(1), func(p *Pool) { p.PostStart, p.StartupTimeout = true, 20*time.Second })
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Minute})
	s.pass(20*time.Second - time.Millisecond)
	none[SandboxReleased](s)
	s.pass(time.Millisecond)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonStartup {
		t.Errorf("released for %s", r.Sandbox.Reason)
	}
	if refused := one[ClaimRefused](s); refused.Why != StartFailed {
		t.Errorf("%+v", refused)
	}
}

func TestASandboxThatHasStartedIsNotReleasedForThat(t *testing.T) {
	s := newSim(t)
	pool := changed(specA(1), func(p *Pool) { p.PostStart, p.StartupTimeout = true, 20*time.Second })
	s.recover([]Pool{pool}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: time.Minute})
	s.slow = true
	s.step(Started{ID: one[StartSandbox](s).Sandbox.ID, OK: true})
	s.pass(30 * time.Second) // it takes long until that is durable
	none[SandboxReleased](s)
	s.written()
	one[Claimed](s)
	s.pass(time.Minute)
	none[SandboxReleased](s)
}

func TestSetTimeoutMovesTheEndWhenItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
	sb := one[Claimed](s).Sandbox
	s.pass(50 * time.Second)
	s.slow = true
	s.step(SetTimeout{Token: 9, ID: sb.ID, Lifetime: 2 * time.Minute})
	none[SandboxCallAnswered](s)
	if f := s.given(); !f.EndAt.Equal(s.now.Wall.Add(2*time.Minute)) || f.Phase != Running {
		t.Errorf("written: %+v", f)
	}
	s.pass(20 * time.Second) // the old end passes while the new one is on its way
	none[Write](s)
	s.written()
	if k := one[SandboxCallAnswered](s); k.Token != 9 || k.Status != CallOK || !k.Sandbox.EndAt.Equal(s.now.Wall.Add(100*time.Second)) {
		t.Errorf("answered: %+v", k)
	}
	if r := one[WriteObject](s); !r.Sandbox.EndAt.Equal(s.now.Wall.Add(100 * time.Second)) {
		t.Errorf("on record: %+v", r)
	}
	s.slow = false
	s.step(SetTimeout{Token: 10, ID: sb.ID, Lifetime: 10 * time.Second}) // it may be earlier as well
	s.pass(10*time.Second - time.Millisecond)
	none[SandboxReleased](s)
	s.pass(time.Millisecond)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != ReasonTimeout {
		t.Errorf("released for %s", r.Sandbox.Reason)
	}
	s.step(SetTimeout{Token: 11, ID: sb.ID, Lifetime: time.Minute})
	if k := one[SandboxCallAnswered](s); k.Status != CallGone {
		t.Errorf("answered: %+v", k)
	}
	s.step(SetTimeout{Token: 12, ID: "none", Lifetime: time.Minute})
	if k := one[SandboxCallAnswered](s); k.Status != CallUnknown {
		t.Errorf("answered: %+v", k)
	}
}

// Facts are whole states: what is on its way must not be taken back by what comes after.
func TestWhatFollowsAChangeOfTheEndKeepsIt(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait, Lifetime: time.Minute})
	id := one[StartSandbox](s).Sandbox.ID
	s.slow = true
	s.step(SetTimeout{Token: 9, ID: id, Lifetime: time.Hour})
	s.step(Started{ID: id, OK: true})
	end := s.now.Wall.Add(time.Hour)
	s.written()
	if f := s.given(); f.Phase != Running || !f.EndAt.Equal(end) {
		t.Errorf("written: %+v", f)
	}
	s.step(SetTimeout{Token: 10, ID: id, Lifetime: 2 * time.Hour})
	s.written()
	if f := s.given(); f.Phase != Running || !f.EndAt.Equal(end.Add(time.Hour)) {
		t.Errorf("written: %+v", f)
	}
	s.written()
	if got, _ := s.core.Sandbox(id); got.Phase != Running || !got.EndAt.Equal(end.Add(time.Hour)) {
		t.Errorf("%+v", got)
	}
}

func TestAKeepAliveIsActivity(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor - time.Second)
	s.step(KeepAlive{Token: 3, ID: sb.ID})
	if k := one[SandboxCallAnswered](s); k.Token != 3 || k.Status != CallOK || k.Sandbox.ID != sb.ID {
		t.Errorf("answered: %+v", k)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
	// Also in the moment in which routers are asked.
	s.step(KeepAlive{Token: 4, ID: sb.ID})
	s.says(SendQuiesce{Number: 1}, 1)
	s.resumed(1)
}

// ---- what people see

func TestActivityIsWrittenAtMostOnceAMinute(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = time.Hour })}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	s.step(ObjectWritten{ID: sb.ID, Revision: sb.Revision})
	written := 0
	last := sb
	for range 10 * 60 {
		s.step(Report{Stream: 1, Activities: []Activity{{ID: sb.ID}}})
		s.ping("r", 1)
		for _, r := range of[WriteObject](s.pass(time.Second)) {
			s.step(ObjectWritten{ID: r.Sandbox.ID, Revision: r.Sandbox.Revision})
			written++
			if !r.Sandbox.LastActive.After(last.LastActive) || !last.Revision.Less(r.Sandbox.Revision) {
				t.Fatalf("%+v after %+v", r.Sandbox, last)
			}
			last = r.Sandbox
		}
	}
	if written < 9 || written > 10 {
		t.Errorf("written %d times in ten minutes", written)
	}
}

func TestActivityWithoutAnIdleTimeoutIsNotWritten(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	for range 200 {
		s.step(Report{Stream: 1, Activities: []Activity{{ID: sb.ID, Kind: activity.Admission}}})
		s.ping("r", 1)
		s.pass(time.Second)
		none[WriteObject](s)
	}
	if list, _ := s.core.Activities(everySandbox, 9); len(list) != 1 || list[0].Kind != activity.Admission || list[0].Router != "r" || list[0].Next != "" {
		t.Errorf("shown as %+v", list)
	}
}

// Thousands are due at once: nobody waits for ever, and no more is written than is
// allowed.
func TestActivityIsWrittenInTurn(t *testing.T) {
	const all = 1000
	s := newSim(t)
	var facts []Fact
	var pods []Pod
	var report Report
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%04d", i))
		f.Sandbox.Pod, f.Sandbox.IdleTimeout, f.Sandbox.IP = key(name), time.Hour, address(i)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
		report.Activities = append(report.Activities, Activity{ID: f.Sandbox.ID})
	}
	s.recover([]Pool{changed(specA(0), func(p *Pool) { p.IdleTimeout = time.Hour })}, pods, facts...)
	for _, f := range facts {
		s.step(ObjectWritten{ID: f.Sandbox.ID, Revision: f.Revision})
	}
	report.Stream = 1
	s.joinAndReport("r", 1)
	written := map[string]int{}
	for second := range 120 {
		s.step(report)
		s.ping("r", 1)
		n := 0
		for range 10 {
			for _, r := range of[WriteObject](s.pass(100 * time.Millisecond)) {
				s.step(ObjectWritten{ID: r.Sandbox.ID, Revision: r.Sandbox.Revision})
				written[r.Sandbox.ID]++
				n++
			}
		}
		if n > 60 {
			t.Fatalf("%d written in second %d", n, second)
		}
	}
	for id, n := range written {
		if n > 2 {
			t.Errorf("%s was written %d times in two minutes", id, n)
		}
	}
	if len(written) != all {
		t.Errorf("%d of %d were written", len(written), all)
	}
}

// address is one of its own for each of many pods.
func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) }

// However many there are, the oldest are listed.
func TestOfManyActivitiesTheFirstAreListed(t *testing.T) {
	const all = 5000
	s := newSim(t)
	var facts []Fact
	var pods []Pod
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%04d", i*7919%all))
		f.Sandbox.Pod, f.Sandbox.IP = key(name), address(i)
		f.Sandbox.ClaimedAt = start.Wall.Add(time.Duration(i*7919%all) * time.Millisecond)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{specA(0)}, pods, facts...)
	for _, most := range []int{0, 1, 100, all - 1, all, all + 1} {
		list, others := s.core.Activities(everySandbox, most)
		if len(list) != min(most, all) || others != all-len(list) {
			t.Errorf("of %d at most %d are listed, and %d others", most, len(list), others)
		}
		for i, st := range list {
			if st.Sandbox.ID != fmt.Sprintf("id%04d", i) {
				t.Fatalf("at %d of %d is %s", i, most, st.Sandbox.ID)
			}
		}
	}
	if list, others := s.core.Activities(only("id0042"), 10); len(list) != 1 || others != 0 {
		t.Errorf("%d, and %d others", len(list), others)
	}
}

// The end of a router stops the round. A sandbox of the round that was released meanwhile is not
// resumed: a resume that reaches a router before the release admits requests.
func TestNoResumeComesBeforeARelease(t *testing.T) {
	s := idleSim(t, 1, "r1", "r2")
	s.step(SessionLeft{Session: "r2", Stream: 2})
	x := s.claim() // r2 cannot have its route, so r2 does not block the question
	s.pass(idleFor)
	s.asks(1)
	s.step(Release{ID: x.ID, Reason: ReasonKilled})
	one[SendRelease](s)
	s.step(DeclareDead{Token: 6, Session: "r2", By: "o", Reason: "gone"})
	one[SessionDeclaredDead](s)
	none[SendResume](s)
}
