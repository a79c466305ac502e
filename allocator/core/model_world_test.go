package core

import (
	"cmp"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/core/pods"
)

type world struct {
	t tb
	// draws decides what is left to chance: a number from 0 to n-1. 0 is the plain course of things.
	draws func(n int) int
	now   Instant
	term  uint64
	// internal is the term in which the internal key was last used.
	internal uint64
	core     *Core
	// leader is the process that has been elected last, old are those before it
	// that have not ended.
	leader *process
	old    []*process
	disk   *disk

	ids, names, versions, addresses, tokens, lives, recycled int

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
	requests   []*request            // that may still be sent to a pod
	holders    map[netip.Addr]string // the sandbox that was given each address last
	lastStream uint64
	writes     int     // that have become durable
	strays     []Event // from streams that have broken off

	claims       map[uint64]*simClaim // token -> not answered yet
	given        map[uint64]string    // token -> the sandbox that it was answered with
	releases     map[uint64]string
	declared     map[uint64]string // DeclareDead that are not answered yet
	asked        map[string]bool   // a caller wanted it released
	answered     map[string]bool   // a caller was given it
	unwanted     map[string]bool   // a user has deleted its Sandbox object
	fired        map[string]bool   // SandboxReleased in this term
	acknowledged map[string]bool   // Acknowledged, ever
	ready        map[string]bool   // SandboxReady, ever
	failed       map[string]bool   // its hook failed
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
	tampered  map[string]bool // a user has changed its object
	extra     int             // pods that may exceed a pool's bound

	// uses are what is in progress at pods.
	uses   []*use
	envoys map[int]*simEnvoy
	prompt bool                // looks take no time
	kept   map[uint64]keptCall // KeepAlive and SetTimeout that are not answered yet
	// lastRules are those that the last SetNetwork has asked for, inEffect those that were said to be in effect, by
	// sandbox.
	lastRules int
	inEffect  map[string]int
	slept     map[string]uint64 // the last call of Sleep for each sandbox, by its token
	// activeAt is when each sandbox was in use last, as far as routers can know.
	activeAt map[string]time.Duration
	judgedBy map[string]uint64 // the term whose verdict on its idleness was judged
	// batches are the sandboxes that were claimed together; complete: a caller was given them.
	batches    map[string][]Sandbox
	closing    map[string]bool   // a verdict has closed it
	unthawed   map[string]bool   // its agent did not continue it
	archived   map[uint64]bool   // by the token of the call: whether the archive was written
	stops      map[string]string // the archives of stops that are there: whose they are
	unarchived map[string]bool   // the last archive for its stop has failed
	complete   map[string]bool

	// held is what does not go on by itself: see scenario_test.go.
	held held
	// nextAddress is what the next pod gets, if it is valid; nextID what the next
	// sandbox is called, if it is set.
	nextAddress netip.Addr
	nextID      string
}

// simClaim is a caller.
type simClaim struct {
	asks      Claim
	abandoned bool
}

// tb is what the model needs of a test.
type tb interface {
	Fatal(...any)
	Fatalf(string, ...any)
	Logf(string, ...any)
}

// newWorld is one with nothing in it.
func newWorld(t tb, draws func(int) int) *world {
	return &world{
		t: t, draws: draws,
		now:     Instant{Boot: time.Hour, Wall: time.Date(2024, 1, 1, 0, 0, 0, 0, time.UTC)},
		disk:    newDisk(),
		nodes:   map[string]bool{"n1": true, "n2": true},
		records: map[string]*simRecord{}, known: map[PodKey]int{}, holders: map[netip.Addr]string{},
		claims: map[uint64]*simClaim{}, given: map[uint64]string{}, releases: map[uint64]string{}, declared: map[uint64]string{}, asked: map[string]bool{}, answered: map[string]bool{}, unwanted: map[string]bool{},
		envoys: map[int]*simEnvoy{}, kept: map[uint64]keptCall{}, slept: map[string]uint64{}, inEffect: map[string]int{}, activeAt: map[string]time.Duration{}, judgedBy: map[string]uint64{}, batches: map[string][]Sandbox{}, complete: map[string]bool{},
		closing: map[string]bool{}, unthawed: map[string]bool{}, archived: map[uint64]bool{}, stops: map[string]string{}, unarchived: map[string]bool{},
		fired: map[string]bool{}, acknowledged: map[string]bool{}, ready: map[string]bool{}, failed: map[string]bool{},
		lastUse: map[string]time.Duration{}, doomed: map[string]bool{}, judged: map[PodKey]bool{}, ended: map[string]PodKey{}, forgotten: map[string]bool{}, tampered: map[string]bool{}, hadAddress: map[netip.Addr]map[PodKey]bool{},
	}
}

