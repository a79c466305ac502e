package rest

import (
	"bytes"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func (a *api) create(w *reply, r *http.Request) error {
	raw := bodyOf(r)
	var request openapi.NewSandbox
	if err := decode(raw, &request); err != nil {
		return err
	}
	w.object = audited(request.TemplateID)
	from, err := a.sourceOf(r.Context(), request.TemplateID)
	if err != nil {
		return err
	}
	request.TemplateID = from.pool
	claim, err := a.claimOf(&request)
	if err != nil {
		return err
	}
	if claim.Binding.IdempotencyKey, err = idempotencyKey(r.Header); err != nil {
		return err
	}
	values, err := a.valuesOf(&request)
	if err != nil {
		return err
	}
	claim.Binding.RequestHash = a.hashOf(raw, values != nil || len(request.Mcp) > 0 || claim.SealHeaders != nil)
	if values = a.restore(from, &claim, values); values != nil {
		claim.Values = values
	}
	claim.Wait = lessWaited(r.Context(), claim.Wait)
	ctx, cancel := a.claimContext(r, claim.Wait+claim.Configuring)
	defer cancel()
	claim.Binding.Team = access.From(ctx).Team
	s, err := a.Allocator.Claim(ctx, request.TemplateID, claim)
	if err != nil {
		return whyEnded(ctx, err)
	}
	w.object = sandboxid.Short(s.ID)
	return writeJSON(w, http.StatusCreated, a.withCredentials(ctx, a.toSandbox(s), &s))
}

// idleTimeoutKey is the metadata that sets the idle timeout. Clients that can send metadata only
// use it.
const idleTimeoutKey = "idle_timeout"

// claimOf checks what the document's schema cannot express, and applies the defaults.
func (a *api) claimOf(request *openapi.NewSandbox) (c core.Claim, err error) {
	if c.Binding.User = deref(request.User, ""); len(request.Metadata) > 0 {
		c.Binding.Metadata = request.Metadata
	}
	if err := checkMetadata(c.Binding.Metadata); err != nil {
		return c, err
	}
	idle, field := request.IdleTimeout, "idleTimeout"
	if text, ok := c.Binding.Metadata[idleTimeoutKey]; ok && idle == nil {
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return c, invalid("metadata.%s: %q: must be a number of seconds", idleTimeoutKey, text)
		}
		idle, field = &n, "metadata."+idleTimeoutKey
	}
	if idle != nil {
		d, err := a.idleTimeoutOf(field, *idle)
		if err != nil {
			return c, err
		}
		c.IdleTimeout = &d
	}
	switch {
	case request.Timeout != nil:
		c.Lifetime = secondsOf(*request.Timeout)
	case idle == nil || *idle == 0: // every sandbox needs an end
		c.Lifetime = defaultTimeout
	}
	if c.Wait = a.Allocator.ClaimWait(); request.WaitTimeout != nil {
		c.Wait = secondsOf(*request.WaitTimeout)
	}
	if c.MinBytes, err = minBytesOf(request.Activity, request.MinBytesPerMinute); err != nil {
		return c, err
	}
	if c.Sleep, err = a.sleepOf(request); err != nil {
		return c, err
	}
	n, err := a.egressOf(request)
	if err != nil {
		return c, err
	}
	c.Binding.Network, c.SealHeaders = n.rules, n.sealHeaders
	return c, a.accessOf(request, &c.Binding)
}

// sleepOf returns when the sandbox of a claim is to sleep, and to be stopped. The words of E2B count if there are none of
// Berth, and autoPause and autoResume only as true: SDKs send false for what their caller has not set. A pool whose
// sandboxes cannot sleep refuses a claim that asks for it, unless it accepts that the sandbox ends instead.
func (a *api) sleepOf(request *openapi.NewSandbox) (ask core.SleepAsk, err error) {
	field := "autoPause"
	if ask.WakeOnTraffic = request.WakeOnTraffic; deref(request.AutoPause, false) {
		ask.AtEnd = request.AutoPause
	}
	if request.OnTimeout != nil {
		sleeps := *request.OnTimeout == openapi.OnEndSleep
		field, ask.AtEnd = "onTimeout", &sleeps
	}
	if request.OnIdle != nil {
		sleeps := *request.OnIdle == openapi.OnEndSleep
		ask.WhenIdle = &sleeps
	}
	if resume := request.AutoResume; ask.WakeOnTraffic == nil && resume != nil && deref(resume.Enabled, false) {
		ask.WakeOnTraffic = resume.Enabled
	}
	stops, err := stopOf(request, &ask)
	if err != nil {
		return ask, err
	}
	switch {
	case deref(ask.AtEnd, false):
	case deref(ask.WhenIdle, false):
		field = "onIdle"
	case request.WakeOnTraffic == nil && deref(ask.WakeOnTraffic, false):
		field = "autoResume.enabled"
	case stops != "":
		field = stops
	default:
		return ask, nil
	}
	pool, ok := a.Allocator.Pool(request.TemplateID)
	switch {
	case !ok:
		pool = &v1alpha1.SandboxPool{} // without an agent
	case pool.Spec.CannotSleep() == "" && stops != "" && a.Snapshots == nil:
		return ask, notImplemented("%s: %s", stops, noStoreToStop)
	case pool.Spec.CannotSleep() == "":
		return ask, nil
	case pool.Spec.AcceptPause == v1alpha1.PauseEnds:
		return core.SleepAsk{}, nil
	}
	return ask, notImplemented("%s: %s. Or leave the field out: at its end a sandbox is released. "+
		"With acceptPause: End the pool accepts the field, and releases the sandbox all the same", field, pool.Spec.CannotSleep())
}

