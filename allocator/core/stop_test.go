package core

import (
	"errors"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/claims"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/step"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

var errStoreFull = errors.New("the store is full")

// archived answers the WriteArchive of a stop.
func (s *sim) archived(name string) {
	s.t.Helper()
	e := one[WriteArchive](s)
	if e.Token != 0 || e.Sandbox.Phase != Asleep {
		s.t.Fatalf("%+v", e)
	}
	written := ArchiveWritten{ID: e.Sandbox.ID, Order: e.Sandbox.Revision, Archive: name}
	if name == "" {
		written.Err = errStoreFull
	}
	s.step(written)
}

// stopped has a sandbox that is asleep stopped.
func (s *sim) stopped(id, archive string) {
	s.t.Helper()
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: id, Stop: true})
	s.archived(archive)
	if a := one[SandboxCallAnswered](s); a.Token != 8 || a.Status != CallOK {
		s.t.Fatalf("answered %+v", a)
	}
}

// anotherPod has a warm pod with an agent come into being.
func (s *sim) anotherPod(n int) {
	s.t.Helper()
	name := string(rune('a'+n-1)) + "-next"
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.AgentPort = key(name), address(n), 49983 })})
}

// Invariant: P33
func TestStoppedSandboxRunsInAnotherPodUnderItsID(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{}, "q")
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID, Stop: true})
	s.acked("q", 1)
	s.pass(window)
	none[WriteArchive](s)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	none[DeletePod](s)
	s.archived("first")
	if a := one[SandboxCallAnswered](s); a.Token != 8 || a.Status != CallOK {
		t.Fatalf("answered %+v", a)
	}
	if d := one[DeletePod](s); d.Pod != sb.Pod {
		t.Errorf("%+v", d)
	}
	none[SendRelease](s) // a tombstone would keep the ID from ever being routed again
	if got := s.view(sb.ID); got.Phase != Stopped || got.Archive != "first" || got.Incarnation != 0 {
		t.Errorf("it is %+v", got)
	}
	s.step(Sleep{Token: 9, Scope: everyTeam, ID: sb.ID, Stop: true})
	if a := one[SandboxCallAnswered](s); a.Status != CallAsleep {
		t.Errorf("%+v", a)
	}

	s.step(SetTimeout{Token: 10, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Extend: true, Wake: true})
	none[SandboxCallAnswered](s) // no pod is warm
	s.anotherPod(2)
	configure := one[Configure](s)
	if c := configure.Sandbox; c.ID != sb.ID || c.Pod == sb.Pod || c.IP != address(2) || c.Archive != "first" || c.Incarnation != 1 || c.Phase != Starting || c.AsleepAt.IsZero() {
		t.Fatalf("%+v", c)
	}
	none[StartSandbox](s)
	s.step(PodGone{Key: sb.Pod}) // the former pod
	s.step(Configured{ID: sb.ID, OK: true})
	none[SendRoute](s)
	s.step(Started{ID: sb.ID, Incarnation: one[StartSandbox](s).Sandbox.Incarnation, OK: true})
	if r := one[SendRoute](s); r.Sandbox.IP != address(2) {
		t.Errorf("%+v", r)
	}
	if a := one[SandboxCallAnswered](s); a.Token != 10 || a.Status != CallOK || !a.Woken {
		t.Errorf("%+v", a)
	}
	none[SandboxReady](s)
	if got := s.view(sb.ID); got.Phase != Running || !got.AsleepAt.IsZero() || !got.EndAt.Equal(s.now.Wall.Add(time.Minute)) || !got.ClaimedAt.Equal(sb.ClaimedAt) {
		t.Errorf("it is %+v", got)
	}

	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID, Stop: true})
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	none[DropArchive](s)
	s.archived("second")
	if d := one[DropArchive](s); d.Sandbox.Archive != "first" {
		t.Errorf("%+v", d)
	}
	s.step(Release{Token: 11, Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled})
	if d := one[DropArchive](s); d.Sandbox.Archive != "second" {
		t.Errorf("%+v", d)
	}
}

