package core

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The model is everything around the core and the journal: an API server whose
// writes may be delayed or answered in doubt, watches that lag, routers that lag,
// break off and die, callers, people who delete things, and leaders that follow
// each other while the writes of the last one are still under way, and while it
// may still be at work itself: it stood still and does not know. It drives the
// production core and the production journal with random histories and judges
// every effect, every write that takes place and, after every step, the core's
// tables.
//
// A failure prints the seed; -rapid.seed runs it again, -rapid.checks runs more.

// profiles weigh what happens. Each is a world in which one kind of trouble is
// frequent.
var profiles = []struct {
	name  string
	often []string
}{
	{"everything", nil},
	{"routers come and go", []string{"all catch up", "claim", "release", "write well", "journal well", "long time passes", "router joins", "router breaks off", "router rejoins at once", "to router", "to router", "from router", "from router", "router acks", "router pings", "time passes"}},
	{"leaders come and go", []string{"leader changes", "old leader works", "old leader works", "old leader works", "all catch up", "claim", "release", "write well", "journal well", "time passes", "long time passes"}},
	{"pods come and go", []string{"pod deleted", "pod removed", "pod ends", "pod moves", "pod changes", "pod terminates"}},
	{"pools change", []string{"pool changes", "pool changes", "pod ready", "write", "write", "pod terminates"}},
	{"claims and releases", []string{"claim", "claim", "release", "release", "pod ready", "write", "journal", "journal well", "abandon", "long time passes"}},
	{"the journal is slow", []string{"journal", "journal", "journal", "claim", "claim", "release", "abandon", "pod ready", "leader changes", "pod removed", "all catch up"}},
}

func TestCoreAndJournalKeepTheirGuaranteesInAnyHistory(t *testing.T) {
	for _, p := range profiles {
		t.Run(p.name, func(t *testing.T) {
			for range repeats { // each of rapid.checks histories
				rapid.Check(t, func(t *rapid.T) { history(t, p.often) })
			}
		})
	}
}

func history(t *rapid.T, often []string) {
	w := newWorld(t)
	defer w.endAll()
	table := w.table(often)
	// Several to a round, so that histories are long. An index of 0 does
	// nothing: that is what failures are shrunk towards.
	t.Repeat(map[string]func(*rapid.T){"round": func(t *rapid.T) {
		w.t = t
		for range 8 {
			if i := rapid.IntRange(0, len(table)).Draw(t, "action"); i > 0 {
				w.log("- %s", table[i-1].name)
				table[i-1].do()
			}
			w.check()
		}
	}})
	w.settle()
}

const (
	maxStale = time.Minute
	window   = 5 * time.Second
	lease    = 15 * time.Second
)

type world struct {
	t    *rapid.T
	now  Instant
	term uint64
	core *Core
	// leader is the process that has been elected last, old are those before it
	// that have not ended.
	leader *process
	old    []*process
	disk   *disk

	ids, names, versions, addresses, tokens int

	pools   []*simPool
	pods    []*simPod // all that there ever were
	nodes   map[string]bool
	records map[string]*simRecord
	// recordWatch is what the watch of Sandbox objects has yet to tell, nodeWatch
	// that of nodes.
	recordWatch, nodeWatch []Event
	jobs                   []*job
	known                  map[PodKey]int // as allocator.loop: the version last observed

	routers    []*router
	lastStream uint64
	strays     []Event // from streams that have broken off

	claims   map[uint64]*simClaim // token -> not answered yet
	releases map[uint64]string
	asked    map[string]bool // a caller wanted it released
	answered map[string]bool // a caller was given it
	unwanted map[string]bool // its Sandbox object was deleted by somebody
	fired    map[string]bool // SandboxReleased in this term
	ready    map[string]bool // SandboxReady, ever
	failed   map[string]bool // its hook failed
	// lastUse is the last moment at which some router could admit a request.
	lastUse map[string]time.Duration
	doomed  map[string]bool // its pod was to be deleted
	judged  map[PodKey]bool // intents
	ended   map[string]PodKey
	// earlier are those that this leader has found.
	earlier    map[string]bool
	hadAddress map[netip.Addr]map[PodKey]bool // the pods that ever had each
	// forgotten are those whose records were to be dropped.
	forgotten map[string]bool
	extra     int // pods that may exceed a pool's bound
}

// simClaim is a caller.
type simClaim struct {
	abandoned bool
	key       claimKey
}

// simRecord is a Sandbox object.
type simRecord struct {
	Sandbox
	deleting bool
}

type simPool struct {
	Pool
	exists, everDeleting bool
	watch                []Event
	shown                Pool // as the shell last saw it: pods are made from its template
	told                 Pool // as the core was last told of it
	seen                 bool // the core was told of it last, and not of its end
}

type simPod struct {
	Pod
	exists, moved, marked bool
	watch                 []Event
	// bound are the sandboxes that were durably on it, discarded that it is
	// durably to be deleted.
	bound     []string
	discarded bool
}

// job is a write under way.
type job struct {
	term   uint64
	effect Effect
	done   bool // the outcome is known but not reported
	report []Event
}

type router struct {
	id         string
	dead       bool
	stream     uint64 // 0: not connected
	cut        bool   // the allocator's side has ended
	in         []message
	out        []Event
	term       uint64
	joined     bool
	routes     map[string]netip.Addr
	told       map[string]Sandbox // what was last said on the stream of each sandbox
	gone       map[string]bool
	applied    uint64
	freshUntil time.Duration
	nonce      uint64
	pings      map[uint64]time.Duration
}

type message struct {
	term   uint64
	effect Effect
}

