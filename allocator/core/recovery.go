package core

import (
	"fmt"
	"maps"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/api/activity"
)

// State is what exists when a term begins. It is read after the journal was taken over: first the
// journal, then the rest.
type State struct {
	// Facts are the latest of the journal, of each thing.
	Facts []Fact
	// Records are the Sandbox objects.
	Records []Sandbox
	Pools   []Pool
	// Nodes are those that are usable.
	Nodes []string
	Pods  []Pod
}

// Recover gives a new Core the state that exists. It is called once, before Step. An error means
// that the records contradict each other and that an operator must repair them.
func (c *Core) Recover(st State) ([]Effect, error) {
	c.recovering = true
	if err := c.recoverSandboxes(st); err != nil {
		return nil, err
	}
	for _, n := range st.Nodes {
		c.nodeSeen(n, true)
	}
	for _, p := range st.Pools {
		c.poolSeen(p)
	}
	for _, p := range st.Pods {
		c.podSeen(p)
	}
	for _, s := range c.sorted() {
		if s.recorded.Less(s.Revision) {
			c.emit(Record{Sandbox: s.Sandbox})
		}
		switch gone := c.pods[s.Pod] == nil; {
		case s.Phase == Ended:
		case s.Phase == Released && gone:
			c.startFence(s)
		case s.Phase != Released && len(s.doubles) > 0:
			c.lost(s, ReasonDuplicate)
		case gone:
			c.lost(s, ReasonPodGone)
		case s.Phase == Starting:
			c.emit(StartSandbox{s.Sandbox})
		}
	}
	for _, key := range slices.SortedFunc(maps.Keys(c.discards), comparePods) {
		if c.pods[key] == nil {
			c.advanceDiscard(key)
		}
	}
	c.recovering = false
	for _, p := range c.sortedPools() {
		if !p.known { // its object is gone, only its pods are left
			p.Deleting = true
		}
		p.touch()
	}
	return c.take(), nil
}

// recoverSandboxes merges the journal and the objects: of each sandbox the higher revision counts.
func (c *Core) recoverSandboxes(st State) error {
	for _, r := range st.Records {
		c.sandboxes[r.ID] = &sandbox{Sandbox: r, recorded: r.Revision}
	}
	there := make(map[PodKey]bool, len(st.Pods))
	for _, p := range st.Pods {
		there[p.Key] = true
	}
	var doubles []Fact
	for _, f := range st.Facts {
		switch {
		case f.Session != "": // below
			continue
		case f.Sandbox == nil:
			c.discards[f.Discard] = &discard{revision: f.Revision, durable: true}
			if f.After != "" {
				doubles = append(doubles, f)
			}
			continue
		}
		s := c.sandboxes[f.Sandbox.ID]
		if s == nil && f.Sandbox.Phase == Released && !there[f.Sandbox.Pod] && c.now.Wall.Sub(f.Sandbox.EndedAt) > c.cfg.KeepEndedFor {
			// Its record was dropped, and no later fact has overwritten its slot.
			c.emit(Settle{ID: f.Sandbox.ID, Revision: f.Revision})
			continue
		}
		if s == nil {
			s = &sandbox{}
			c.sandboxes[f.Sandbox.ID] = s
		} else if s.Pod != f.Sandbox.Pod || s.IP != f.Sandbox.IP {
			// A claim is never changed, so an allocator did not write one of the two.
			other := *f.Sandbox
			if s.Revision.Less(f.Revision) {
				other = s.Sandbox
			}
			s.double(other.Pod, other.IP)
			c.emit(Repaired{Pod: other.Pod, What: "the journal and a Sandbox object name different pods, or addresses, for one sandbox: none of them is used any more"})
		}
		if s.Revision.Less(f.Revision) {
			shown := s.LastActive // the journal does not have it
			s.Sandbox = *f.Sandbox
			s.LastActive = shown
		} else {
			c.emit(Settle{ID: s.ID, Revision: f.Revision})
		}
	}
	for _, f := range doubles { // an earlier leader found them; discardDoubles renews the intents
		if s := c.sandboxes[f.After]; s != nil {
			for _, at := range f.At {
				s.double(f.Discard, at)
			}
		}
	}
	for _, s := range c.sorted() {
		if other := c.holds[s.Pod]; other != nil {
			return contradiction(other, s, s.Pod)
		}
		c.add(s)
		if s.IdempotencyKey != "" {
			c.keys[s.claimKey()] = &keyed{hash: s.RequestHash, sandbox: s}
		}
		switch s.Phase {
		case Released, Ended:
			s.endedAt = c.now.Boot - c.now.Wall.Sub(s.EndedAt)
			c.keyEnds(s)
			if s.Phase == Ended {
				s.elem = c.ended.PushBack(s)
			}
		case Starting, Running, Releasing:
			s.Phase = max(s.Phase, Starting)
			c.times(s)
			s.at, s.kind = c.now.Boot, activity.Claim
			if s.Phase == Running {
				c.recoverActivity(s)
			}
			c.schedule(s)
		}
	}
	slices.SortFunc(c.live, func(a, b *sandbox) int { return byClaim(a, b.mark()) })
	for _, f := range st.Facts {
		if f.Session != "" {
			c.recoverSession(f)
		}
	}
	for _, s := range c.sorted() {
		for _, d := range s.doubles {
			if other := c.holds[d.pod]; other != nil && other != s {
				return contradiction(other, s, d.pod)
			}
		}
		c.discardDoubles(s)
	}
	return nil
}

func contradiction(one, other *sandbox, pod PodKey) error {
	return fmt.Errorf("core: sandboxes %s and %s are both on record with pod %s (UID %s): this is not of our making; delete the Sandbox object that is wrong", one.ID, other.ID, pod.Name, pod.UID)
}

// recoverSession restores a session of an earlier term, its end, or its declaration.
func (c *Core) recoverSession(f Fact) {
	switch {
	case f.Declared != nil:
		c.members.Ban(f.Session, member.Revision(f.Revision), 0, c.now.Boot)
		return
	case f.Left: // the objects may not show yet what it left open
		c.leftovers = append(c.leftovers, &leftover{session: f.Session, since: c.now.Boot, until: c.now.Boot + c.cfg.expiry(), upTo: c.lastRouteSeq})
		c.settleLater(Settle{Session: f.Session, Revision: f.Revision})
		return
	}
	c.addSession(member.Session{ID: f.Session, From: f.From, Durable: true, Earlier: f.Earlier, LastPing: c.now.Boot + c.cfg.Lease})
}
