package webhooks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"go.uber.org/zap"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/wait"
)

// Bounds of webhooks.
const (
	// maxHooks is how many there can be, teamHooks how many of one team.
	maxHooks, teamHooks = 100, 10
	// lanes is how many deliveries of a webhook are under way at most. All but the first one take a part of shared.
	lanes  = 4
	shared = 28
	// saveEvery is the pause between writes of positions.
	saveEvery = 2 * time.Second
	// minRetry and maxRetry bound the back-off after a failed call of the API server.
	minRetry, maxRetry = 200 * time.Millisecond, 10 * time.Second
)

// Log is the log of events. *eventlog.Log implements it.
type Log interface {
	After(position uint64, f eventlog.Filter, most int) (eventlog.Batch, error)
	Last() (uint64, error)
}

// Store keeps the EventWebhook objects. Errors are those of the API server. Update has the resource version as condition.
type Store interface {
	List(ctx context.Context) ([]v1alpha1.EventWebhook, error)
	Get(ctx context.Context, id string) (*v1alpha1.EventWebhook, error)
	Create(ctx context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error)
	Update(ctx context.Context, o *v1alpha1.EventWebhook) (*v1alpha1.EventWebhook, error)
	Delete(ctx context.Context, id string) error
}

// Options configure a Manager. All are required unless their comment says otherwise.
type Options struct {
	Store Store
	Log   Log
	// Key seals secrets. Optional: without it there are no webhooks.
	Key   *sandboxaccess.Key
	Guard *Guard
	// Valid reports whether this replica certainly leads. Nothing is sent or written otherwise.
	Valid  func() bool
	Logger *zap.Logger
}

// Manager has the webhooks of a term. Its methods may be called concurrently.
type Manager struct {
	o      Options
	sealer *sealer // nil: there are no webhooks
	client *http.Client
	shared chan struct{} // holds a value for each shared delivery that is under way
	// changing serializes changes of objects.
	changing sync.Mutex

	mu      sync.Mutex
	ctx     context.Context // of Run; nil until the webhooks are read
	hooks   map[string]*hook
	runners sync.WaitGroup
	stats   Stats
}

// Stats count deliveries, and describe the webhooks.
type Stats struct {
	Delivered, Failed, GivenUp, Gaps uint64
	Webhooks, Locked                 int
	// Lag is how many events the webhook that is furthest behind has not got, of all types and teams.
	Lag uint64
}

// hook is a webhook. Its fields are guarded by the Manager's mu; object is not changed but replaced.
type hook struct {
	object     *v1alpha1.EventWebhook
	through    uint64
	locked     bool
	deliveries []openapi.WebhookDelivery // the newest last
	stop       func()                    // ends its runner and waits for it; nil: it has none
}

// New returns a Manager, or an error that names the missing options.
func New(o Options) (*Manager, error) {
	if err := options.Require(o, "Store", "Log", "Guard", "Valid", "Logger"); err != nil {
		return nil, err
	}
	m := &Manager{o: o, client: o.Guard.client(), shared: make(chan struct{}, shared), hooks: map[string]*hook{}}
	if o.Key != nil {
		m.sealer = newSealer(o.Key)
	}
	return m, nil
}

// Run reads the webhooks and sends events until ctx ends, and waits for the deliveries that are under way.
func (m *Manager) Run(ctx context.Context) {
	defer m.client.CloseIdleConnections()
	defer m.runners.Wait()
	if m.sealer == nil {
		return
	}
	for pause := minRetry; ; pause = min(2*pause, maxRetry) {
		all, err := m.o.Store.List(ctx)
		if err == nil {
			m.mu.Lock()
			m.ctx = ctx
			for i := range all {
				h := &hook{object: &all[i], through: uint64(max(0, all[i].Status.Through))}
				m.hooks[all[i].Name] = h
				m.start(h)
			}
			m.mu.Unlock()
			break
		}
		if apierrors.IsNotFound(err) {
			pause = time.Minute
		}
		if ctx.Err() == nil {
			m.o.Logger.Warn("webhooks were not read, retrying", zap.Error(err))
		}
		if !wait.Sleep(ctx, pause) {
			return
		}
	}
	for wait.Sleep(ctx, saveEvery) {
		m.save(ctx)
	}
}

