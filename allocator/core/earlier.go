package core

import (
	"slices"
	"time"
)

// A journal that was begun anew, after a loss or after it was restored from a backup,
// does not say which routers there were, which sandboxes they knew, and at which
// addresses. So one session stands for all routers of the earlier journal. It is a fact
// like any other session, and no router speaks for it: each fence waits for it until it
// expires, or an operator declares it dead, and so does each verdict that a sandbox is
// idle. While it is there
//
//   - no pod is handed out, because a sandbox that is on no record may have had its
//     address;
//   - idle pods that have an address are kept, because the next pod, which may be
//     anyone's, would get it. They are deleted when the session ends: a sandbox that is on
//     no record may have used them, or requests for it may have reached them.
//
// Sandboxes that are on record go on: routers are told of them as always.

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

// earlierLives acts on the word of a router that it may still serve what it knows from
// another journal: others may, too.
func (c *Core) earlierLives(journal string) {
	if c.sessions[EarlierSession(journal)] != nil || c.sessions[EarlierSession("")] != nil {
		return
	}
	// It counts at once, and not only when it is durable: what is there can only be waited
	// for too long.
	s := &session{id: EarlierSession(journal), from: EarlierFrom, durable: true, knows: c.told, lastPing: max(c.now.Boot, c.started.Boot+c.cfg.Lease)}
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

// expiryOf is how long after it was heard last a session is waited for. For one of an
// earlier journal the window is in it: unlike a fence, nothing waits for that besides.
func (c *Core) expiryOf(s *session) time.Duration {
	if s.earlier {
		return c.expiry() + c.cfg.Window
	}
	return c.expiry()
}

// quarantine is for how long no pod is handed out yet, if it is not ended before.
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

// Quarantine is for how long no pod is handed out yet, because routers of an earlier
// journal may serve what they know; 0: pods are handed out.
func (c *Core) Quarantine() time.Duration { return max(0, c.quarantine()) }

// discardEarly takes the idle pods out of use that had an address while the last session
// of an earlier journal was there. That must be durable no later than its end: the next
// leader would not know. A session whose declaration is on its way into the journal may
// end before this one or after it, so it is no reason to wait.
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