func newWorld(t *rapid.T) *world {
	w := &world{
		t:       t,
		now:     Instant{Boot: time.Hour, Wall: time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)},
		disk:    newDisk(),
		nodes:   map[string]bool{"n1": true, "n2": true},
		records: map[string]*simRecord{}, known: map[PodKey]int{},
		claims: map[uint64]*simClaim{}, releases: map[uint64]string{}, asked: map[string]bool{}, answered: map[string]bool{}, unwanted: map[string]bool{},
		fired: map[string]bool{}, ready: map[string]bool{}, failed: map[string]bool{},
		lastUse: map[string]time.Duration{}, doomed: map[string]bool{}, judged: map[PodKey]bool{}, ended: map[string]PodKey{}, forgotten: map[string]bool{}, hadAddress: map[netip.Addr]map[PodKey]bool{},
	}
	for _, name := range []string{"a", "b"} {
		warm := rapid.IntRange(0, 3).Draw(t, "warm")
		most := rapid.SampledFrom([]int{0, 1, 3, 5}).Draw(t, "max pods")
		refused := rapid.IntRange(0, 3).Draw(t, "refused") == 3
		hook := rapid.IntRange(0, 2).Draw(t, "hook") == 2
		keep := rapid.Bool().Draw(t, "keep on restart")
		w.pools = append(w.pools, &simPool{exists: true, Pool: Pool{Key: PoolKey{"ns", name}, Warm: warm, MaxPods: most, Template: "t1", Refused: refused, PostStart: hook, KeepOnRestart: keep, DefaultPort: 80}})
	}
	for range 2 {
		w.addRouter()
	}
	w.lead()
	if rapid.Bool().Draw(t, "begins at work") {
		w.catchUp()
	}
	return w
}

type action struct {
	name string
	do   func()
}

func (w *world) table(often []string) []action {
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
			// The loop is told a little later.
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
		{"leader is about to end", func() {
			if w.draw(4) == 0 {
				w.step(Closing{})
			}
		}},
		{"idle said to be available", func() { w.step(IdleAvailable{w.pools[w.draw(len(w.pools))].Key}) }},
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
		{"pod restarts", func() { w.write(pick(w, w.pods, exists), func(p *Pod) { p.Restarts++ }) }},
		{"pod deleted", func() { w.write(pick(w, w.pods, exists), func(p *Pod) { p.Deleting = true }) }},
		{"pod removed", func() { w.remove(pick(w, w.pods, exists)) }},
		{"pod moves", w.move},
		{"pool changes", w.changePool},
		{"claim", w.claim},
		{"claim", w.claim},
		{"abandon", w.abandon},
		{"release", w.release},
		{"router joins", func() {
			w.join(pick(w, w.routers, func(r *router) bool { return !r.dead && (r.stream == 0 || r.cut) }))
		}},
		{"router breaks off", func() { w.breakOff(pick(w, w.routers, func(r *router) bool { return r.stream != 0 })) }},
		{"router rejoins at once", func() {
			if r := pick(w, w.routers, func(r *router) bool { return !r.dead && r.stream != 0 }); r != nil {
				w.join(r)
			}
		}},
		{"to router", func() { w.toRouter(pick(w, w.routers, func(r *router) bool { return len(r.in) > 0 })) }},
		{"to router", func() { w.toRouter(pick(w, w.routers, func(r *router) bool { return len(r.in) > 0 })) }},
		{"from router", func() { w.fromRouter(pick(w, w.routers, func(r *router) bool { return len(r.out) > 0 })) }},
		{"from router", func() { w.fromRouter(pick(w, w.routers, func(r *router) bool { return len(r.out) > 0 })) }},
		{"router acks", func() { w.ack(pick(w, w.routers, connected)) }},
		{"router pings", func() { w.ping(pick(w, w.routers, connected)) }},
		{"router asks", w.ask},
		{"router dies", func() { w.die(pick(w, w.routers, alive), false) }},
		{"dead router found", func() {
			if r := pick(w, w.routers, func(r *router) bool { return r.dead }); r != nil {
				by := pick(w, w.routers, alive)
				w.strays = append(w.strays, SessionDead{Session: r.id, By: by.id})
			}
		}},
		{"router says goodbye", func() { w.die(pick(w, w.routers, connected), true) }},
		{"stray", func() {
			if len(w.strays) > 0 {
				ev := w.strays[0]
				w.strays = w.strays[1:]
				w.step(ev)
			}
		}},
		{"time passes", func() { w.advance(time.Duration(1+w.draw(30)) * 100 * time.Millisecond) }},
		{"long time passes", func() { w.advance(time.Duration(1+w.draw(8)) * 10 * time.Second) }},
		{"leader changes", w.changeLeader},
		{"all catch up", w.catchUp},
	}
	for _, name := range often {
		i := slices.IndexFunc(all, func(a action) bool { return a.name == name })
		if i < 0 {
			w.t.Fatalf("no action %q", name)
		}
		all = append(all, all[i], all[i])
	}
	return all
}

func exists(p *simPod) bool    { return p.exists }
func alive(r *router) bool     { return !r.dead }
func connected(r *router) bool { return !r.dead && r.stream != 0 && !r.cut }

func (w *world) draw(n int) int { return rapid.IntRange(0, n-1).Draw(w.t, "n") }

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

// ---- the core and its effects

// lead elects a leader and lets it take over the journal and read what is there,
// with late writes of those before it in between.
func (w *world) lead() {
	p := w.newProcess()
	for p.log == nil {
		if len(w.old) > 0 && w.draw(3) == 0 {
			w.oldWorks()
		}
		w.journal(p, max(0, w.draw(8)-4))
	}
	w.leader, w.term = p, p.log.Term()
	var err error
	p.core, err = New(Config{
		Term: w.term, MaxStale: maxStale, Window: window, Lease: lease, KeepEnded: 4, KeepEndedFor: 20 * time.Minute, MaxWaiting: 3, KeepKeys: time.Minute,
		NewID:     func() string { w.ids++; return "id" + strconv.Itoa(w.ids) },
		NewSuffix: func() string { w.names++; return strconv.Itoa(w.names) },
	}, w.now)
	if err != nil {
		w.t.Fatal(err)
	}
	w.core = p.core
	// The order in which the shell reads, with late writes in between.
	var st State
	for _, r := range p.opened {
		st.Facts = append(st.Facts, w.disk.facts[r.Key][Revision{r.Term, r.Counter}])
	}
	w.lateWrites()
	for _, id := range sorted(w.records) {
		st.Records = append(st.Records, w.records[id].Sandbox)
	}
	w.recordWatch = nil
	for _, id := range sorted(w.records) {
		w.recordWatch = append(w.recordWatch, w.seenRecord(id))
	}
	w.lateWrites()
	for _, p := range w.pools {
		p.watch, p.seen = nil, p.exists
		if p.exists {
			st.Pools = append(st.Pools, p.Pool)
			p.shown, p.told = p.Pool, p.Pool
		}
	}
	w.nodeWatch = nil
	for _, name := range sorted(w.nodes) {
		if w.nodes[name] {
			st.Nodes = append(st.Nodes, name)
		}
	}
	w.lateWrites()
	clear(w.known)
	for _, p := range w.pods {
		p.watch = nil
		if p.exists {
			st.Pods = append(st.Pods, p.Pod)
			w.known[p.Key] = version(p.Version)
			p.watch = append(p.watch, PodSeen{p.Pod}) // the watch begins with a list of its own
		}
	}
	w.log("  recover %d facts, %d pools, %d pods, %d records", len(st.Facts), len(st.Pools), len(st.Pods), len(st.Records))
	effects, err := w.core.Recover(st)
	if err != nil {
		w.t.Fatal(err)
	}
	w.checkRecovered()
	w.earlier = map[string]bool{}
	for id := range w.core.sandboxes {
		w.earlier[id] = true
	}
	w.do(effects)
	for _, p := range w.pools {
		if p.exists {
			p.watch = append(p.watch, PoolSeen{p.Pool})
		}
	}
}