func TestFailedStopLeavesTheSandboxAsleep(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{StopAfter: time.Minute})
	s.asleep(sb.ID)
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID, Stop: true})
	s.archived("")
	if a := one[SandboxCallAnswered](s); a.Status != CallRefused || a.Why != "the store is full" {
		t.Errorf("%+v", a)
	}
	if got := s.view(sb.ID); got.Phase != Asleep || got.Archive != "" {
		t.Errorf("it is %+v", got)
	}
	none[DeletePod](s)
	s.pass(time.Minute)
	s.archived("")
	s.pass(19 * time.Second) // longer each time
	none[WriteArchive](s)
	s.pass(time.Second)
	e := one[WriteArchive](s)
	s.step(ArchiveWritten{ID: sb.ID, Order: sb.Revision, Archive: "of an earlier sleep"})
	if got := s.view(sb.ID); got.Phase != Asleep {
		t.Errorf("it is %+v", got)
	}
	s.step(ArchiveWritten{ID: sb.ID, Order: e.Sandbox.Revision, Archive: "late"})
	if got := s.view(sb.ID); got.Phase != Stopped || got.Archive != "late" {
		t.Errorf("it is %+v", got)
	}
}

func TestFewCallersWaitForOneStop(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	const most = 1000
	for i := range most + 1 {
		s.step(Sleep{Token: uint64(100 + i), Scope: everyTeam, ID: sb.ID, Stop: true})
		if i == 0 {
			one[WriteArchive](s)
		}
	}
	if a := one[SandboxCallAnswered](s); a.Token != 100+most || a.Status != CallAsleep {
		t.Errorf("%+v", a)
	}
	s.step(ArchiveWritten{ID: sb.ID, Order: s.view(sb.ID).Revision, Archive: "x"})
	if n := len(of[SandboxCallAnswered](s.effects)); n != most {
		t.Errorf("%d are answered", n)
	}
}

// A called stop completes, as a called sleep does. One that was not called for ends with a wake.
func TestRequestWakesAfterACalledStop(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{WakeOnTraffic: true, StopAfter: 20 * time.Second}, "q")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID, Stop: true})
	archive := one[WriteArchive](s)
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
	none[Thaw](s)
	s.step(ArchiveWritten{ID: sb.ID, Order: archive.Sandbox.Revision, Archive: "x"})
	s.anotherPod(2)
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	s.step(Started{ID: sb.ID, Incarnation: 1, OK: true})
	one[SendRoute](s)

	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	s.pass(20 * time.Second)
	one[WriteArchive](s)
	s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
	one[Thaw](s)
}

// Invariant: P33
func TestFailedStartLeavesTheSandboxStopped(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.stopped(sb.ID, "x")
	wake := func(token uint64) {
		s.step(SetTimeout{Token: token, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Wake: true})
	}
	refused := func(token uint64, status CallStatus, why string) {
		t.Helper()
		if a := one[SandboxCallAnswered](s); a.Token != token || a.Status != status || a.Why != why {
			t.Errorf("%+v", a)
		}
		if got := s.view(sb.ID); got.Phase != Stopped || got.Archive != "x" {
			t.Errorf("it is %+v", got)
		}
		none[SandboxReleased](s)
		none[DropArchive](s)
	}
	wake(20)
	for i := range claims.MaxFailures {
		s.anotherPod(i + 2)
		c := one[Configure](s)
		s.step(Configured{ID: sb.ID, Why: "it is damaged"})
		if d := one[DeletePod](s); d.Pod != c.Sandbox.Pod {
			t.Errorf("%+v", d)
		}
	}
	refused(20, CallRefused, "it is damaged")

	wake(21)
	s.pass(30 * time.Second)
	refused(21, CallNotReady, "its pool has no pod for it")

	wake(22)
	s.anotherPod(6)
	s.step(Configured{ID: sb.ID, OK: true})
	start := one[StartSandbox](s).Sandbox
	s.step(Started{ID: sb.ID, Incarnation: start.Incarnation - 1, OK: true}) // of an earlier pod
	if got := s.view(sb.ID); got.Phase != Starting {
		t.Errorf("it is %+v", got)
	}
	s.step(Started{ID: sb.ID, Incarnation: start.Incarnation, Why: "500"})
	pod := start.Pod
	if d := one[DeletePod](s); d.Pod != pod {
		t.Errorf("%+v", d)
	}
	refused(22, CallRefused, "500")

	wake(23)
	s.anotherPod(7)
	s.step(Release{Token: 24, Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled}) // it does not wait for the agent
	one[SandboxStopped](s)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonKilled {
		t.Errorf("%+v", r)
	}
	one[DropArchive](s)
	if a := one[SandboxCallAnswered](s); a.Token != 23 || a.Status != CallGone {
		t.Errorf("%+v", a)
	}
}

