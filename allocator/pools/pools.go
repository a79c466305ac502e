package pools

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/record"

	"github.com/berth-sandbox/berth/agent/archive"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/credentials"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/egress/policy"
	"github.com/berth-sandbox/berth/internal/options"
)

const resource = "sandboxpools"

// statusEvery is the interval between writes of changed statuses.
const statusEvery = time.Second

// Options configure Pools. All but Stops and Egress are required.
type Options struct {
	kube.Options
	Policy Policy
	// Settings are those with which pods are made.
	Settings pods.Settings
	// Stops: there is an object store for the files of sandboxes that are stopped.
	Stops bool
	// Egress: there is an egress gateway.
	Egress bool
}

// Pools watches and maintains the pools of one namespace. Its methods may be called
// concurrently.
type Pools struct {
	o        Options
	resource kube.Resource

	mu        sync.Mutex
	pools     map[core.PoolKey]seen
	createErr map[core.PoolKey]error // of the last pod creation
	syncErr   map[core.PoolKey]syncFailure
	withheld  map[core.PoolKey]string

	correlator *record.EventCorrelator // used by Maintain alone
}

// New returns Pools, or an error that names the missing options.
func New(o Options) (*Pools, error) {
	if err := errors.Join(o.Check(), options.Require(o, "Policy", "Settings")); err != nil {
		return nil, err
	}
	r := kube.Resource{Client: o.Clients.Berth, Name: resource, Namespace: o.Namespace}
	return &Pools{
		o: o, resource: r, pools: map[core.PoolKey]seen{}, createErr: map[core.PoolKey]error{},
		syncErr: map[core.PoolKey]syncFailure{}, withheld: map[core.PoolKey]string{},
		correlator: record.NewEventCorrelatorWithOptions(record.CorrelatorOptions{}),
	}, nil
}

// seen is the latest observation of a pool.
type seen struct {
	pool    *v1alpha1.SandboxPool
	refused bool // by the policy
	// egress has the latest lists that can be read.
	egress *core.PoolEgress
}

func keyOf(p *v1alpha1.SandboxPool) core.PoolKey {
	return core.PoolKey{Namespace: p.Namespace, Name: p.Name}
}

// List returns the pools and the resource version of that list, read from the API server's store.
// It retries until ctx ends.
func (p *Pools) List(ctx context.Context) (all []core.Pool, version string, err error) {
	listed := map[core.PoolKey]bool{}
	all, version, err = kube.List(ctx, p.resource, p.o.Log, func(page *v1alpha1.SandboxPoolList) (pools []core.Pool) {
		for i := range page.Items {
			pools = append(pools, p.keep(&page.Items[i]))
			listed[keyOf(&page.Items[i])] = true
		}
		return pools
	})
	if err != nil {
		return nil, "", err
	}
	// An earlier list can have come after the watch had reported a deletion, and have brought that pool back.
	for _, pool := range p.All() {
		if !listed[keyOf(pool)] && kube.Older(pool.ResourceVersion, version) {
			p.forget(pool)
		}
	}
	return all, version, nil
}

// Get returns the latest observation of a pool, for making a pod from it. It returns false if the
// pool's object is gone or the policy refuses its template; the core may not know that yet when it
// asks for a pod. The caller must not change the pool.
func (p *Pools) Get(key core.PoolKey) (*v1alpha1.SandboxPool, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.pools[key]
	return s.pool, ok && !s.refused
}

// Seen returns the latest observation of a pool. The caller must not change it.
func (p *Pools) Seen(key core.PoolKey) (*v1alpha1.SandboxPool, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.pools[key]
	return s.pool, ok
}

// All returns the latest observations of all pools, by name. The caller must not change them.
func (p *Pools) All() []*v1alpha1.SandboxPool {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make([]*v1alpha1.SandboxPool, 0, len(p.pools))
	for _, s := range p.pools {
		all = append(all, s.pool)
	}
	slices.SortFunc(all, func(a, b *v1alpha1.SandboxPool) int { return strings.Compare(a.Name, b.Name) })
	return all
}

// CreateResult records how the latest creation of a pod went, for the condition Degraded.
func (p *Pools) CreateResult(key core.PoolKey, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.createErr, key)
	} else {
		p.createErr[key] = err
	}
}

// Withhold records what the leader withholds of a pool for as long as it leads, for the condition Degraded.
func (p *Pools) Withhold(key core.PoolKey, what string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.withheld[key] = what
}

