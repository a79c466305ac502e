package core

import (
	"cmp"
	"flag"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/teams"
	"github.com/berth-sandbox/berth/envoy"
)

// The model is everything around the core and the journal: an API server whose
// writes may be delayed or answered in doubt, watches that lag, routers that lag,
// break off, stop and die, two of them beside one Envoy at times, partitions in one
// direction, clocks that run slower and time that passes while all stand still, Envoys
// that read late what a router has answered and connect late to where it says,
// callers, people who delete things, a network that gives addresses out again, and
// leaders that follow each other while the writes of the last one are still under way,
// and while it may still be at work itself: it stood still and does not know.
//
// It drives the production core, the production journal, the production route cache
// and the production count of unread answers with random histories, and judges every
// effect, every write that takes place, every request that is admitted, every address
// that is given out and, after every step, the core's tables.
//
// A failure prints the seed and what happened, shrunk for 30 s at most; -rapid.seed runs
// it again, -rapid.checks runs more.

// profiles weigh what happens. Each is a world in which one kind of trouble is
// frequent.
var profiles = []profile{
	{name: "everything"},
	{name: "routers come and go", often: []string{"all catch up", "claim", "release", "write well", "journal well", "long time passes", "router joins", "router breaks off", "router rejoins at once", "to router", "to router", "from router", "from router", "router acks", "router pings", "time passes", "set network"}},
	{name: "leaders come and go", often: []string{"leader changes", "old leader works", "old leader works", "old leader works", "all catch up", "claim", "release", "write well", "journal well", "time passes", "long time passes"}},
	{name: "pods come and go", often: []string{"pod deleted", "pod removed", "pod ends", "pod moves", "pod changes", "pod terminates"}},
	{name: "pools change", often: []string{"pool changes", "pool changes", "pod ready", "write", "write", "pod terminates"}},
	{name: "claims and releases", often: []string{"claim", "claim", "release", "release", "pod ready", "write", "journal", "journal well", "abandon", "long time passes"}},
	{name: "pods are recycled", often: []string{"claim", "claim", "release", "release", "journal well", "write well", "write well", "watch", "watch", "pod ready", "all catch up", "a moment passes", "request", "request", "Envoy reads", "leader changes", "old leader works"}},
	{name: "the journal is slow", often: []string{"journal", "journal", "journal", "claim", "claim", "release", "abandon", "pod ready", "leader changes", "pod removed", "all catch up"}},
	{name: "requests and releases", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "claim", "release", "request", "request", "request", "Envoy reads", "to router", "to router", "to router",
		"from router", "from router", "router acks", "router pings", "router joins", "time passes", "a moment passes",
	}},
	{name: "requests, releases and trouble", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "claim", "claim", "release", "release", "request", "request", "request", "request", "Envoy reads", "Envoy reads",
		"to router", "to router", "to router", "to router", "from router", "from router", "from router", "router acks", "router acks", "router pings", "router pings", "router joins", "router joins",
		"time passes", "time passes", "a moment passes", "a moment passes", "freshness has nearly ended", "long time passes", "all sleep", "one direction breaks", "router breaks off", "router rejoins at once", "stray", "stray",
		"router dies", "dead router found", "dead router found", "living router reported by another gateway", "router stops", "another router beside an Envoy", "leader changes", "old leader works", "pod deleted", "pod moves", "pod removed", "pod restarts",
	}},
	{name: "use and silence", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "cluster works", "claim", "claim", "request", "request", "request", "request", "Envoy reads", "Envoy reads", "Envoy reads", "routers work", "routers work", "routers work", "routers work",
		"to router", "from router", "router looks", "router looks", "router pings", "router pings", "a request ends", "a request ends", "keep-alive", "set timeout",
		"time passes", "time passes", "time passes", "time passes", "a moment passes", "a moment passes",
	}},
	{name: "sleep and trouble", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "cluster works", "claim", "claim", "request", "request", "Envoy reads", "Envoy reads", "routers work", "routers work", "routers work",
		"sleep", "sleep", "stop", "stop", "wake", "wake", "wake", "wake", "wake", "wake", "archive", "request for a sleeper", "request for a sleeper", "write", "write", "write well", "write well", "journal", "journal well",
		"to router", "from router", "router acks", "router looks", "router pings", "router joins", "router breaks off", "router dies", "dead router found", "a request ends", "release",
		"time passes", "time passes", "a moment passes", "a moment passes", "long time passes", "leader changes", "old leader works", "pod restarts", "stray", "sleeper evicted", "sleeper evicted", "agent told to end", "set network", "set network",
	}},
	{name: "rules and trouble", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "claim", "claim", "set network", "set network", "set network", "journal", "journal well",
		"to router", "to router", "to router", "from router", "from router", "router acks", "router acks", "router pings", "router joins", "router joins", "routers work", "routers work",
		"router breaks off", "router rejoins at once", "one direction breaks", "router dies", "dead router found", "router stops", "another router beside an Envoy", "stray",
		"time passes", "time passes", "a moment passes", "long time passes", "freshness has nearly ended", "sleep", "wake", "release", "leader changes", "old leader works",
	}},
	{name: "stops and wakes", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "cluster works", "cluster works", "cluster works", "claim", "request", "routers work", "routers work", "routers work", "routers work",
		"stop", "stop", "stop", "wake", "wake", "wake", "set network", "archive", "request for a sleeper", "sleeper evicted", "journal well", "write well",
		"router looks", "router pings", "a moment passes", "a moment passes", "time passes", "leader changes", "old leader works",
	}},
	{name: "use, silence and trouble", only: true, often: []string{
		"cluster works", "cluster works", "cluster works", "cluster works", "claim", "claim", "request", "request", "request", "request", "Envoy reads", "Envoy reads", "Envoy reads", "routers work", "routers work", "routers work", "routers work",
		"to router", "to router", "from router", "from router", "router looks", "router pings", "router pings", "a request ends", "a request ends", "keep-alive", "journal",
		"time passes", "time passes", "time passes", "time passes", "a moment passes", "a moment passes", "all sleep", "Envoy does not answer looks", "Envoy answers looks again", "Envoy is replaced", "router stands still", "router goes on", "router goes on", "one direction breaks",
		"router breaks off", "router rejoins at once", "router joins", "router joins", "stray", "stray", "router dies", "dead router found", "dead router found", "dead router declared dead", "router stops", "another router beside an Envoy", "leader changes", "old leader works",
	}},
}

