package core

import (
	"slices"
	"time"
)

// A journal begins anew after a loss, or after a restore from a backup. It does not say which
// routers had sessions before, which sandboxes they knew, and at which addresses. One session
// stands for all routers of the earlier journal. It is a fact like any other session. No router
// speaks for it: every fence waits for it until it expires or an operator declares it dead, and
// so does every verdict that a sandbox is idle. While the session lasts:
//
//   - No pod is handed out. A sandbox that is on no record may have had the pod's address.
//   - Idle pods that have an address are kept. If one were deleted, the pod that gets its
//     address next would receive the requests of a sandbox that is on no record. They are
//     deleted when the session ends, because such a sandbox may have used them.
//
// Sandboxes that are on record are served as always.

// EarlierSession names the session that stands for all routers of an earlier journal, by
// its ID, "" if that is lost.
func EarlierSession(journal string) string {
	if journal == "" {
		journal = "unknown"
	}
	return "earlier-journal-" + journal
}

// EarlierFrom is where that session is said to have joined from.
const EarlierFrom = "every router of the earlier journal"

// addEarlier makes such a session known.
func (c *Core) addEarlier(s *session) {
	s.earlier = true
	c.earlier++
	c.addSession(s)
}

// earlierLives begins the session of an earlier journal. A router has reported that it may still
// serve routes of that journal, so other routers may do so too.
func (c *Core) earlierLives(journal string) {
	if c.sessions[EarlierSession(journal)] != nil || c.sessions[EarlierSession("")] != nil {
		return
	}
	// The session counts at once, not only when it is durable. The worst consequence is a wait
	// that is too long.
	s := &session{id: EarlierSession(journal), from: EarlierFrom, durable: true, seenUpTo: c.lastRouteSeq, lastPing: max(c.now.Boot, c.started.Boot+c.cfg.Lease)}
	c.endRound(false)
	c.addEarlier(s)
	c.commit(Fact{Session: s.id, From: s.from, Earlier: true}, true, func(Fact, time.Duration) {})
	c.fences.Await(s.id)
	for _, p := range c.sortedPools() {
		for _, q := range sortedPods(p.pods) {
			q.early = q.early || q.place != nil && q.sandbox == nil
			c.consider(q)
		}
	}
}

// expiryOf is how long after its last ping a session expires. For the session of an earlier
// journal it includes the connect window, because pods that are handed out after its end have no
// fence that waits for the window.
func (c *Core) expiryOf(s *session) time.Duration {
	if s.earlier {
		return c.expiry() + c.cfg.Window
	}
	return c.expiry()
}

// quarantine is how long no pod is handed out yet, unless the session ends before.
func (c *Core) quarantine() (left time.Duration) {
	if c.earlier == 0 {
		return 0
	}
	for _, s := range c.byID {
		if s.earlier {
			left = max(left, s.lastPing+c.expiryOf(s)-c.now.Boot)
		}
	}
	return left
}

// Quarantine is how long no pod is handed out yet, because routers may serve routes of an earlier
// journal. 0: pods are handed out.
func (c *Core) Quarantine() time.Duration { return max(0, c.quarantine()) }

// discardEarly takes idle pods out of use that had an address while the last session of an earlier
// journal lasted. That intent must be durable no later than the end of the session, because the
// next leader cannot know it otherwise. Other sessions of earlier journals count only if they
// are not declared dead: a declaration on its way into the journal may end them at any time.
func (c *Core) discardEarly(ends *session) {
	if !ends.earlier || slices.ContainsFunc(c.byID, func(s *session) bool { return s != ends && s.earlier && s.declared == nil }) {
		return
	}
	for _, p := range c.sortedPools() {
		for _, q := range sortedPods(p.pods) {
			if q.early && q.sandbox == nil && !q.reached {
				q.change(func() { q.reached = true })
				c.consider(q)
			}
		}
	}
}
