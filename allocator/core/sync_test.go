package core

import "testing"

func labelled(metadata string) func(*Pod) { return func(p *Pod) { p.Metadata = metadata } }

func TestChangedLabelsReachIdlePodsAndNoOthers(t *testing.T) {
	s := newSim(t)
	p := specA(2)
	p.Metadata = "m1"
	m1 := labelled("m1")
	s.recover([]Pool{p}, []Pod{with(warmPod("a-1"), m1), with(warmPod("a-2"), m1), with(with(warmPod("a-3"), m1), old)})
	none[SyncPod](s)
	given := s.claim()
	rest := key("a-2")
	if given.Pod == rest {
		rest = key("a-1")
	}
	p.Metadata = "m2"
	s.step(PoolSeen{p})
	none[DeletePod](s)
	if got := one[SyncPod](s); got != (SyncPod{Pod: rest, Pool: poolA}) { // not the outdated one, which is replaced
		t.Errorf("%+v", got)
	}
	s.step(PodSeen{with(warmPod(rest.Name), m1)}) // it is under way
	none[SyncPod](s)
	s.step(PodSeen{with(warmPod(rest.Name), labelled("m2"))})
	none[SyncPod](s)
	s.step(PodSeen{with(warmPod(rest.Name), m1)}) // by another client
	one[SyncPod](s)
}

func TestNextLeaderSyncsLabels(t *testing.T) {
	s := newSim(t)
	p := specA(1)
	p.Metadata = "m2"
	s.recover([]Pool{p}, []Pod{with(warmPod("a-1"), labelled("m1")), warmPod("a-2")}, on("a-2", "x"))
	if got := one[SyncPod](s); got.Pod != key("a-1") {
		t.Errorf("%+v", got)
	}
}

// The template changes back before the watch shows what became of the first change.
func TestLabelsThatChangeBackAreSynced(t *testing.T) {
	s := newSim(t)
	p := specA(1)
	s.recover([]Pool{p}, []Pod{warmPod("a-1")})
	p.Metadata = "m1"
	s.step(PoolSeen{p})
	one[SyncPod](s)
	p.Metadata = ""
	s.step(PoolSeen{p})
	none[SyncPod](s)
	s.step(PodSeen{with(warmPod("a-1"), labelled("m1"))})
	one[SyncPod](s)
	s.step(PodSeen{warmPod("a-1")})
	p.Metadata = "m1"
	s.step(PoolSeen{p})
	one[SyncPod](s)
}

func TestPodOfAWithdrawnClaimIsSynced(t *testing.T) {
	s := newSim(t)
	s.slow = true
	p := specA(1)
	s.recover([]Pool{p}, []Pod{warmPod("a-1")})
	s.step(SessionJoined{Session: "r", Stream: 1}) // keeps the writer busy
	s.step(Claim{Token: 1, Pool: poolA, Wait: wait})
	p.Metadata = "m1"
	s.step(PoolSeen{p})
	none[SyncPod](s)
	s.step(ClaimAbandoned{Token: 1})
	one[SyncPod](s)
}
