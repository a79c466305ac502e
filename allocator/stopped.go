package allocator

import (
	"context"
	"errors"
	"io"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/internal/wait"
)

// writeStopped writes the archive of a sandbox that is asleep and is to be stopped. It reports nothing when ctx ends:
// the sandbox wakes or has been released, or the term ends.
func (t *term) writeStopped(ctx context.Context, e core.WriteArchive) {
	began := time.Now()
	made, err := t.stop(ctx, e.Sandbox)
	for errors.Is(err, snapshots.ErrBusy) && time.Since(began) < stopWait && wait.Sleep(ctx, placePause) {
		made, err = t.stop(ctx, e.Sandbox)
	}
	if ctx.Err() != nil {
		return
	}
	outcome := doneOr(err)
	if errors.Is(err, snapshots.ErrBusy) {
		outcome = "busy"
	}
	t.a.metrics.stopArchives.WithLabelValues(outcome, string(e.Cause)).Inc()
	fields := []zap.Field{zap.String("pool", e.Sandbox.Pool.Name), zap.String("sandboxID", sandboxid.Short(e.Sandbox.ID)),
		zap.String("cause", string(e.Cause)), zap.Duration("took", time.Since(began))}
	switch outcome {
	case "done":
		t.log.Info("sandbox archived to be stopped", append(fields, zap.Int64("bytes", made.Size))...)
	case "failed":
		t.log.Warn("sandbox not archived, so it is not stopped", append(fields, zap.Error(err))...)
	}
	t.Submit(core.ArchiveWritten{ID: e.Sandbox.ID, Order: e.Sandbox.Revision, Err: snapshots.Public(err), Archive: made.Tag})
}

func (t *term) stop(ctx context.Context, s core.Sandbox) (snapshots.Snapshot, error) {
	what, err := t.filesOf(s)
	if err != nil {
		return snapshots.Snapshot{}, err
	}
	of := snapshots.Snapshot{Team: s.Team, Pool: s.Pool.Name, SandboxID: s.ID}
	return t.a.o.Snapshots.WriteStopped(ctx, of, sizeOf(what)+initbox.MaxSealed,
		func(ctx context.Context, name string, w io.Writer) (snapshots.Contents, error) {
			what.Stop = name
			return t.archive(ctx, s, what, w)
		})
}

// stoppedFiles returns what the agent in the new pod of a stopped sandbox is to restore.
func (t *term) stoppedFiles(ctx context.Context, s core.Sandbox) (*agents.Values, error) {
	what, err := t.filesOf(s)
	if err != nil {
		return nil, err
	}
	found, err := t.a.o.Snapshots.GetStopped(ctx, s.Team, s.ID, s.Archive)
	if err != nil {
		return nil, err
	}
	what.Stop = s.Archive
	return &agents.Values{
		Restore: &agents.Restore{Archive: what, SHA256: found.SHA256, Size: found.Size},
		Open:    func(ctx context.Context) (io.ReadCloser, error) { return t.a.o.Snapshots.Open(ctx, found) },
	}, nil
}

// ofStore reports whether a restore has failed because of the store. A wake is then not tried with the next pod: each
// try costs a warm one, and the sandbox can be woken later.
func ofStore(err error) bool {
	return isOne(err, snapshots.ErrStore, snapshots.ErrTimeout, snapshots.ErrBusy)
}

// dropArchive deletes an archive that no record names any more. What it fails to delete is swept.
func (t *term) dropArchive(ctx context.Context, s core.Sandbox) {
	if t.a.o.Snapshots == nil {
		return
	}
	if err := t.a.o.Snapshots.DropStopped(ctx, s.Team, s.ID, s.Archive); err != nil && ctx.Err() == nil {
		t.log.Warn("the archive of a stopped sandbox is not deleted before the next sweep", zap.String("sandboxID", sandboxid.Short(s.ID)),
			zap.Error(err))
	}
}

// sweepStopped deletes archives of stopped sandboxes that no live sandbox names.
func (t *term) sweepStopped(ctx context.Context) {
	done, err := t.a.o.Snapshots.SweepStopped(ctx, t.archivesOf)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		t.log.Warn("the archives of stopped sandboxes were not swept", zap.Error(err))
	}
	if done.Archives > 0 {
		t.log.Info("archives that no stopped sandbox has deleted", zap.Int("archives", done.Archives), zap.Int64("bytes", done.Bytes))
	}
}

// archivesOf returns the archives that live sandboxes name, by the IDs of the sandboxes. The lease is valid behind the
// look, so no other leader had changed that.
func (t *term) archivesOf(ctx context.Context, sandboxIDs []string) (map[string]string, error) {
	named, _, err := ask(ctx, t, func(c core.View) (map[string]string, bool) {
		all := make(map[string]string, len(sandboxIDs))
		for _, id := range sandboxIDs {
			if s, ok := c.Sandbox(id); ok && s.Phase < core.Released {
				all[id] = s.Archive
			}
		}
		return all, true
	})
	if err == nil && !t.Valid() {
		err = agents.ErrDeposed
	}
	return named, err
}
