package core

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"
	"time"
)

// idleFor is the idle timeout of the sandboxes of these tests.
const idleFor = 10 * time.Second

// idleForLong is one of those that are longer than anything else takes.
const idleForLong = 3 * maxStale

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
	s.step(SessionJoined{Session: session, Stream: stream, Quiesces: true})
	one[SendSnapshot](s)
	s.step(Report{Session: session, Stream: stream, Activities: activities, Complete: true})
}

// asks returns the only question of the last step, which every stream was asked.
func (s *sim) asks(streams ...uint64) SendQuiesce {
	s.t.Helper()
	all := of[SendQuiesce](s.effects)
	var got []uint64
	for _, q := range all {
		got = append(got, q.Stream)
		if q.Number != all[0].Number || !slices.Equal(q.IDs, all[0].IDs) {
			s.t.Fatalf("%+v and %+v", q, all[0])
		}
	}
	if !slices.Equal(got, streams) {
		s.t.Fatalf("streams %v were asked, expected %v", got, streams)
	}
	return all[0]
}

// says has a router answer.
func (s *sim) says(session string, q SendQuiesce, stream uint64, doubt time.Duration, activities ...Activity) {
	s.t.Helper()
	s.step(Quiesced{Session: session, Stream: stream, Number: q.Number, Activities: activities, Doubt: doubt})
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
	s.says("q", q, 1, 0)
	none[SandboxReleased](s)
	s.says("r", q, 2, 0, Activity{ID: sb.ID, Age: idleFor, Quiet: idleFor})
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

// Whatever a router says but that it is certain of silence, everybody goes on.
func TestOneRouterThatKnowsOfUseIsEnough(t *testing.T) {
	for name, c := range map[string]struct {
		activity Activity
		doubt    time.Duration
		again    time.Duration // until it is asked again
	}{
		"in use":                {Activity{}, 0, idleFor},
		"used a moment ago":     {Activity{Age: time.Second, Quiet: time.Second}, 0, idleFor - time.Second},
		"used just long enough": {Activity{Age: idleFor - time.Millisecond, Quiet: idleFor}, 0, time.Millisecond},
		"may be in use":         {Activity{Settles: 700 * time.Millisecond}, 0, 700 * time.Millisecond},
		"is, and may be":        {Activity{Open: 1, Settles: 700 * time.Millisecond}, 0, idleFor},
		"in doubt":              {Activity{Age: time.Hour, Quiet: time.Hour}, 3 * time.Second, 3 * time.Second},
		"may be beyond a doubt": {Activity{Age: time.Hour, Quiet: time.Hour, Settles: 3 * time.Second}, time.Second, 3 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			c.activity.ID = s.claim().ID
			s.pass(idleFor)
			q := s.asks(1, 2)
			s.says("q", q, 1, c.doubt, c.activity)
			s.says("r", q, 2, 0)
			s.resumed(1, 2)
			s.pass(c.again - time.Millisecond)
			none[SendQuiesce](s)
			s.pass(time.Millisecond)
			s.asks(1, 2)
		})
	}
}

// A router that is not right in the head, or whose Envoy says that it flushes once a day,
// must not keep a sandbox after it has gone.
func TestDoubtIsAskedAboutAgainHoweverLongARouterSaysThatItLasts(t *testing.T) {
	for name, c := range map[string]struct{ doubt, settles time.Duration }{
		"what is open":       {24 * time.Hour, 0},
		"one of its answers": {0, 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			sb := s.claim()
			s.pass(idleFor)
			q := s.asks(1, 2)
			s.says("q", q, 1, 0)
			s.says("r", q, 2, c.doubt, Activity{ID: sb.ID, Age: time.Hour, Quiet: time.Hour, Settles: c.settles})
			s.resumed(1, 2)
			s.step(SessionGoodbye{Session: "r"})
			for range 10 {
				s.ping("q", 1)
				s.pass(30 * time.Second)
				if all := of[SendQuiesce](s.effects); len(all) > 0 {
					s.says("q", all[0], 1, 0)
					one[SandboxReleased](s)
					return
				}
			}
			t.Error("nobody was asked again, although the router that was in doubt has ended")
		})
	}
}

