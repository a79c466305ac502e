package allocator

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/rand"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/events"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/poststart"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/allocator/webhooks"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Numbers of concurrent writes. Sandbox objects get the most, because the journal must carry every
// state that they do not show yet; labels get the fewest.
const (
	createWorkers     = 16
	deleteWorkers     = 8
	backgroundWorkers = 8
	objectWorkers     = 24
	labelWorkers      = 4
	logWorkers        = 4
	dropWorkers       = 4
)

// term holds the parts of a leader, from its election to the end of its term.
type term struct {
	number    uint64
	a         *Allocator
	journal   *journalWriter
	loop      *loop
	answers   *answers
	writer    *pods.Writer
	labeler   *pods.Labeler
	objects   *sandboxobjects.Writer
	noCRD     atomic.Bool // objects has met sandboxobjects.ErrNoCRD at the last look of watchPressure
	headStart headStart
	hooks     *podCalls[core.Sandbox]
	inits     *podCalls[core.Configure]
	restores  *podCalls[core.Configure] // those that restore files before, which takes longer
	orders    *podCalls[agentOrder]
	keeps     *podCalls[agentOrder]
	archives  *podCalls[core.WriteArchive]
	stops     *podCalls[core.WriteArchive] // those of sandboxes that are to be stopped, which wait for a place
	creates   *workers
	deletes   *workers
	other     *workers
	lines     *workers // log lines of releases: writing one takes longer than a release
	found     *workers // delayed log lines, see report
	logs      *workers // reads of the logs of sandboxes that have ended
	drops     *workers // deletions of archives
	caller    *poststart.Caller
	agents    *agents.Caller // nil without a cluster's key: no pool has agents then
	events    *events.Ring
	eventLog  *eventlog.Log
	webhooks  *webhooks.Manager
	history   *history.Ring
	// withholds: too many terms have ended because of violations of late. withheld has the violations of this one.
	withholds bool
	withheld  map[string]bool
	began     core.Instant
	log       *zap.Logger
}