// Invariant: P33
func TestNextLeaderFindsStoppedSandboxes(t *testing.T) {
	pool := changed(idlePool(0), func(p *Pool) { p.Agent.Port = 49983 })
	record := on("a-1", "x")
	state := sandboxOf(record)
	state.Phase, state.Archive, state.AsleepAt, state.Agent.Port = Stopped, "files", start.Wall, 49983
	former := with(warmPod("a-1"), func(p *Pod) { p.Used = true })

	s := newSimAt(t, 2, start)
	s.recover([]Pool{pool}, []Pod{former}, record)
	if d := one[DeletePod](s); d.Pod != former.Key {
		t.Errorf("%+v", d)
	}
	none[SandboxReleased](s)
	s.step(SetTimeout{Token: 9, Scope: everyTeam, ID: "x", Lifetime: time.Minute, Wake: true})
	s.anotherPod(2)
	if c := one[Configure](s).Sandbox; c.Archive != "files" || c.Incarnation != 1 {
		t.Errorf("%+v", c)
	}

	// The earlier leader has ended while the agent was being configured.
	next := *state
	next.Revision = Revision{Term: 1, Counter: 9}
	next.Phase, next.Incarnation, next.Pod, next.IP, next.AsleepAt = Starting, 1, key("b-next"), address(2), time.Time{}
	shown := *state
	half := Fact{Revision: Revision{Term: 1, Counter: 9}, Subject: &SandboxFact{Sandbox: next, Ungranted: 1}}
	for _, ok := range []bool{true, false} {
		s = newSimAt(t, 2, start)
		st := State{Facts: []Fact{half}, Objects: []Sandbox{shown}, Pools: []Pool{pool}, Pods: []Pod{
			with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.AgentPort = key("b-next"), address(2), 49983 }),
		}}
		s.recoverState(st)
		none[Repaired](s) // the object is of the earlier incarnation
		if c := one[Configure](s); !c.Ask || c.Sandbox.Pod != key("b-next") {
			t.Fatalf("%+v", c)
		}
		s.step(Configured{ID: "x", OK: ok})
		if ok {
			one[StartSandbox](s)
			continue
		}
		none[SandboxReleased](s)
		if got := s.view("x"); got.Phase != Stopped || got.Archive != "files" {
			t.Errorf("it is %+v", got)
		}
		if d := one[DeletePod](s); d.Pod != key("b-next") {
			t.Errorf("%+v", d)
		}
	}
}

