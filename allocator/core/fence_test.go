package core

import (
	"net/netip"
	"testing"
)

// The deposed leader may answer pings for a lease. A router that has reached the new one
// in between, and has heard nothing from it, may go back there.
func TestARouterThatIsHeardOfIsNotWaitedForLessThanBefore(t *testing.T) {
	s := newSimAt(t, 2, start)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")}, on("a-1", "x"), Fact{Revision: Revision{1, 1}, Session: "r"})
	s.step(SessionJoined{Session: "r", Stream: 1})
	s.step(SessionLeft{Session: "r", Stream: 1})
	s.release("x")
	if after := s.deletedAfter(key("a-1"), never); after < lease+maxStale+window {
		t.Errorf("deleted %v after the term began; the router may have been made fresh by the deposed leader until %v, and needs the window, %v", after, lease+maxStale, window)
	}
}

// A claimed pod's status loses its address for a while (podIP is empty while its
// sandbox is made anew), and the network may give the address to another pod.
func TestASandboxWhosePodHasLostItsAddressIsReleased(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(5)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	sb := s.claim()
	s.step(PodSeen{with(warmPod("a-1"), func(p *Pod) { p.IP, p.Ready = netip.Addr{}, false })})
	if r := one[SandboxReleased](s); r.Sandbox.ID != sb.ID || r.Sandbox.Reason != ReasonPodMoved {
		t.Errorf("released %+v", r)
	}
	if running := s.core.Running(); len(running) != 0 {
		t.Errorf("routers are told %v", running)
	}
}

// A router reports its neighbour dead and pings; the pong makes it remove the lock file
// (link.buried). If the leader ended before that it has left is durable, nobody could
// prove its death to the next one.
func TestADeathIsConfirmedOnceItIsDurable(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{specA(1)}, []Pod{warmPod("a-1")})
	s.join("r", 1)
	s.join("x", 2)
	s.slow = true
	s.step(SessionDead{Session: "x", By: "r"})
	s.step(SessionPing{Session: "r", Stream: 1, Nonce: 7})
	none[SendPong](s)
	s.written()
	if p := one[SendPong](s); p.Stream != 1 || p.Nonce != 7 {
		t.Errorf("pong %+v", p)
	}
}

// The pool keeps sandboxes over restarts; a pod restarts, which is fine. The pool is
// edited to end sandboxes with a restart. The next observation of that pod, which has
// not restarted since, ends the sandbox.
func TestARestartThatWasAllowedEndsNothingLater(t *testing.T) {
	s := newSim(t)
	keep := specA(1)
	keep.KeepOnRestart = true
	s.recover([]Pool{keep}, []Pod{warmPod("a-1")})
	s.claim()
	again := with(warmPod("a-1"), func(p *Pod) { p.Restarts = 1 })
	s.step(PodSeen{again})
	s.step(PoolSeen{specA(1)})
	none[SandboxReleased](s)
	s.step(PodSeen{again})
	none[SandboxReleased](s)
}
