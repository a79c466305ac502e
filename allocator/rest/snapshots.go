package rest

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// errNoStore is the answer of allocators without a store.
func errNoStore() error {
	return notImplemented("the allocators have no object store for snapshots; start them with --snapshots")
}

// createSnapshot makes a snapshot of the files of a sandbox.
func (a *api) createSnapshot(w *reply, r *http.Request) error {
	var request openapi.CreateSnapshotJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	if a.Snapshots == nil {
		return errNoStore()
	}
	id, team := r.PathValue("sandboxID"), access.From(r.Context()).Team
	of := snapshots.Snapshot{Team: team, Name: snapshots.NewName(), Tag: snapshots.DefaultTag}
	if name := deref(request.Name, ""); name != "" {
		var err error
		if of.Name, of.Tag, err = snapshots.ParseRef(team, name); err != nil {
			return invalid("name: %v", err)
		}
	}
	w.object = sandboxid.Short(id) + " " + of.Ref()
	if a.SnapshotsKept > 0 {
		of.ExpiresAt = time.Now().Add(a.SnapshotsKept).UTC()
	}
	made, e, err := a.Allocator.MakeSnapshot(r.Context(), id, of)
	if err != nil {
		return notMade(id, err)
	}
	if err := notLive(id, e.Status); err != nil {
		return because(err, e.Why)
	}
	return writeJSON(w, http.StatusCreated, toSnapshot(made))
}

// notMade says why there is no snapshot.
func notMade(id string, err error) error {
	if reason := notArchived(err); reason != apierror.SnapshotFailed || errors.Is(err, snapshots.ErrTimeout) {
		return about(id, reason, err.Error())
	}
	if errors.As(err, new(*apierror.Error)) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return about(id, apierror.SnapshotFailed, err.Error())
}

// notArchived is the reason for an error for which the files of a sandbox were not archived.
func notArchived(err error) apierror.Reason {
	var refused *agents.RefusedError
	switch {
	case errors.Is(err, snapshots.ErrFull):
		return apierror.QuotaExceeded
	case errors.Is(err, snapshots.ErrBusy):
		return apierror.Overloaded
	case errors.Is(err, snapshots.ErrTooLarge), errors.As(err, &refused) && (refused.Reason == initbox.TooLarge || refused.Reason == initbox.TooManyFiles):
		return apierror.SnapshotTooLarge
	case errors.Is(err, snapshots.ErrStore):
		return apierror.StoreUnavailable
	case errors.Is(err, agents.ErrUnreachable):
		return apierror.SandboxUnreachable
	}
	return apierror.SnapshotFailed
}

// listSnapshots lists the snapshots of the caller's team.
func (a *api) listSnapshots(w *reply, r *http.Request) error {
	if a.Snapshots == nil {
		return errNoStore()
	}
	query, team := r.URL.Query(), access.From(r.Context()).Team
	limit, err := decodeLimit(r, defaultPage)
	if err != nil {
		return err
	}
	filter := snapshots.Filter{SandboxID: query.Get("sandboxID")}
	if text := query.Get("name"); text != "" {
		if filter.Name, filter.Tag, err = snapshots.ParseRef(team, text); err != nil {
			return writeJSON(w, http.StatusOK, []openapi.Snapshot{}) // there can be none
		}
		if !strings.Contains(text, ":") {
			filter.Tag = ""
		}
	}
	page, err := a.Snapshots.List(r.Context(), team, filter, query.Get("nextToken"), limit)
	if err != nil {
		return a.storeFailed(err)
	}
	for _, damaged := range page.Damaged {
		a.Log.Error("a snapshot cannot be read", zap.Error(damaged))
	}
	shown := make([]openapi.Snapshot, 0, len(page.Snapshots))
	for _, s := range page.Snapshots {
		shown = append(shown, toSnapshot(s))
	}
	if page.Next != "" {
		w.Header().Set("X-Next-Token", page.Next)
	}
	return writeJSON(w, http.StatusOK, shown)
}