func TestCordonStopsWhatSleepsOnTheNode(t *testing.T) {
	cordon := NodeSeen{Name: "n1", Cordoned: true}
	s, sb := sleepSim(t, fact.SleepPolicy{StopAfter: time.Hour})
	s.asleep(sb.ID)
	s.step(NodeSeen{Name: "n2", Cordoned: true})
	s.pass(time.Second)
	none[WriteArchive](s)
	s.step(cordon)
	s.pass(time.Second)
	s.archived("x")
	if got := s.view(sb.ID); got.Phase != Stopped {
		t.Errorf("it is %+v", got)
	}

	s, sb = sleepSim(t, fact.SleepPolicy{StopAfter: time.Hour})
	s.step(cordon)
	s.asleep(sb.ID)
	s.pass(time.Second)
	one[WriteArchive](s)

	s, sb = sleepSim(t, fact.SleepPolicy{}) // not to be stopped
	s.asleep(sb.ID)
	s.step(cordon)
	s.pass(time.Second)
	none[WriteArchive](s)

	s, sb = sleepSim(t, fact.SleepPolicy{})
	s.boundSleepers(9)
	s.asleep(sb.ID)
	s.step(cordon)
	s.pass(time.Second)
	one[WriteArchive](s)

	record := on("a-1", "x")
	state := sandboxOf(record)
	state.Phase, state.AsleepAt, state.Agent.Port, state.Sleep.StopAfter = Asleep, start.Wall, 49983, time.Hour
	s = newSimAt(t, 2, start)
	s.recoverState(State{Facts: []Fact{record}, Pools: []Pool{changed(idlePool(0), func(p *Pool) { p.Agent.Port = 49983 })},
		Pods: []Pod{with(warmPod("a-1"), func(p *Pod) { p.Used = true })}, Cordoned: []string{"n1"}})
	s.pass(time.Second)
	one[WriteArchive](s)
}

func TestArchiveNamesTheCauseOfItsStop(t *testing.T) {
	for want, c := range map[step.StopCause]struct {
		after time.Duration
		event Event
	}{
		step.StopCalled:     {0, Sleep{Token: 8, Scope: everyTeam, Stop: true}},
		step.StopAfter:      {time.Second, Tick{}},
		step.StopOfCordon:   {time.Hour, NodeSeen{Name: "n1", Cordoned: true}},
		step.StopOfDeletion: {time.Hour, evicted(nil)},
	} {
		s, sb := sleepSim(t, fact.SleepPolicy{StopAfter: c.after})
		s.asleep(sb.ID)
		if call, ok := c.event.(Sleep); ok {
			call.ID = sb.ID
			c.event = call
		}
		s.step(c.event)
		if len(of[WriteArchive](s.effects)) == 0 {
			s.pass(time.Second)
		}
		if got := one[WriteArchive](s); got.Cause != want {
			t.Errorf("the cause is %q, want %q", got.Cause, want)
		}
	}
}

// evicted is an observation of the pod a-1 while it is evicted.
func evicted(change func(*Pod)) PodSeen {
	return PodSeen{with(warmPod("a-1"), func(p *Pod) {
		p.Used, p.AgentPort, p.Deleting, p.Cause = true, 49983, true, fact.Because(fact.ReasonEvicted)
		if change != nil {
			change(p)
		}
	})}
}

// boundSleepers has the pool of sleepSim stop sandboxes when more than these are asleep.
func (s *sim) boundSleepers(most int) {
	s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.MaxAsleep = 49983, most })})
}

// Invariant: P33
func TestEvictedSleeperOfABoundedPoolIsStopped(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.boundSleepers(9)
	s.asleep(sb.ID)
	s.step(evicted(nil))
	none[SandboxReleased](s)
	s.archived("x")
	one[SandboxStopped](s)
}