// checkRecovered compares what a new leader knows with what is durable.
func (w *world) checkRecovered() {
	for id, durable := range w.disk.sandboxes {
		if w.forgotten[id] {
			continue
		}
		s := w.core.sandboxes[id]
		if s == nil {
			w.t.Fatalf("%s is durable as %+v, the new leader does not know it", id, durable)
		}
		if !reflect.DeepEqual(s.Binding, durable.Binding) || s.Pod != durable.Pod || s.IP != durable.IP {
			w.t.Fatalf("%s is durable as %+v, the new leader has %+v", id, durable, s.Sandbox)
		}
		if gone := s.Phase == Released || s.Phase == Ended; gone != (durable.Phase == Released) {
			w.t.Fatalf("%s is durable in phase %d, the new leader has it in phase %d", id, durable.Phase, s.Phase)
		}
	}
	for id := range w.answered {
		if w.core.sandboxes[id] == nil && !w.forgotten[id] {
			w.t.Fatalf("%s was answered, the new leader does not know it", id)
		}
	}
	for id, there := range w.disk.sessions {
		if s := w.core.sessions[id]; there != (s != nil && s.durable) {
			w.t.Fatalf("session %s: there is one durably: %v, the new leader has %+v", id, there, s)
		}
	}
	for key, q := range w.core.pods {
		if p := w.pod(key); p.discarded && q.phase != podDeleting {
			w.t.Fatalf("pod %s is durably to be deleted, the new leader has it in phase %d", key.Name, q.phase)
		}
	}
}

func (w *world) lateWrites() {
	if len(w.jobs) > 0 {
		for range w.draw(3) {
			w.run(w.pickJob(), 0)
		}
	}
}

// changeLeader elects another leader. The one before stood still, or is cut off,
// and may go on.
func (w *world) changeLeader() {
	for _, r := range w.routers {
		if r.stream != 0 {
			r.cut, r.out = true, nil
		}
	}
	w.strays = nil
	clear(w.claims) // their callers were told to try again
	clear(w.releases)
	clear(w.fired)
	for _, j := range w.jobs {
		if _, ok := j.effect.(CreatePod); ok {
			w.extra++
		}
	}
	w.old = append(w.old, w.leader)
	if len(w.old) > 2 {
		w.end(w.old[0])
	}
	w.lead()
}

func (w *world) step(ev Event) {
	w.log("  %T%+v", ev, ev)
	w.do(w.core.Step(w.now, ev))
}

// observe drops what is older than known, as allocator.loop does.
func (w *world) observe(p Pod) {
	if last, ok := w.known[p.Key]; ok && (last == gone || version(p.Version) < last) {
		return
	}
	w.known[p.Key] = version(p.Version)
	w.step(PodSeen{p})
}

func (w *world) submit(ev Event) {
	switch ev := ev.(type) {
	case PodSeen:
		w.observe(ev.Pod)
	case PodGone:
		w.known[ev.Key] = gone
		w.step(ev)
	default:
		w.step(ev)
	}
}

// gone is the version of a pod that is not there any more.
const gone = -1

func version(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil {
		panic(err)
	}
	return n
}

