// Package sandboxobjects writes committed facts into Sandbox objects, in the
// background and forwards only: an older revision never overwrites a newer one,
// whoever wrote it.
package sandboxobjects

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const resource = "sandboxes"

// Pauses before an object is written again after a failure.
const (
	retryFirst = 50 * time.Millisecond
	retryMost  = 5 * time.Second
)

// Writer writes Sandbox objects. Only the latest state of a sandbox is
// written: what came in between, while a write was under way, is skipped. So
// what waits is bounded by the number of sandboxes.
type Writer struct {
	client    rest.Interface
	namespace string
	submit    func(core.Event)
	log       *zap.Logger
	yield     func(context.Context)
	queue     workqueue.TypedRateLimitingInterface[string]

	mu sync.Mutex
	// latest is what has yet to be written of each sandbox.
	latest map[string]waiting
	// written is what the API server answered to the last write.
	written map[string]version
}

type waiting struct {
	sandbox core.Sandbox
	touch   bool          // an object that is not there is not made
	since   time.Duration // boot clock
	refused bool          // by the API server, not for want of it
}

// Backlog is what was recorded and is not written.
type Backlog struct {
	// Objects are so many. Refused are those of them that the API server does not
	// take, for a reason of their own: a webhook, or somebody's edit.
	Objects, Refused int
	// Lag is for how long the first has been waiting. Objects that are refused do
	// not count, unless they are many: what concerns a few must not stop all
	// others, what concerns many is likely to concern all.
	Lag time.Duration
}

// refusedMost is how many refused objects are left out of the lag.
const refusedMost = 100

type version struct {
	uid        types.UID
	version    string
	finalizers []string
	revision   core.Revision
	lastActive time.Time
	broken     bool // it could not be read: all of it is written anew
}

// NewWriter returns a Writer that tells submit what it has written. Before each
// write it calls yield, which may wait.
func NewWriter(client rest.Interface, namespace string, submit func(core.Event), yield func(context.Context), log *zap.Logger) *Writer {
	return &Writer{
		client: client, namespace: namespace, submit: submit, log: log, yield: yield,
		queue:  workqueue.NewTypedRateLimitingQueue(workqueue.NewTypedItemExponentialFailureRateLimiter[string](retryFirst, retryMost)),
		latest: map[string]waiting{}, written: map[string]version{},
	}
}

// Record queues a state to be written.
func (p *Writer) Record(r core.Record) {
	s := r.Sandbox
	p.mu.Lock()
	w, waits := p.latest[s.ID]
	if !waits {
		w.since, w.touch = bootclock.Now(), true
	}
	w.sandbox, w.touch = s, w.touch && r.Touch
	p.latest[s.ID] = w
	p.mu.Unlock()
	p.queue.Add(s.ID)
}

// Backlog says what has yet to be written.
func (p *Writer) Backlog() Backlog {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := Backlog{Objects: len(p.latest)}
	var refused time.Duration
	now := bootclock.Now()
	for _, w := range p.latest {
		if w.refused {
			b.Refused++
			refused = max(refused, now-w.since)
		} else {
			b.Lag = max(b.Lag, now-w.since)
		}
	}
	if b.Refused > refusedMost {
		b.Lag = max(b.Lag, refused)
	}
	return b
}

// Run writes with so many workers until ctx ends.
func (p *Writer) Run(ctx context.Context, workers int) {
	kube.Work(ctx, p.queue, workers, p.next)
}

// next writes what is next in the queue. It is false after the end.
func (p *Writer) next(ctx context.Context) bool {
	id, ended := p.queue.Get()
	if ended {
		return false
	}
	defer p.queue.Done(id)
	p.yield(ctx)
	p.mu.Lock()
	w, waits := p.latest[id]
	p.mu.Unlock()
	if !waits {
		return true // it was written meanwhile, with what came before
	}
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	err := p.write(call, w.sandbox, w.touch)
	cancel()
	gone := w.touch && apierrors.IsNotFound(err) // the watch tells the core, which has it made if it must be there
	if err != nil && !gone {
		if ctx.Err() == nil {
			p.log.Warn("will try again: write Sandbox object", zap.String("sandbox", sandboxid.Short(id)), zap.Error(err))
		}
		p.mu.Lock()
		if w, waits := p.latest[id]; waits {
			w.refused = refused(err)
			p.latest[id] = w
		}
		p.mu.Unlock()
		p.queue.AddRateLimited(id)
		return true
	}
	p.queue.Forget(id)
	p.mu.Lock()
	now := p.latest[id]
	if now.sandbox.Revision == w.sandbox.Revision {
		delete(p.latest, id)
	} else {
		now.since, now.refused = bootclock.Now(), false
		p.latest[id] = now
	}
	p.mu.Unlock()
	if !gone {
		p.submit(core.Recorded{ID: id, Revision: w.sandbox.Revision})
	}
	return true
}

// refused reports whether the API server has understood a write and does not want
// it. It will not want it the next time, unless something else changes.
func refused(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	switch code := status.Status().Code; code {
	case http.StatusNotFound, http.StatusRequestTimeout, http.StatusConflict, http.StatusTooManyRequests:
		return false
	default:
		return code/100 == 4
	}
}

