package core

import (
	"cmp"
	"maps"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core/member"
	"github.com/berth-sandbox/berth/allocator/core/pods"
	"github.com/berth-sandbox/berth/allocator/core/sandboxes"
)

// RouteStatus says whether requests reach a sandbox, and why.
type RouteStatus struct {
	Sandbox Sandbox
	Why     RouteWhy
	// NotReady is why its pod is not ready, "" if it is ready or gone.
	NotReady string
	// Routers are the sessions, by ID and at most maxRouters. Others is how many more there are.
	Routers []RouterOfRoute
	Others  int
	// Fence is set while its fence is not complete.
	Fence *FenceStatus
}

// RouterOfRoute is what a session knows of the latest change of a route.
type RouterOfRoute struct {
	SessionStatus
	// Acknowledged: the route, or its release, has taken effect at the router.
	Acknowledged bool
}

// RouteWhy is why requests reach a sandbox, or do not.
type RouteWhy int

// Why requests reach a sandbox: RouteServed and RouteEnding. Why they do not: the others.
const (
	RouteServed   RouteWhy = iota + 1 // it runs
	RouteEnding                       // its release is on its way into the journal
	RouteStarting                     // its PostStart hook has not succeeded yet
	RouteReaped                       // it was found idle, and its release is on its way into the journal
	RouteLost                         // its pod cannot serve it, and its release is on its way into the journal
	RouteNotBegun                     // it is being released, and did not run before
	RouteReleased
	RouteEnded
	RouteAsleep // it is asleep, or about to be
	RouteWaking // it is about to run
)

// Routable reports whether routers may have the route.
func (w RouteWhy) Routable() bool { return w == RouteServed || w == RouteEnding }

// maxRouters bounds the sessions of a RouteStatus.
const maxRouters = 100

// Route returns the route of a sandbox, or false if there is no such sandbox within the scope.
func (v View) Route(id string, scope Scope) (st RouteStatus, ok bool) {
	sb := v.c.sandboxes.Seen(id, scope)
	if sb == nil {
		return st, false
	}
	st.Sandbox, st.Why = sb.Sandbox, routeWhy(sb)
	if p := v.c.pods.Get(sb.Pod); p != nil && !p.Seen().Ready {
		st.NotReady = p.Seen().Why
		if st.NotReady == "" {
			st.NotReady = "it is not Ready"
		}
	}
	if sb.Phase == Released && !v.c.fences.Complete(id) {
		fence := v.fenceOf(sb)
		st.Fence = &fence
	}
	if !st.Why.Routable() && st.Fence == nil {
		return st, true
	}
	waiting := maps.Collect(v.c.fences.Waiting(id))
	all := slices.DeleteFunc(slices.Clone(v.c.routers.members.All()), func(s *member.Session) bool { return !s.Has(sb.Agent) })
	for _, s := range all[:min(maxRouters, len(all))] {
		router := RouterOfRoute{SessionStatus: v.statusOf(s), Acknowledged: s.Acknowledges(id)}
		if st.Fence != nil {
			_, waits := waiting[s.ID]
			router.Acknowledged = !waits
		}
		st.Routers = append(st.Routers, router)
	}
	st.Others = len(all) - len(st.Routers)
	return st, true
}

func routeWhy(sb *sandboxes.Sandbox) RouteWhy {
	switch {
	case sb.Phase == Ended:
		return RouteEnded
	case sb.Phase == Released:
		return RouteReleased
	case sb.Routable() && sb.Phase == Running:
		return RouteServed
	case sb.Routable():
		return RouteEnding
	case sb.IsLost():
		return RouteLost
	case sb.FoundIdle():
		return RouteReaped
	case sb.Phase == Starting:
		return RouteStarting
	case sb.Lives() && sb.Wakes():
		return RouteWaking
	case sb.Lives() && sb.Sleeps():
		return RouteAsleep
	}
	return RouteNotBegun
}

// PendingPods lists the pods of a pool that are not ready, at most so many, and first those of which
// it is known why. It returns how many more there are.
func (v View) PendingPods(key PoolKey, most int) (list []PodKey, others int) {
	pool := v.c.pools.Find(key)
	if pool == nil {
		return nil, 0
	}
	all := pool.Sorted(pods.Pending)
	slices.SortStableFunc(all, func(a, b *pods.Pod) int { return cmp.Compare(min(1, len(b.Seen().Why)), min(1, len(a.Seen().Why))) })
	for _, p := range all[:min(most, len(all))] {
		list = append(list, p.Key())
	}
	return list, len(all) - len(list)
}

// PodFailures lists the latest idle pods of a pool that have failed since this leader began, the latest first.
func (v View) PodFailures(key PoolKey) []PodFailure {
	if pool := v.c.pools.Find(key); pool != nil {
		return pool.Failures()
	}
	return nil
}