// syncFailure is how the last write of the template's labels and annotations to a pod failed.
type syncFailure struct {
	generation int64 // of the pool
	err        error
}

// SyncResult records how the latest write of the labels and annotations of this generation of a pool to one of its
// pods went, for the condition Degraded.
func (p *Pools) SyncResult(pool *v1alpha1.SandboxPool, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err == nil {
		delete(p.syncErr, keyOf(pool))
	} else {
		p.syncErr[keyOf(pool)] = syncFailure{pool.Generation, err}
	}
}

// keep returns the core's view of a pool, and stores the pool unless a later observation is there: a list may be read
// before a change, and come after the watch has reported that.
func (p *Pools) keep(pool *v1alpha1.SandboxPool) core.Pool {
	spec := core.Pool{
		Key: keyOf(pool), Warm: int(pool.Spec.Warm), DefaultPort: uint16(pool.Spec.DefaultPort),
		Template: pods.TemplateHash(pool, p.o.Settings), Metadata: pods.Metadata(pool), PostStart: pool.Spec.PostStart != nil, KeepOnRestart: pool.Spec.OnRestart == v1alpha1.KeepOnRestart, Version: pool.ResourceVersion,
		Recycle: pool.Spec.Reuse == v1alpha1.ReuseRecycle, CannotSleep: pool.Spec.CannotSleep(),
		Refused: message(p.check(pool)), Deleting: pool.DeletionTimestamp != nil,
	}
	for _, port := range pool.Spec.Ports {
		spec.Ports = append(spec.Ports, uint16(port))
	}
	slices.Sort(spec.Ports)
	spec.Hold = secondsOf(pool.Spec.HoldSeconds)
	spec.MaxLifetime, spec.StartupTimeout = secondsOf(pool.Spec.MaxLifetimeSeconds), secondsOf(pool.Spec.StartupTimeoutSeconds)
	spec.IdleTimeout = secondsOf(pool.Spec.IdleTimeoutSeconds)
	spec.Sleep = core.SleepPolicy{
		WhenIdle: pool.Spec.OnIdle == v1alpha1.OnEndSleep, AtEnd: pool.Spec.OnTimeout == v1alpha1.OnEndSleep, WakeOnTraffic: pool.Spec.WakeOnTraffic,
	}
	if after := pool.Spec.StopAfter; after != nil {
		spec.Sleep.StopAfter = after.Duration
	}
	if least := pool.Spec.MinBytesPerMinute; pool.Spec.Activity == v1alpha1.ActivityBytes && least != nil {
		spec.MinBytes = uint64(*least)
	}
	var known bool
	if spec.Access, known = fact.AccessOf(string(pool.Spec.Access)); !known { // the schema refuses such a word
		spec.Access = core.AccessTeam
	}
	if probe := pool.Spec.BusyProbe; probe != nil {
		spec.BusyProbe = core.BusyProbe{Port: uint16(probe.Port), Path: probe.Path}
	}
	if a := pool.Spec.AgentEnabled(); a != nil {
		spec.Agent = core.Agent{Port: uint16(a.Port), Public: a.Public}
		if at, listed := slices.BinarySearch(spec.Ports, spec.Agent.Port); !listed && len(spec.Ports) > 0 {
			spec.Ports = slices.Insert(spec.Ports, at, spec.Agent.Port)
		}
		if a.Busy == v1alpha1.BusyCommands {
			spec.BusyProbe = core.BusyProbe{Port: spec.Agent.Port, Path: busyPath}
		}
	}
	spec.Agent.Egress = pool.Spec.EgressEnabled() != nil
	if e := pool.Spec.Egress; e != nil { // sandboxes keep the mode of their pod
		spec.Egress = &core.PoolEgress{EgressRules: core.EgressRules{Allow: e.Allow, Deny: e.Deny}}
		for _, port := range e.Ports {
			spec.Egress.Ports = append(spec.Egress.Ports, uint16(port))
		}
		slices.Sort(spec.Egress.Ports)
		var err error
		spec.Egress.Credentials, err = credentialsOf(e)
		spec.Egress.CredentialsUnknown = err != nil
	}
	if pool.Spec.MaxWarm != nil {
		spec.MaxWarm = int(*pool.Spec.MaxWarm)
	}
	if pool.Spec.MaxPods != nil {
		spec.MaxPods = int(*pool.Spec.MaxPods)
	}
	if pool.Spec.MaxAsleep != nil {
		spec.MaxAsleep = int(*pool.Spec.MaxAsleep)
	}
	if pool.Spec.MaxSurge != nil {
		spec.MaxSurge = int(*pool.Spec.MaxSurge)
	}
	spec.MaxUnavailable, spec.Paused, spec.ReadyWithin = int(pool.Spec.MaxUnavailable), pool.Spec.Paused, secondsOf(pool.Spec.ReadyWithinSeconds)
	spec.KeepSandboxes = pool.Spec.DeletionPolicy == v1alpha1.OrphanSandboxes
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.pools[spec.Key]
	readable := spec.Egress
	if spec.Egress != nil && (spec.Egress.CredentialsUnknown || checkLists(pool.Spec.Egress) != nil) {
		if readable = s.egress; readable != nil {
			spec.Egress = readable // a mistake does not cut off the sandboxes that run, nor open anything to them
		}
	}
	if !ok || !kube.Older(pool.ResourceVersion, s.pool.ResourceVersion) {
		p.pools[spec.Key] = seen{pool, spec.Refused != "", readable}
	}
	return spec
}