// do judges the effects of one step and puts them where they belong.
func (w *world) do(effects []Effect) {
	t := w.t
	most := 20 + 4*(len(w.core.pods)+len(w.core.sandboxes)+8)*(1+len(w.core.sessions))
	if len(effects) > most {
		t.Fatalf("%d effects of one step, expected at most %d", len(effects), most)
	}
	w.judgeDiscards()
	var writes []*job
	for _, e := range effects {
		w.log("    => %T%+v", e, e)
		switch e := e.(type) {
		case Write:
			w.leader.commit(e.Facts)
			continue
		case Settle:
			w.settleFact(w.leader, e)
			continue
		case Repaired:
			if p := w.pod(e.Pod); !p.marked {
				t.Fatalf("pod %s repaired: %s", e.Pod.Name, e.What)
			}
			continue
		case SandboxReady:
			if w.ready[e.Sandbox.ID] || w.disk.sandboxes[e.Sandbox.ID].Phase != Running {
				t.Fatalf("%s is said to be ready, before: %v; durable is %+v", e.Sandbox.ID, w.ready[e.Sandbox.ID], w.disk.sandboxes[e.Sandbox.ID])
			}
			w.ready[e.Sandbox.ID] = true
			continue
		case CreatePod:
			if p := w.pool(e.Pool); p.told.Refused {
				t.Fatalf("pod %s is to be made from a template that is refused", e.Name)
			}
		case DeletePod:
			w.judgeDelete(e)
		case PoolDrained:
			for _, p := range w.pods {
				if p.exists && len(p.bound) > 0 && p.pool() == e.Key {
					t.Fatalf("pool %s is said to be drained, but pod %s holds a sandbox", e.Key.Name, p.Key.Name)
				}
			}
		case ForgetRecord:
			if r, ok := w.records[e.ID]; ok && r.Phase != Ended && r.Revision.Term == w.term {
				t.Fatalf("record of %s to be forgotten while it says %+v", e.ID, r)
			}
			delete(w.ended, e.ID)
			w.forgotten[e.ID] = true
			// No observation lags behind for as long as records are kept.
			if p := w.podOf(e.ID); p != nil && !p.exists {
				p.watch = nil
			}
		case Claimed:
			w.answerClaim(e.Token)
			w.judgeClaimed(e.Sandbox)
			continue
		case ClaimRefused:
			w.judgeRefused(e)
			w.answerClaim(e.Token)
			continue
		case ReleaseAnswered:
			id, waits := w.releases[e.Token]
			if !waits {
				t.Fatalf("release %d answered twice", e.Token)
			}
			delete(w.releases, e.Token)
			if e.Status == ReleaseOK && !w.released(id) {
				t.Fatalf("release of %s answered before it was durable", id)
			}
			continue
		case SandboxReleased:
			w.judgeRelease(e.Sandbox)
			continue
		case CloseStream:
			for _, r := range w.routers {
				if r.stream == e.Stream {
					r.cut, r.out = true, nil
				}
			}
			continue
		case SendSnapshot:
			w.judgeSession(e.Stream)
			for _, s := range e.Routes {
				w.judgeRoute(s)
			}
			w.send(e.Stream, e)
			continue
		case SendRoute:
			w.judgeRoute(e.Sandbox)
			w.send(e.Stream, e)
			continue
		case SendRelease:
			if !w.released(e.ID) {
				t.Fatalf("routers are told that %s is gone before that is durable", e.ID)
			}
			w.send(e.Stream, e)
			continue
		case SendResolved:
			if e.Sandbox != nil {
				w.judgeRoute(*e.Sandbox)
			}
			w.send(e.Stream, e)
			continue
		case SendPong:
			w.judgeSession(e.Stream)
			w.send(e.Stream, e)
			continue
		case Record:
			if durable, ok := w.disk.sandboxes[e.Sandbox.ID]; !ok || e.Sandbox.Phase != Ended && durable.Revision.Less(e.Sandbox.Revision) && durable.Phase != Released {
				t.Fatalf("%s is to be recorded as %+v, durable is %+v", e.Sandbox.ID, e.Sandbox, durable)
			}
			if i := slices.IndexFunc(w.jobs, func(j *job) bool {
				r, ok := j.effect.(Record)
				return ok && j.term == w.term && !j.done && r.Sandbox.ID == e.Sandbox.ID
			}); i >= 0 {
				w.jobs[i].effect = e // as the projector: only the latest is written
				continue
			}
		}
		writes = append(writes, &job{term: w.term, effect: e})
	}
	// Writes run side by side, and the core may list them in any order.
	slices.SortStableFunc(writes, func(a, b *job) int { return cmp.Compare(a.String(), b.String()) })
	w.jobs = append(w.jobs, writes...)
}

func (j *job) String() string {
	switch e := j.effect.(type) {
	case CreatePod:
		return "create " + e.Name
	case LabelPod:
		return "label " + e.Pod.Name
	case StartSandbox:
		return "start " + e.Sandbox.ID
	case DeletePod:
		return "delete " + e.Pod.Name
	case Record:
		return "record " + e.Sandbox.ID
	case ForgetRecord:
		return "forget " + e.ID
	case PoolDrained:
		return "drained " + e.Key.Name
	}
	return fmt.Sprintf("%T", j.effect)
}

// judgeSession: a router is told nothing before the next leader would know of it.
func (w *world) judgeSession(stream uint64) {
	for _, r := range w.routers {
		if r.stream == stream && !w.disk.sessions[r.id] {
			w.t.Fatalf("%s is spoken to, and that it is there is not durable", r.id)
		}
	}
}

func (w *world) answerClaim(token uint64) {
	c, waits := w.claims[token]
	if !waits || c.abandoned {
		w.t.Fatalf("claim %d answered, but waits=%v, %+v", token, waits, c)
	}
	delete(w.claims, token)
}

// judgeClaimed: what callers are given is durable, and has not been released.
func (w *world) judgeClaimed(s Sandbox) {
	if durable, ok := w.disk.sandboxes[s.ID]; !ok || durable.Phase == Released && !s.EndedAt.IsZero() {
		w.t.Fatalf("claim answered with %+v, durable is %+v", s, durable)
	}
	if s.Phase == Running && !w.ready[s.ID] && !w.inherited(s.ID) {
		w.t.Fatalf("%s is answered as running, and OnSandboxReady was not called", s.ID)
	}
	w.answered[s.ID] = true
}

func (w *world) inherited(id string) bool {
	return w.earlier[id]
}

// judgeRefused: nobody is refused for want of a pod while one is warm.
func (w *world) judgeRefused(e ClaimRefused) {
	if e.Why == PoolEmpty && e.Counts.Warm > 0 {
		w.t.Fatalf("claim %d refused with %+v", e.Token, e.Counts)
	}
}

// released reports whether the release of a sandbox is durable.
func (w *world) released(id string) bool { return w.disk.sandboxes[id].Phase == Released }

// judgeDelete: a pod that held a sandbox is deleted only when that was durably
// released and no router can have sent a request to it for a window; any other
// only when that is durable.
func (w *world) judgeDelete(e DeletePod) {
	p := w.pod(e.Pod)
	if len(p.bound) == 0 {
		if !p.discarded {
			w.t.Fatalf("pod %s is to be deleted before that is durable", p.Key.Name)
		}
		return
	}
	id := p.bound[0]
	if !w.released(id) {
		w.t.Fatalf("pod of %s deleted before its release is durable", id)
	}
	for _, r := range w.routers {
		if r.routable(id, w.now.Boot) {
			w.t.Fatalf("pod of %s deleted while router %s can route to it", id, r.id)
		}
	}
	if last, ok := w.lastUse[id]; ok && w.now.Boot < last+window {
		w.t.Fatalf("pod of %s deleted %v after a router could route to it", id, w.now.Boot-last)
	}
	w.doomed[id] = true
}

// judgeDiscards: a pool whose template is refused loses warm pods of an earlier
// template only as far as it has more of them than it asks for.
func (w *world) judgeDiscards() {
	for key := range w.core.discards {
		q := w.core.pods[key]
		if w.judged[key] || q == nil {
			continue
		}
		w.judged[key] = true
		known, pool := q.pool, w.pool(q.pool.Key)
		if !known.known || !known.Refused || known.Deleting || !q.usable() || q.seen.Used || q.seen.Template == pool.told.Template {
			continue
		}
		if want := wanted(pool.told, inUse(known)); known.sum(podWarm) < want {
			w.t.Fatalf("pod %s of an earlier template deleted, %d are left, %d are asked for, and the present one is refused", key.Name, known.sum(podWarm), want)
		}
	}
}