// write brings the object to the state of s, unless it shows a newer one. touch: it fails
// with NotFound if there is none.
func (p *Writer) write(ctx context.Context, s core.Sandbox, touch bool) error {
	p.mu.Lock()
	at, known := p.written[s.ID]
	p.mu.Unlock()
	if known && s.Revision.Less(at.revision) {
		return nil
	}
	switch {
	case !known && touch:
		newer, found, err := p.read(ctx, s)
		if newer || err != nil {
			return err
		}
		at = found
	case !known:
		// The answer goes into an object of its own: the maps of the first are shared.
		var made v1alpha1.Sandbox
		err := p.client.Post().Namespace(p.namespace).Resource(resource).Body(toObject(s, p.namespace)).Do(ctx).Into(&made)
		if err == nil {
			p.remember(s, &made)
			return nil
		}
		if !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create sandbox object: %w", err)
		}
		newer, found, err := p.read(ctx, s)
		if newer || err != nil {
			return err
		}
		at = found
	}
	var object v1alpha1.Sandbox
	raw, err := json.Marshal(patchOf(s, at))
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	err = p.client.Patch(types.MergePatchType).Namespace(p.namespace).Resource(resource).Name(s.ID).Body(raw).Do(ctx).Into(&object)
	if err != nil {
		p.forget(s.ID) // whatever it was, what is there is read, or made, the next time
		return fmt.Errorf("update sandbox object: %w", err)
	}
	p.remember(s, &object)
	return nil
}

// holds reports whether the object of s must stay, whoever deletes it: until the
// sandbox has ended, and for as long as its idempotency key holds, of which Forget
// is the end.
func holds(s core.Sandbox) bool { return s.Phase != core.Ended || s.IdempotencyKey != "" }

// patchOf moves the object from what it is known to be. Its version is a
// precondition.
func patchOf(s core.Sandbox, at version) any {
	metadata := map[string]any{"uid": at.uid, "resourceVersion": at.version}
	if !holds(s) && slices.Contains(at.finalizers, v1alpha1.SandboxFinalizer) {
		metadata["finalizers"] = slices.DeleteFunc(slices.Clone(at.finalizers), func(f string) bool { return f == v1alpha1.SandboxFinalizer })
	}
	status := toStatus(s)
	if s.LastActive.Before(at.lastActive) {
		status.LastActive = nil // what is there stays
	}
	patch := map[string]any{"metadata": metadata, "status": status}
	if at.broken {
		patch["spec"] = toObject(s, "").Spec
	} else {
		patch["spec"] = map[string]any{"endAt": momentOf(s.EndAt)} // the rest was fixed by the claim
	}
	return patch
}

// read finds out what the object shows. newer: that state, or a later one.
func (p *Writer) read(ctx context.Context, s core.Sandbox) (newer bool, at version, err error) {
	var object v1alpha1.Sandbox
	if err := p.client.Get().Namespace(p.namespace).Resource(resource).Name(s.ID).Do(ctx).Into(&object); err != nil {
		return false, version{}, fmt.Errorf("read sandbox object: %w", err)
	}
	stored, err := fromObject(&object)
	if err != nil {
		p.log.Warn("a Sandbox object is not as an allocator writes it; it is written anew", zap.Error(err))
		at = versionOf(&object, core.Revision{})
		at.broken = true
		return false, at, nil
	}
	return !stored.Revision.Less(s.Revision), versionOf(&object, stored.Revision), nil
}

func versionOf(o *v1alpha1.Sandbox, revision core.Revision) version {
	return version{uid: o.UID, version: o.ResourceVersion, finalizers: o.Finalizers, revision: revision, lastActive: timeOf(o.Status.LastActive)}
}

func (p *Writer) remember(s core.Sandbox, o *v1alpha1.Sandbox) {
	if s.Phase == core.Ended { // nothing will be written to it any more
		p.forget(s.ID)
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.written[s.ID] = versionOf(o, s.Revision)
}

func (p *Writer) forget(id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.written, id)
}

// Forget deletes the object of a sandbox that ended long ago, or one that was
// written by a leader that was deposed. It returns an error until that is done, and
// is then to be called again.
func (p *Writer) Forget(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	err := p.client.Delete().Namespace(p.namespace).Resource(resource).Name(id).Do(ctx).Error()
	if err == nil {
		err = p.release(ctx, id)
	}
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete sandbox object: %w", err)
	}
	return nil
}

// release removes the finalizer of a deleted object, if it still has one.
func (p *Writer) release(ctx context.Context, id string) error {
	var object v1alpha1.Sandbox
	if err := p.client.Get().Namespace(p.namespace).Resource(resource).Name(id).Do(ctx).Into(&object); err != nil {
		return err
	}
	if object.DeletionTimestamp == nil {
		return errors.New("it was made again")
	}
	at := versionOf(&object, core.Revision{})
	raw, err := json.Marshal(patchOf(core.Sandbox{Phase: core.Ended}, at).(map[string]any)["metadata"])
	if err != nil {
		return fmt.Errorf("encode patch: %w", err)
	}
	return p.client.Patch(types.MergePatchType).Namespace(p.namespace).Resource(resource).Name(id).Body([]byte(`{"metadata":` + string(raw) + `}`)).Do(ctx).Error()
}
