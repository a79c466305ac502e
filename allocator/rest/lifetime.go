package rest

import (
	"context"
	"errors"
	"net/http"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// setTimeout moves the end of a sandbox.
func (a *api) setTimeout(w *reply, r *http.Request) error {
	var request openapi.SetTimeoutJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	id := r.PathValue("sandboxID")
	status, err := a.Allocator.SetTimeout(r.Context(), id, secondsOf(request.Timeout))
	return noContent(w, id, status, err)
}

// connect extends the life of a sandbox and answers with it.
func (a *api) connect(w *reply, r *http.Request) error {
	var request openapi.ConnectSandboxJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	return a.extend(w, r, request.Timeout, http.StatusOK)
}

// pause has a sandbox fall asleep, or stops it.
func (a *api) pause(w *reply, r *http.Request) error {
	var request openapi.PauseSandboxJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	id, ctx, stop := r.PathValue("sandboxID"), r.Context(), !deref(request.Memory, true)
	switch {
	case !stop: // nothing is archived
		short, cancel := context.WithTimeout(ctx, sleepWait)
		defer cancel()
		ctx = short
	case a.Snapshots == nil:
		return notImplemented("memory: false: %s", noStoreToStop)
	}
	e, err := a.Allocator.Sleep(ctx, id, stop)
	if err != nil {
		return err
	}
	refused := notLive(id, e.Status)
	switch failed := stop && e.Status == core.CallRefused; {
	case failed && e.Sandbox.Phase == core.Asleep:
		refused = about(id, notArchived(e.Err), "this sandbox is asleep, and its files were not archived")
	case failed:
		refused = about(id, apierror.SleepFailed, "this sandbox was not stopped, and runs")
	}
	if refused != nil {
		return because(refused, e.Why)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// noStoreToStop says why no sandbox can be stopped.
const noStoreToStop = "the allocators have no object store for the files of a sandbox that is stopped; start them with --snapshots, or leave it out"

// because adds to an error why it is so.
func because(err error, why string) error {
	var known *apierror.Error
	if errors.As(err, &known) && why != "" {
		known.Message += ": " + why
	}
	return err
}

// resume is connect as older SDKs call it.
func (a *api) resume(w *reply, r *http.Request) error {
	var request openapi.ResumeSandboxJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	return a.extend(w, r, request.Timeout, http.StatusCreated)
}

// refresh extends the life of a sandbox.
func (a *api) refresh(w *reply, r *http.Request) error {
	var request openapi.RefreshSandboxJSONBody
	if err := decodeBody(r, &request); err != nil {
		return err
	}
	return a.extend(w, r, request.Duration, http.StatusNoContent)
}

// extend moves the end of a sandbox, but never forward in time. If code allows a body, it wakes a sandbox that is asleep,
// and answers with the sandbox.
func (a *api) extend(w *reply, r *http.Request, by *openapi.Seconds, code int) error {
	id, ctx := r.PathValue("sandboxID"), r.Context()
	if s, known, err := a.Allocator.Sandbox(ctx, id); err == nil && known && s.Phase == core.Running { // there is no wake
		short, cancel := context.WithTimeout(ctx, answerWait)
		defer cancel()
		ctx = short
	}
	e, err := a.Allocator.Extend(ctx, id, secondsOf(deref(by, int64(defaultTimeout.Seconds()))), code != http.StatusNoContent)
	if err == nil && e.Sandbox.Phase == core.Stopped {
		switch e.Status {
		case core.CallRefused:
			return because(about(id, apierror.StartFailed, "this sandbox is stopped, and could not be woken"), e.Why)
		case core.CallNotReady:
			return because(about(id, apierror.PoolEmpty, "this sandbox is stopped, and there is no pod for it now"), e.Why)
		default:
		}
	}
	if err != nil || e.Status != core.CallOK || code == http.StatusNoContent {
		return noContent(w, id, e.Status, err)
	}
	if e.Woken {
		code = http.StatusCreated
	}
	return writeJSON(w, code, a.withCredentials(r.Context(), a.toSandbox(e.Sandbox), &e.Sandbox))
}

// keepAlive records activity of a sandbox.
func (a *api) keepAlive(w *reply, r *http.Request) error {
	id := r.PathValue("sandboxID")
	status, err := a.Allocator.KeepAlive(r.Context(), id)
	return noContent(w, id, status, err)
}

// noContent answers a call about a live sandbox with 204.
func noContent(w *reply, id string, status core.CallStatus, err error) error {
	if err != nil {
		return err
	}
	if err := notLive(id, status); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}