// lead leads a term until ctx ends or a part of it fails.
func (a *Allocator) lead(ctx context.Context) error {
	a.o.Log.Info("elected; reading the journal")
	log, facts, err := a.openJournal(ctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	t, err := a.newTerm(log, facts)
	if err != nil {
		return err
	}
	// Attach before the first list, so that no change between list and watch is missed.
	a.watches.attach(t)
	defer a.watches.attach(nil)
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	if err = t.recover(ctx, facts); err != nil {
		if ctx.Err() != nil {
			err = nil
		}
		stop() // the parts below then end at once, and drain what the watches submit
	}
	t.history = history.New(a.o.WallClock())
	var all sync.WaitGroup
	failed := make(chan error, 1)
	all.Go(func() {
		if err := t.journal.run(ctx); err != nil {
			failed <- err
		}
	})
	all.Go(func() { t.loop.run(ctx) })
	all.Go(func() { t.creates.run(ctx, createWorkers) })
	all.Go(func() { t.deletes.run(ctx, deleteWorkers) })
	all.Go(func() { t.other.run(ctx, backgroundWorkers) })
	all.Go(func() { t.callBack(ctx) })
	all.Go(func() { t.lines.finish(ctx, 1) })
	all.Go(func() { t.found.run(ctx, 1) })
	all.Go(func() { t.logs.run(ctx, logWorkers) })
	all.Go(func() { t.hooks.run(ctx) })
	all.Go(func() { t.inits.run(ctx) })
	all.Go(func() { t.restores.run(ctx) })
	all.Go(func() { t.orders.run(ctx) })
	all.Go(func() { t.keeps.run(ctx) })
	all.Go(func() { t.archives.run(ctx) })
	all.Go(func() { t.stops.run(ctx) })
	all.Go(func() { t.drops.run(ctx, dropWorkers) })
	if a.o.Snapshots != nil {
		all.Go(func() { t.sweepSnapshots(ctx) })
	}
	if t.agents != nil {
		all.Go(func() { t.agents.Run(ctx) })
	}
	all.Go(func() { t.labeler.Run(ctx, labelWorkers) })
	all.Go(func() { t.objects.Run(ctx, objectWorkers) })
	all.Go(func() { t.eventLog.Run(ctx) })
	all.Go(func() { t.webhooks.Run(ctx) })
	all.Go(func() { t.keepHistory(ctx) })
	all.Go(func() { t.watchPressure(ctx, t.journalBacklog) })
	all.Go(func() { t.journal.audit(ctx) })
	all.Go(func() { t.audit(ctx) })
	all.Go(func() { a.limits.run(ctx, t.Submit) })
	all.Go(func() { a.watches.pools.Maintain(ctx, t.counts) })

	if ctx.Err() == nil {
		a.setTerm(t)
		a.control.Lead(t)
		t.log.Info("leading")
	}
	select {
	case <-ctx.Done():
	case err = <-failed:
	case <-t.loop.done:
		if ctx.Err() == nil { // a violation has ended it
			err = awaitEnd(ctx, failed)
		}
	}
	a.setTerm(nil)
	t.events.Close()
	stop()
	all.Wait()
	return err
}

// openJournal takes the journal over. After that no earlier leader can commit.
func (a *Allocator) openJournal(ctx context.Context) (*journal.Log, []core.Fact, error) {
	// Decoding a full journal makes much garbage. Half of the memory limit is reserved for all
	// other data.
	if limit := debug.SetMemoryLimit(-1); limit != math.MaxInt64 {
		debug.SetMemoryLimit(limit / 2)
		defer debug.SetMemoryLimit(limit)
	}
	log, records, err := journal.Open(ctx, journal.Options{
		Store: &journal.Objects{Client: a.o.Clients.Berth, Namespace: a.o.Namespace},
		Valid: a.lock.valid, Begin: a.mayBeginJournal,
		Nonce: func() string { return rand.String(12) },
		Log:   a.o.Log.Named("journal"),
	})
	if errors.Is(err, journal.ErrMissing) || errors.Is(err, journal.ErrDamaged) {
		err = fmt.Errorf("%w; \"berth journal check\" shows what is wrong, \"berth journal begin\" begins it anew with what is left, see docs/backup.md", err)
	}
	if err != nil {
		return nil, nil, err
	}
	var facts []core.Fact
	for _, r := range records {
		if r.Key == violationsKey {
			if a.violations, err = readViolations(r); err != nil {
				return nil, nil, fmt.Errorf("%w: %w", journal.ErrDamaged, err)
			}
			continue
		}
		f, known, err := fromRecord(r, a.o.Namespace)
		switch {
		case err != nil:
			return nil, nil, fmt.Errorf("%w: %w", journal.ErrDamaged, err)
		case !known:
			a.o.Log.Warn("journal record of an unknown kind kept; a later version wrote it", zap.String("key", r.Key))
			continue
		}
		facts = append(facts, f)
	}
	return log, facts, nil
}

// mayBeginJournal refuses to create a journal where traces show that one existed: its promises
// would be forgotten.
func (a *Allocator) mayBeginJournal(ctx context.Context) error {
	var records v1alpha1.SandboxList
	err := a.o.Clients.Berth.Get().Namespace(a.o.Namespace).Resource("sandboxes").Param("limit", "1").Do(ctx).Into(&records)
	if err != nil {
		return fmt.Errorf("list sandboxes: %w", err)
	}
	found, _, err := a.watches.pods.List(ctx)
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	if len(records.Items) == 0 && !slices.ContainsFunc(found, func(p core.Pod) bool { return p.Pool != "" }) {
		return nil
	}
	return journal.Refuse(fmt.Errorf("%w: namespace %s has no journal (JournalSlot objects), but it has Sandbox objects or pods of pools",
		journal.ErrMissing, a.o.Namespace))
}

func (a *Allocator) newTerm(log *journal.Log, facts []core.Fact) (*term, error) {
	began := now(a.o.WallClock)
	c, err := core.New(core.Config{
		Term: log.Term(), Lease: a.o.LeaseDuration, MaxStale: a.o.MaxStale, ConnectWindow: a.o.ConnectWindow, MaxWaiting: a.o.MaxWaiting, DryRun: a.o.ReapDryRun,
		NewID: sandboxid.New, NewSuffix: func() string { return rand.String(6) },
	}, began)
	if err != nil {
		return nil, err
	}
	t := &term{
		number: log.Term(), a: a, answers: newAnswers(), events: events.New(log.Term()), began: began, withheld: map[string]bool{},
		log: a.o.Log.With(zap.Uint64("term", log.Term())),
	}
	for _, w := range []**workers{&t.creates, &t.deletes, &t.other, &t.lines, &t.found, &t.logs, &t.drops} {
		*w = newWorkers(t.log)
	}
	t.hooks = newPodCalls(t.start, func(s core.Sandbox) core.Sandbox { return s })
	ofConfigure := func(e core.Configure) core.Sandbox { return e.Sandbox }
	t.inits, t.restores = newPodCalls(t.configure, ofConfigure), newPodCalls(t.configure, ofConfigure)
	ofOrder := func(o agentOrder) core.Sandbox { return o.sandbox }
	t.orders, t.keeps = newPodCalls(t.order, ofOrder), newPodCalls(t.order, ofOrder)
	ofArchive := func(e core.WriteArchive) core.Sandbox { return e.Sandbox }
	t.archives, t.stops = newPodCalls(t.writeArchive, ofArchive), newPodCalls(t.writeStopped, ofArchive)
	t.loop = newLoop(c, guard.New(a.o.ConnectWindow), a.o.WallClock, t.do)
	t.loop.violated = t.violated
	k := a.o.Clients
	t.journal = newJournalWriter(log, a.o.JournalBytesPerSecond, t.Submit, a.metrics, t.log.Named("journal"))
	t.journal.ended, t.journal.wall = recent(a.violations, began.Wall), a.o.WallClock
	ended := len(t.journal.ended)
	if t.withholds = ended >= violatedTerms; ended == 0 {
		log.Settle(violationsKey, log.Term(), 0)
	}
	a.metrics.violatedTerms.Set(float64(ended))
	t.journal.maxStale = a.o.MaxStale
	for _, f := range facts {
		t.journal.maxStale = max(t.journal.maxStale, f.MaxStale())
	}
	named := func(name string) kube.Options {
		return kube.Options{Clients: k, Namespace: a.o.Namespace, Submit: t.Submit, Log: t.log.Named(name)}
	}
	var errs [6]error
	t.caller, errs[0] = poststart.New(poststart.Options{Leads: a.lock.valid})
	t.writer, errs[1] = pods.NewWriter(pods.WriterOptions{
		Options: named("pods"), Settings: a.o.podSettings(), Gateway: func() string { return t.agents.EgressGateway() },
	})
	t.objects, errs[2] = sandboxobjects.NewWriter(sandboxobjects.WriterOptions{Options: named("objects"), Yield: t.headStart.wait})
	t.labeler, errs[3] = pods.NewLabeler(pods.LabelerOptions{Client: k.Kubernetes, Yield: t.headStart.wait, Log: t.log.Named("pods")})
	errs[5] = t.newEvents(log.Term())
	if a.o.AccessKey != nil {
		t.agents, errs[4] = agents.New(agents.Options{Key: a.o.AccessKey, Leads: a.lock.valid, EgressProxy: a.o.EgressProxy})
	}
	return t, errors.Join(errs[:]...)
}

// recover reads the state of the cluster and passes it to the core. Calls are answered only after
// that.
func (t *term) recover(ctx context.Context, facts []core.Fact) error {
	st := core.State{Facts: facts}
	w := t.a.watches
	// The objects are listed after the journal was read: a record that is in neither was settled in
	// an object of this list.
	records, err := w.records.List(ctx)
	if err != nil {
		return err
	}
	if st.Pools, t.loop.poolsListed, err = w.pools.List(ctx); err != nil {
		return err
	}
	if st.Nodes, st.Cordoned, err = w.nodes.List(ctx); err != nil {
		return err
	}
	if st.Pods, t.loop.listed, err = w.pods.List(ctx); err != nil {
		return err
	}
	if err := t.unreadable(records, facts); err != nil {
		return err
	}
	st.Objects = records.Sandboxes
	// This term has not written an object yet.
	if seen := latestTerm(st.Objects); seen >= t.number {
		t.log.Error("Sandbox objects are of a later term than the journal: it was restored from a backup and is begun anew, see docs/backup.md", zap.Uint64("seenTerm", seen))
		return t.journal.renew(ctx, seen)
	}
	t.loop.knows(st)
	effects, err := t.loop.core.Recover(st)
	if err != nil {
		return err
	}
	t.eventLog.Recover(latestStates(st))
	t.loop.guard.Recover(t.began.Boot, st)
	t.loop.carryOut(t.began, nil, effects)
	for i := range st.Pods {
		t.expect(&st.Pods[i])
	}
	for _, ev := range records.Deleting {
		t.loop.step(ev)
	}
	t.loop.step(core.TeamLimits{Settings: t.a.limits.current()})
	if left := t.loop.core.View().Quarantine(); left > 0 {
		t.log.Error("the journal was begun anew recently: no pod is handed out until no router of the earlier journal can send requests to its address, or until an operator ends the wait, see docs/backup.md", zap.Duration("atMost", left))
	}
	t.log.Info("recovered", zap.Int("facts", len(facts)), zap.Int("pools", len(st.Pools)), zap.Int("pods", len(st.Pods)), zap.Int("records", len(st.Objects)))
	return nil
}

// latestTerm returns the highest term that has written a Sandbox object.
func latestTerm(records []core.Sandbox) (term uint64) {
	for i := range records {
		term = max(term, records[i].Revision.Term)
	}
	return term
}

// unreadable returns an error if the state of a live sandbox is in neither a readable object nor
// the journal. Its pod must not be touched, and it is unknown which pod that is.
func (t *term) unreadable(records sandboxobjects.Listed, facts []core.Fact) error {
	for _, f := range facts {
		id, isSandbox := f.Thing().(core.SandboxID)
		if err, ok := records.Unreadable[string(id)]; ok && isSandbox {
			t.log.Warn("sandbox recovered from the journal because its object cannot be read", zap.Error(err))
			delete(records.Unreadable, string(id))
		}
	}
	var errs []error
	for _, err := range records.Unreadable {
		errs = append(errs, err)
	}
	if len(errs) == 0 {
		return nil
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return fmt.Errorf("%d Sandbox objects in namespace %s cannot be read, and the journal no longer holds them; correct them, or delete them and their pods: %w",
		len(errs), t.a.o.Namespace, errors.Join(errs[:min(len(errs), maxUnreadable)]...))
}

// maxUnreadable bounds the number of objects that one error names.
const maxUnreadable = 10

// do carries out an effect. The loop calls it; it never blocks.
func (t *term) do(e core.Effect) {
	t.a.traces.effect(e)
	if !t.a.control.Deliver(t.number, e) && !t.write(e) {
		t.tell(e)
	}
}

// write queues what an effect has to change: the journal, pods, objects, agents. It returns false for other effects.
func (t *term) write(e core.Effect) bool {
	switch e := e.(type) {
	case core.Write:
		t.journal.facts <- e.Facts // never blocks: one core.Write is under way at a time
	case core.Settle:
		t.journal.log.Settle(keyOf(e.Thing), e.Revision.Term, e.Revision.Counter)
	case core.DeletePod:
		t.deletes.add("delete pod", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			return t.writer.Delete(ctx, e)
		})
	case core.RecyclePod:
		t.deletes.add("recycle pod", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			pool, ok := t.a.watches.pools.Get(e.Pool)
			if !ok {
				pool = nil
			}
			return t.writer.Recycle(ctx, pool, e)
		})
	case core.CreatePod:
		t.creates.add("create pod", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			t.create(ctx, e)
			return nil // the core creates another one
		})
	case core.PoolDrained:
		t.other.add("remove finalizer of a pool", func(ctx context.Context) error { return t.a.watches.pools.Drained(ctx, e.Key) })
	case core.DeleteObject:
		t.other.add("delete Sandbox object", func(ctx context.Context) error {
			if !t.eventLog.Stored(e.ID) {
				return errUntold
			}
			return t.objects.Forget(ctx, e)
		})
	case core.WriteObject:
		if e.Sandbox.Phase == core.Ended && !t.eventLog.Stored(e.Sandbox.ID) { // the write may let a deleted object go
			t.other.add("show the end in a Sandbox object", func(context.Context) error {
				if !t.eventLog.Stored(e.Sandbox.ID) {
					return errUntold
				}
				t.objects.Record(e)
				return nil
			})
			break
		}
		t.objects.Record(e)
	case core.ReadLog:
		t.readLog(e)
	case core.SyncPod:
		t.other.add("sync the labels and annotations of a pod", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			return t.sync(ctx, e)
		})
	case core.ResizePod:
		t.other.add("resize a pod", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			return t.writer.Resize(ctx, e)
		})
	case core.LabelPod:
		t.labeler.Label(e)
	case core.StartSandbox:
		t.hooks.add(e.Sandbox)
	case core.Configure:
		if values, _ := e.Values.(*agents.Values); values != nil && values.Restore != nil || e.Sandbox.Archive != "" && !e.Ask {
			t.restores.add(e)
		} else {
			t.inits.add(e)
		}
	case core.Freeze:
		t.give(agentOrder{sandbox: e.Sandbox, keep: e.Keep})
	case core.Thaw:
		t.stops.drop(e.Sandbox)
		t.give(agentOrder{sandbox: e.Sandbox, thaw: true})
	case core.WriteArchive:
		if e.Token != 0 {
			t.archives.add(e)
			break
		}
		t.stops.drop(e.Sandbox)
		t.stops.add(e)
	case core.DropArchive:
		t.drops.add("delete an archive", func(ctx context.Context) error { t.dropArchive(ctx, e.Sandbox); return nil })
	default:
		return false
	}
	return true
}

