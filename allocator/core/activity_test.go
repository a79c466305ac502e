package core

import (
	"fmt"
	"math"
	"net/netip"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
	"github.com/berth-sandbox/berth/api/activity"
)

// What people see of activity.

func TestActivityIsPersistedOnceAMinute(t *testing.T) {
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

func TestActivityWithoutIdleTimeoutIsNotPersisted(t *testing.T) {
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
	if list := s.activities(everySandbox, 9); len(list) != 1 || list[0].Kind != activity.Admission || list[0].Router != "r" || list[0].Next != "" {
		t.Errorf("shown as %+v", list)
	}
}

// When a thousand are due at once, each is written, at a bounded rate.
func TestManyActivitiesArePersistedInTurn(t *testing.T) {
	const all = 1000
	s := newSim(t)
	s.unchecked = true // but once in each second
	var facts []Fact
	var pods []Pod
	var report Report
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%04d", i))
		sandboxOf(f).Pod, sandboxOf(f).IdleTimeout, sandboxOf(f).IP = key(name), time.Hour, address(i)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
		report.Activities = append(report.Activities, Activity{ID: sandboxOf(f).ID})
	}
	s.recover([]Pool{changed(specA(0), func(p *Pool) { p.IdleTimeout = time.Hour })}, pods, facts...)
	for _, f := range facts {
		s.step(ObjectWritten{ID: sandboxOf(f).ID, Revision: f.Revision})
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
		checkTables(t, s.core)
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

// address returns a different address for each of many pods.
func address(i int) netip.Addr { return netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}) }

func TestActivitiesListsTheOldestSandboxesFirst(t *testing.T) {
	const all = 5000
	s := newSim(t)
	var facts []Fact
	var pods []Pod
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%04d", i*7919%all))
		sandboxOf(f).Pod, sandboxOf(f).IP = key(name), address(i)
		sandboxOf(f).ClaimedAt = start.Wall.Add(time.Duration(i*7919%all) * time.Millisecond)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{specA(0)}, pods, facts...)
	for _, most := range []int{0, 1, 100, all - 1, all, all + 1} {
		part := s.core.View().Activities(sandboxes.Everything(), Mark{}, everySandbox, most, math.MaxInt)
		list, others := part.List, part.Others
		if len(list) != min(most, all) || others != all-len(list) {
			t.Errorf("of %d at most %d are listed, and %d others", most, len(list), others)
		}
		for i, st := range list {
			if st.Sandbox.ID != fmt.Sprintf("id%04d", i) {
				t.Fatalf("at %d of %d is %s", i, most, st.Sandbox.ID)
			}
		}
	}
	if list := s.activities(only("id0042"), 10); len(list) != 1 {
		t.Errorf("%d are listed", len(list))
	}
}

// A page must cost what it returns, however many sandboxes other teams and pools have.
func TestSelectionHasItsTeamAndPoolOnly(t *testing.T) {
	const all = 60
	s := newSim(t)
	var facts []Fact
	var pods []Pod
	for i := range all {
		name := fmt.Sprintf("a-%d", i)
		f := on("a-1", fmt.Sprintf("id%02d", i))
		sandboxOf(f).Pod, sandboxOf(f).IP, sandboxOf(f).Team = key(name), address(i), fmt.Sprint("team-", i%3)
		sandboxOf(f).ClaimedAt = start.Wall.Add(time.Duration(i) * time.Millisecond)
		facts = append(facts, f)
		pods = append(pods, with(warmPod("a-1"), func(p *Pod) { p.Key, p.IP, p.Used = key(name), address(i), true }))
	}
	s.recover([]Pool{specA(0)}, pods, facts...)
	v := s.core.View()
	one := Scope{Team: "team-1"}
	for sel, want := range map[Selection]int{
		sandboxes.Everything(): all, {Scope: Scope{All: true, Team: "x"}, Pool: poolA}: all, {Scope: one}: all / 3, {Scope: one, Pool: poolA}: all / 3,
		{Scope: one, Pool: PoolKey{Name: "other"}}: 0, {}: 0, {Scope: Scope{Team: "other"}}: 0,
	} {
		if p := v.List(Query{Selection: sel, Live: true, Most: all}); len(p.List) != want || p.More {
			t.Errorf("%+v: %d sandboxes, %v more; want %d", sel, len(p.List), p.More, want)
		}
		if scanned := v.Activities(sel, Mark{}, everySandbox, all, want); len(scanned.List) != want || !scanned.Done {
			t.Errorf("%+v: it passes over sandboxes that it does not have: %d, %v", sel, len(scanned.List), scanned.Done)
		}
	}
	if part := v.Activities(Selection{Scope: one}, Mark{}, everySandbox, all, 7); len(part.List) != 7 || part.Done || part.Next.ID != part.List[6].Sandbox.ID {
		t.Errorf("a part of 7 has %d, and continues after %s", len(part.List), part.Next.ID)
	}

	// A sandbox of another team is unknown to every call.
	others := sandboxOf(facts[0]).ID
	s.step(Release{Token: 1, Scope: one, ID: others})
	s.step(KeepAlive{Token: 2, Scope: one, ID: others})
	s.step(SetTimeout{Token: 3, Scope: Scope{}, ID: others, Lifetime: time.Hour})
	if _, known := v.Activity(others, one); known {
		t.Error("its activity is shown")
	}
	if sb, _ := v.Sandbox(others); sb.Phase != Running {
		t.Error("it was released")
	}
	s.step(Release{Token: 4, Scope: Scope{Team: "team-0"}, ID: others})
	if sb, _ := v.Sandbox(others); sb.Phase < Releasing {
		t.Error("its own team cannot release it")
	}
}