type profile struct {
	name string
	// often happens three times as often as the rest, or alone.
	often []string
	only  bool
}

// Invariant: I3, I4, I5, I7, I9, P1, P3, P27
func TestCoreAndJournalKeepTheirGuaranteesInAnyHistory(t *testing.T) {
	var steps, worlds atomic.Int64
	least := int64(stepsLeast)
	if testing.Short() {
		least /= 10 // rapid makes a fifth of the histories then
	}
	t.Cleanup(func() {
		t.Logf("%d steps, %d sandboxes released for being idle, %d asleep, %d woken, %d archives, %d of stops, %d run in another pod, %d evicted, %d changes of rules", steps.Load(), verdicts.Load(), sleeps.Load(), wakes.Load(), archives.Load(), stops.Load(), revivals.Load(), evictions.Load(), ruled.Load())
		if asked := flag.Lookup("rapid.checks"); asked.Value.String() == asked.DefValue && int(worlds.Load()) == len(profiles) && !t.Failed() && steps.Load() < least {
			t.Errorf("%d steps, expected %d at least", steps.Load(), least)
		}
		if !testing.Short() && int(worlds.Load()) == len(profiles) && ruled.Load() == 0 {
			t.Error("no change of rules was ever answered while an egress router had some")
		}
		if int(worlds.Load()) == len(profiles) && verdicts.Load() == 0 {
			t.Error("nothing was ever released for being idle")
		}
		if !testing.Short() && int(worlds.Load()) == len(profiles) && min(sleeps.Load(), wakes.Load(), archives.Load(), stops.Load(), revivals.Load(), evictions.Load()) == 0 {
			t.Errorf("%d sandboxes fell asleep, %d woke, %d archives were written, %d of stops, %d sandboxes ran in another pod, %d were evicted",
				sleeps.Load(), wakes.Load(), archives.Load(), stops.Load(), revivals.Load(), evictions.Load())
		}
	})
	for _, p := range profiles {
		t.Run(p.name, func(t *testing.T) {
			t.Parallel()
			worlds.Add(1)
			for range repeats { // each of rapid.checks histories
				rapid.Check(t, func(t *rapid.T) { steps.Add(history(t, p)) })
			}
		})
	}
}

// history is one of them. It returns how many steps it had.
func history(t *rapid.T, p profile) (steps int64) {
	inner := t
	w := anyWorld(t, func(n int) int { return rapid.IntRange(0, n-1).Draw(inner, "n") })
	defer w.endAll()
	table := w.table(p)
	// Several to a round, so that histories are long. An index of 0 does
	// nothing: that is what failures are shrunk towards.
	t.Repeat(map[string]func(*rapid.T){"round": func(t *rapid.T) {
		w.t, inner = t, t
		for range 8 {
			if i := rapid.IntRange(0, len(table)).Draw(t, "action"); i > 0 {
				w.log("- %s", table[i-1].name)
				table[i-1].do()
			}
			w.check()
			steps++
		}
	}})
	w.settle()
	return steps
}