// tell answers callers, and says in metrics, events and the log what has happened.
func (t *term) tell(e core.Effect) {
	switch e := e.(type) {
	case core.Claimed:
		if !t.answers.deliver(e.Token, e) {
			// The caller was cancelled at this moment.
			t.other.add("release", func(context.Context) error { t.releaseUncollected(e.Sandbox); return nil })
		}
	case core.BatchClaimed:
		if !t.answers.deliver(e.Token, e) {
			t.other.add("release", func(context.Context) error { t.releaseUncollected(e.Sandboxes...); return nil })
		}
	case core.ClaimRefused:
		t.a.metrics.pools.refused(e.Pool.Name, e.Why)
		t.answers.deliver(e.Token, e)
	case core.ClaimGranted:
		t.a.metrics.pools.granted(e.Pool.Name, e.Waited, e.Wait)
	case core.ClaimCanceled:
		t.a.metrics.pools.canceled(e.Pool.Name)
	case core.ReleaseAnswered:
		t.answers.deliver(e.Token, e)
	case core.DeadDeclared:
		t.answers.deliver(e.Token, e)
	case core.SandboxCallAnswered:
		t.answers.deliver(e.Token, e)
	case core.IdlePodFailed:
		t.a.metrics.podFailures.WithLabelValues(e.Failure.Reason).Inc()
		t.lines.add("log", func(ctx context.Context) error {
			t.headStart.wait(ctx)
			t.log.Warn("idle pod failed and is replaced", zap.String("pool", e.Pool.Name), zap.String("pod", e.Pod.Name),
				zap.String("reason", e.Failure.Reason), zap.String("why", e.Failure.Why))
			return nil
		})
	case core.RecycleEnded:
		t.a.metrics.recycles.WithLabelValues(e.Outcome).Inc()
	case core.WouldReap:
		t.a.metrics.wouldReap.Inc()
		t.log.Info("dry run: an idle sandbox would be released", zap.String("sandboxID", sandboxid.Short(e.Sandbox.ID)),
			zap.String("pool", e.Sandbox.Pool.Name), zap.Duration("idle", e.Idle), zap.Duration("idleTimeout", e.Sandbox.IdleTimeout))
	case core.SessionDeclaredDead:
		t.a.metrics.declaredDead.Inc()
		t.log.Error("an operator declared a router dead, so no fence waits for it: if it still runs, it may send requests to pods of other sandboxes until its routes are stale",
			zap.String("router", e.Session), zap.String("address", e.From), zap.String("by", e.Declaration.By), zap.String("reason", e.Declaration.Reason), zap.Int("fences", e.Fences))
	case core.SandboxCreated:
		t.publish(events.Created, e.Sandbox)
	case core.SandboxReady:
		t.publish(events.Ready, e.Sandbox)
	case core.SandboxAsleep:
		t.publish(events.Asleep, e.Sandbox)
		t.a.metrics.sleeps.Inc()
	case core.SandboxAwake:
		t.publish(events.Awake, e.Sandbox)
		t.a.metrics.wakes.Observe(e.Took.Seconds())
	case core.SandboxStopped:
		t.dropCalls(e.Sandbox)
	case core.SandboxReleased:
		t.dropCalls(e.Sandbox)
		t.publish(events.Released, e.Sandbox)
		t.a.metrics.releases.WithLabelValues(e.Sandbox.Reason).Inc()
		if e.Late > 0 {
			t.a.metrics.reapLate.WithLabelValues(e.Sandbox.Reason).Observe(e.Late.Seconds())
		}
		t.logRelease(e.Sandbox)
	case core.Acknowledged:
		t.a.metrics.acknowledged.Observe(e.Took.Seconds())
	case core.Repaired:
		t.report(e.What, zap.String("pod", e.Pod.Name))
	default:
		panic(fmt.Sprintf("allocator: unknown effect %T", e))
	}
}