// deleteSnapshot deletes a snapshot of the caller's team.
func (a *api) deleteSnapshot(w *reply, r *http.Request) error {
	ref := r.PathValue("templateID")
	w.object = audited(ref)
	if _, ok := a.Allocator.Pool(ref); ok {
		return notImplemented("%q is a SandboxPool; use kubectl to delete it", ref)
	}
	if a.Snapshots == nil {
		return errNoStore()
	}
	if err := a.Snapshots.Delete(r.Context(), access.From(r.Context()).Team, ref); err != nil {
		return a.storeFailed(err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// storeFailed is the answer to a call for a snapshot that has failed.
func (a *api) storeFailed(err error) error {
	switch {
	case errors.Is(err, snapshots.ErrNotFound), errors.Is(err, snapshots.ErrInvalid):
		return apierror.New(apierror.SnapshotNotFound, "%v", snapshots.ErrNotFound)
	case errors.Is(err, context.Canceled):
		return err
	}
	a.Log.Error("a call to the store of snapshots has failed", zap.Error(err))
	return apierror.New(notArchived(err), "%v", snapshots.Public(err))
}

// source is where a claim gets its sandboxes from: a pool, or a snapshot and its pool, which has this spec.
type source struct {
	pool     string
	snapshot *snapshots.Snapshot
	spec     *v1alpha1.SandboxPoolSpec
}

// sourceOf returns what a claim means by a name. A name of neither is taken for that of a pool.
func (a *api) sourceOf(ctx context.Context, name string) (source, error) {
	if _, ok := a.Allocator.Pool(name); ok || a.Snapshots == nil {
		return source{pool: name}, nil
	}
	s, err := a.Snapshots.Get(ctx, access.From(ctx).Team, name)
	switch {
	case errors.Is(err, snapshots.ErrInvalid), errors.Is(err, snapshots.ErrNotFound) && !strings.Contains(name, ":"):
		return source{pool: name}, nil
	case err != nil:
		return source{}, a.storeFailed(err)
	}
	pool, ok := a.Allocator.Pool(s.Pool)
	if !ok {
		return source{}, apierror.New(apierror.PoolNotFound, "the snapshot %s is of the pool %q, which there is no more; create the pool, with an image and a user as before", s.Ref(), s.Pool)
	} else if pool.Spec.AgentEnabled() == nil {
		return source{}, notImplemented("the snapshot %s is of the pool %q, whose pods have no agent any more that restores it; enable spec.agent of the pool", s.Ref(), s.Pool)
	}
	return source{s.Pool, &s, &pool.Spec}, nil
}

// restore adds the restore of the snapshot to what a claim brings for the agent.
func (a *api) restore(from source, c *core.Claim, values *agents.Values) *agents.Values {
	s := from.snapshot
	if s == nil {
		return values
	}
	if values == nil {
		values = &agents.Values{}
	}
	values.Restore = &agents.Restore{SHA256: s.SHA256, Size: s.Size}
	values.Restore.Paths, values.Restore.MaxBytes, values.Restore.MaxFiles = from.spec.Snapshots()
	values.Open = func(ctx context.Context) (io.ReadCloser, error) { return a.Snapshots.Open(ctx, *s) }
	c.Configuring = agents.RestoreFor
	return values
}

func toSnapshot(s snapshots.Snapshot) openapi.Snapshot {
	shown := openapi.Snapshot{
		SnapshotID: s.Ref(), Names: []string{s.Ref()}, SandboxID: s.SandboxID, Pool: s.Pool, CreatedAt: s.CreatedAt,
		SizeBytes: s.Size, Files: s.Entries, Bytes: s.Bytes, Paths: append([]string{}, s.Paths...),
	}
	if !s.ExpiresAt.IsZero() {
		shown.ExpiresAt = &s.ExpiresAt
	}
	if len(s.LeftOut) > 0 {
		shown.LeftOut = s.LeftOut
	}
	return shown
}
