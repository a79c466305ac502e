package sandboxobjects

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/util/workqueue"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/options"
)

const resource = "sandboxes"

// minRetry and maxRetry bound the back-off after a failed write.
const (
	minRetry = 50 * time.Millisecond
	maxRetry = 5 * time.Second
)

// Writer writes Sandbox objects. It writes only the latest state of a sandbox and skips the states
// in between, so its backlog is bounded by the number of sandboxes. Its methods may be called
// concurrently.
type Writer struct {
	o     WriterOptions
	queue workqueue.TypedRateLimitingInterface[string]

	mu sync.Mutex
	// latest is the unwritten state of each sandbox.
	latest map[string]waiting
	// written is the version of each object after the latest write.
	written map[string]version
}

type waiting struct {
	sandbox core.Sandbox
	touch   bool          // update only: a missing object is not created
	lines   []string      // of the log, to be added; nil: none
	since   time.Duration // boot clock
	refused bool          // the API server answered, and rejected the write
	noCRD   bool          // the last write failed with ErrNoCRD
}

// Backlog describes the states that wait to be written.
type Backlog struct {
	// Objects is the number of sandboxes with a waiting state. Refused is the number of those whose
	// latest write the API server rejected, for example because of a webhook or an edit by another
	// client.
	Objects, Refused int
	// Lag is the age of the oldest waiting state. Rejected writes count only if there are more than
	// maxRefused of them: a few concern single objects, many are likely to concern all.
	Lag time.Duration
	// NoCRD: the latest write of one of them failed with ErrNoCRD.
	NoCRD bool
}

// ErrNoCRD is why no object can be created.
var ErrNoCRD = errors.New("the CRD sandboxes.berth.sh is missing or is being deleted")

// maxRefused is the number of rejected objects up to which they do not count for the lag.
const maxRefused = 100

type version struct {
	uid        types.UID
	version    string
	finalizers []string
	revision   core.Revision
	lastActive time.Time
	// incarnation is that of the pod in the object.
	incarnation int
	broken      bool // the object cannot be read: all of it is written again
}

// WriterOptions configure a Writer. All are required.
type WriterOptions struct {
	// Submit gets a core.ObjectWritten for each written state.
	kube.Options
	// Yield is called before each write and may wait.
	Yield func(context.Context)
}

// NewWriter returns a Writer, or an error that names the missing options.
func NewWriter(o WriterOptions) (*Writer, error) {
	return &Writer{
		o: o, queue: kube.NewQueue[string](minRetry, maxRetry),
		latest: map[string]waiting{}, written: map[string]version{},
	}, errors.Join(o.Check(), options.Require(o, "Yield"))
}

// Record queues a state, unless a later one waits. It never blocks.
func (p *Writer) Record(r core.WriteObject) {
	s := r.Sandbox
	p.mu.Lock()
	w, waits := p.latest[s.ID]
	if waits && s.Revision.Less(w.sandbox.Revision) {
		p.mu.Unlock()
		return
	}
	if !waits {
		w.since, w.touch = bootclock.Now(), true
	}
	w.sandbox, w.touch = s, w.touch && r.Touch
	if len(r.LogLines) > 0 {
		w.lines = r.LogLines
	}
	p.latest[s.ID] = w
	p.mu.Unlock()
	p.queue.Add(s.ID)
}

// Backlog returns the current backlog.
func (p *Writer) Backlog() Backlog {
	p.mu.Lock()
	defer p.mu.Unlock()
	b := Backlog{Objects: len(p.latest)}
	var refused time.Duration
	now := bootclock.Now()
	for _, w := range p.latest {
		b.NoCRD = b.NoCRD || w.noCRD
		if w.refused {
			b.Refused++
			refused = max(refused, now-w.since)
		} else {
			b.Lag = max(b.Lag, now-w.since)
		}
	}
	if b.Refused > maxRefused {
		b.Lag = max(b.Lag, refused)
	}
	return b
}

// strictError begins what the API server says of a field that strict has it refuse. Before that it repeats the object.
const strictError = "strict decoding error"

// errOtherCRD is why strict has an object refused.
type errOtherCRD struct{ *apierrors.StatusError }

func (e errOtherCRD) Error() string {
	fields := e.ErrStatus.Message
	fields = fields[strings.LastIndex(fields, strictError)+len(strictError):]
	return "the CRD sandboxes.berth.sh is not of the version of the allocators; install that of their version" + fields
}

// Run writes with this many workers until ctx ends.
func (p *Writer) Run(ctx context.Context, workers int) {
	kube.Work(ctx, p.queue, workers, p.next)
}

