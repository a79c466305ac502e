package core

import (
	"time"

	"github.com/berth-sandbox/berth/allocator/core/member"
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

// EarlierPrefix begins the IDs of such sessions. No router has such an ID.
const EarlierPrefix = "earlier-journal-"

// EarlierSession names the session that stands for all routers of an earlier journal, by
// its ID, "" if that is lost.
func EarlierSession(journal string) string {
	if journal == "" {
		journal = "unknown"
	}
	return EarlierPrefix + journal
}

// EarlierFrom is where that session is said to have joined from.
const EarlierFrom = "every router of the earlier journal"

// earlierLives begins the session of an earlier journal. A router has reported that it may still
// serve routes of that journal, so other routers may do so too, and for as long as that one.
func (c *Core) earlierLives(ev EarlierSeen) {
	r := c.routers
	r.longest = max(r.longest, ev.MaxStale)
	s := r.members.Get(EarlierSession(ev.Journal))
	if s == nil {
		s = r.members.Get(EarlierSession(""))
	}
	isNew := s == nil
	switch {
	case isNew:
		s = r.know(member.Session{
			ID: EarlierSession(ev.Journal), From: EarlierFrom, Durable: true, Earlier: true, MaxStale: r.longest,
			LastPing: max(c.Now.Boot, c.started.Boot+c.cfg.Lease),
		})
	case !r.members.Learn(s, ev.MaxStale, Gateway{}):
		return
	}
	// The session counts at once, not only when it is durable. The worst consequence is a wait
	// that is too long.
	f := r.factOf(s)
	f.From, f.Earlier = s.From, true
	c.outbox.Commit(c.Now.Boot, f, true, func(Revision, time.Duration) {
		if !isNew {
			r.members.Learned(s)
		}
	})
	if !isNew {
		return
	}
	c.fences.Await(s.ID)
	c.closings.Await(s.ID)
	c.routers.rulings.Await(s.ID)
	for _, pool := range c.pools.Sorted() {
		c.pods.Quarantine(pool.Group)
	}
}

// retireQuarantined takes idle pods out of use that had an address while a session of an earlier
// journal lasted. That intent must be durable no later than the end of the last such session,
// because the next leader cannot know it otherwise.
func (c *Core) retireQuarantined() {
	for _, pool := range c.pools.Sorted() {
		c.pods.RetireQuarantined(pool.Group)
	}
}