// stopSoon is how long a sandbox is asleep that E2B's clients have pause without its memory.
const stopSoon = time.Second

// stopOf sets when the sandbox of a claim is to be stopped, and returns the field that asks for it, "" for none.
func stopOf(request *openapi.NewSandbox, ask *core.SleepAsk) (field string, err error) {
	withoutMemory, resume := !deref(request.AutoPauseMemory, true), request.AutoResume
	switch {
	case withoutMemory && resume != nil && deref(resume.Enabled, false):
		return "", invalid("autoPauseMemory: false: not with autoResume.enabled, as in E2B; leave one of them out, or set wakeOnTraffic instead of autoResume")
	case request.StopAfter != nil:
		field, ask.StopAfter = "stopAfter", new(secondsOf(*request.StopAfter))
	case withoutMemory && deref(ask.AtEnd, false):
		field, ask.StopAfter = "autoPauseMemory", new(stopSoon)
	}
	if deref(ask.StopAfter, 0) == 0 {
		field = ""
	}
	return field, nil
}

func checkMetadata(metadata map[string]string) error {
	size := 0
	for k, v := range metadata {
		size += len(k) + len(v)
	}
	if size > maxMetadata {
		return invalid("metadata: %d bytes: at most %d in all", size, maxMetadata)
	}
	return nil
}

// decode decodes a body that was checked against its schema. An empty one is an empty object.
func decode(raw []byte, into any) error {
	if len(bytes.TrimSpace(raw)) == 0 {
		return nil
	}
	err := json.Unmarshal(raw, into)
	if err == nil {
		return nil
	}
	if mistake := (*json.UnmarshalTypeError)(nil); errors.As(err, &mistake) && strings.HasPrefix(mistake.Value, "number") {
		// JSON Schema takes 5.0 and 5e0 for integers, and programs in Python send them. The decoder
		// does not take them. The encoder writes them without fraction and exponent.
		var body any
		if err = json.Unmarshal(raw, &body); err == nil {
			if raw, err = json.Marshal(body); err == nil {
				err = json.Unmarshal(raw, into)
			}
		}
	}
	if err != nil {
		return invalid("body: %v", err)
	}
	return nil
}

func deref[T any](p *T, absent T) T {
	if p == nil {
		return absent
	}
	return *p
}

func secondsOf(n int64) time.Duration { return time.Duration(n) * time.Second }

// idleTimeoutOf checks an idle timeout, in seconds.
func (a *api) idleTimeoutOf(field string, s int64) (time.Duration, error) {
	least := int64((a.MinIdleTimeout + time.Second - 1) / time.Second)
	if most := int64(maxTimeout / time.Second); s != 0 && (s < least || s > most) {
		return 0, invalid("%s: %d: must be 0, for none, or %d to %d seconds", field, s, least, most)
	}
	return secondsOf(s), nil
}

// defaultMinBytes is that of a SandboxPool.
const defaultMinBytes = 1024

// minBytesOf returns how many bytes a minute must move over an open connection, 0 for none, nil if
// the claim does not say.
func minBytesOf(activity *openapi.ActivityMode, least *int64) (*uint64, error) {
	var n uint64
	switch {
	case activity == nil && least == nil:
		return nil, nil
	case activity == nil:
		return nil, invalid(`minBytesPerMinute: %d: needs "activity":"Bytes"`, *least)
	case *activity == openapi.Requests && least == nil:
	case *activity == openapi.Requests:
		return nil, invalid("minBytesPerMinute: %d: has no meaning with activity Requests; leave it out, or make activity Bytes", *least)
	default:
		n = uint64(deref(least, defaultMinBytes))
	}
	return &n, nil
}