// busyPath is where the agent answers a busyProbe.
const busyPath = "/busy"

// check returns nil, or an error that says why no pod may be made from a pool's template.
func (p *Pools) check(pool *v1alpha1.SandboxPool) error {
	return errors.Join(pods.CheckAgent(pool, p.o.Settings), pods.CheckRecycle(pool, p.o.Settings), checkSleep(pool), p.checkEgress(pool), p.checkStop(pool), checkSnapshot(pool), p.o.Policy.Check(pool))
}

// ErrEgress is in the error for a pool whose field egress cannot be.
var ErrEgress = errors.New("no pod is made for spec.egress")

// checkEgress returns nil, or an error that wraps ErrEgress and names what is wrong in spec.egress.
func (p *Pools) checkEgress(pool *v1alpha1.SandboxPool) error {
	e := pool.Spec.EgressEnabled()
	if e == nil {
		return nil
	}
	var errs []error
	if !p.o.Egress {
		errs = append(errs, errors.New("spec.egress.mode Gateway: the allocators have no egress gateway; start them with --egress-proxy (egress.enabled of the chart), or make it None"))
	}
	if pool.Spec.AgentEnabled() == nil {
		errs = append(errs, errors.New("spec.egress.mode Gateway: it needs the agent, which gives processes the credential of the gateway: set spec.agent.enabled"))
	}
	_, credentials := credentialsOf(e)
	if err := errors.Join(append(errs, checkLists(e), credentials)...); err != nil {
		return fmt.Errorf("%w: %w", ErrEgress, err)
	}
	return nil
}

// credentialsOf returns the headers that the gateway sets, and an error that names those that it cannot set.
func credentialsOf(e *v1alpha1.PoolEgress) (all []core.EgressCredential, err error) {
	type target struct {
		policy.Dest
		header string
	}
	seen := map[target]bool{}
	var errs []error
	for i, c := range e.Credentials {
		port := cmp.Or(uint16(c.Port), policy.CredentialPort)
		dest, err := policy.CredentialDest(c.Host, port)
		if err == nil && strings.Contains(c.Host, ":") {
			err = fmt.Errorf("host %q: write the port into the field port", c.Host)
		}
		header, headerErr := policy.CredentialHeader(c.Header)
		to := target{dest, header}
		if err = errors.Join(err, headerErr); err == nil && seen[to] {
			err = fmt.Errorf("host %s: header %s: an earlier entry has it", dest.Host, header)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("spec.egress.credentials[%d]: %w", i, err))
			continue
		}
		seen[to] = true
		value := credentials.Name(c.Secret.Name, c.Secret.Key)
		all = append(all, core.EgressCredential{Host: dest.Host, Port: dest.Port, Header: header, Value: value})
	}
	return all, errors.Join(errs...)
}

// checkLists returns nil, or an error that names the entry that cannot be read.
func checkLists(e *v1alpha1.PoolEgress) error {
	_, err := policy.Parse(policy.List{Field: "spec.egress.allow", Entries: e.Allow}, policy.List{Field: "spec.egress.deny", Entries: e.Deny})
	return err
}

