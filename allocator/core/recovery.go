package core

// State is what exists when a term begins. It is read after the journal was taken over: first the
// journal, then the rest.
type State struct {
	// Facts are the latest of the journal, of each thing.
	Facts []Fact
	// Objects are the Sandbox objects.
	Objects []Sandbox
	Pools   []Pool
	// Nodes are those that are usable, Cordoned those that would be if they were not cordoned.
	Nodes, Cordoned []string
	Pods            []Pod
}

// Recover gives a new Core the state that exists. It is called once, before Step. An error means
// that the records contradict each other and that an operator must repair them.
//
// The order matters. Sandboxes come first: a pod that one of them has on record is used, whatever the pod shows. Nodes
// and pools come before pods, because they say whether a pod may be handed out. Until pods.Recovered no pod counts as
// failed. Pools are adjusted in endStep only, when they know all of their pods.
func (c *Core) Recover(st State) ([]Effect, error) {
	c.pods.Recover()
	if err := c.recoverSandboxes(st); err != nil {
		return nil, err
	}
	for _, n := range st.Nodes {
		c.pods.NodeSeen(n, true, false)
	}
	for _, n := range st.Cordoned {
		c.pods.NodeSeen(n, false, true)
	}
	for _, p := range st.Pools {
		c.pools.Observe(p)
	}
	for _, p := range st.Pods {
		c.podSeen(p)
		c.heed()
	}
	for _, sb := range c.sandboxes.ByEnd() {
		if c.sandboxes.Resume(sb) {
			c.startFence(sb)
		}
	}
	c.heed()
	c.pods.Recovered()
	for _, pool := range c.pools.Sorted() {
		c.pools.Recovered(pool)
	}
	return c.endStep(), nil
}

// recoverSandboxes merges the journal and the objects, and recovers what was merged. How long a sandbox may have been
// in use unseen depends on the longest max-stale of a router. So that is read before the sandboxes are recovered.
func (c *Core) recoverSandboxes(st State) error {
	for _, r := range st.Objects {
		c.sandboxes.MergeObject(r)
	}
	c.mergeFacts(st)
	for _, f := range st.Facts {
		if s, ok := f.Subject.(*SessionFact); ok && !s.Egress {
			c.routers.longest = max(c.routers.longest, s.MaxStale)
		}
	}
	for _, sb := range c.sandboxes.ByEnd() {
		if err := c.sandboxes.Recover(sb, recoveryMargin+2*c.cfg.expiry(c.routers.longest, false)); err != nil {
			return err
		}
		c.claims.Recovered(sb)
	}
	for _, f := range st.Facts {
		if s, ok := f.Subject.(*SessionFact); ok {
			c.routers.recover(s, f.Revision)
		}
	}
	for _, sb := range c.sandboxes.ByEnd() {
		if err := c.sandboxes.RetireConflicts(sb); err != nil {
			return err
		}
	}
	return nil
}

// mergeFacts merges the journal into what the objects show.
func (c *Core) mergeFacts(st State) {
	there := make(map[PodKey]bool, len(st.Pods))
	for _, p := range st.Pods {
		there[p.Key] = true
	}
	var conflicts []*RetirementFact
	for _, f := range st.Facts {
		switch s := f.Subject.(type) {
		case *SandboxFact:
			c.sandboxes.MergeFact(s, there[s.Pod], c.cfg.KeepEndedFor)
		case *RetirementFact:
			c.pods.RecoverRetirement(s.Pod, f.Revision)
			if s.After != "" {
				conflicts = append(conflicts, s)
			}
		}
	}
	for _, f := range conflicts { // an earlier leader found them; RetireConflicts renews the intents
		c.sandboxes.MergeConflict(f)
	}
}
