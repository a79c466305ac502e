package core

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
)

// simRecord is a Sandbox object.
type simRecord struct {
	Sandbox
	deleting bool
}

type simPool struct {
	Pool
	exists, everDeleting bool
	egress               bool // what leaves its pods goes through the egress gateway
	everReleasing        bool // its deletion releases its sandboxes
	watch                []Event
	shown                Pool // as the shell last saw it: pods are made from its template
	sent                 Pool // that the core was sent last
	seen                 bool // the last event about it was an observation, not its end
}

type simPod struct {
	Pod
	exists, moved, marked bool
	watch                 []Event
	// bound are the sandboxes that were durably on it, discarded that it is
	// durably to be deleted.
	bound     []string
	discarded bool
	// configured is the sandbox that its agent was configured for, in this life of the agent. forgot is the
	// same for an earlier life.
	configured, forgot string
	restored           string // the archive that it was given then
	agent              simAgent
	told               bool // its agent was told to end
}

// job is a write under way.
type job struct {
	term   uint64
	effect Effect
	done   bool // the outcome is known but not reported
	report []Event
}

func (j *job) String() string {
	switch e := j.effect.(type) {
	case CreatePod:
		return "create " + e.Name
	case LabelPod:
		return "label " + e.Pod.Name
	case SyncPod:
		return "sync " + e.Pod.Name
	case ResizePod:
		return "resize " + e.Pod.Name + " in version " + e.Version
	case StartSandbox:
		return "start " + e.Sandbox.ID
	case Configure:
		return "configure " + e.Sandbox.ID
	case Freeze:
		return "freeze " + e.Sandbox.ID
	case Thaw:
		return "thaw " + e.Sandbox.ID
	case WriteArchive:
		return "archive " + e.Sandbox.ID
	case DropArchive:
		return "drop archive " + e.Sandbox.Archive
	case DeletePod:
		return "delete " + e.Pod.Name
	case RecyclePod:
		return "recycle " + e.Pod.Name
	case WriteObject:
		return "record " + e.Sandbox.ID
	case ReadLog:
		return "read log " + e.Sandbox.ID
	case DeleteObject:
		return "forget " + e.ID
	case PoolDrained:
		return "drained " + e.Key.Name
	}
	return fmt.Sprintf("%T", j.effect)
}

func (p *simPod) pool() PoolKey { return PoolKey{Namespace: p.Key.Namespace, Name: p.Pool} }

func (w *world) pod(key PodKey) *simPod {
	for _, p := range w.pods {
		if p.Key == key {
			return p
		}
	}
	w.t.Fatalf("no such pod: %v", key)
	return nil
}

// podOf is the pod of a sandbox, or the last one that it had.
func (w *world) podOf(id string) *simPod {
	if s, ok := w.disk.sandboxes[id]; ok {
		if p := w.pod(s.Pod); slices.Contains(p.bound, id) {
			return p
		}
	}
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

// restart: an agent that starts again is not configured any more.
func (w *world) restart(p *simPod) {
	if p != nil && p.configured != "" {
		p.forgot, p.configured, p.agent = p.configured, "", simAgent{}
	}
	w.write(p, func(p *Pod) { p.Restarts++ })
}

// life is the last life of a pod.
func (w *world) life(key PodKey) (p *simPod) {
	for _, q := range w.pods {
		if q.Key.Whole() == key.Whole() {
			p = q
		}
	}
	return p
}

// nextLife ends the life of a pod and begins another one.
func (w *world) nextLife(p *simPod) *simPod {
	p.exists = false
	next := &simPod{exists: true, Pod: p.Pod}
	next.Key.Life++
	w.pods = append(w.pods, next)
	w.write(next, func(p *Pod) { p.Ready, p.Recycling, p.Used, p.Restarts = false, true, false, p.Restarts+1 })
	w.lives++
	return next
}

func (w *world) remove(p *simPod) {
	if p != nil {
		p.exists = false
		p.watch = append(p.watch, PodGone{p.Key.Whole()})
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
		pod.Recycling = false
	})
}

// address is a new one, or one that has become free: its pod is gone, has ended or
// has moved away.
func (w *world) address() netip.Addr {
	if at := w.nextAddress; at.IsValid() {
		w.nextAddress = netip.Addr{}
		return at
	}
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
			p.sent = seen.Pool
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
	keys := w.core.View().PodKeys()
	slices.SortFunc(keys, func(a, b PodKey) int { return cmp.Compare(a.UID, b.UID) })
	for _, key := range keys {
		switch p := w.life(key); {
		case !p.exists:
			w.submit(PodGone{key.Whole()})
		case p.Key != key:
			w.submit(PodSeen{p.Pod})
		}
	}
}