// inUse counts the pods that hold a sandbox, or are being given one, as far as
// the core knows.
func inUse(p *pool) (n int) {
	for q := range p.pods {
		if q.phase == podClaiming || q.phase == podClaimed {
			n++
		}
	}
	return n
}

// wanted is how many pods are to be warm beside those in use.
func wanted(p Pool, inUse int) int {
	if p.MaxPods == 0 {
		return p.Warm
	}
	return max(0, min(p.Warm, p.MaxPods-inUse))
}

// judgeRoute: what routers are told was written, and is true as far as is known.
func (w *world) judgeRoute(s Sandbox) {
	p := w.pod(s.Pod)
	if !slices.Contains(p.bound, s.ID) {
		w.t.Fatalf("%s is said to be on pod %s, which holds %v", s.ID, s.Pod.Name, p.bound)
	}
	if q := w.core.pods[s.Pod]; q.seen.IP != s.IP {
		w.t.Fatalf("%s is said to be at %v, its pod is at %v", s.ID, s.IP, q.seen.IP)
	}
	if w.disk.sandboxes[s.ID].Phase == Starting {
		w.t.Fatalf("%s is told to routers and is starting", s.ID)
	}
}

func (w *world) judgeRelease(s Sandbox) {
	if w.fired[s.ID] {
		w.t.Fatalf("%s released twice", s.ID)
	}
	w.fired[s.ID] = true
	w.ended[s.ID] = s.Pod
	p := w.pod(s.Pod)
	ok := false
	switch s.Reason {
	case ReasonKilled:
		ok = w.asked[s.ID]
	case ReasonTimeout:
		ok = !s.EndAt.IsZero() && !s.EndAt.After(w.now.Wall)
	case ReasonAbandoned:
		ok = !w.answered[s.ID]
	case ReasonPodDeleted:
		ok = p.Deleting || !p.exists
	case ReasonPodGone:
		ok = !p.exists
	case ReasonPodFailed:
		ok = p.Finished
	case ReasonPodMoved:
		ok = p.moved
	case ReasonDeleted:
		ok = w.unwanted[s.ID]
	case ReasonStartFailed:
		ok = w.failed[s.ID]
	case ReasonRestart:
		pool := w.pool(p.pool())
		ok = p.Restarts > s.Restarts && (!pool.KeepOnRestart || pool.everDeleting)
	case ReasonAddressShared:
		ok = len(w.hadAddress[s.IP]) > 1
	case ReasonPoolDeleted:
		ok = w.pool(p.pool()).everDeleting
	}
	if !ok {
		w.t.Fatalf("%s released for no good reason: %q", s.ID, s.Reason)
	}
}

// ---- the API server

func (p *simPod) pool() PoolKey { return PoolKey{p.Key.Namespace, p.Pool} }

func (w *world) pod(key PodKey) *simPod {
	for _, p := range w.pods {
		if p.Key == key {
			return p
		}
	}
	w.t.Fatalf("no such pod: %v", key)
	return nil
}

func (w *world) podOf(id string) *simPod {
	for _, p := range w.pods {
		if slices.Contains(p.bound, id) {
			return p
		}
	}
	return nil
}

func (w *world) pool(key PoolKey) *simPool {
	for _, p := range w.pools {
		if p.Key == key {
			return p
		}
	}
	w.t.Fatalf("no such pool: %v", key)
	return nil
}

// write changes a pod, which the watch will tell of.
func (w *world) write(p *simPod, change func(*Pod)) {
	if p == nil {
		return
	}
	change(&p.Pod)
	if p.IP.IsValid() {
		if w.hadAddress[p.IP] == nil {
			w.hadAddress[p.IP] = map[PodKey]bool{}
		}
		w.hadAddress[p.IP][p.Key] = true
	}
	w.versions++
	p.Version = strconv.Itoa(w.versions)
	p.watch = append(p.watch, PodSeen{p.Pod})
}

func (w *world) remove(p *simPod) {
	if p != nil {
		p.exists = false
		p.watch = append(p.watch, PodGone{p.Key})
	}
}

func (w *world) becomesReady(p *simPod) {
	w.write(p, func(pod *Pod) {
		pod.Ready = true
		if pod.Node == "" {
			// The scheduler knows of cordons.
			pod.Node = "n1"
			if !w.nodes["n1"] || w.nodes["n2"] && w.draw(2) == 0 {
				pod.Node = "n2"
			}
		}
		if !pod.IP.IsValid() {
			pod.IP = w.address()
		}
	})
}

// address is a new one, or one that has become free: its pod is gone, has ended or
// has moved away.
func (w *world) address() netip.Addr {
	if w.draw(3) == 0 {
		taken := map[netip.Addr]bool{}
		for _, p := range w.pods {
			taken[p.IP] = taken[p.IP] || p.exists && !p.Finished
		}
		var free []netip.Addr
		for n := range w.addresses {
			if at := netip.AddrFrom4([4]byte{10, 0, byte((n + 1) >> 8), byte(n + 1)}); !taken[at] {
				free = append(free, at)
			}
		}
		if len(free) > 0 {
			return free[w.draw(len(free))]
		}
	}
	w.addresses++
	return netip.AddrFrom4([4]byte{10, 0, byte(w.addresses >> 8), byte(w.addresses)})
}

func (w *world) move() {
	p := pick(w, w.pods, func(p *simPod) bool { return p.exists && p.IP.IsValid() })
	if p != nil {
		p.moved = true
		w.write(p, func(pod *Pod) { pod.IP = w.address() })
	}
}

func (w *world) watch(p *simPod) {
	if p != nil {
		ev := p.watch[0]
		p.watch = p.watch[1:]
		w.submit(ev)
	}
}

func (w *world) watchPool(p *simPool) {
	if p != nil {
		ev := p.watch[0]
		p.watch = p.watch[1:]
		p.show(ev)
		seen, ok := ev.(PoolSeen)
		if p.seen = ok; ok {
			p.told = seen.Pool
		}
		w.step(ev)
	}
}

// show lets the shell see what the watch tells of a pool.
func (p *simPool) show(ev Event) {
	if seen, ok := ev.(PoolSeen); ok {
		p.shown = seen.Pool
	}
}

func (w *world) audit() {
	keys := w.core.PodKeys()
	slices.SortFunc(keys, func(a, b PodKey) int { return cmp.Compare(a.UID, b.UID) })
	for _, key := range keys {
		if p := w.pod(key); !p.exists {
			w.submit(PodGone{key})
		}
	}
}

