package rest

import (
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// idleTimeoutOf checks the idle timeout of a claim, in seconds.
func (a *api) idleTimeoutOf(s int64) (time.Duration, error) {
	least := int64((a.MinIdleTimeout + time.Second - 1) / time.Second)
	if s != 0 && (s < least || s > int64(maxTimeout/time.Second)) {
		return 0, invalid("idleTimeout: %d: must be 0, for none, or %d to %d seconds", s, least, int64(maxTimeout/time.Second))
	}
	return time.Duration(s) * time.Second, nil
}

// timeoutOf checks a timeout, in seconds.
func timeoutOf(s int64) (time.Duration, error) {
	if s < 1 || s > int64(maxTimeout/time.Second) {
		return 0, invalid("timeout: %d: must be 1 to %d seconds", s, int64(maxTimeout/time.Second))
	}
	return time.Duration(s) * time.Second, nil
}

// defaultMinBytes and maxMinBytes are those of a SandboxPool.
const (
	defaultMinBytes = 1024
	maxMinBytes     = 1 << 30
)

// minBytesOf checks the activity fields of a claim. It returns how many bytes a minute must move
// over an open connection, 0 for none, nil if the claim does not say.
func minBytesOf(activity *v1alpha1.Activity, least *int64) (*uint64, error) {
	var n uint64
	switch {
	case activity == nil && least == nil:
		return nil, nil
	case activity == nil:
		return nil, invalid(`minBytesPerMinute: %d: needs "activity":"Bytes"`, *least)
	case *activity == v1alpha1.ActivityRequests && least == nil:
	case *activity == v1alpha1.ActivityRequests:
		return nil, invalid("minBytesPerMinute: %d: has no meaning with activity Requests; leave it out, or make activity Bytes", *least)
	case *activity != v1alpha1.ActivityBytes:
		return nil, invalid("activity: %q: must be Requests or Bytes", *activity)
	case least == nil:
		n = defaultMinBytes
	case *least < 1 || *least > maxMinBytes:
		return nil, invalid("minBytesPerMinute: %d: must be 1 to %d", *least, maxMinBytes)
	default:
		n = uint64(*least)
	}
	return &n, nil
}

// setTimeout moves the end of a sandbox.
func (a *api) setTimeout(w *reply, r *http.Request) error {
	var request struct {
		Timeout *int64 `json:"timeout"`
	}
	if err := decodeObject(r.Body, &request); err != nil {
		return err
	}
	if request.Timeout == nil {
		return invalid("timeout: required: seconds from now after which the sandbox is released")
	}
	timeout, err := timeoutOf(*request.Timeout)
	if err != nil {
		if *request.Timeout == 0 {
			return invalid("timeout: 0: must be at least 1 second; DELETE releases a sandbox at once")
		}
		return err
	}
	id := r.PathValue("id")
	status, err := a.Allocator.SetTimeout(r.Context(), id, timeout)
	return noContent(w, id, status, err)
}

// keepAlive records activity of a sandbox.
func (a *api) keepAlive(w *reply, r *http.Request) error {
	var nothing struct{}
	if err := decodeObject(r.Body, &nothing); err != nil {
		return err
	}
	id := r.PathValue("id")
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