// checkSnapshot returns an error that names what is wrong in spec.snapshot.
func checkSnapshot(pool *v1alpha1.SandboxPool) error {
	if err := pool.Spec.CheckSnapshot(); err != nil {
		return err
	}
	paths, _, _ := pool.Spec.Snapshots()
	if err := archive.CheckPaths(paths); err != nil {
		return fmt.Errorf("spec.snapshot.paths%w", err)
	}
	return nil
}

// ErrSleep is in the error for a pool that asks for sleep, and whose sandboxes cannot sleep.
var ErrSleep = errors.New("sandboxes of this pool cannot sleep; make it Release, leave stopAfter and maxAsleep out, or change what keeps them awake")

// checkSleep returns nil, or an error that wraps ErrSleep and lists what keeps the sandboxes of a pool awake that are to
// sleep.
func checkSleep(pool *v1alpha1.SandboxPool) error {
	var asks []string
	for _, f := range []struct {
		field string
		asks  bool
	}{
		{"spec.onIdle: Sleep", pool.Spec.OnIdle == v1alpha1.OnEndSleep}, {"spec.onTimeout: Sleep", pool.Spec.OnTimeout == v1alpha1.OnEndSleep},
		{"spec.stopAfter", pool.Spec.StopAfter != nil}, {"spec.maxAsleep", pool.Spec.MaxAsleep != nil},
	} {
		if f.asks {
			asks = append(asks, f.field)
		}
	}
	why := pool.Spec.CannotSleep()
	if len(asks) == 0 || why == "" {
		return nil
	}
	return fmt.Errorf("%s: %w: %s", strings.Join(asks, ", "), ErrSleep, why)
}

// ErrStop is in the error for a pool whose sandboxes are to be stopped, and have nowhere to keep their files.
var ErrStop = errors.New("the allocators have no object store for the files; start them with --snapshots, or leave it out")

// checkStop returns nil, or an error that wraps ErrStop and names the field that has sandboxes stopped.
func (p *Pools) checkStop(pool *v1alpha1.SandboxPool) error {
	switch {
	case p.o.Stops:
	case pool.Spec.StopAfter != nil:
		return fmt.Errorf("spec.stopAfter: %w", ErrStop)
	case pool.Spec.MaxAsleep != nil:
		return fmt.Errorf("spec.maxAsleep: %w", ErrStop)
	}
	return nil
}

// secondsOf is 0 for a field that is not set.
func secondsOf(field *int32) time.Duration {
	if field == nil {
		return 0
	}
	return time.Duration(*field) * time.Second
}

// forget drops a pool whose object is gone.
func (p *Pools) forget(pool *v1alpha1.SandboxPool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	key := keyOf(pool)
	if s, ok := p.pools[key]; ok && s.pool.UID == pool.UID { // unless a new object has the name
		delete(p.pools, key)
		delete(p.createErr, key)
		delete(p.syncErr, key)
		delete(p.withheld, key)
	}
}

// Run watches until ctx ends. It must be called once.
func (p *Pools) Run(ctx context.Context) error {
	return kube.Watch(ctx, p.resource, &v1alpha1.SandboxPool{}, nil, func(_, pool *v1alpha1.SandboxPool) {
		p.o.Submit(core.PoolSeen{Pool: p.keep(pool)})
	}, func(pool *v1alpha1.SandboxPool) {
		p.forget(pool)
		p.o.Submit(core.PoolGone{Key: keyOf(pool), Version: pool.ResourceVersion})
	})
}

// Maintain updates the finalizers and statuses of all pools until ctx ends. counts returns a pool's
// pods by state, or false if the core did not answer; the status of that pool then stays as it is
// until the next turn.
func (p *Pools) Maintain(ctx context.Context, counts func(context.Context, core.PoolKey) (core.Counts, bool)) {
	ticker := time.NewTicker(statusEvery)
	defer ticker.Stop()
	for {
		p.mu.Lock()
		all := slices.Collect(maps.Values(p.pools))
		p.mu.Unlock()
		for _, s := range all {
			counted, known := counts(ctx, keyOf(s.pool))
			p.maintain(ctx, s.pool, counted, known)
		}
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
	}
}