const (
	maxStale = time.Minute
	window   = envoy.ConnectWindow
	lease    = 15 * time.Second
)

type action struct {
	name string
	do   func()
}

func (w *world) table(p profile) []action {
	all := []action{
		{"journal", func() { w.journal(w.leader, w.draw(4)) }},
		{"journal well", func() { w.journal(w.leader, 0) }},
		{"journal well", func() { w.journal(w.leader, 0) }},
		{"journal well", func() { w.journal(w.leader, 0) }},
		{"late journal write", func() { w.disk.landLate(w) }},
		{"old leader works", w.oldWorks},
		{"old leader ends", func() {
			if len(w.old) > 0 {
				w.end(w.old[w.draw(len(w.old))])
			}
		}},
		{"write", func() { w.run(w.pickJob(), w.draw(6)) }},
		{"write well", func() { w.run(w.pickJob(), 0) }},
		{"write well", func() { w.run(w.pickJob(), 0) }},
		{"watch", func() { w.watch(pick(w, w.pods, func(p *simPod) bool { return len(p.watch) > 0 })) }},
		{"watch", func() { w.watch(pick(w, w.pods, func(p *simPod) bool { return len(p.watch) > 0 })) }},
		{"shell sees pool", func() {
			// The loop learns it a little later.
			if p := pick(w, w.pools, func(p *simPool) bool { return len(p.watch) > 0 }); p != nil {
				p.show(p.watch[0])
			}
		}},
		{"watch records", w.watchRecords},
		{"watch nodes", w.watchNodes},
		{"node changes", func() {
			name := []string{"n1", "n2"}[w.draw(2)]
			w.nodes[name] = !w.nodes[name]
			w.nodeWatch = append(w.nodeWatch, NodeSeen{Name: name, Usable: w.nodes[name]})
		}},
		{"object deleted", func() {
			if ids := sorted(w.records); len(ids) > 0 {
				w.deleteObject(ids[w.draw(len(ids))])
			}
		}},
		{"a user writes on an object, and the leader changes", func() {
			// The journal still has it: what only an object says must be believed.
			ids := slices.DeleteFunc(sorted(w.records), func(id string) bool {
				durable := w.disk.sandboxes[id]
				return durable.Phase != Running || !w.records[id].Revision.Less(durable.Revision)
			})
			if p := pick(w, w.pods, unused); p != nil && len(ids) > 0 && w.draw(2) == 0 {
				w.tamper(ids[w.draw(len(ids))], p)
				w.changeLeader()
			}
		}},
		{"leader is about to end", func() {
			if w.draw(4) == 0 {
				w.step(Closing{})
			}
		}},
		{"pod marked", func() {
			if p := pick(w, w.pods, func(p *simPod) bool { return p.exists && len(p.bound) == 0 }); p != nil && w.draw(4) == 0 {
				p.marked = true
				w.write(p, func(p *Pod) { p.Used = true })
			}
		}},
		{"watch pool", func() { w.watchPool(pick(w, w.pools, func(p *simPool) bool { return len(p.watch) > 0 })) }},
		{"audit", w.audit},
		{"pod ready", func() {
			w.becomesReady(pick(w, w.pods, func(p *simPod) bool { return p.exists && !p.Ready && !p.Finished }))
		}},
		{"pod ready", func() {
			w.becomesReady(pick(w, w.pods, func(p *simPod) bool { return p.exists && !p.Ready && !p.Finished }))
		}},
		{"pod terminates", func() { w.remove(pick(w, w.pods, func(p *simPod) bool { return p.exists && p.Deleting })) }},
		{"pod changes", func() { w.write(pick(w, w.pods, exists), func(*Pod) {}) }},
		{"pod unready", func() { w.write(pick(w, w.pods, exists), func(p *Pod) { p.Ready = false }) }},
		{"pod ends", func() { w.write(pick(w, w.pods, exists), func(p *Pod) { p.Ready, p.Finished = false, true }) }},
		{"pod restarts", func() { w.restart(pick(w, w.pods, exists)) }},
		{"pod being configured restarts", func() {
			w.restart(pick(w, w.pods, func(p *simPod) bool { return p.exists && len(p.bound) > 0 && !w.answered[p.bound[0]] }))
		}},
		{"leader changes during configuration", func() {
			for range w.core.claims.Configuring() {
				w.changeLeader()
				break
			}
		}},
		{"pod deleted", func() { w.write(pick(w, w.pods, exists), func(p *Pod) { p.Deleting = true }) }},
		{"sleeper evicted", func() { w.evictSleeper() }},
		{"agent told to end", w.tellAgent},
		{"pod removed", func() { w.remove(pick(w, w.pods, exists)) }},
		{"pod moves", w.move},
		{"a user changes the life of a pod", func() {
			if p := pick(w, w.pods, func(p *simPod) bool { return p.exists && p.Recyclable && !p.Deleting }); p != nil && w.draw(4) == 0 {
				w.nextLife(p)
			}
		}},
		{"pool changes", w.changePool},
		{"claim", w.claim},
		{"claim", w.claim},
		{"abandon", w.abandon},
		{"release", w.release},
		{"router joins", func() {
			w.join(pick(w, w.routers, func(r *router) bool { return !r.dead && !r.frozen && (r.stream == 0 || r.cut) }))
		}},
		{"router breaks off", func() { w.breakOff(pick(w, w.routers, func(r *router) bool { return r.stream != 0 })) }},
		{"router rejoins at once", func() {
			if r := pick(w, w.routers, func(r *router) bool { return !r.dead && !r.frozen && r.stream != 0 }); r != nil {
				w.join(r)
			}
		}},
		{"to router", func() { w.toRouter(pick(w, w.routers, func(r *router) bool { return len(r.in) > 0 && !r.deaf })) }},
		{"to router", func() { w.toRouter(pick(w, w.routers, func(r *router) bool { return len(r.in) > 0 && !r.deaf })) }},
		{"from router", func() { w.fromRouter(pick(w, w.routers, func(r *router) bool { return len(r.out) > 0 && !r.mute })) }},
		{"from router", func() { w.fromRouter(pick(w, w.routers, func(r *router) bool { return len(r.out) > 0 && !r.mute })) }},
		{"router acks", func() { w.ack(pick(w, w.routers, connected)) }},
		{"router pings", func() { w.ping(pick(w, w.routers, connected)) }},
		{"router dies", func() { w.die(pick(w, w.routers, alive)) }},
		{"dead router found", w.findDead},
		{"living router reported by another gateway", w.findWrongly},
		{"dead router declared dead", w.declareDead},
		{"router stops", func() { w.stopRouter(pick(w, w.routers, connected)) }},
		{"another router beside an Envoy", func() {
			if living := slices.DeleteFunc(slices.Clone(w.routers), func(r *router) bool { return r.dead }); len(living) < 4 {
				w.addRouter([]int{0, 1, egressEnvoy}[w.draw(3)])
			}
		}},
		{"one direction breaks", func() {
			if r := pick(w, w.routers, connected); r != nil {
				r.deaf, r.mute = w.draw(3) != 0, w.draw(3) != 0
			}
		}},
		{"request", w.anyRequest},
		{"request", w.anyRequest},
		{"Envoy reads", func() { w.read(pick(w, w.requests, readable)) }},
		{"Envoy reads", func() { w.read(pick(w, w.requests, readable)) }},
		{"a request ends", w.endUse},
		{"a request ends", w.endUse},
		{"Envoy does not answer looks", func() { w.envoy(w.draw(2)).stopped = true }},
		{"Envoy answers looks again", func() { w.envoy(w.draw(2)).stopped = false }},
		{"Envoy is replaced", func() { w.replaceEnvoy(w.draw(2)) }},
		{"router stands still", func() { w.freeze(pick(w, w.routers, alive)) }},
		{"router goes on", func() { w.thaw(pick(w, w.routers, func(r *router) bool { return r.frozen })) }},
		{"router looks", func() { w.looks(pick(w, w.routers, connected)) }},
		{"routers work", w.routersWork},
		{"keep-alive", w.keepAlive},
		{"sleep", w.sleepCall},
		{"stop", w.stopCall},
		{"wake", w.wakeCall},
		{"archive", w.archiveCall},
		{"request for a sleeper", w.requestForSleeper},
		{"set timeout", w.setTimeout},
		{"set network", w.setNetwork},
		{"stray", func() {
			if len(w.strays) > 0 {
				ev := w.strays[0]
				w.strays = w.strays[1:]
				w.step(ev)
			}
		}},
		{"time passes", func() { w.advance(time.Duration(1+w.draw(30)) * 100 * time.Millisecond) }},
		{"long time passes", func() { w.advance(time.Duration(1+w.draw(8)) * 10 * time.Second) }},
		{"a moment passes", func() { w.advance(window + time.Duration(w.draw(2))*100*time.Millisecond) }},
		{"freshness has nearly ended", func() {
			if r := pick(w, w.routers, (*router).fresh); r != nil {
				w.advance(max(0, r.freshUntil-w.now.Boot-time.Duration(w.draw(6))*100*time.Millisecond))
			}
		}},
		{"cluster works", func() {
			for range 2000 {
				if !w.clusterWorks() {
					return
				}
				w.check()
			}
			w.t.Fatal("no end: something is done over and over")
		}},
		{"all sleep", func() { w.sleep(time.Duration(1+w.draw(8)) * 10 * time.Second) }},
		{"leader changes", w.changeLeader},
		{"all catch up", w.catchUp},
	}
	table := all
	if p.only {
		table = nil
	}
	for _, name := range p.often {
		i := slices.IndexFunc(all, func(a action) bool { return a.name == name })
		if i < 0 {
			w.t.Fatalf("no action %q", name)
		}
		if table = append(table, all[i]); !p.only {
			table = append(table, all[i])
		}
	}
	return table
}