func TestBytesOnlyIsJudgedByWhatMoved(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(idlePool(1), func(p *Pool) { p.BytesOnly = true })}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	s.pass(idleFor)
	s.says("r", s.asks(1), 1, 0, Activity{ID: sb.ID, Age: 0, Quiet: idleFor, Open: 1})
	one[SandboxReleased](s)
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

// Sandboxes live on when the access log is flushed less often than when they were
// claimed.
func TestAnIdleTimeoutIsNeverShorterThanWhatRoutersCanTell(t *testing.T) {
	s := newSim(t)
	s.cfg.ActivityWindow = idleFor + time.Second
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
	s.step(Report{Session: "r", Stream: 1, Activities: []Activity{{ID: sb.ID, Age: time.Second}}})
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
	s.says("q", q, 1, 0)
	s.pass(249 * time.Millisecond)
	none[SendResume](s)
	s.pass(time.Millisecond)
	s.resumed(1, 2)
	s.says("r", q, 2, 0) // late
	none[SandboxReleased](s)
	s.pass(askAgain)
	q = s.asks(1, 2)
	s.now.Boot += 251 * time.Millisecond // the answer is there before the tick
	s.says("q", q, 1, 0)
	s.says("r", q, 2, 0)
	none[SandboxReleased](s)
	if got, _ := s.core.Sandbox(sb.ID); got.Phase != Running {
		t.Errorf("%+v", got)
	}
}

// A router that stays mute is cut off; if it comes back and is mute again it is not let
// in any more, and when it has gone stale, its fence ends the doubt.
func TestAMuteRouterCannotKeepEverythingForEver(t *testing.T) {
	s := idleSim(t, 1, "q")
	sb := s.claim()
	s.joinAndReport("r", 100)
	s.pass(idleFor)
	var cut []RouterMute
	stream, released := uint64(100), time.Duration(0)
	began := s.now.Boot
	for s.now.Boot-began < 3*maxStale && released == 0 {
		s.pass(50 * time.Millisecond)
		effects := s.effects
		s.ping("q", 1)
		s.ping("r", stream)
		for _, q := range of[SendQuiesce](effects) {
			if q.Stream == 1 {
				s.says("q", q, 1, 0)
				if len(of[SandboxReleased](s.effects)) > 0 {
					released = s.now.Boot - began
				}
			}
		}
		for _, m := range of[RouterMute](effects) {
			cut = append(cut, m)
			if closed := of[CloseStream](effects); len(closed) != 1 || closed[0].Stream != stream {
				t.Fatalf("closed: %+v", closed)
			}
			stream++
			s.step(SessionJoined{Session: "r", Stream: stream, Quiesces: true})
			if m.Banned {
				one[CloseStream](s)
				none[SendSnapshot](s)
				continue
			}
			s.step(Report{Session: "r", Stream: stream, Complete: true})
		}
	}
	if len(cut) != cutsMost || cut[0].Banned || !cut[2].Banned || cut[2].Session != "r" {
		t.Errorf("cut: %+v", cut)
	}
	if released < maxStale {
		t.Errorf("%s was released after %v, the mute router could serve it until %v and more", sb.ID, released, maxStale)
	}
}

func TestARouterThatAnswersAgainIsForgiven(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor)
	for range 100 {
		s.pass(askAgain)
		for _, q := range of[SendQuiesce](s.effects) {
			if s.now.Boot/time.Second%4 == 0 {
				s.says("r", q, 1, 0, Activity{ID: sb.ID})
			}
		}
		none[RouterMute](s)
	}
}

// The router has missed one question, and an hour later, with none in between, another
// one. It was never mute for longer than Config.QuiesceWait.
func TestTwoQuestionsMissedFarApartAreNotFiveSecondsOfSilence(t *testing.T) {
	s := idleSim(t, 1, "r")
	sb := s.claim()
	s.pass(idleFor)
	s.asks(1)
	s.step(Report{Session: "r", Stream: 1, Activities: []Activity{{ID: sb.ID}}}) // it is in use again
	s.pass(s.core.cfg.QuiesceWait)
	s.resumed(1)
	s.step(Report{Session: "r", Stream: 1, Activities: []Activity{{ID: sb.ID}}})
	s.ping("r", 1)
	s.pass(idleFor)
	s.asks(1)
	s.pass(s.core.cfg.QuiesceWait)
	none[RouterMute](s)
}