// logRelease writes the line that says why a sandbox was released.
func (t *term) logRelease(s core.Sandbox) {
	t.lines.add("log", func(ctx context.Context) error {
		t.headStart.wait(ctx)
		fields := []zap.Field{
			zap.String("sandboxID", sandboxid.Short(s.ID)), zap.String("pod", s.Pod.Name), zap.String("reason", s.Reason),
		}
		if s.Message != "" {
			fields = append(fields, zap.String("message", s.Message))
		}
		if s.ExitCode != nil {
			fields = append(fields, zap.Int32("exitCode", *s.ExitCode))
		}
		t.log.Info("sandbox released", fields...)
		return nil
	})
}

// maxLogTries is how often the log of a sandbox is read at most.
const maxLogTries = 3

// readLog has the last lines of the log of a sandbox read if its pool wants them. The pod may be deleted before.
func (t *term) readLog(e core.ReadLog) {
	pool, ok := t.a.watches.pools.Seen(e.Sandbox.Pool)
	if !ok || pool.Spec.Records == nil || pool.Spec.Records.LogLines == 0 {
		return
	}
	tries := 0
	t.logs.add("read the log of a sandbox", func(ctx context.Context) error {
		t.headStart.wait(ctx)
		err := t.writer.ReadLog(ctx, e, int(pool.Spec.Records.LogLines))
		// A bad request will not be a good one: the kubelet has removed the container, or never started it.
		if tries++; err != nil && (tries == maxLogTries || apierrors.IsBadRequest(err)) {
			t.log.Warn("the record of a sandbox gets no log lines", zap.String("sandboxID", sandboxid.Short(e.Sandbox.ID)), zap.Error(err))
			return nil
		}
		return err
	})
}

