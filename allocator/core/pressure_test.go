package core

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/step"
)

// pressurePool is one whose sandboxes can be stopped, with a bound on those that are asleep.
func pressurePool(maxAsleep int) Pool {
	return changed(specA(9), func(p *Pool) { p.Agent.Port, p.MaxAsleep = 49983, maxAsleep })
}

// sleepersOf has a sandbox for each of these teams, which fall asleep one after the other. They are returned in that order.
func sleepersOf(t *testing.T, maxAsleep int, teams ...string) (s *sim, ids []string) {
	t.Helper()
	s = newSim(t)
	var pods []Pod
	for _, p := range warmPods(len(teams)) {
		pods = append(pods, with(p, func(p *Pod) { p.AgentPort = 49983 }))
	}
	s.recover([]Pool{pressurePool(maxAsleep)}, pods)
	for i, team := range teams {
		s.step(Claim{Token: uint64(100 + i), Pool: poolA, Lifetime: time.Hour, Binding: Binding{Team: team}})
		s.step(Configured{ID: one[Configure](s).Sandbox.ID, OK: true})
		ids = append(ids, one[Claimed](s).Sandbox.ID)
	}
	for _, id := range ids {
		s.asleep(id)
	}
	return s, ids
}

// presses are the sandboxes whose files are to be archived after one more look.
func (s *sim) presses() (all []Sandbox) {
	s.pass(time.Second)
	for _, e := range of[WriteArchive](s.effects) {
		require.Equal(s.t, step.StopForPressure, e.Cause)
		all = append(all, e.Sandbox)
	}
	return all
}

func idsOf(all []Sandbox) (ids []string) {
	for _, sb := range all {
		ids = append(ids, sb.ID)
	}
	return ids
}

// archives answers the WriteArchives of stops.
func (s *sim) archives(ok bool, all ...Sandbox) {
	for _, sb := range all {
		written := ArchiveWritten{ID: sb.ID, Order: sb.Revision, Archive: "x"}
		if !ok {
			written.Err, written.Archive = errStoreFull, ""
		}
		s.step(written)
	}
}

// Invariant: P34
func TestPressureStopsTheTeamWithTheMostAsleep(t *testing.T) {
	s, ids := sleepersOf(t, 0, "y", "x", "x", "y", "", "x", "x")
	for _, c := range []struct {
		most  int
		stops []string
	}{
		{7, nil},
		{5, []string{ids[1], ids[2]}}, // x has four asleep, and these for longest
		{3, []string{ids[0], ids[5]}}, // x and y have two each
		{1, []string{ids[3], ids[4]}}, // each has one
	} {
		s.step(PoolSeen{pressurePool(c.most)})
		pressed := s.presses()
		require.Equal(t, c.stops, idsOf(pressed), "of %d", c.most)
		s.archives(true, pressed...)
		for _, sb := range pressed {
			require.Equal(t, Stopped, s.view(sb.ID).Phase)
		}
		require.Empty(t, s.presses(), "it fits")
	}
}

func TestSleepBeyondTheBoundCompletesBeforeTheStop(t *testing.T) {
	s, ids := sleepersOf(t, 2, "x", "x", "x") // the last call is answered as the others are
	require.Equal(t, ids[:1], idsOf(s.presses()))

	s, ids = sleepersOf(t, 2, "x", "x", "x")
	s.step(SetTimeout{Token: 20, Scope: everyTeam, ID: ids[2], Lifetime: time.Minute, Wake: true})
	require.Empty(t, s.presses(), "one of them wakes")

	s, ids = sleepersOf(t, 2, "x", "x", "x")
	s.step(Sleep{Token: 21, Scope: everyTeam, ID: ids[2], Stop: true})
	one[WriteArchive](s)
	require.Empty(t, s.presses(), "one of them is being stopped")

	s, ids = sleepersOf(t, 2, "x", "x", "x")
	s.step(Archive{Token: 22, Scope: everyTeam, ID: ids[0]})
	one[WriteArchive](s)
	require.Equal(t, ids[1:2], idsOf(s.presses()), "a snapshot is made of the first")
}

// Invariant: P34
func TestFailedStopHasNoOtherStoppedInItsPlace(t *testing.T) {
	s, ids := sleepersOf(t, 0, "y", "y", "x", "x", "x")
	s.step(PoolSeen{pressurePool(4)})
	failed := s.presses()
	require.Equal(t, ids[2:3], idsOf(failed))
	s.archives(false, failed...)
	require.Equal(t, Asleep, s.view(ids[2]).Phase)
	for range 9 {
		require.Empty(t, s.presses())
	}
	failed = s.presses()
	require.Equal(t, ids[2:3], idsOf(failed), "its time to try again has come")
	s.archives(false, failed...)

	s.step(PoolSeen{pressurePool(3)}) // x has three asleep, although the stop of one has failed
	failed = s.presses()
	require.Equal(t, ids[3:4], idsOf(failed))
	s.archives(false, failed...)
	require.Empty(t, s.presses())
}

func TestPressureLeavesPlacesOfTheStoreToOthers(t *testing.T) {
	s, ids := sleepersOf(t, 0, "x", "x", "x", "x", "x", "x", "x")
	s.step(PoolSeen{pressurePool(1)})
	pressed := s.presses()
	require.Equal(t, ids[:4], idsOf(pressed))
	require.Empty(t, s.presses(), "four are under way")
	s.archives(true, pressed[0])
	s.archives(false, pressed[1])
	require.Equal(t, ids[4:6], idsOf(s.presses()))
}