// start starts the runner of an enabled webhook. The caller holds mu.
func (m *Manager) start(h *hook) {
	h.stop, h.locked = nil, false
	secret, err := m.sealer.open(h.object.Spec.Secret, h.object.Name, h.object.Spec.Team)
	if err != nil {
		h.locked = true
		m.o.Logger.Error("a webhook sends nothing", zap.String("webhook", h.object.Name), zap.String("team", h.object.Spec.Team), zap.Error(err))
		return
	}
	if !h.object.Spec.Enabled {
		return
	}
	r := newRunner(m, h, secret)
	ctx, cancel := context.WithCancel(m.ctx)
	done := make(chan struct{})
	m.runners.Go(func() { defer close(done); r.run(ctx) })
	h.stop = func() { cancel(); <-done }
}

// save stores the positions that have moved.
func (m *Manager) save(ctx context.Context) {
	m.mu.Lock()
	var moved []string
	for id, h := range m.hooks {
		if h.through != uint64(h.object.Status.Through) {
			moved = append(moved, id)
		}
	}
	m.mu.Unlock()
	slices.Sort(moved)
	for _, id := range moved {
		if !m.o.Valid() || ctx.Err() != nil {
			return
		}
		if err := m.saveOne(ctx, id); err != nil && ctx.Err() == nil {
			m.o.Logger.Warn("the position of a webhook was not stored, retrying", zap.String("webhook", id), zap.Error(err))
		}
	}
}

func (m *Manager) saveOne(ctx context.Context, id string) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	h := m.hooks[id]
	if h == nil {
		m.mu.Unlock()
		return nil
	}
	next := h.object.DeepCopy()
	next.Status.Through = int64(h.through)
	m.mu.Unlock()
	written, err := m.o.Store.Update(ctx, next)
	switch {
	case apierrors.IsNotFound(err): // another client has deleted it
		m.drop(id)
		return nil
	case apierrors.IsConflict(err): // another client has written it: what it wrote counts for the next leader
		there, err := m.o.Store.Get(ctx, id)
		if err != nil {
			return err
		}
		next.ResourceVersion = there.ResourceVersion
		written = next
		written.Status.Through = there.Status.Through
	case err != nil:
		return err
	}
	m.mu.Lock()
	h.object = written
	m.mu.Unlock()
	return nil
}

// drop forgets a webhook.
func (m *Manager) drop(id string) {
	m.mu.Lock()
	h := m.hooks[id]
	delete(m.hooks, id)
	m.mu.Unlock()
	if h != nil && h.stop != nil {
		h.stop()
	}
}

// Scope is whose webhooks a caller sees.
type Scope struct {
	All  bool
	Team string
}

// find returns a webhook of the scope. The caller holds mu.
func (m *Manager) find(s Scope, id string) (*hook, error) {
	if err := m.ready(); err != nil {
		return nil, err
	}
	h := m.hooks[id]
	if h == nil || !s.All && h.object.Spec.Team != s.Team {
		return nil, apierror.New(apierror.NotFound, "webhook %q: there is none of this ID", id)
	}
	return h, nil
}

func (m *Manager) ready() error {
	switch {
	case m.sealer == nil:
		return apierror.New(apierror.NotImplemented, "webhooks need a key of the cluster; start the allocators with --access-key-file")
	case m.ctx == nil:
		return apierror.New(apierror.Overloaded, "the webhooks are being read; try again")
	}
	return nil
}

// List returns the webhooks of a scope, the oldest first.
func (m *Manager) List(s Scope) ([]*v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.ready(); err != nil {
		return nil, err
	}
	var all []*v1alpha1.EventWebhook
	for _, h := range m.hooks {
		if s.All || h.object.Spec.Team == s.Team {
			all = append(all, h.object)
		}
	}
	slices.SortFunc(all, func(a, b *v1alpha1.EventWebhook) int {
		return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Name, b.Name))
	})
	return all, nil
}

// Get returns a webhook.
func (m *Manager) Get(s Scope, id string) (*v1alpha1.EventWebhook, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, err := m.find(s, id)
	if err != nil {
		return nil, err
	}
	return h.object, nil
}

// Deliveries returns the latest attempts of this leader to deliver events to a webhook, the newest first.
func (m *Manager) Deliveries(s Scope, id string, most int) ([]openapi.WebhookDelivery, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	h, err := m.find(s, id)
	if err != nil {
		return nil, err
	}
	all := slices.Clone(h.deliveries[max(0, len(h.deliveries)-most):])
	slices.Reverse(all)
	return all, nil
}

// Change is what a call asks for. Fields that are nil or empty stay as they are.
type Change struct {
	Name, URL, Secret *string
	Enabled           *bool
	Events            []string
}