func exists(p *simPod) bool { return p.exists }

func (w *world) draw(n int) int { return w.draws(n) }

func (w *world) log(format string, args ...any) { w.t.Logf(format, args...) }

// pick draws one of those that fit, nil if there is none.
func pick[T any](w *world, all []*T, fits func(*T) bool) *T {
	var fitting []*T
	for _, x := range all {
		if fits(x) {
			fitting = append(fitting, x)
		}
	}
	if len(fitting) == 0 {
		return nil
	}
	return fitting[w.draw(len(fitting))]
}

func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

func (w *world) token() uint64 { w.tokens++; return uint64(w.tokens) }

func (w *world) claim() {
	token := w.token()
	ev := Claim{Token: token, Pool: w.pools[w.draw(len(w.pools))].Key, Lifetime: time.Duration(w.draw(3)) * 30 * time.Second, Wait: time.Duration(w.draw(3)) * 10 * time.Second}
	if w.draw(4) == 3 {
		idle := []time.Duration{idleShort, 0}[w.draw(2)]
		ev.IdleTimeout = &idle
	}
	ev.Binding.Team = teamsOfModel[w.draw(len(teamsOfModel))]
	if w.draw(3) == 2 {
		ev.Count = 1 + w.draw(4)
		ev.AtLeast = w.draw(ev.Count + 1)
	}
	if n := w.draw(4); n > 1 {
		ev.Binding.IdempotencyKey = "k" + strconv.Itoa(n)
		if n == 3 && w.internal != w.term { // a replica does not repeat a claim at the same leader
			ev.Binding.IdempotencyKey, w.internal = fact.InternalKeys+"k", w.term
		}
		ev.Binding.RequestHash = [32]byte{byte(w.draw(2)), byte(ev.Count), byte(ev.AtLeast)}
	}
	if w.draw(2) == 1 {
		ev.Values = &valuesOfModel{count: max(1, ev.Count)}
	}
	w.claims[token] = &simClaim{asks: ev}
	w.step(ev)
}