// A router answers every question at once, but the leader is behind by more than
// Config.QuiesceWait with what it receives.
func TestARouterThatAnswersLateIsNotBanned(t *testing.T) {
	s := idleSim(t, 1, "r")
	s.claim()
	s.pass(idleFor)
	stream := uint64(1)
	for range 400 {
		questions := of[SendQuiesce](s.effects)
		for _, m := range of[RouterMute](s.effects) {
			if m.Banned {
				t.Fatal("a router that has answered every question is not let in any more: with all the others, if it is the leader that is slow, they serve nothing new until they have expired")
			}
			stream++
			s.joinAndReport("r", stream)
			questions = append(questions, of[SendQuiesce](s.effects)...)
		}
		s.ping("r", stream)
		s.pass(300 * time.Millisecond)
		effects := s.effects
		for _, q := range questions {
			s.says("r", q, stream, 0)
			effects = append(effects, s.effects...)
		}
		s.effects = effects
	}
}

// What a session could serve is not released while it may serve it.
func TestWhoCannotBeAskedKeepsWhatItCouldServe(t *testing.T) {
	joined := func(s *sim) { s.step(SessionJoined{Session: "r", Stream: 9, Quiesces: true}) }
	for name, leave := range map[string]func(s *sim){
		"not connected":    func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}) },
		"has not reported": func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}); joined(s) },
		"of an older version": func(s *sim) {
			s.step(SessionJoined{Session: "r", Stream: 9})
			s.step(Report{Session: "r", Stream: 9, Complete: true})
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 2, "q", "r")
			sb := s.claim()
			leave(s)
			later := s.claim() // which it knows only if it is connected
			s.pass(idleFor)
			if q := of[SendQuiesce](s.effects); name == "not connected" {
				if len(q) != 1 || !slices.Equal(q[0].IDs, []string{later.ID}) {
					t.Fatalf("asked: %+v", q)
				}
				s.says("q", q[0], 1, 0)
				if r := one[SandboxReleased](s); r.Sandbox.ID != later.ID {
					t.Fatalf("released %+v", r)
				}
			} else if len(q) > 0 {
				t.Fatalf("asked: %+v", q)
			}
			if list, _ := s.core.Activities(func(id string) bool { return id == sb.ID }, 1); len(list) != 1 || !slices.Equal(list[0].Awaits, []string{"r"}) || list[0].In != 0 {
				t.Errorf("shown as %+v", list)
			}
			// As soon as it can be asked, it is.
			s.step(SessionJoined{Session: "r", Stream: 10, Quiesces: true})
			none[SendQuiesce](s)
			s.step(Report{Session: "r", Stream: 10, Complete: true})
			s.asks(1, 10)
		})
	}
}

// Nobody knows what was in use through a router that has ended without a word: it was in
// use until then.
func TestTheEndOfARouterThatIsNotSureIsActivity(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(s *sim)
		sure bool
	}{
		"Goodbye":          {func(s *sim) { s.step(SessionGoodbye{Session: "r"}) }, true},
		"Goodbye in doubt": {func(s *sim) { s.step(SessionGoodbye{Session: "r", Doubt: true, EnvoyEnded: true}) }, false},
		"found dead":       {func(s *sim) { s.step(SessionDead{Session: "r", By: "q"}) }, false},
		"Goodbye without connection": {func(s *sim) {
			s.step(SessionLeft{Session: "r", Stream: 2})
			s.step(SessionGoodbye{Session: "r", EnvoyEnded: true})
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 1, "q", "r")
			s.claim()
			s.pass(idleFor - time.Second)
			c.end(s)
			s.pass(time.Second)
			if c.sure {
				s.says("q", s.asks(1), 1, 0)
				one[SandboxReleased](s)
				return
			}
			none[SendQuiesce](s)
			s.pass(idleFor - time.Second - time.Millisecond)
			none[SendQuiesce](s)
			s.pass(time.Millisecond)
			s.says("q", s.asks(1), 1, 0)
			one[SandboxReleased](s)
		})
	}
}