// Invariant: P34
func TestPoolsUnderPressureTakeTurnsAtTheStore(t *testing.T) {
	var facts []Fact
	var pods []Pod
	for i := range 9 { // six of pool a, and three of pool b, which have slept for less long
		name := fmt.Sprintf("a-%d", i+1)
		f, p := on(name, fmt.Sprint("id", i)), with(warmPod(name), func(p *Pod) { p.Used = true })
		state := sandboxOf(f)
		state.Phase, state.AsleepAt, state.Agent.Port = Asleep, start.Wall.Add(time.Duration(i)*time.Second), 49983
		if i >= 6 {
			state.Pool.Name, p.Pool = "b", "b"
		}
		facts, pods = append(facts, f), append(pods, p)
	}
	s := newSimAt(t, 2, start)
	s.recover([]Pool{pressurePool(1), changed(pressurePool(1), func(p *Pool) { p.Key.Name = "b" })}, pods, facts...)
	pressed := s.presses()
	require.Equal(t, []string{"id0", "id6", "id1", "id7"}, idsOf(pressed))
	require.Empty(t, s.presses(), "four are under way")
	s.archives(true, pressed[0], pressed[1])
	require.Equal(t, []string{"id2", "id3"}, idsOf(s.presses()), "b fits")
}

// A team could have the bounds of all pools not kept with calls to stop.
//
// Invariant: P34
func TestCalledStopsTakeNoPlacesFromPressure(t *testing.T) {
	s, ids := sleepersOf(t, 0, "x", "x", "x", "x", "y", "y", "y")
	for i, id := range ids[:4] {
		s.step(Sleep{Token: uint64(20 + i), Scope: everyTeam, ID: id, Stop: true})
		require.Equal(t, step.StopCalled, one[WriteArchive](s).Cause)
	}
	s.step(PoolSeen{pressurePool(1)})
	require.Equal(t, ids[4:6], idsOf(s.presses()))
}

func TestPoolThatMakesNoPodsPressesNone(t *testing.T) {
	s, ids := sleepersOf(t, 0, "x", "x")
	s.step(PoolSeen{changed(pressurePool(1), func(p *Pool) { p.Refused = "no" })})
	require.Empty(t, s.presses())
	s.step(PoolSeen{changed(pressurePool(1), func(p *Pool) { p.Deleting, p.KeepSandboxes = true, true })})
	require.Empty(t, s.presses())
	s.step(PoolSeen{pressurePool(1)})
	require.Equal(t, ids[:1], idsOf(s.presses()))
}

// Invariant: P34
func TestNextLeaderGoesOnWithPressure(t *testing.T) {
	var facts []Fact
	var pods []Pod
	for i, team := range []string{"y", "x", "x"} {
		name := fmt.Sprintf("a-%d", i+1)
		f := on(name, fmt.Sprint("id", i))
		state := sandboxOf(f)
		state.Phase, state.AsleepAt, state.Agent.Port, state.Team = Asleep, start.Wall.Add(time.Duration(i)*time.Second), 49983, team
		facts, pods = append(facts, f), append(pods, with(warmPod(name), func(p *Pod) { p.Used = true }))
	}
	s := newSimAt(t, 2, start)
	s.recover([]Pool{pressurePool(2)}, pods, facts...)
	require.Equal(t, []string{"id1"}, idsOf(s.presses()))
}

// BenchmarkPressure: what a look at a pool with 10,000 sandboxes that are asleep costs the core, which is due each second:
// if none is to be stopped, and if four are.
func BenchmarkPressure(b *testing.B) {
	const sleepers, teams = 10_000, 100
	for name, most := range map[string]int{"fits": sleepers, "over": sleepers / 2} {
		b.Run(name, func(b *testing.B) {
			s := newBenchSim(b)
			pool := changed(pressurePool(most), func(p *Pool) { p.Key.Name = "pool" })
			st := State{Nodes: []string{"n1"}, Pools: []Pool{pool}}
			for i := range sleepers {
				key := PodKey{Namespace: "ns", Name: fmt.Sprint("pod-", i), UID: fmt.Sprint("uid-", i)}
				ip := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
				st.Pods = append(st.Pods, Pod{Key: key, Pool: "pool", Node: "n1", IP: ip, Template: "t1", Version: "1", Ready: true, Used: true})
				st.Objects = append(st.Objects, Sandbox{
					Binding: Binding{ID: benchID(i), ClaimedAt: start.Wall, Team: fmt.Sprint("team-", i%teams), Agent: Agent{Port: 49983}},
					Pool:    pool.Key, Pod: key, IP: ip, Phase: Asleep, AsleepAt: start.Wall.Add(time.Duration(i) * time.Millisecond),
					Revision: Revision{Term: 1, Counter: uint64(i) + 1},
				})
			}
			var err error
			s.core, err = New(s.core.cfg, s.now)
			require.NoError(b, err)
			_, err = s.core.Recover(st)
			require.NoError(b, err)
			for b.Loop() {
				s.core.relieve()
				b.StopTimer()
				s.now.Boot += time.Second
				for _, e := range of[WriteArchive](s.do(Tick{})) {
					s.do(ArchiveWritten{ID: e.Sandbox.ID, Order: e.Sandbox.Revision, Err: errStoreFull})
				}
				b.StartTimer()
			}
		})
	}
}