// reportEvery is the interval in which report checks the lease.
const reportEvery = 100 * time.Millisecond

// report logs and counts a repair, once a renewal of the lease was sent after the finding. A
// deposed leader that does not know it yet may find changes of the next leader, and does nothing
// about them.
func (t *term) report(what string, fields ...zap.Field) {
	at := bootclock.Now()
	t.found.add("report", func(ctx context.Context) error {
		for !t.a.lock.renewedSince(at) {
			if !wait.Sleep(ctx, reportEvery) {
				return nil // end of the term
			}
		}
		t.a.metrics.repairs.Inc()
		t.log.Warn("found: "+what, fields...)
		return nil
	})
}

func (t *term) publish(what events.Type, s core.Sandbox) {
	t.events.Publish(events.Event{
		Type: what, At: t.a.o.WallClock(), SandboxID: s.ID, Pool: s.Pool.Name, Team: s.Team, User: s.User, Reason: s.Reason,
	})
}

// callBack makes the calls of Options. It reads the events of the term, as the streams of /v1/events do.
func (t *term) callBack(ctx context.Context) {
	calls := map[events.Type]func(context.Context, string){
		events.Ready: t.a.o.OnSandboxReady, events.Released: t.a.o.OnSandboxReleased,
	}
	for last := uint64(0); ctx.Err() == nil; {
		next, lost, changed := t.events.After(last, 1)
		if lost > 0 {
			t.log.Warn("OnSandboxReady and OnSandboxReleased are not called for some events, because earlier calls took too long", zap.Uint64("events", lost))
		}
		for _, e := range next {
			if last = e.Number; calls[e.Type] != nil {
				calls[e.Type](ctx, e.SandboxID)
			}
		}
		if len(next) == 0 {
			select {
			case <-changed:
			case <-ctx.Done():
			}
		}
	}
}