func (w *world) changePool() {
	p := pick(w, w.pools, func(*simPool) bool { return true })
	switch n := w.draw(20); {
	case !p.exists: // another of the same name
		p.exists, p.Deleting, p.KeepSandboxes, p.Template, p.Refused, p.Ports = true, false, false, "t1", "", nil
	case n < 2 && p.Deleting: // which sandboxes go on can change until the end
		p.KeepSandboxes = n == 1
		p.everReleasing = p.everReleasing || n == 0
	case p.Deleting:
		return
	case n < 4:
		p.Warm = n
		p.Metadata = []string{"", "m1", "m2"}[w.draw(3)]
	case n < 7:
		p.Template, p.Agent.Port = "t"+strconv.Itoa(n-3), []uint16{0, 49983}[w.draw(2)]
		p.CannotSleep = []string{"", "", "a probe"}[w.draw(3)]
	case n < 9:
		p.Template, p.Refused = "t"+strconv.Itoa(n-6), "refused"
	case n < 11: // the same template under another policy, or one that was mended
		p.Refused = map[string]string{"": "refused"}[p.Refused]
	case n < 13:
		p.Ports = w.ports(p.Ports)
	case n < 15:
		p.DefaultPort = []uint16{80, 8080}[n-13]
	case n < 16:
		p.MaxSurge, p.MaxUnavailable, p.MaxAsleep = w.draw(3), w.draw(3), w.draw(3)
	case n < 18:
		p.Paused = n == 17
	default:
		p.Deleting, p.everDeleting, p.KeepSandboxes = true, true, n == 19
		p.everReleasing = p.everReleasing || !p.KeepSandboxes
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
// allocator/sandboxobjects.Writer do.
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
	if j.term != w.term { // the deposed leader neither waits for it nor tries again
		w.finish(j)
		return
	}
	if j.done = done; done && luck != landsReportedLate {
		w.run(j, lands)
	}
}

// attempt reports whether the outcome is known; j.report has the events of the outcome.
func (w *world) attempt(j *job, luck int) bool {
	takesPlace := luck != lost && luck != refused
	switch e := j.effect.(type) {
	case SyncPod:
		if p := w.pod(e.Pod); takesPlace && p.exists && !p.Used {
			w.write(p, func(p *Pod) { p.Metadata = w.pool(e.Pool).shown.Metadata })
		}
		return luck <= landsReportedLate
	case ResizePod:
		p := w.pod(e.Pod)
		if !p.exists || p.Version != e.Version {
			return true
		}
		if takesPlace {
			w.write(p, func(p *Pod) { p.Lowered = e.Lower })
		}
		return luck <= landsReportedLate
	case LabelPod:
		if p := w.pod(e.Pod); takesPlace && p.exists {
			w.write(p, func(p *Pod) { p.Used = true })
		}
		if luck > landsReportedLate {
			return false
		}
	case Configure:
		p := w.pod(e.Sandbox.Pod)
		there := e.Sandbox.Archive == "" || w.stops[e.Sandbox.Archive] == e.Sandbox.ID
		if takesPlace && !e.Ask && there && p.exists && p.configured == "" {
			p.configured, p.restored = e.Sandbox.ID, e.Sandbox.Archive
		}
		switch certain := luck <= landsReportedLate; {
		case e.Ask && (!p.exists || w.released(e.Sandbox.ID)): // the shell stops asking
		case e.Ask && !certain:
			return false
		default:
			j.report = []Event{Configured{ID: e.Sandbox.ID, OK: certain && p.configured == e.Sandbox.ID}}
		}
	case Freeze:
		return w.orderAgent(j, e.Sandbox, luck)
	case Thaw:
		return w.orderAgent(j, e.Sandbox, luck)
	case WriteArchive:
		w.writeArchive(j, e, luck)
	case DropArchive:
		if takesPlace {
			w.judgeDropped(e)
			delete(w.stops, e.Sandbox.Archive)
		}
	case StartSandbox:
		// The hook may be called any number of times.
		switch luck {
		case refused:
			w.failed[e.Sandbox.ID] = true
			j.report = []Event{Started{ID: e.Sandbox.ID, Incarnation: e.Sandbox.Incarnation}}
		case lands, landsReportedLate:
			j.report = []Event{Started{ID: e.Sandbox.ID, Incarnation: e.Sandbox.Incarnation, OK: true}}
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
		case !p.exists && !w.life(p.Key).exists:
			j.report = []Event{PodGone{p.Key.Whole()}}
		}
	case RecyclePod:
		p := w.pod(e.Pod)
		outcome := Event(PodGone{p.Key.Whole()})
		switch {
		case !takesPlace || !p.exists || p.Deleting:
		case !p.Recyclable || w.draw(8) == 7: // the shell finds that it cannot be recycled
			w.judgeDeleted(p)
			w.write(p, func(p *Pod) { p.Deleting = true })
		default:
			w.judgeDeleted(p)
			outcome = PodSeen{w.nextLife(p).Pod}
		}
		switch {
		case luck > answerLost:
			return false
		case !p.exists:
			if next := w.life(p.Key); next.exists {
				outcome = PodSeen{next.Pod}
			}
			j.report = []Event{outcome}
		}
	case CreatePod:
		j.report = []Event{w.create(e, luck)}
	case WriteObject:
		if takesPlace {
			w.writeRecord(e)
		}
		if luck > landsReportedLate {
			return false
		}
		j.report = []Event{ObjectWritten{e.Sandbox.ID, e.Sandbox.Revision}}
	case ReadLog:
		if takesPlace {
			j.report = []Event{LogRead{ID: e.Sandbox.ID, Lines: []string{"x"}}}
		}
	case DeleteObject:
		if r := w.records[e.ID]; takesPlace && r != nil && !e.Revision.Less(r.Revision) {
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

func (w *world) create(e CreatePod, luck int) Event {
	p := w.pool(e.Pool)
	taken := slices.ContainsFunc(w.pods, func(o *simPod) bool { return o.exists && o.Key.Name == e.Name })
	if luck == lost || luck == refused || !p.exists || taken || p.shown.Refused != "" { // the last is allocator/pools.Pools.Get
		return CreateFailed{Pool: e.Pool, Name: e.Name}
	}
	again := slices.ContainsFunc(w.pods, func(o *simPod) bool { return o.Key.Name == e.Name })
	if again {
		w.extra++ // made twice, removed in between: too rare to be worth a rule
	}
	uid := fmt.Sprintf("uid%02d", len(w.pods))
	made := &simPod{exists: true, Pod: Pod{Key: PodKey{Namespace: e.Pool.Namespace, Name: e.Name, UID: uid}, Pool: e.Pool.Name, Template: p.shown.Template, Metadata: p.shown.Metadata, AgentPort: p.shown.Agent.Port, Egress: p.egress && p.shown.Agent.Port != 0, CreatedAt: w.now.Wall, Recyclable: p.shown.Recycle, CPURequest: "1"}}
	if made.Recyclable {
		made.Key.Life = 1
	}
	w.pods = append(w.pods, made)
	w.write(made, func(*Pod) {})
	if luck > landsReportedLate {
		return CreateFailed{Pool: e.Pool, Name: e.Name}
	}
	return PodSeen{made.Pod}
}

func (w *world) writeRecord(e WriteObject) {
	s := e.Sandbox
	if s.Phase == Releasing {
		s.Phase = Running
	}
	stored, ok := w.records[s.ID]
	if !ok && !e.Touch || ok && stored.Revision.Less(s.Revision) {
		if !ok {
			stored = &simRecord{}
		}
		stored.Sandbox = s
		if w.records[s.ID] = stored; s.Phase == Ended && !s.Keyed() && stored.deleting { // its finalizer goes
			w.forgotten[s.ID] = true
			w.dropObject(s.ID)
		} else {
			w.recordWatch = append(w.recordWatch, w.seenRecord(s.ID))
		}
	}
}

func (w *world) seenRecord(id string) Event {
	r := w.records[id]
	return ObjectSeen{ID: id, Pool: r.Pool, Revision: r.Revision, Deleting: r.deleting}
}

// deleteObject: a user deletes an object; a finalizer keeps the object until its
// sandbox has ended, and if its caller gave a key until that holds no longer.
func (w *world) deleteObject(id string) {
	r := w.records[id]
	w.unwanted[id] = true
	if r.Phase == Ended && !r.Keyed() {
		w.forgotten[id] = true
		w.dropObject(id)
		return
	}
	r.deleting = true
	w.recordWatch = append(w.recordWatch, w.seenRecord(id))
}

func (w *world) dropObject(id string) {
	if w.records[id] != nil {
		delete(w.records, id)
		w.recordWatch = append(w.recordWatch, ObjectGone{id})
	}
}

func (w *world) watchRecords() {
	if len(w.recordWatch) > 0 {
		ev := w.recordWatch[0]
		w.recordWatch = w.recordWatch[1:]
		w.step(ev)
	}
}

func (w *world) watchNodes() {
	if len(w.nodeWatch) > 0 {
		ev := w.nodeWatch[0]
		w.nodeWatch = w.nodeWatch[1:]
		w.step(ev)
	}
}

// unused: it can be handed out, and never was.
func unused(p *simPod) bool { return p.exists && p.Ready && !p.discarded && len(p.bound) == 0 }

// tamper writes on the object of a sandbox that it is on another pod. A leader that begins
// finds that out.
func (w *world) tamper(id string, p *simPod) {
	r := w.records[id]
	r.Pod, r.IP = p.Key, p.IP
	w.tampered[id] = true
	w.log("  %s is said to be on %s", id, p.Key.Name)
}

// untamper takes back that a sandbox is said to be on a pod that another one was given
// meanwhile: no leader begins with two sandboxes on record with one pod.
func (w *world) untamper(id string) {
	r := w.records[id]
	for other, durable := range w.disk.sandboxes {
		if w.tampered[id] && other != id && durable.Pod == r.Pod {
			r.Pod, r.IP = w.disk.sandboxes[id].Pod, w.disk.sandboxes[id].IP
		}
	}
}