// apply changes a webhook.
func (m *Manager) apply(c Change, o *v1alpha1.EventWebhook) error {
	if c.Name != nil {
		o.Spec.Name = *c.Name
	}
	if c.Enabled != nil {
		o.Spec.Enabled = *c.Enabled
	}
	if c.Events != nil {
		o.Spec.Events = slices.Compact(slices.Sorted(slices.Values(c.Events)))
	}
	if c.URL != nil {
		if err := m.o.Guard.CheckURL(*c.URL); err != nil {
			return apierror.New(apierror.BadRequest, "url: %v", err)
		}
		o.Spec.URL = *c.URL
	}
	if c.Secret != nil {
		o.Spec.Secret = m.sealer.seal(*c.Secret, o.Name, o.Spec.Team)
	}
	return nil
}

// Create makes a webhook of a team. It gets the events after the newest one.
func (m *Manager) Create(ctx context.Context, team string, c Change) (*v1alpha1.EventWebhook, error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	err, all, ofTeam := m.ready(), len(m.hooks), 0
	for _, h := range m.hooks {
		if h.object.Spec.Team == team {
			ofTeam++
		}
	}
	m.mu.Unlock()
	switch {
	case err != nil:
		return nil, err
	case ofTeam >= teamHooks:
		return nil, apierror.New(apierror.QuotaExceeded, "team %q has %d webhooks, the most that one team can have; delete one", team, ofTeam)
	case all >= maxHooks:
		return nil, apierror.New(apierror.QuotaExceeded, "there are %d webhooks of all teams, the most that there can be; an operator must delete one", all)
	}
	last, err := m.o.Log.Last()
	if err != nil {
		return nil, apierror.New(apierror.Overloaded, "%v; try again", err)
	}
	o := &v1alpha1.EventWebhook{ObjectMeta: metav1.ObjectMeta{Name: uuid.NewString()}, Spec: v1alpha1.EventWebhookSpec{Team: team}}
	o.Status.Through = int64(last)
	if err := m.apply(c, o); err != nil {
		return nil, err
	}
	if o, err = m.o.Store.Create(ctx, o); err != nil {
		return nil, fmt.Errorf("create webhook: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	h := &hook{object: o, through: last}
	m.hooks[o.Name] = h
	m.start(h)
	return o, nil
}

// Update changes a webhook. One that is enabled again gets the events after the newest one.
func (m *Manager) Update(ctx context.Context, s Scope, id string, c Change) (*v1alpha1.EventWebhook, error) {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	h, err := m.find(s, id)
	m.mu.Unlock()
	if err != nil {
		return nil, err
	}
	next := h.object.DeepCopy()
	if err := m.apply(c, next); err != nil {
		return nil, err
	}
	restarted := next.Spec.Enabled && !h.object.Spec.Enabled
	if restarted {
		last, err := m.o.Log.Last()
		if err != nil {
			return nil, apierror.New(apierror.Overloaded, "%v; try again", err)
		}
		next.Status.Through = int64(last)
	}
	written, err := m.o.Store.Update(ctx, next)
	switch {
	case apierrors.IsNotFound(err):
		m.drop(id)
		return nil, apierror.New(apierror.NotFound, "webhook %q: there is none of this ID", id)
	case apierrors.IsConflict(err):
		if there, err := m.o.Store.Get(ctx, id); err == nil {
			m.mu.Lock()
			current := h.object.DeepCopy()
			current.ResourceVersion = there.ResourceVersion
			h.object = current
			m.mu.Unlock()
		}
		return nil, apierror.New(apierror.Overloaded, "another client has changed the webhook in this moment; try again")
	case err != nil:
		return nil, fmt.Errorf("update webhook: %w", err)
	}
	if h.stop != nil {
		h.stop()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if h.object = written; restarted {
		h.through = uint64(written.Status.Through)
	}
	if m.ctx.Err() == nil {
		m.start(h)
	}
	return written, nil
}

// Delete deletes a webhook. When it returns, nothing is sent any more.
func (m *Manager) Delete(ctx context.Context, s Scope, id string) error {
	m.changing.Lock()
	defer m.changing.Unlock()
	m.mu.Lock()
	_, err := m.find(s, id)
	m.mu.Unlock()
	if err != nil {
		return err
	}
	if err := m.o.Store.Delete(ctx, id); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete webhook: %w", err)
	}
	m.drop(id)
	return nil
}

// Stats returns the current values.
func (m *Manager) Stats() Stats {
	last, err := m.o.Log.Last()
	m.mu.Lock()
	defer m.mu.Unlock()
	s := m.stats
	s.Webhooks = len(m.hooks)
	for _, h := range m.hooks {
		if h.locked {
			s.Locked++
		}
		if h.stop != nil && err == nil && last > h.through {
			s.Lag = max(s.Lag, last-h.through)
		}
	}
	return s
}

var errNotValid = errors.New("this replica is not certain to lead")
