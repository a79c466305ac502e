package warm

// Spec is what a pool asks for.
type Spec struct {
	// Warm is how many warm pods it should have.
	Warm int
	// Lacking is how many pods its waiting claims still need. It creates them in addition.
	Lacking int
	// Spare is how many pods more it does not delete, although it does not create them.
	Spare int
	// MaxPods bounds its pods in all states; 0: no bound.
	MaxPods int
	// MaxSurge bounds the pods that start: created and not ready; 0: no bound.
	MaxSurge int
	// MaxUnavailable is how many warm pods may be missing while others replace outdated ones.
	MaxUnavailable int
	// Window bounds the creations under way.
	Window int
	// Held is how many pods ended early and are not replaced yet.
	Held int
	// Retrying: no pod is created now, because a creation failed a short while ago.
	Retrying bool
	// Paused: idle pods are neither created nor deleted.
	Paused bool
	// Refused: no pod may be created from the current template.
	Refused bool
}

// Counts are the pods of a pool. A pod is outdated if it was created from an older template. It is
// stranded if it is pending, and the pool creates another pod for it.
type Counts struct {
	Creating        int // asked for, and not seen yet
	Pending         int // not ready
	OutdatedPending int // of Pending
	Stranded        int // of Pending
	Coming          int // of Pending: neither outdated nor stranded
	Warm            int // current ones
	OutdatedWarm    int
	InUse           int // by claims and sandboxes
	Deleting        int
	Recycling       int // pods of released sandboxes that become pending again
	Total           int // that exist, in all states
}

// Plan is what a pool does to reach its spec. Pods are created, and idle pods are deleted.
type Plan struct {
	Create int
	// Stranded is how many stranded pods are deleted at most, to make room for new ones. Current
	// pods go before outdated ones.
	Stranded int
	// OutdatedPending: all pods that are not ready and outdated are deleted. AllPending: all pods
	// that are not ready are.
	OutdatedPending, AllPending bool
	// OutdatedWarm is how many outdated warm pods are deleted, the oldest first.
	OutdatedWarm int
	// Coming is how many current pods are deleted that are neither ready nor stranded.
	Coming int
	// Warm is how many current warm pods are deleted, the oldest first.
	Warm int
}

// Retires reports whether the plan deletes pods.
func (p Plan) Retires() bool {
	return p.OutdatedPending || p.AllPending || p.Stranded+p.OutdatedWarm+p.Coming+p.Warm > 0
}

// Wanted is how many warm pods a pool should have, as far as MaxPods leaves room beside the pods
// in use.
func (s Spec) Wanted(inUse int) int {
	return s.room(s.Warm, inUse)
}

// room is how many of these pods there is room for beside the pods in use.
func (s Spec) room(pods, inUse int) int {
	if s.MaxPods == 0 {
		return pods
	}
	return max(0, min(pods, s.MaxPods-inUse))
}

// idle is how many current pods are warm or will be.
func (n Counts) idle() int { return n.Creating + n.Recycling + n.Coming + n.Warm }

// kept is how many idle pods the pool keeps.
func (s Spec) kept(inUse int) int { return s.room(s.Warm+s.Lacking+s.Spare, inUse) }

// Keeps reports whether the pool keeps one more pod that becomes warm again.
func (s Spec) Keeps(n Counts) bool { return n.idle() < s.kept(n.InUse) }

// PlanFor decides what a pool does. After the plan is carried out, the plan for the new counts is
// empty. Surplus pods go in this order: outdated pods that are not ready; outdated warm pods as far
// as current warm pods replace them; current pods that are not ready; the oldest warm pods. Claims take
// the oldest pods too, so what is left is as far as possible from what ages in a pod: its memory, its
// image, what it has cached. Stranded pods go when enough others are warm.
func PlanFor(s Spec, n Counts) (p Plan) {
	wanted, warm := s.room(s.Warm+s.Lacking, n.InUse), n.Warm+n.OutdatedWarm
	if s.Refused { // warm pods of an earlier template are kept as far as they are wanted
		return Plan{AllPending: n.Pending > 0, OutdatedWarm: max(0, n.OutdatedWarm-s.Wanted(n.InUse)), Warm: n.Warm}
	}
	if s.Paused {
		return p
	}
	// Stranded pods do not count.
	idle := n.idle()
	if !s.Retrying {
		missing := s.Warm + s.Lacking - idle - s.Held
		if room := s.MaxPods - n.Total - n.Creating; s.MaxPods > 0 && missing > room {
			if wanted > warm {
				p.Stranded = max(0, min(n.Stranded, missing-room-n.Deleting))
			}
			missing = room
		}
		if s.MaxSurge > 0 {
			missing = min(missing, s.MaxSurge-n.Creating-n.Coming)
		}
		p.Create = max(0, min(missing, s.Window-n.Creating))
	}
	if n.Stranded > 0 && warm >= wanted {
		p.Stranded = n.Stranded
	}
	p.OutdatedPending = n.OutdatedPending > 0
	if n.OutdatedWarm > 0 {
		p.OutdatedWarm = max(0, min(warm-wanted+s.MaxUnavailable, n.OutdatedWarm))
		full := s.MaxPods > 0 && n.Total+n.Creating+p.Create >= s.MaxPods
		underWay := n.Creating + n.Recycling + p.Create + p.Stranded + n.Coming + n.OutdatedPending + n.Deleting
		if p.OutdatedWarm == 0 && full && underWay == 0 {
			// There is no room for a replacement, so one pod at a time makes room.
			if n.Stranded > 0 {
				p.Stranded = 1
			} else {
				p.OutdatedWarm = 1
			}
		}
	}
	kept := s.kept(n.InUse)
	if surplus := idle - kept; surplus > 0 {
		p.Coming = min(surplus, n.Coming)
		// Pods that are still being created cannot be deleted.
		p.Warm = max(0, min(surplus-p.Coming, n.Warm-kept))
	}
	return p
}
