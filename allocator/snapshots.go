package allocator

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// sweepEvery is the pause between two sweeps of the store of snapshots.
	sweepEvery = 10 * time.Minute
	// compressionMargin is how much longer an archive can become by its compression, as a part of it; and archiveMargin
	// what comes to that in any case.
	compressionMargin = 64
	archiveMargin     = 1 << 20
	// placePause is the pause before a restore or a stop asks again for one of the places to read or write archives, and
	// stopWait is how long a stop does that. The core tries a stop again.
	placePause = 50 * time.Millisecond
	stopWait   = 30 * time.Second
)

// errNoStore: a replica with a store has stopped the sandbox, or its pool asks for it.
var errNoStore = errors.New("the allocator has no object store: start all of them with --snapshots")

// snapshotCall is a call that makes a snapshot. The core carries it to the effect WriteArchive.
type snapshotCall struct {
	of snapshots.Snapshot

	mu   sync.Mutex
	made snapshots.Snapshot
}

// String implements core.Values.
func (*snapshotCall) String() string { return "a call for a snapshot" }

// MakeSnapshot implements rest.Allocator. When ctx ends first, the snapshot may be made all the same.
func (a *Allocator) MakeSnapshot(ctx context.Context, id string, of snapshots.Snapshot) (snapshots.Snapshot, core.SandboxCallAnswered, error) {
	c := &snapshotCall{of: of}
	e, err := call[core.SandboxCallAnswered](ctx, a, func(t *term, token uint64) core.Event {
		t.headStart.call()
		return core.Archive{Token: token, Scope: scopeOf(ctx), ID: id, Values: c}
	}, nil)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err == nil && e.Status == core.CallRefused {
		err = e.Err // nil if the sandbox did not fall asleep
	}
	return c.made, e, err
}

// writeArchive makes the snapshot of a sandbox whose processes are stopped. It reports nothing when ctx ends: the next
// leader has the sandbox run, or it has been released.
func (t *term) writeArchive(ctx context.Context, e core.WriteArchive) {
	c := e.Values.(*snapshotCall)
	began := time.Now()
	made, err := t.snapshot(ctx, e.Sandbox, c.of)
	if ctx.Err() != nil {
		return
	}
	c.mu.Lock()
	c.made = made
	c.mu.Unlock()
	t.a.metrics.snapshots.WithLabelValues(doneOr(err)).Inc()
	fields := []zap.Field{zap.String("pool", e.Sandbox.Pool.Name), zap.String("sandboxID", sandboxid.Short(e.Sandbox.ID)),
		zap.String("snapshot", c.of.Ref()), zap.Duration("took", time.Since(began))}
	if err != nil {
		t.log.Warn("no snapshot was made", append(fields, zap.Error(err))...)
	} else {
		t.log.Info("snapshot made", append(fields, zap.Int64("bytes", made.Size))...)
	}
	t.Submit(core.ArchiveWritten{ID: e.Sandbox.ID, Token: e.Token, Order: e.Sandbox.Revision, Err: snapshots.Public(err)})
}

func (t *term) snapshot(ctx context.Context, s core.Sandbox, of snapshots.Snapshot) (snapshots.Snapshot, error) {
	what, err := t.filesOf(s)
	if err != nil {
		return of, err
	}
	of.Pool, of.SandboxID = s.Pool.Name, s.ID
	return t.a.o.Snapshots.Write(ctx, of, sizeOf(what), func(ctx context.Context, w io.Writer) (snapshots.Contents, error) {
		return t.archive(ctx, s, what, w)
	})
}

// filesOf says which files of a sandbox are archived and restored.
func (t *term) filesOf(s core.Sandbox) (what agents.Archive, err error) {
	pool, ok := t.a.Pool(s.Pool.Name)
	switch {
	case t.agents == nil: // a replica with a key has made the claim
		return what, errors.New("the allocator has no --access-key-file")
	case t.a.o.Snapshots == nil:
		return what, errNoStore
	case !ok:
		return what, fmt.Errorf("its pool %q is gone", s.Pool.Name)
	}
	what.Paths, what.MaxBytes, what.MaxFiles = pool.Spec.Snapshots()
	return what, nil
}

// sizeOf returns how many bytes an archive may have.
func sizeOf(a agents.Archive) int64 { return a.MaxBytes + a.MaxBytes/compressionMargin + archiveMargin }

// archive writes an archive of a sandbox to w.
func (t *term) archive(ctx context.Context, s core.Sandbox, what agents.Archive, w io.Writer) (c snapshots.Contents, err error) {
	sum, err := t.agents.Archive(ctx, s, what, w)
	c = snapshots.Contents{Entries: sum.Entries, Bytes: sum.Bytes, Paths: what.Paths}
	for reason, left := range sum.LeftOut {
		if c.LeftOut == nil {
			c.LeftOut = map[string]int{}
		}
		c.LeftOut[reason] = left.Count
	}
	return c, err
}

// restore has the agent of a claimed pod restore an archive.
func (t *term) restore(ctx context.Context, s core.Sandbox, values *agents.Values) error {
	ctx, cancel := context.WithTimeout(ctx, agents.RestoreFor)
	defer cancel()
	archive, err := values.Open(ctx)
	for errors.Is(err, snapshots.ErrBusy) && wait.Sleep(ctx, placePause) {
		archive, err = values.Open(ctx)
	}
	if err == nil {
		_, err = t.agents.Restore(ctx, s, *values.Restore, archive)
		_ = archive.Close() // it was read, or the restore has failed
	}
	t.a.metrics.restores.WithLabelValues(doneOr(err)).Inc()
	if err != nil {
		return fmt.Errorf("restore the files: %w", err)
	}
	return nil
}

// hopeless reports whether a restore fails with this error in every pod of the pool.
func hopeless(err error) bool {
	var refused *agents.RefusedError
	return isOne(err, snapshots.ErrNotFound, snapshots.ErrGone, snapshots.ErrInvalid, snapshots.ErrDamaged, errNoStore) ||
		errors.As(err, &refused) && slices.Contains([]initbox.Reason{
			initbox.Damaged, initbox.TooLarge, initbox.TooManyFiles, initbox.NotAllowed, initbox.NotOpened,
		}, refused.Reason)
}

func isOne(err error, of ...error) bool {
	return slices.ContainsFunc(of, func(one error) bool { return errors.Is(err, one) })
}

// sweepSnapshots deletes what has expired and what is left over, until ctx ends.
func (t *term) sweepSnapshots(ctx context.Context) {
	for {
		done, err := t.a.o.Snapshots.Sweep(ctx)
		if ctx.Err() != nil {
			return
		}
		for _, damaged := range done.Damaged {
			t.log.Error("a snapshot cannot be read, and as long as it is there no archive that is left over is deleted", zap.Error(damaged))
		}
		if err != nil {
			t.log.Warn("the store of snapshots was not swept", zap.Error(err))
		}
		if done.Snapshots > 0 || done.Archives > 0 {
			t.log.Info("expired snapshots deleted", zap.Int("snapshots", done.Snapshots), zap.Int("archives", done.Archives), zap.Int64("bytes", done.Bytes))
		}
		t.sweepStopped(ctx)
		if !wait.Sleep(ctx, sweepEvery) {
			return
		}
	}
}

// doneOr is the label of an outcome.
func doneOr(err error) string {
	if err != nil {
		return "failed"
	}
	return "done"
}