func (w *world) changePool() {
	p := pick(w, w.pools, func(*simPool) bool { return true })
	switch n := w.draw(16); {
	case !p.exists: // another of the same name
		p.exists, p.Deleting, p.Template, p.Refused, p.Ports = true, false, "t1", false, nil
	case p.Deleting:
		return
	case n < 4:
		p.Warm = n
	case n < 7:
		p.Template = "t" + strconv.Itoa(n-3)
	case n < 9:
		p.Template, p.Refused = "t"+strconv.Itoa(n-6), true
	case n < 11: // the same template under another policy, or one that was mended
		p.Refused = !p.Refused
	case n < 13:
		p.Ports = w.ports(p.Ports)
	case n < 15:
		p.DefaultPort = []uint16{80, 8080}[n-13]
	default:
		p.Deleting, p.everDeleting = true, true
	}
	p.watch = append(p.watch, PoolSeen{p.Pool})
}

// ports are others than these.
func (w *world) ports(not []uint16) []uint16 {
	others := slices.DeleteFunc([][]uint16{nil, {80}, {80, 8080}, {8080}}, func(p []uint16) bool { return slices.Equal(p, not) })
	return others[w.draw(len(others))]
}

func (w *world) pickJob() *job {
	if len(w.jobs) == 0 {
		return nil
	}
	return w.jobs[w.draw(len(w.jobs))]
}

func (w *world) finish(j *job) {
	w.jobs = slices.DeleteFunc(w.jobs, func(o *job) bool { return o == j })
}

// What may become of an attempt to write.
const (
	lands = iota
	landsReportedLate
	answerLost      // it took place; what follows is a read
	answerLostTwice // it took place; the read fails too
	lost            // it did not take place
	refused         // by something that has nothing to do with its condition
)

// run makes an attempt at a write, as allocator/pods.Writer and
// allocator/project.Projector do.
func (w *world) run(j *job, luck int) {
	switch {
	case j == nil:
		return
	case j.done:
		w.finish(j)
		if j.term == w.term {
			for _, ev := range j.report {
				w.submit(ev)
			}
		}
		return
	}
	w.log("  %s (%d)", j, luck)
	done := w.attempt(j, luck)
	if j.term != w.term { // nobody waits for it, and nobody tries again
		w.finish(j)
		return
	}
	if j.done = done; done && luck != landsReportedLate {
		w.run(j, lands)
	}
}

// attempt reports whether the outcome is known; j.report is then what is told.
func (w *world) attempt(j *job, luck int) bool {
	takesPlace := luck != lost && luck != refused
	switch e := j.effect.(type) {
	case LabelPod:
		if p := w.pod(e.Pod); takesPlace && p.exists {
			w.write(p, func(p *Pod) { p.Used = true })
		}
		if luck > landsReportedLate {
			return false
		}
	case StartSandbox:
		// The hook may be called any number of times.
		switch luck {
		case refused:
			w.failed[e.Sandbox.ID] = true
			j.report = []Event{Started{ID: e.Sandbox.ID}}
		case lands, landsReportedLate:
			j.report = []Event{Started{ID: e.Sandbox.ID, OK: true}}
		default:
			return false
		}
	case DeletePod:
		p := w.pod(e.Pod)
		if takesPlace && p.exists && !p.Deleting {
			w.judgeDeleted(p)
			w.write(p, func(p *Pod) { p.Deleting = true })
		}
		switch {
		case luck > answerLost:
			return false
		case !p.exists:
			j.report = []Event{PodGone{p.Key}}
		}
	case CreatePod:
		p := w.pool(e.Pool)
		taken := slices.ContainsFunc(w.pods, func(o *simPod) bool { return o.exists && o.Key.Name == e.Name })
		if !takesPlace || !p.exists || taken || p.shown.Refused { // the last is allocator/pools.Pools.Get
			j.report = []Event{CreateFailed(e)}
			return true
		}
		again := slices.ContainsFunc(w.pods, func(o *simPod) bool { return o.Key.Name == e.Name })
		if again {
			w.extra++ // made twice, removed in between: too rare to be worth a rule
		}
		uid := fmt.Sprintf("uid%02d", len(w.pods))
		made := &simPod{exists: true, Pod: Pod{Key: PodKey{e.Pool.Namespace, e.Name, uid}, Pool: e.Pool.Name, Template: p.shown.Template, CreatedAt: w.now.Wall}}
		w.pods = append(w.pods, made)
		w.write(made, func(*Pod) {})
		if luck > landsReportedLate {
			j.report = []Event{CreateFailed(e)}
		} else {
			j.report = []Event{PodSeen{made.Pod}}
		}
	case Record:
		s := e.Sandbox
		if s.Phase == Releasing {
			s.Phase = Running
		}
		stored, ok := w.records[s.ID]
		if takesPlace && (!ok || stored.Revision.Less(s.Revision)) {
			if !ok {
				stored = &simRecord{}
			}
			stored.Sandbox = s
			if w.records[s.ID] = stored; s.Phase == Ended && s.IdempotencyKey == "" && stored.deleting { // its finalizer goes
				w.forgotten[s.ID] = true
				w.dropObject(s.ID)
			} else {
				w.recordWatch = append(w.recordWatch, w.seenRecord(s.ID))
			}
		}
		if luck > landsReportedLate {
			return false
		}
		j.report = []Event{Recorded{s.ID, s.Revision}}
	case ForgetRecord:
		if takesPlace {
			w.dropObject(e.ID)
		}
		if luck > landsReportedLate {
			return false
		}
	case PoolDrained:
		if p := w.pool(e.Key); p.exists && p.Deleting {
			p.exists = false
			p.watch = append(p.watch, PoolGone{Key: p.Key})
			for _, q := range w.pods {
				if q.exists && q.pool() == p.Key { // made after all, and garbage now
					w.write(q, func(q *Pod) { q.Deleting = true })
					w.extra++
				}
			}
		}
	default:
		w.t.Fatalf("unknown effect %T", e)
	}
	return true
}

// ---- callers

func (w *world) token() uint64 { w.tokens++; return uint64(w.tokens) }