// next writes the latest state of a sandbox.
func (p *Writer) next(ctx context.Context, id string) error {
	p.o.Yield(ctx)
	p.mu.Lock()
	w, waits := p.latest[id]
	p.mu.Unlock()
	if !waits {
		return nil // an earlier write included it
	}
	call, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	err := p.write(call, w)
	cancel()
	if status := new(apierrors.StatusError); errors.As(err, &status) && strings.Contains(status.ErrStatus.Message, strictError) {
		err = errOtherCRD{status}
	}
	gone := w.touch && apierrors.IsNotFound(err) // the watch reports the loss, and the core has the object created if it is needed
	if err != nil && !gone {
		if ctx.Err() == nil {
			p.o.Log.Warn("Sandbox object not written, retrying", zap.String("sandboxID", sandboxid.Short(id)), zap.Error(err))
		}
		p.mu.Lock()
		if w, waits := p.latest[id]; waits {
			w.refused, w.noCRD = refused(err), errors.Is(err, ErrNoCRD)
			p.latest[id] = w
		}
		p.mu.Unlock()
		return err
	}
	p.mu.Lock()
	now := p.latest[id]
	if now.sandbox.Revision == w.sandbox.Revision {
		delete(p.latest, id)
	} else {
		now.since, now.refused, now.noCRD = bootclock.Now(), false, false
		p.latest[id] = now
	}
	p.mu.Unlock()
	if !gone {
		p.o.Submit(core.ObjectWritten{ID: id, Revision: w.sandbox.Revision})
	}
	return nil
}

// refused reports whether the API server rejected a write for its content. A retry fails too unless
// something else changes.
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

// noCRD reports whether a creation failed because the API server does not serve the resource, or because it refuses
// new objects of a CRD that is being deleted, which only its message tells. A missing namespace is named in the details.
func noCRD(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	if details := status.Status().Details; apierrors.IsNotFound(err) {
		return details == nil || details.Kind != "namespaces"
	}
	return strings.Contains(status.Status().Message, "custom resource definition is terminating")
}

// write updates the object to the state that waits unless the object shows a newer one. With touch it returns
// NotFound if the object does not exist.
func (p *Writer) write(ctx context.Context, w waiting) error {
	s := w.sandbox
	p.mu.Lock()
	at, known := p.written[s.ID]
	p.mu.Unlock()
	if known && s.Revision.Less(at.revision) {
		return nil
	}
	var refusal error // of the creation
	if !known && !w.touch {
		// Decode into an object of its own, because the maps of the first are shared.
		var made v1alpha1.Sandbox
		err := strict(p.o.Clients.Berth.Post()).Namespace(p.o.Namespace).Resource(resource).
			Body(toObject(s, p.o.Namespace, w.lines)).Do(ctx).Into(&made)
		if err == nil {
			p.remember(s, &made)
			return nil
		}
		if noCRD(err) { // an object that is there can be updated
			refusal = fmt.Errorf("create sandbox object: %w: %w", ErrNoCRD, err)
		} else if !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create sandbox object: %w", err)
		}
	}
	if !known {
		newer, found, err := p.read(ctx, s)
		if apierrors.IsNotFound(err) && refusal != nil {
			return refusal
		}
		if newer || err != nil {
			return err
		}
		at = found
	}
	object, err := p.patch(ctx, s.ID, patchOf(s, at, w.lines))
	if err != nil {
		p.forget(s.ID) // the next attempt reads or creates the object
		return fmt.Errorf("update sandbox object: %w", err)
	}
	p.remember(s, object)
	return nil
}

// patch applies a merge patch.
func (p *Writer) patch(ctx context.Context, id string, patch map[string]any) (*v1alpha1.Sandbox, error) {
	raw, err := json.Marshal(patch)
	if err != nil {
		return nil, fmt.Errorf("encode patch: %w", err)
	}
	var object v1alpha1.Sandbox
	return &object, p.named(strict(p.o.Clients.Berth.Patch(types.MergePatchType)), id).Body(raw).Do(ctx).Into(&object)
}

// strict has the API server refuse an object with fields that the CRD does not have. Otherwise it would drop them, and a
// record that is settled by such an object is lost: so a CRD of an earlier version would take rules from a sandbox.
func strict(r *rest.Request) *rest.Request {
	return r.Param("fieldValidation", metav1.FieldValidationStrict)
}

// named completes a request for an object.
func (p *Writer) named(r *rest.Request, id string) *rest.Request {
	return r.Namespace(p.o.Namespace).Resource(resource).Name(id)
}

// needsFinalizer reports whether the object of s must survive a deletion by another client. It must
// while the sandbox is live, and while its idempotency key is valid, which Forget ends.
func needsFinalizer(s core.Sandbox) bool { return s.Phase != core.Ended || s.Keyed() }