// Invariant: P33
func TestEvictedSleeperIsStoppedBeforeItsPodEnds(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{StopAfter: time.Hour, WakeOnTraffic: true}, "q")
	s.step(Sleep{Token: 7, Scope: everyTeam, ID: sb.ID})
	s.acked("q", 1)
	s.pass(window)
	s.step(Frozen{ID: sb.ID, Revision: one[Freeze](s).Sandbox.Revision, OK: true})
	s.step(evicted(nil))
	archive := one[WriteArchive](s)
	for _, wake := range []Event{
		Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true},
		SetTimeout{Token: 9, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Extend: true, Wake: true},
		evicted(func(p *Pod) { p.Ready, p.Version = false, "2" }),
	} {
		s.step(wake)
		none[Thaw](s)
		none[SandboxCallAnswered](s)
		none[WriteArchive](s)
	}
	s.step(ArchiveWritten{ID: sb.ID, Order: archive.Sandbox.Revision, Archive: "x"})
	one[SandboxStopped](s)
	s.step(PodGone{Key: sb.Pod})
	none[SandboxReleased](s)
	s.anotherPod(2)
	if c := one[Configure](s).Sandbox; c.ID != sb.ID || c.Archive != "x" {
		t.Errorf("%+v", c)
	}
}

// Invariant: P33
func TestEvictedSleeperWithoutAnArchiveEnds(t *testing.T) {
	fails := func(sb Sandbox) []Event {
		return []Event{ArchiveWritten{ID: sb.ID, Order: sb.Revision, Err: errors.New("no")}}
	}
	leaving := func(then func(Sandbox) []Event) func(Sandbox) []Event {
		return func(sb Sandbox) []Event { return append([]Event{evicted(nil)}, then(sb)...) }
	}
	lost := evicted(func(p *Pod) { p.Ready, p.NoExecute = false, true })
	for name, c := range map[string]struct {
		policy fact.SleepPolicy
		events func(Sandbox) []Event
		reason string
	}{
		"that is not to be stopped": {fact.SleepPolicy{}, leaving(func(Sandbox) []Event { return nil }), fact.ReasonEvicted},
		"whose archive fails":       {fact.SleepPolicy{StopAfter: time.Hour}, leaving(fails), fact.ReasonEvicted},
		"whose pod is gone before": {fact.SleepPolicy{StopAfter: time.Hour},
			leaving(func(sb Sandbox) []Event { return []Event{PodGone{sb.Pod}} }), fact.ReasonEvicted},
		"whose container ends before": {fact.SleepPolicy{StopAfter: time.Hour},
			leaving(func(Sandbox) []Event { return []Event{evicted(func(p *Pod) { p.Finished = true })} }), fact.ReasonEvicted},
		"whose container runs again": {fact.SleepPolicy{StopAfter: time.Hour}, leaving(func(sb Sandbox) []Event {
			return []Event{Frozen{ID: sb.ID, Revision: sb.Revision, Why: "the container was told to end"}}
		}), fact.ReasonEvicted},
		"whose node is lost": {fact.SleepPolicy{StopAfter: time.Hour},
			func(Sandbox) []Event { return []Event{NodeSeen{Name: "n1"}, lost} }, fact.ReasonNodeLost},
	} {
		t.Run(name, func(t *testing.T) {
			s, sb := sleepSim(t, c.policy)
			s.asleep(sb.ID)
			for _, ev := range c.events(s.view(sb.ID)) {
				s.step(ev)
			}
			if r := one[SandboxReleased](s); r.Sandbox.Reason != c.reason {
				t.Errorf("%+v", r)
			}
			none[WriteArchive](s)
			none[Thaw](s)
		})
	}
}