// A router of an earlier version stays, and the others do not come and go: what was
// released meanwhile is held in memory.
func TestWhatWasReleasedIsNotHeldAmongWhatCouldNotBeAskedAbout(t *testing.T) {
	s := idleSim(t, 1, "q")
	s.step(SessionJoined{Session: "old", Stream: 9})
	for i := range 50 {
		sb := s.claim()
		s.ping("q", 1)
		s.ping("old", 9)
		s.pass(idleFor)
		s.step(Release{ID: sb.ID, Reason: ReasonKilled})
		// a pod for the next one
		p := warmPod("a-1")
		p.Key = PodKey{Namespace: p.Key.Namespace, Name: p.Key.Name + string(rune('a'+i)), UID: p.Key.UID + string(rune('a'+i))}
		p.IP = address(i + 300)
		s.step(PodSeen{Pod: p})
	}
	if n := len(s.core.blocked); n > 10 {
		t.Errorf("%d sandboxes are held that were released", n)
	}
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
			if len(s.core.byID) > 0 {
				t.Fatal("it has not expired")
			}
			s.pass(idleFor - standsAfter/2)
			s.slow = true
			s.step(SessionJoined{Session: "r", Stream: 2, Quiesces: true})
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
			s.step(Report{Session: "r", Stream: 2, Activities: []Activity{{ID: sb.ID, Age: time.Second}}, Complete: true})
			s.pass(idleFor - time.Second)
			s.asks(2)
		})
	}
}