// patchOf returns the patch from the known version of the object to s. The version is a
// precondition. Without lines the object keeps those that it has.
func patchOf(s core.Sandbox, at version, lines []string) map[string]any {
	metadata := map[string]any{"uid": at.uid, "resourceVersion": at.version}
	if !needsFinalizer(s) && slices.Contains(at.finalizers, v1alpha1.SandboxFinalizer) {
		metadata["finalizers"] = slices.DeleteFunc(slices.Clone(at.finalizers), func(f string) bool { return f == v1alpha1.SandboxFinalizer })
	}
	status := toStatus(s, lines)
	if s.LastActive.Before(at.lastActive) {
		status.LastActive = nil // keep the newer time
	}
	patch := map[string]any{"metadata": metadata, "status": statusPatch{SandboxStatus: status, AsleepAt: status.AsleepAt, Wakeable: status.Wakeable}}
	switch spec := toObject(s, "", nil).Spec; {
	case at.broken:
		patch["spec"] = specPatch{
			SandboxSpec: spec, NetworkAllow: spec.NetworkAllow, NetworkDeny: spec.NetworkDeny, NetworkHeaders: spec.NetworkHeaders,
		}
	case s.Incarnation != at.incarnation: // it was stopped, and has another pod
		patch["spec"] = map[string]any{
			"endAt": spec.EndAt, "networkAllow": spec.NetworkAllow, "networkDeny": spec.NetworkDeny, "networkHeaders": spec.NetworkHeaders, "startBy": spec.StartBy,
			"podName": spec.PodName, "podUID": spec.PodUID, "podIP": spec.PodIP,
			"restarts": spec.Restarts, "agentPort": spec.AgentPort, "agentPublic": spec.AgentPublic, "agentEgress": spec.AgentEgress, "workload": spec.Workload,
		}
	default:
		// All other fields are constant since the claim.
		patch["spec"] = map[string]any{"endAt": spec.EndAt, "networkAllow": spec.NetworkAllow, "networkDeny": spec.NetworkDeny, "networkHeaders": spec.NetworkHeaders}
	}
	return patch
}

// specPatch is a spec in a merge patch. It has what a call can take away.
type specPatch struct {
	v1alpha1.SandboxSpec
	NetworkAllow   []string `json:"networkAllow"`
	NetworkDeny    []string `json:"networkDeny"`
	NetworkHeaders []byte   `json:"networkHeaders"`
}

// statusPatch is a status in a merge patch, which leaves alone what it does not have. So it has what a wake takes away.
type statusPatch struct {
	v1alpha1.SandboxStatus
	AsleepAt *metav1.MicroTime `json:"asleepAt"`
	Wakeable bool              `json:"wakeable"`
}

// read reads the object's version. newer is true if the object shows s or a later state.
func (p *Writer) read(ctx context.Context, s core.Sandbox) (newer bool, at version, err error) {
	var object v1alpha1.Sandbox
	if err := p.named(p.o.Clients.Berth.Get(), s.ID).Do(ctx).Into(&object); err != nil {
		return false, version{}, fmt.Errorf("read sandbox object: %w", err)
	}
	stored, err := fromObject(&object)
	if err != nil {
		p.o.Log.Warn("Sandbox object cannot be read and is rewritten", zap.Error(err))
		at = versionOf(&object, core.Revision{})
		at.broken = true
		return false, at, nil
	}
	return !stored.Revision.Less(s.Revision), versionOf(&object, stored.Revision), nil
}

func versionOf(o *v1alpha1.Sandbox, revision core.Revision) version {
	return version{
		uid: o.UID, version: o.ResourceVersion, finalizers: o.Finalizers, revision: revision, lastActive: timeFromObject(o.Status.LastActive),
		incarnation: int(o.Status.Incarnation),
	}
}

func (p *Writer) remember(s core.Sandbox, o *v1alpha1.Sandbox) {
	if s.Phase == core.Ended { // its last write
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

// Forget deletes the object of a sandbox that ended long ago, or of one that a deposed leader wrote. It keeps
// an object that shows a later revision: another leader has written it. The caller repeats it until it returns
// nil.
func (p *Writer) Forget(ctx context.Context, e core.DeleteObject) error {
	ctx, cancel := context.WithTimeout(ctx, kube.CallTimeout)
	defer cancel()
	if err := p.forgetObject(ctx, e); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete sandbox object: %w", err)
	}
	return nil
}

// forgetObject removes the finalizer of the object, and deletes the object. Both are conditional on what it has
// read.
func (p *Writer) forgetObject(ctx context.Context, e core.DeleteObject) error {
	var object v1alpha1.Sandbox
	if err := p.named(p.o.Clients.Berth.Get(), e.ID).Do(ctx).Into(&object); err != nil {
		return err
	}
	if shown, err := ParseRevision(object.Status.Revision); err == nil && e.Revision.Less(shown) {
		return nil
	}
	at := versionOf(&object, core.Revision{})
	if slices.Contains(at.finalizers, v1alpha1.SandboxFinalizer) {
		patch := patchOf(core.Sandbox{Phase: core.Ended}, at, nil)
		changed, err := p.patch(ctx, e.ID, map[string]any{"metadata": patch["metadata"]})
		if err != nil {
			return err
		}
		at = versionOf(changed, core.Revision{})
	}
	raw, err := json.Marshal(metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &at.uid, ResourceVersion: &at.version}})
	if err != nil {
		return fmt.Errorf("encode precondition: %w", err)
	}
	return p.named(p.o.Clients.Berth.Delete(), e.ID).SetHeader("Content-Type", "application/json").Body(raw).Do(ctx).Error()
}