// Invariant: P33
func TestStopUnderWayGoesOnWhenItsPodIsDeleted(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.step(Sleep{Token: 8, Scope: everyTeam, ID: sb.ID, Stop: true})
	archive := one[WriteArchive](s)
	s.step(evicted(nil))
	none[SandboxReleased](s)
	s.step(ArchiveWritten{ID: sb.ID, Order: archive.Sandbox.Revision, Archive: "x"})
	if a := one[SandboxCallAnswered](s); a.Token != 8 || a.Status != CallOK {
		t.Errorf("%+v", a)
	}
	none[DeletePod](s) // it is being deleted

	// An archive of a snapshot is written before.
	s, sb = sleepSim(t, fact.SleepPolicy{StopAfter: time.Hour})
	s.asleep(sb.ID)
	s.step(Archive{Token: 8, Scope: everyTeam, ID: sb.ID})
	archive = one[WriteArchive](s)
	s.step(evicted(nil))
	none[WriteArchive](s)
	s.step(ArchiveWritten{ID: sb.ID, Token: 8, Order: archive.Sandbox.Revision})
	s.archived("x")
	one[SandboxStopped](s)

	// The fact that it is stopped is on its way.
	s, sb = sleepSim(t, fact.SleepPolicy{StopAfter: time.Hour})
	s.asleep(sb.ID)
	s.step(evicted(nil))
	archive = one[WriteArchive](s)
	s.slow = true
	s.step(ArchiveWritten{ID: sb.ID, Order: archive.Sandbox.Revision, Archive: "x"})
	s.step(PodGone{Key: sb.Pod})
	s.written()
	one[SandboxStopped](s)
	none[SandboxReleased](s)
}

// Invariant: P33
func TestNextLeaderStopsWhatSleepsInADeletedPod(t *testing.T) {
	record := on("a-1", "x")
	state := sandboxOf(record)
	state.Phase, state.AsleepAt, state.Agent.Port, state.Sleep.StopAfter = Asleep, start.Wall, 49983, time.Hour
	s := newSimAt(t, 2, start)
	pool := changed(idlePool(0), func(p *Pool) { p.Agent.Port = 49983 })
	s.recoverState(State{Facts: []Fact{record}, Pools: []Pool{pool}, Pods: []Pod{evicted(nil).Pod}})
	s.archived("files")
	if got := s.view("x"); got.Phase != Stopped || got.Archive != "files" {
		t.Errorf("it is %+v", got)
	}
}

func TestDeletedPoolEndsItsStoppedSandboxes(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.stopped(sb.ID, "x")
	s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Deleting = 49983, true })})
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonPoolDeleted {
		t.Errorf("%+v", r)
	}
	one[DropArchive](s)
}

// rising has a sandbox stopped, and a call that wakes it while no pod is warm.
func rising(t *testing.T, key string) (*sim, Sandbox) {
	t.Helper()
	s := newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Sleep.WakeOnTraffic = 49983, true })
	s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })})
	s.step(TeamLimits{teams.Settings{Default: teams.Limits{MaxSandboxes: 2}}})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Minute, Binding: Binding{IdempotencyKey: key, Team: "t"}})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	sb := one[Claimed](s).Sandbox
	s.asleep(sb.ID)
	s.stopped(sb.ID, "x")
	s.step(SetTimeout{Token: 20, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Wake: true})
	none[SandboxCallAnswered](s)
	return s, sb
}

// Invariant: P33
func TestReleasedSandboxThatWaitsGetsNoPod(t *testing.T) {
	s, sb := rising(t, "")
	s.slow = true
	s.step(Release{Token: 21, Scope: everyTeam, ID: sb.ID, Reason: fact.ReasonKilled})
	s.anotherPod(2)
	s.written()
	one[SandboxReleased](s)
	s.written()
	none[Configure](s)
	if p := s.core.pods.Get(key("b-next")); p.State() != pods.Warm {
		t.Errorf("the pod is in state %d", p.State())
	}
}

// The guard knows the pod that a sandbox is bound to, and callers learn of the one that it had.
func TestWakingSandboxIsShownStopped(t *testing.T) {
	s, sb := rising(t, "k")
	s.anotherPod(2)
	one[Configure](s)
	s.step(Claim{Token: 2, Pool: poolA, Lifetime: time.Minute, Binding: Binding{IdempotencyKey: "k", Team: "t"}})
	if c := one[Claimed](s); c.Sandbox.ID != sb.ID || c.Sandbox.Phase != Stopped {
		t.Errorf("%+v", c)
	}
	s.step(ObjectGone{ID: sb.ID}) // it ends then, and does not wait for the agent
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonObjectDeleted {
		t.Errorf("%+v", r)
	}
}