// anyWorld is one with two pools and two routers, and perhaps an egress router.
func anyWorld(t tb, draws func(int) int) *world {
	w := newWorld(t, draws)
	for _, name := range []string{"a", "b"} {
		w.addPool(Pool{
			Key: PoolKey{Namespace: "ns", Name: name}, Warm: w.draw(4), MaxPods: []int{0, 1, 3, 5}[w.draw(4)], Agent: []Agent{{}, {Port: 49983}}[w.draw(2)], Refused: []string{"", "", "", "refused"}[w.draw(4)], PostStart: w.draw(3) == 2, KeepOnRestart: w.draw(2) == 1, Recycle: w.draw(2) == 1,
			IdleTimeout: []time.Duration{0, idleLong}[w.draw(2)], ReadyWithin: []time.Duration{0, 0, 30 * time.Second}[w.draw(3)],
			Sleep:       fact.SleepPolicy{WhenIdle: w.draw(3) == 2, AtEnd: w.draw(3) == 2, WakeOnTraffic: w.draw(2) == 1, StopAfter: []time.Duration{0, 0, 20 * time.Second}[w.draw(3)]},
			MaxAsleep:   []int{0, 0, 1, 2}[w.draw(4)],
			MaxLifetime: []time.Duration{0, 0, 2 * time.Minute}[w.draw(3)], StartupTimeout: []time.Duration{0, 20 * time.Second}[w.draw(2)],
		}).egress = w.draw(2) == 1
	}
	for i := range 2 {
		w.addRouter(i % (1 + w.draw(2)))
	}
	if w.draw(2) == 1 {
		w.addRouter(egressEnvoy)
	}
	w.lead()
	if w.draw(2) == 1 {
		w.catchUp()
	}
	return w
}

func (w *world) addPool(p Pool) *simPool {
	p.Template, p.DefaultPort = "t1", 80
	made := &simPool{exists: true, Pool: p}
	w.pools = append(w.pools, made)
	return made
}

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
		Term: w.term, MaxStale: []time.Duration{maxStale, maxStale / 2, maxStale * 3 / 2}[w.draw(3)], ConnectWindow: window, Lease: lease, KeepEnded: 4, KeepEndedFor: 20 * time.Minute, MaxWaiting: 3, KeepKeys: time.Minute,
		NewID: func() string {
			if id := w.nextID; id != "" {
				w.nextID = ""
				return id
			}
			w.ids++
			return "id" + strconv.Itoa(w.ids)
		},
		NewSuffix: func() string { w.names++; return strconv.Itoa(w.names) },
	}, w.now)
	if err != nil {
		w.t.Fatal(err)
	}
	w.core = p.core
	st := w.readState()
	w.log("  recover %d facts, %d pools, %d pods, %d records", len(st.Facts), len(st.Pools), len(st.Pods), len(st.Objects))
	effects, err := w.core.Recover(st)
	if err != nil {
		w.t.Fatal(err)
	}
	w.checkRecovered()
	w.earlier = map[string]bool{}
	for sb := range w.core.sandboxes.All() {
		id := sb.ID
		w.earlier[id] = true
	}
	p.guard = NewWatcher(window)
	p.guard.Recover(w.now.Boot, st)
	w.do(p.guarded(nil, effects))
	w.step(TeamLimits{limitsOfModel})
	for _, p := range w.pools {
		if p.exists {
			p.watch = append(p.watch, PoolSeen{p.Pool})
		}
	}
}

// readState reads what exists, in the order of the shell, with late writes in between.
func (w *world) readState() (st State) {
	for _, r := range w.leader.opened {
		st.Facts = append(st.Facts, w.disk.facts[r.Key][Revision{Term: r.Term, Counter: r.Counter}])
	}
	w.lateWrites()
	for _, id := range sorted(w.records) {
		w.untamper(id)
		st.Objects = append(st.Objects, w.records[id].Sandbox)
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
			p.shown, p.sent = p.Pool, p.Pool
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
			w.known[p.Key.Whole()] = version(p.Version)
			p.watch = append(p.watch, PodSeen{p.Pod}) // the watch begins with a list of its own
		}
	}
	return st
}