// A router process that is restarted on its own says Goodbye, and Envoy keeps what is
// open. Until its successor stands there nobody sees it go on, or end: so it is in use for
// as long as a router that had not said Goodbye would have been waited for.
func TestWhatWasInUseAtAGoodbyeIsInUseWhileNobodyCanTell(t *testing.T) {
	const expiry = maxStale + maxStale/100
	cases := map[string]struct {
		report            Report
		goodbye           SessionGoodbye
		inUse, other, new time.Duration // until when it counts as in use, from the Goodbye
	}{
		"open":       {Report{Activities: []Activity{{Open: 1}}, Handover: true}, SessionGoodbye{}, expiry, 0, 0},
		"may be":     {Report{Activities: []Activity{{}}, Handover: true}, SessionGoodbye{}, expiry, 0, 0},
		"over":       {Report{Activities: []Activity{{Age: time.Second}}, Handover: true}, SessionGoodbye{}, -time.Second, 0, 0},
		"in doubt":   {Report{Handover: true}, SessionGoodbye{Doubt: true}, expiry, expiry, 0},
		"Envoy too":  {Report{Activities: []Activity{{Open: 1}}}, SessionGoodbye{EnvoyEnded: true}, 0, 0, 0},
		"both":       {Report{}, SessionGoodbye{Doubt: true, EnvoyEnded: true}, 0, 0, 0},
		"not at all": {Report{Activities: []Activity{{Open: 1}}}, SessionGoodbye{}, 0, 0, 0},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			s := idleSim(t, 2, "q", "r") // each beside an Envoy of its own
			one, other := s.claim(), s.claim()
			s.pass(idleFor - 2*time.Second)
			for _, b := range []Sandbox{one, other} {
				s.step(Report{Session: "q", Stream: 1, Activities: []Activity{{ID: b.ID}}})
			}
			for i := range c.report.Activities {
				c.report.Activities[i].ID = one.ID
			}
			c.report.Session, c.report.Stream, c.goodbye.Session = "r", 2, "r"
			s.step(c.report)
			s.step(c.goodbye)
			began := s.now.Boot
			want := map[string]time.Duration{one.ID: max(c.inUse, 0) + idleFor, other.ID: c.other + idleFor}
			for released := 0; released < 2; {
				s.ping("q", 1)
				s.pass(time.Second)
				for _, q := range of[SendQuiesce](s.effects) {
					s.says("q", q, 1, 0)
					for _, r := range of[SandboxReleased](s.effects) {
						released++
						after := s.now.Boot - began
						if w := want[r.Sandbox.ID]; after < w || after > w+time.Second {
							t.Errorf("%s was released %v after the Goodbye, expected %v", r.Sandbox.ID, after, w)
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

// The leader that has heard the Goodbye may be gone when the next router stands there.
func TestARouterThatIsNewToANewLeaderMakesWhatWentOnBeforeItInUseUntilThen(t *testing.T) {
	for name, c := range map[string]struct{ joins, idle time.Duration }{
		"soon":       {time.Second, time.Second + idleForLong},
		"much later": {2 * maxStale, idleForLong},
	} {
		t.Run(name, func(t *testing.T) {
			s := newSimAt(t, 2, start)
			f := on("a-1", "x")
			f.Sandbox.IdleTimeout, f.Sandbox.ClaimedAt = idleForLong, start.Wall
			s.recover([]Pool{idlePool(0)}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, f, Fact{Session: "q"})
			s.joinAndReport("q", 1)
			began, joined := s.now.Boot, false
			for !joined || len(of[SendQuiesce](s.effects)) == 0 {
				if s.now.Boot-began > 2*idleForLong {
					t.Fatal("it is not asked about")
				}
				if !joined && s.now.Boot-began >= c.joins {
					s.joinAndReport("new", 2)
					joined = true
				}
				s.ping("q", 1)
				s.ping("new", 2)
				s.pass(100 * time.Millisecond)
			}
			if asked := s.now.Boot - began; asked < c.idle || asked > c.idle+200*time.Millisecond {
				t.Errorf("asked after %v, expected %v", asked, c.idle)
			}
		})
	}
}

// It may be a router that had expired, with something open.
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
	s.step(SessionJoined{Session: "new", Stream: 9, Quiesces: true})
	s.says("q", q, 1, 0)
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

func TestWhoeverComesOrGoesEndsTheRound(t *testing.T) {
	for name, c := range map[string]struct {
		do      func(s *sim)
		resumed []uint64
	}{
		"a new router":     {func(s *sim) { s.step(SessionJoined{Session: "new", Stream: 9, Quiesces: true}) }, []uint64{1, 2}},
		"one leaves":       {func(s *sim) { s.step(SessionLeft{Session: "r", Stream: 2}) }, []uint64{1}},
		"one comes back":   {func(s *sim) { s.step(SessionJoined{Session: "r", Stream: 9, Quiesces: true}) }, []uint64{1}},
		"one says Goodbye": {func(s *sim) { s.step(SessionGoodbye{Session: "r"}) }, []uint64{1}},
	} {
		for _, answered := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, having answered: %v", name, answered), func(t *testing.T) {
				s := idleSim(t, 1, "q", "r")
				s.claim()
				s.pass(idleFor)
				q := s.asks(1, 2)
				if answered {
					s.says("r", q, 2, 0)
				}
				c.do(s)
				s.resumed(c.resumed...)
				s.says("q", q, 1, 0)
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
	s.says("r", q, 1, 0)
	if f := s.given(); f.Phase != Released || f.Reason != ReasonIdle {
		t.Fatalf("written: %+v", f)
	}
	s.step(SessionJoined{Session: "r", Stream: 2, Quiesces: true})
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
	s.asks(1)
}

func TestARoundIsBounded(t *testing.T) {
	s := newSim(t)
	const all = roundMost + 10
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
	s.says("r", q, 1, 0)
	rest := one[SendQuiesce](s)
	if len(q.IDs) != roundMost || len(rest.IDs) != all-roundMost || len(of[SandboxReleased](s.effects)) != roundMost {
		t.Errorf("asked about %d and %d, released %d", len(q.IDs), len(rest.IDs), len(of[SandboxReleased](s.effects)))
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
	s.says("r", s.asks(1), 1, 0)
	s.resumed(1)
	if w := one[WouldReap](s); w.Sandbox.ID != sb.ID || w.Idle != idleFor {
		t.Errorf("%+v", w)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
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
			list, _ := s.core.Activities(func(id string) bool { return id == sb.ID }, 1)
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
	none[Kept](s)
	if f := s.given(); !f.EndAt.Equal(s.now.Wall.Add(2*time.Minute)) || f.Phase != Running {
		t.Errorf("written: %+v", f)
	}
	s.pass(20 * time.Second) // the old end passes while the new one is on its way
	none[Write](s)
	s.written()
	if k := one[Kept](s); k.Token != 9 || k.Status != ReleaseOK || !k.Sandbox.EndAt.Equal(s.now.Wall.Add(100*time.Second)) {
		t.Errorf("answered: %+v", k)
	}
	if r := one[Record](s); !r.Sandbox.EndAt.Equal(s.now.Wall.Add(100 * time.Second)) {
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
	if k := one[Kept](s); k.Status != ReleaseGone {
		t.Errorf("answered: %+v", k)
	}
	s.step(SetTimeout{Token: 12, ID: "none", Lifetime: time.Minute})
	if k := one[Kept](s); k.Status != ReleaseUnknown {
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
	if k := one[Kept](s); k.Token != 3 || k.Status != ReleaseOK || k.Sandbox.ID != sb.ID {
		t.Errorf("answered: %+v", k)
	}
	s.pass(idleFor - time.Millisecond)
	none[SendQuiesce](s)
	s.pass(time.Millisecond)
	s.asks(1)
	// Also in the moment in which routers are asked.
	s.step(KeepAlive{Token: 4, ID: sb.ID})
	s.says("r", SendQuiesce{Number: 1}, 1, 0)
	s.resumed(1)
}

// ---- what people see

func TestActivityIsWrittenAtMostOnceAMinute(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.IdleTimeout = time.Hour })}, []Pod{warmPod("a-1")})
	s.joinAndReport("r", 1)
	sb := s.claim()
	written := 0
	last := sb
	for range 10 * 60 {
		s.step(Report{Session: "r", Stream: 1, Activities: []Activity{{ID: sb.ID}}})
		s.ping("r", 1)
		for _, r := range of[Record](s.pass(time.Second)) {
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
		s.step(Report{Session: "r", Stream: 1, Activities: []Activity{{ID: sb.ID}}})
		s.ping("r", 1)
		s.pass(time.Second)
		none[Record](s)
	}
	if list, _ := s.core.Activities(func(string) bool { return true }, 9); len(list) != 1 || list[0].Source != Reported || list[0].Router != "r" || list[0].Next != "" {
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
	report.Session, report.Stream = "r", 1
	s.joinAndReport("r", 1)
	written := map[string]int{}
	for second := range 120 {
		s.step(report)
		s.ping("r", 1)
		n := 0
		for range 10 {
			for _, r := range of[Record](s.pass(100 * time.Millisecond)) {
				written[r.Sandbox.ID]++
				n++
			}
		}
		if n > showRate+10 {
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

// However many there are, the first ones by ID are listed.
func TestOfManyActivitiesTheFirstAreListed(t *testing.T) {
	const all = 5000
	s := newSim(t)
	var facts []Fact
	var pods []Pod
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%04d", i*7919%all))
		f.Sandbox.Pod, f.Sandbox.IP = key(name), address(i)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{specA(0)}, pods, facts...)
	for _, most := range []int{0, 1, 100, all - 1, all, all + 1} {
		list, others := s.core.Activities(func(string) bool { return true }, most)
		if len(list) != min(most, all) || others != all-len(list) {
			t.Errorf("of %d at most %d are listed, and %d others", most, len(list), others)
		}
		for i, st := range list {
			if st.Sandbox.ID != fmt.Sprintf("id%04d", i) {
				t.Fatalf("at %d of %d is %s", i, most, st.Sandbox.ID)
			}
		}
	}
	if list, others := s.core.Activities(func(id string) bool { return id == "id0042" }, 10); len(list) != 1 || others != 0 {
		t.Errorf("%d, and %d others", len(list), others)
	}
}