// releaseUncollected releases sandboxes whose caller was cancelled. Those with an idempotency key of
// the caller stay, because a retry must find them.
func (t *term) releaseUncollected(all ...core.Sandbox) {
	for _, s := range all {
		if !s.Keyed() {
			t.Submit(core.Release{Scope: core.Scope{All: true}, ID: s.ID, Reason: fact.ReasonCanceled})
		}
	}
}

func (t *term) create(ctx context.Context, e core.CreatePod) {
	pool, ok := t.a.watches.pools.Get(e.Pool)
	if !ok { // its object is gone, or its template is refused now
		t.Submit(core.CreateFailed{Pool: e.Pool, Name: e.Name})
		return
	}
	err := t.writer.Create(ctx, pool, e)
	t.a.watches.pools.CreateResult(e.Pool, err)
	if err != nil && ctx.Err() == nil {
		t.log.Warn("pod not created", zap.String("pool", e.Pool.Name), zap.Error(err))
	}
}

// sync returns an error if it is to be tried again. The core asks anew after a change of the template.
func (t *term) sync(ctx context.Context, e core.SyncPod) error {
	pool, ok := t.a.watches.pools.Get(e.Pool)
	if !ok {
		return nil
	}
	err := t.writer.Sync(ctx, pool, e)
	t.a.watches.pools.SyncResult(pool, err)
	if apierrors.IsInvalid(err) { // such as the value of a label that is too long
		return nil
	}
	return err
}

