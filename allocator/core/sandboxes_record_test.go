package core

import (
	"testing"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// The next leader goes by the object: requests must not reach it before its hook has
// been answered.
func TestNewEndOfStartingSandboxKeepsItsPhase(t *testing.T) {
	s := newSim(t)
	s.recover([]Pool{changed(specA(1), func(p *Pool) { p.PostStart = true })}, []Pod{warmPod("a-1")})
	s.step(Claim{Token: 1, Pool: poolA})
	id := one[StartSandbox](s).Sandbox.ID
	s.slow = true
	s.step(SetTimeout{Scope: everyTeam, Token: 2, ID: id, Lifetime: time.Minute})
	s.step(Release{Scope: everyTeam, Token: 3, ID: id, Reason: fact.ReasonKilled})
	s.effects = s.stepCore(Written{})
	if r := one[WriteObject](s).Sandbox; r.Phase != Starting {
		t.Errorf("recorded in phase %d", r.Phase)
	}
}