func (w *world) claim() {
	token := w.token()
	ev := Claim{Token: token, Pool: w.pools[w.draw(len(w.pools))].Key, Lifetime: time.Duration(w.draw(3)) * 30 * time.Second, Wait: time.Duration(w.draw(3)) * 10 * time.Second}
	if n := w.draw(4); n > 1 {
		ev.Binding.IdempotencyKey = "k" + strconv.Itoa(n)
		ev.Binding.RequestHash[0] = byte(w.draw(2))
	}
	w.claims[token] = &simClaim{key: ev.Binding.claimKey()}
	w.step(ev)
}

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
	w.step(Release{Token: token, ID: id, Reason: ReasonKilled})
}

// ---- routers

func (w *world) addRouter() {
	w.routers = append(w.routers, &router{
		id: "router" + strconv.Itoa(len(w.routers)), routes: map[string]netip.Addr{}, gone: map[string]bool{},
	})
}

// routable reports whether the router would admit a request for id.
func (r *router) routable(id string, now time.Duration) bool {
	_, ok := r.routes[id]
	return ok && !r.dead && now < r.freshUntil
}

// used notes, until then, what is in use. It comes before whatever may end a
// use.
func (w *world) used(until time.Duration) {
	for _, r := range w.routers {
		for id := range r.routes {
			if r.routable(id, w.now.Boot) {
				w.lastUse[id] = max(w.lastUse[id], min(until, r.freshUntil))
			}
		}
	}
}

func (w *world) send(stream uint64, e Effect) {
	for _, r := range w.routers {
		if r.stream == stream {
			r.in = append(r.in, message{w.term, e})
			r.hear(e)
		}
	}
}

// hear notes what the stream has said, whether it has arrived or not.
func (r *router) hear(e Effect) {
	switch e := e.(type) {
	case SendSnapshot:
		r.told = map[string]Sandbox{}
		for _, s := range e.Routes {
			r.told[s.ID] = s
		}
	case SendRoute:
		r.told[e.Sandbox.ID] = e.Sandbox
	case SendRelease:
		delete(r.told, e.ID)
	case SendResolved:
		delete(r.told, e.ID)
		if e.Sandbox != nil {
			r.told[e.ID] = *e.Sandbox
		}
	}
}

func (w *world) join(r *router) {
	if r == nil {
		return
	}
	if r.stream != 0 {
		w.leave(r)
	}
	w.lastStream++
	r.stream, r.cut, r.joined, r.applied, r.in, r.out, r.pings = w.lastStream, false, false, 0, nil, nil, map[uint64]time.Duration{}
	r.told = map[string]Sandbox{}
	w.step(SessionJoined{Session: r.id, Stream: r.stream})
	w.ping(r)
}

// leave ends the stream. What it carried may reach the core later, and in any
// order with what comes from another stream.
func (w *world) leave(r *router) {
	if !r.cut && w.draw(2) == 0 {
		w.strays = append(w.strays, r.out...)
	}
	w.strays = append(w.strays, SessionLeft{Session: r.id, Stream: r.stream})
	r.stream, r.cut, r.in, r.out = 0, false, nil, nil
}

func (w *world) breakOff(r *router) {
	if r != nil {
		w.leave(r)
	}
}

func (w *world) ping(r *router) {
	if r != nil {
		r.nonce++
		r.pings[r.nonce] = w.now.Boot
		r.out = append(r.out, SessionPing{Session: r.id, Stream: r.stream, Nonce: r.nonce})
	}
}

func (w *world) ack(r *router) {
	if r != nil && r.applied > 0 {
		r.out = append(r.out, SessionAck{Session: r.id, Stream: r.stream, Sequence: r.applied})
	}
}

func (w *world) ask() {
	if r := pick(w, w.routers, func(r *router) bool { return connected(r) && r.joined }); r != nil {
		r.out = append(r.out, Resolve{Session: r.id, Stream: r.stream, ID: w.anyID()})
	}
}

// die ends a router's process; a clean end comes with a Goodbye.
func (w *world) die(r *router, clean bool) {
	if r == nil {
		return
	}
	w.used(w.now.Boot)
	r.dead = true
	switch {
	case clean:
		r.out = append(r.out, SessionGoodbye{r.id})
		w.strays = append(w.strays, r.out...)
		w.strays = append(w.strays, SessionLeft{Session: r.id, Stream: r.stream})
		r.stream, r.in, r.out = 0, nil, nil
	case r.stream != 0:
		w.leave(r)
	}
	living := 0
	for _, r := range w.routers {
		if !r.dead {
			living++
		}
	}
	if living < 2 {
		w.addRouter()
	}
}

func (w *world) fromRouter(r *router) {
	if r != nil {
		ev := r.out[0]
		r.out = r.out[1:]
		w.step(ev)
	}
}

// toRouter puts one message into effect, as extproc/link and routecache do, but
// without tombstones: the core must not need them.
func (w *world) toRouter(r *router) {
	if r == nil {
		return
	}
	w.used(w.now.Boot)
	m := r.in[0]
	r.in = r.in[1:]
	if m.term < r.term {
		w.leave(r)
		return
	}
	r.term = m.term
	if _, ok := m.effect.(SendSnapshot); !ok && !r.joined {
		w.t.Fatalf("%s got %T before the snapshot", r.id, m.effect)
	}
	put := func(s Sandbox) {
		if r.gone[s.ID] {
			w.t.Fatalf("%s is told a route to %s after it was told that it is gone", r.id, s.ID)
		}
		r.routes[s.ID] = s.IP
	}
	sequence := uint64(0)
	switch e := m.effect.(type) {
	case SendSnapshot:
		r.routes = map[string]netip.Addr{}
		for _, s := range e.Routes {
			put(s)
		}
		r.joined, sequence = true, e.Sequence
	case SendRoute:
		put(e.Sandbox)
		sequence = e.Sequence
	case SendRelease:
		delete(r.routes, e.ID)
		r.gone[e.ID] = true
		sequence = e.Sequence
	case SendResolved:
		switch {
		case e.Sandbox != nil:
			put(*e.Sandbox)
		case e.Gone:
			delete(r.routes, e.ID)
			r.gone[e.ID] = true
		default:
			delete(r.routes, e.ID)
		}
	case SendPong:
		if sent, ok := r.pings[e.Nonce]; ok {
			// Its clock may be slow by as much as is allowed for.
			r.freshUntil = max(r.freshUntil, sent+maxStale+maxStale/100)
		}
	}
	if sequence > 0 {
		if sequence != r.applied+1 {
			w.t.Fatalf("%s got message %d after message %d", r.id, sequence, r.applied)
		}
		r.applied = sequence
	}
}