// start calls the postStart hook of the sandbox's pool.
func (t *term) start(ctx context.Context, s core.Sandbox) {
	pool, ok := t.a.watches.pools.Get(s.Pool)
	if !ok || pool.Spec.PostStart == nil { // the pool has no hook any more
		t.Submit(core.Started{ID: s.ID, Incarnation: s.Incarnation, OK: true})
		return
	}
	err := t.caller.Call(ctx, *pool.Spec.PostStart, s.DefaultPort, s)
	if ctx.Err() != nil {
		return // the next leader calls it again
	}
	if err != nil {
		t.log.Warn("postStart hook failed", zap.String("pool", s.Pool.Name), zap.String("sandboxID", sandboxid.Short(s.ID)),
			zap.String("failurePolicy", string(pool.Spec.PostStart.FailurePolicy)), zap.Error(err))
	}
	ignored := pool.Spec.PostStart.FailurePolicy == v1alpha1.Ignore
	t.Submit(core.Started{ID: s.ID, Incarnation: s.Incarnation, OK: err == nil || ignored, Why: reasonOf(err)})
}

// dropCalls ends what is under way in the pod of a sandbox.
func (t *term) dropCalls(s core.Sandbox) {
	t.hooks.drop(s)
	t.inits.drop(s)
	t.restores.drop(s)
	t.dropOrders(s)
	t.archives.drop(s)
	t.stops.drop(s)
}

// Submit queues an event for the core.
func (t *term) Submit(ev core.Event) { t.loop.Submit(ev) }

// Valid implements control.Leader.
func (t *term) Valid() bool { return t.a.lock.valid() }

// Term implements control.Leader.
func (t *term) Term() uint64 { return t.number }

// Journal implements control.Leader.
func (t *term) Journal() string { return t.journal.log.Stamp().Journal }

// Began implements control.Leader.
func (t *term) Began() uint64 { return t.journal.log.Began() }

// Position implements control.Leader.
func (t *term) Position() uint64 { return t.journal.log.Position() }

// Restored implements control.Leader.
func (t *term) Restored(term uint64) {
	select {
	case t.journal.restored <- term:
	default: // already reported
	}
}

// lookWait bounds reads of the core for metrics, statuses and audits, which can do without.
const lookWait = time.Second

// ask is look for at most lookWait.
func ask[T, U any](ctx context.Context, t *term, f func(core.View) (T, U)) (T, U, error) {
	ctx, cancel := context.WithTimeout(ctx, lookWait)
	defer cancel()
	return look(ctx, t.loop, f)
}

// quarantine returns for how long no pod is handed out yet, or 0 if the core does not
// answer in time.
func (t *term) quarantine() time.Duration {
	left, _, _ := ask(context.Background(), t, func(c core.View) (time.Duration, bool) { return c.Quarantine(), true })
	return left
}

// counts returns a pool's pods by state. It returns false if the core does not know the
// pool or does not answer in time.
func (t *term) counts(ctx context.Context, key core.PoolKey) (core.Counts, bool) {
	counts, known, _ := ask(ctx, t, func(c core.View) (core.Counts, bool) { return c.Counts(key) })
	return counts, known
}
