package allocator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/sandboxobjects"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/wait"
)

// JournalBeginning begins a journal anew, after its loss or after its restoration from a backup.
// Live sandboxes stay live, as recorded in their Sandbox objects or in the readable rest of the
// journal.
type JournalBeginning struct {
	Clients   *kube.Clients
	Namespace string
	// Restored begins the journal anew although it is intact, because it is not the latest one.
	Restored bool
	// Nonce returns a random string, never the same twice. Optional.
	Nonce func() string
}

// beginLease bounds the whole operation, and leaseGrace the additional wait for the lease beside
// allocators that cannot lead and take it again and again.
const (
	beginLease = time.Minute
	beginRetry = 200 * time.Millisecond
	leaseGrace = 5 * time.Second
)

// Plan returns what Begin would do. It changes nothing.
func (b JournalBeginning) Plan(ctx context.Context) (*journal.Condition, *journal.Beginning, error) {
	c, err := journal.Check(ctx, b.store())
	if err != nil {
		return nil, nil, err
	}
	if c.Err == nil && !b.Restored {
		return c, nil, errors.New("the journal is intact and need not be begun anew; if it was restored from a backup, use --restored")
	}
	term, err := b.latestTerm(ctx)
	if err != nil {
		return c, nil, err
	}
	nonce := b.Nonce
	if nonce == nil {
		nonce = func() string { return rand.String(12) }
	}
	plan, err := c.Plan(journal.BeginOptions{MinTerm: term, Nonce: nonce, Records: func(s journal.Stamp) ([]journal.Record, error) {
		var longest time.Duration // of the routers that the readable rest names
		for _, r := range c.Records() {
			if f, _, err := fromRecord(r, b.Namespace); err == nil {
				longest = max(longest, f.MaxStale())
			}
		}
		r, err := earlierRecord(c.ID, s.Term, longest)
		return []journal.Record{r}, err
	}})
	return c, plan, err
}

// Begin carries the plan out under the leader's lease, so no allocator opens the journal meanwhile.
func (b JournalBeginning) Begin(ctx context.Context) (c *journal.Condition, plan *journal.Beginning, err error) {
	ctx, cancel := context.WithTimeout(ctx, beginLease)
	defer cancel()
	host, _ := os.Hostname()
	lock := newTimedLock(b.Clients.Kubernetes.CoordinationV1(), b.Namespace, "berth-journal-begin-"+host+"-"+rand.String(10), beginLease)
	release, err := takeLease(ctx, lock)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, release()) }()
	if c, plan, err = b.Plan(ctx); err != nil {
		return c, nil, err
	}
	return c, plan, plan.Begin(ctx, b.store())
}

func (b JournalBeginning) store() *journal.Objects {
	return &journal.Objects{Client: b.Clients.Berth, Namespace: b.Namespace}
}

// latestTerm returns the highest term that has written a Sandbox object.
func (b JournalBeginning) latestTerm(ctx context.Context) (term uint64, err error) {
	objects := kube.Resource{Client: b.Clients.Berth, Name: "sandboxes", Namespace: b.Namespace}
	for next := ""; ; {
		var page v1alpha1.SandboxList
		if err := objects.Page(ctx, next, &page); err != nil {
			return 0, err
		}
		for i := range page.Items {
			if r, err := sandboxobjects.ParseRevision(page.Items[i].Status.Revision); err == nil {
				term = max(term, r.Term)
			}
		}
		if next = page.Continue; next == "" {
			return term, nil
		}
	}
}

// takeLease takes the lease unless a leader holds it, and returns the function that gives it back.
func takeLease(ctx context.Context, lock *timedLock) (release func() error, err error) {
	began := time.Now()
	var seen resourcelock.LeaderElectionRecord
	unchanged := began
	for {
		have, _, err := lock.Get(ctx)
		now := time.Now()
		mine := resourcelock.LeaderElectionRecord{
			HolderIdentity: lock.Identity(), LeaseDurationSeconds: int(beginLease / time.Second), AcquireTime: metav1.NewTime(now), RenewTime: metav1.NewTime(now),
		}
		switch {
		case apierrors.IsNotFound(err):
			err = lock.Create(ctx, mine)
		case err != nil:
			return nil, fmt.Errorf("read the lease: %w", err)
		default:
			if *have != seen {
				seen, unchanged = *have, now
			}
			duration := time.Duration(have.LeaseDurationSeconds) * time.Second
			if have.HolderIdentity != "" && now.Sub(unchanged) < duration {
				if now.Sub(began) > duration+leaseGrace {
					return nil, fmt.Errorf("%w: %s", ErrLeads, have.HolderIdentity)
				}
				wait.Sleep(ctx, beginRetry)
				if ctx.Err() != nil {
					return nil, fmt.Errorf("%w: %s", ErrLeads, have.HolderIdentity)
				}
				continue
			}
			mine.LeaderTransitions = have.LeaderTransitions + 1
			err = lock.Update(ctx, mine)
		}
		switch {
		case apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err):
			continue // another writer was first
		case err != nil:
			return nil, fmt.Errorf("take the lease: %w", err)
		}
		return func() error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaseGrace)
			defer cancel()
			mine.HolderIdentity, mine.LeaseDurationSeconds = "", 1
			if err := lock.Update(ctx, mine); err != nil {
				return fmt.Errorf("give the lease back: %w", err)
			}
			return nil
		}, nil
	}
}