func (w *world) advance(d time.Duration) {
	w.used(w.now.Boot + d)
	w.now.Boot += d
	w.now.Wall = w.now.Wall.Add(d)
	w.step(Tick{})
}

// ---- what must hold in the end

// settle lets everything work and expects rest: nothing endless, nothing left
// over, everybody answered.
func (w *world) settle() {
	w.log("- settle")
	for name := range w.nodes {
		if !w.nodes[name] {
			w.nodes[name] = true
			w.nodeWatch = append(w.nodeWatch, NodeSeen{Name: name, Usable: true})
		}
	}
	for _, p := range w.pods {
		if p.exists {
			w.write(p, func(*Pod) {}) // whatever was refused is looked at again
		}
	}
	for range 30 {
		w.quiesce()
		for _, r := range w.routers {
			if connected(r) {
				w.ping(r)
			}
		}
		w.advance(10 * time.Second)
		w.check()
	}
	w.quiesce()
	t := w.t
	for token, c := range w.claims {
		if !c.abandoned {
			t.Fatalf("claim %d was never answered", token)
		}
	}
	if len(w.releases) > 0 {
		t.Fatalf("releases never answered: %v", w.releases)
	}
	if w.core.fences.Len() > 0 {
		t.Fatalf("%d fences never completed", w.core.fences.Len())
	}
	used := map[PoolKey]int{}
	warm := map[PoolKey]int{}
	for _, p := range w.pods {
		switch {
		case !p.exists:
			continue
		case p.Finished || p.Deleting || p.discarded || len(p.bound) == 0 && p.Used:
			t.Fatalf("pod %s was left over: %+v", p.Key.Name, p.Pod)
		case len(p.bound) > 0:
			id := p.bound[0]
			used[p.pool()]++
			if s := w.core.sandboxes[id]; s == nil || s.Phase != Running {
				t.Fatalf("pod %s is left with %s: %+v", p.Key.Name, id, s)
			}
			if r, ok := w.records[id]; !ok || r.Phase != Running {
				t.Fatalf("%s runs, its record says %+v", id, r)
			}
		default:
			warm[p.pool()]++
			switch pool := w.pool(p.pool()); {
			case !pool.Refused && p.Template != pool.Template:
				t.Fatalf("pod %s is of an older template", p.Key.Name)
			case pool.Refused && p.Template == pool.Template:
				t.Fatalf("pod %s is of a template that is refused", p.Key.Name)
			}
		}
	}
	for _, p := range w.pools {
		switch known := w.core.pools[p.Key]; {
		case p.Deleting && (p.exists || known != nil):
			t.Fatalf("pool %s is being deleted and still there, known: %v", p.Key.Name, known != nil)
		case p.Deleting:
			continue
		}
		want := wanted(p.Pool, used[p.Key])
		if p.Refused {
			want = min(want, warm[p.Key]) // none are made
		}
		counts, _ := w.core.Counts(p.Key)
		if warm[p.Key] != want || counts != (Counts{Warm: want, Claimed: used[p.Key]}) {
			t.Fatalf("pool %s: %d warm pods, expected %d; counts %+v", p.Key.Name, warm[p.Key], want, counts)
		}
	}
	for id, r := range w.records {
		if w.core.sandboxes[id] == nil {
			continue // written late by a deposed leader: the next one will find it
		}
		if p := w.podOf(id); r.Phase == Running && (p == nil || !p.exists) {
			t.Fatalf("%s has no pod, its record says that it runs", id)
		}
	}
	for _, id := range sorted(w.ended) {
		r, ok := w.records[id]
		if w.unwanted[id] {
			continue
		}
		if !ok || r.Phase != Ended {
			t.Fatalf("%s has ended, its record says %+v", id, r)
		}
	}
}

// catchUp lets everything be done that is under way, and makes all routers
// fresh.
func (w *world) catchUp() {
	w.quiesce()
	for _, r := range w.routers {
		if connected(r) {
			w.ping(r)
		}
	}
	w.quiesce()
}

// quiesce does all that can be done without time passing.
func (w *world) quiesce() {
	for range 2000 {
		switch {
		case w.tellShown(): // not far behind: pods of a template that the core does not know yet are replaced over and over
		case len(w.nodeWatch) > 0:
			w.watchNodes()
		case w.leader.pending != nil || w.leader.paced:
			w.journal(w.leader, 0)
		case len(w.jobs) > 0:
			w.run(w.jobs[0], lands)
		case len(w.recordWatch) > 0:
			w.watchRecords()
		case w.first(func(p *simPod) bool { return len(p.watch) > 0 }, w.watch):
		case w.first(func(p *simPod) bool { return p.exists && p.Deleting }, w.remove):
		case w.first(func(p *simPod) bool { return p.exists && !p.Ready && !p.Finished }, w.becomesReady):
		case len(w.strays) > 0:
			ev := w.strays[0]
			w.strays = w.strays[1:]
			w.step(ev)
		case w.firstPool():
		case w.firstRouter():
		default:
			w.audit()
			if len(w.jobs) == 0 {
				return
			}
		}
		w.check()
	}
	w.t.Fatal("no end: something is done over and over")
}

func (w *world) first(fits func(*simPod) bool, do func(*simPod)) bool {
	i := slices.IndexFunc(w.pods, fits)
	if i < 0 {
		return false
	}
	do(w.pods[i])
	return true
}

// tellShown tells the core of a pool that the shell has seen already.
func (w *world) tellShown() bool {
	for _, p := range w.pools {
		if !reflect.DeepEqual(p.shown, p.told) && len(p.watch) > 0 {
			w.watchPool(p)
			return true
		}
	}
	return false
}

func (w *world) firstPool() bool {
	for _, p := range w.pools {
		if len(p.watch) > 0 {
			w.watchPool(p)
			return true
		}
	}
	return false
}

func (w *world) firstRouter() bool {
	for _, r := range w.routers {
		switch {
		case r.dead:
			continue
		case r.stream == 0 || r.cut:
			w.join(r)
		case len(r.out) > 0:
			w.fromRouter(r)
		case len(r.in) > 0:
			w.toRouter(r)
			w.ack(r)
		default:
			continue
		}
		return true
	}
	return false
}