// checkRecovered compares what a new leader knows with what is durable.
func (w *world) checkRecovered() {
	for id, durable := range w.disk.sandboxes {
		if w.forgotten[id] {
			continue
		}
		s := w.core.sandboxes.Get(id)
		if s == nil {
			w.t.Fatalf("%s is durable as %+v, the new leader does not know it", id, durable)
		}
		if w.tampered[id] {
			continue
		}
		if !reflect.DeepEqual(s.Binding, durable.Binding) || s.Pod != durable.Pod || s.IP != durable.IP {
			w.t.Fatalf("%s is durable as %+v, the new leader has %+v", id, durable, s.Sandbox)
		}
		if gone := s.Phase == Released || s.Phase == Ended; gone != (durable.Phase == Released) {
			w.t.Fatalf("%s is durable in phase %d, the new leader has it in phase %d", id, durable.Phase, s.Phase)
		}
	}
	for id := range w.answered {
		if w.core.sandboxes.Get(id) == nil && !w.forgotten[id] {
			w.t.Fatalf("%s was answered, the new leader does not know it", id)
		}
	}
	for id, there := range w.disk.sessions {
		if s := w.core.routers.members.Get(id); there != (s != nil && s.Durable) {
			w.t.Fatalf("session %s: there is one durably: %v, the new leader has %+v", id, there, s)
		}
	}
	for _, key := range w.core.pods.Keys() {
		if p, q := w.pod(key), w.core.pods.Get(key); p.discarded && q.State() != pods.Going {
			w.t.Fatalf("pod %s is durably to be deleted, the new leader has it in state %d", key.Name, q.State())
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
	clear(w.claims) // their callers were asked to try again
	clear(w.releases)
	clear(w.declared)
	clear(w.kept)
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
	w.log("  %v", traced{ev})
	members := w.core.routers.members
	if ping, ok := ev.(SessionPing); ok && members.OfStream(ping.Stream) != nil { // else it is late: the stream has ended
		w.heard(ping.Session)
	}
	effects := w.core.Step(w.now, ev)
	if join, ok := ev.(SessionJoined); ok && members.OfStream(join.Stream) != nil { // else it was refused
		w.heard(join.Session)
	}
	w.do(w.leader.guarded(ev, effects))
}

// observe drops what is older than known, as allocator.loop does.
func (w *world) observe(p Pod) {
	if last, ok := w.known[p.Key.Whole()]; ok && (last == gone || version(p.Version) < last) {
		return
	}
	w.known[p.Key.Whole()] = version(p.Version)
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
	most := 20 + 4*(w.core.pods.Len()+w.core.sandboxes.Len()+8)*(1+len(w.core.routers.members.All()))
	if len(effects) > most {
		w.t.Fatalf("%d effects of one step, expected at most %d", len(effects), most)
	}
	w.judgeDiscards()
	w.judgeVerdicts()
	w.judgeClosings()
	var writes []*job
	for _, e := range effects {
		w.log("    => %v", traced{e})
		switch e := e.(type) {
		case WriteObject:
			w.judgeWrite(e)
			same := func(j *job) bool {
				r, ok := j.effect.(WriteObject)
				return ok && j.term == w.term && !j.done && r.Sandbox.ID == e.Sandbox.ID
			}
			// As the projector: only the latest is written.
			if i := slices.IndexFunc(w.jobs, same); i >= 0 {
				w.jobs[i].effect = e
				continue
			}
			writes = slices.DeleteFunc(writes, same)
		case CreatePod, DeletePod, RecyclePod, PoolDrained, DeleteObject, LabelPod, SyncPod, ResizePod, ReadLog, StartSandbox, Configure, Freeze, Thaw, WriteArchive, DropArchive:
			w.judgeJob(e)
		case SendSnapshot, SendRoute, SendRelease, SendResolved, SendClose, SendPong, SendQuiesce, SendResume, CloseStream:
			w.deliver(e)
			continue
		default:
			w.judge(e)
			continue
		}
		writes = append(writes, &job{term: w.term, effect: e})
	}
	// Writes run side by side, and the core may list them in any order.
	slices.SortStableFunc(writes, func(a, b *job) int { return cmp.Compare(a.String(), b.String()) })
	w.jobs = append(w.jobs, writes...)
}