// maintain adds the finalizer to a new pool, or updates its status if its counts are known. A
// failure is retried at the next turn.
func (p *Pools) maintain(ctx context.Context, pool *v1alpha1.SandboxPool, counts core.Counts, known bool) {
	var err error
	if pool.DeletionTimestamp == nil && !slices.Contains(pool.Finalizers, v1alpha1.PoolFinalizer) {
		err = p.setFinalizers(ctx, pool, append(slices.Clone(pool.Finalizers), v1alpha1.PoolFinalizer))
	} else if known { // an unknown count must not show as 0
		if status := p.Status(pool, counts); !equality.Semantic.DeepEqual(status, pool.Status) {
			err = p.patch(ctx, pool, map[string]any{"status": status}, "status")
			if err == nil { // the write was conditional, so this process has changed the conditions
				for _, e := range transitions(pool.Status.Conditions, status.Conditions) {
					p.emit(ctx, pool, e)
				}
			}
		}
	}
	if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
		return // the pool has changed: the watch delivers it before a later turn
	}
	if err != nil && ctx.Err() == nil {
		p.o.Log.Warn("pool not updated, retrying", zap.String("pool", pool.Name), zap.Error(err))
	}
}

// Drained removes the finalizer of a pool whose pods are gone. The caller repeats it until it
// returns nil.
func (p *Pools) Drained(ctx context.Context, key core.PoolKey) error {
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	var pool v1alpha1.SandboxPool
	err := p.o.Clients.Berth.Get().Namespace(key.Namespace).Resource(resource).Name(key.Name).Do(call).Into(&pool)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read pool %s: %w", key.Name, err)
	case pool.DeletionTimestamp == nil || !slices.Contains(pool.Finalizers, v1alpha1.PoolFinalizer):
		return nil // a new object has the name, or the finalizer is gone already
	}
	if err := p.setFinalizers(ctx, &pool, slices.DeleteFunc(pool.Finalizers, func(f string) bool { return f == v1alpha1.PoolFinalizer })); err != nil {
		return fmt.Errorf("remove finalizer of pool %s: %w", key.Name, err)
	}
	return nil
}

func (p *Pools) setFinalizers(ctx context.Context, pool *v1alpha1.SandboxPool, finalizers []string) error {
	return p.patch(ctx, pool, map[string]any{"metadata": map[string]any{"finalizers": finalizers}})
}

// patch applies a merge patch on condition that the pool has not changed since it was read.
func (p *Pools) patch(ctx context.Context, pool *v1alpha1.SandboxPool, patch map[string]any, subresource ...string) error {
	m, _ := patch["metadata"].(map[string]any)
	if m == nil {
		m = map[string]any{}
	}
	m["uid"], m["resourceVersion"] = pool.UID, pool.ResourceVersion
	patch["metadata"] = m
	raw, err := json.Marshal(patch)
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	return p.o.Clients.Berth.Patch(types.MergePatchType).Namespace(pool.Namespace).Resource(resource).Name(pool.Name).
		SubResource(subresource...).Body(raw).Do(call).Error()
}

// Status returns the status that a pool should have with these counts of its pods. The object has it a second later.
func (p *Pools) Status(pool *v1alpha1.SandboxPool, counts core.Counts) v1alpha1.SandboxPoolStatus {
	s := v1alpha1.SandboxPoolStatus{
		ObservedGeneration: pool.Generation,
		Warm:               int32(counts.Warm), Pending: int32(counts.Pending),
		Claimed: int32(counts.Claimed), Releasing: int32(counts.Releasing),
		Waiting: int32(counts.Waiting), Outdated: int32(counts.Outdated),
		Selector: v1alpha1.LabelPool + "=" + pool.Name + "," + v1alpha1.LabelPhase + "=" + v1alpha1.PhaseWarm,
	}
	s.LastFailure = pool.Status.LastFailure // also of an earlier leader
	if f := counts.Failed; f != (core.PodFailure{}) {
		s.LastFailure = &v1alpha1.PodFailure{Pod: f.Pod, Reason: f.Reason, Message: f.Why, Time: metav1.NewTime(f.At)}
	}
	k := known{pool: pool, counts: counts, refused: p.check(pool)}
	p.mu.Lock()
	k.createErr, k.withheld = p.createErr[keyOf(pool)], p.withheld[keyOf(pool)]
	if f := p.syncErr[keyOf(pool)]; f.generation == pool.Generation {
		k.syncErr = f.err
	}
	p.mu.Unlock()
	s.Conditions = k.conditions()
	return s
}

// message is empty for no error.
func message(err error) string {
	if err == nil {
		return ""
	}
	return kube.Bounded(err.Error(), maxMessage)
}