func TestWakeOfAStoppedSandboxCostsItsTeamNothing(t *testing.T) {
	s, sb := rising(t, "")
	s.step(Claim{Token: 2, Pool: poolA, Lifetime: time.Minute, Binding: Binding{Team: "t"}, Wait: time.Second})
	none[ClaimRefused](s)
	s.pass(30 * time.Second)
	s.step(SetTimeout{Token: 21, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Wake: true})
	s.anotherPod(2)
	if c := one[Configure](s); c.Sandbox.ID != sb.ID {
		t.Errorf("%+v", c)
	}
}

func TestRequestsDoNotRepeatAFailedStart(t *testing.T) {
	s, sb := rising(t, "")
	s.joinAndReport("q", 1)
	s.anotherPod(2)
	s.step(Configured{ID: sb.ID, OK: true})
	start := one[StartSandbox](s).Sandbox
	s.step(Started{ID: sb.ID, Incarnation: start.Incarnation, Why: "500"})
	if got := s.view(sb.ID); got.Phase != Stopped || !got.Wakeable || got.AsleepAt.IsZero() || !got.EndAt.IsZero() {
		t.Errorf("it is %+v", got)
	}
	ask := func() SendResolved {
		s.step(Resolve{Session: "q", Stream: 1, ID: sb.ID, Wake: true})
		return one[SendResolved](s)
	}
	s.anotherPod(3)
	if r := ask(); !r.Busy {
		t.Errorf("%+v", r)
	}
	none[Configure](s)
	s.pass(10 * time.Second)
	if r := ask(); r.Busy {
		t.Errorf("%+v", r)
	}
	one[Configure](s)
}

func TestClockStepDoesNotEndAStoppedSandbox(t *testing.T) {
	s := newSim(t)
	pool := changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.MaxLifetime, p.IdleTimeout = 49983, time.Hour, 0 })
	s.recover([]Pool{pool}, []Pod{with(warmPod("a-1"), func(p *Pod) { p.AgentPort = 49983 })})
	s.step(Claim{Token: 1, Pool: poolA, Lifetime: time.Minute})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	sb := one[Claimed](s).Sandbox
	s.asleep(sb.ID)
	s.now.Wall = s.now.Wall.Add(2 * time.Hour)
	s.stopped(sb.ID, "x")
	s.pass(time.Minute)
	s.now.Wall = s.now.Wall.Add(2 * time.Hour)
	s.anotherPod(2)
	s.step(SetTimeout{Token: 20, Scope: everyTeam, ID: sb.ID, Lifetime: 10 * time.Minute, Wake: true})
	s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
	s.step(Started{ID: sb.ID, Incarnation: 1, OK: true})
	s.pass(9 * time.Minute)
	if got := s.view(sb.ID); got.Phase != Running {
		t.Errorf("it is %+v", got)
	}
	s.pass(time.Minute)
	if r := one[SandboxReleased](s); r.Sandbox.Reason != fact.ReasonEndTime {
		t.Errorf("%+v", r)
	}
}

func TestOrphanedPoolKeepsItsStoppedSandboxes(t *testing.T) {
	s, sb := sleepSim(t, fact.SleepPolicy{})
	s.asleep(sb.ID)
	s.stopped(sb.ID, "x")
	s.step(PoolSeen{Pool: changed(idlePool(1), func(p *Pool) { p.Agent.Port, p.Deleting, p.KeepSandboxes = 49983, true, true })})
	s.step(PodGone{Key: sb.Pod})
	s.step(PoolGone{Key: poolA})
	s.pass(time.Second)
	if got := s.view(sb.ID); got.Phase != Stopped {
		t.Errorf("it is %+v", got)
	}
	s.step(SetTimeout{Token: 21, Scope: everyTeam, ID: sb.ID, Lifetime: time.Minute, Wake: true})
	if a := one[SandboxCallAnswered](s); a.Status != CallRefused {
		t.Errorf("%+v", a)
	}
}