// valuesOfModel counts how many agents they were brought to.
type valuesOfModel struct{ count, tried int }

func (*valuesOfModel) String() string { return "values" }

// teamsOfModel: the second one has a limit.
var teamsOfModel = []string{"", "limited", "other"}

var limitsOfModel = teams.Settings{Teams: map[string]teams.Limits{teamsOfModel[1]: {MaxSandboxes: 3, MaxWaiting: 2}}}

func (w *world) abandon() {
	if waiting := sorted(w.claims); len(waiting) > 0 {
		token := waiting[w.draw(len(waiting))]
		w.claims[token].abandoned = true
		w.step(ClaimAbandoned{token})
	}
}

func (w *world) anyID() string { return "id" + strconv.Itoa(1+w.draw(w.ids+1)) }

func (w *world) release() {
	id := w.anyID()
	token := w.token()
	w.releases[token], w.asked[id] = id, true
	w.step(Release{Scope: everyTeam, Token: token, ID: id, Reason: fact.ReasonKilled})
}

func (w *world) advance(d time.Duration) {
	w.runFor(d)
	w.step(Tick{})
}

// sleep lets time pass without any event.
func (w *world) sleep(d time.Duration) {
	w.used(w.now.Boot + d)
	w.now.Boot += d
	w.now.Wall = w.now.Wall.Add(d)
	w.pass(w.now.Boot)
	w.agentsThaw()
	w.passUses()
}
