package rest

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func (a *api) create(w *reply, r *http.Request) error {
	request, err := a.decodeCreate(r.Body)
	if err != nil {
		return err
	}
	key, err := idempotencyKey(r.Header)
	if err != nil {
		return err
	}
	wait := a.Allocator.ClaimWait()
	if request.Wait != nil {
		wait = *request.Wait
	}
	ctx, cancel := context.WithTimeout(r.Context(), wait+answerWait)
	defer cancel()
	s, err := a.Allocator.Claim(ctx, request.TemplateID, core.Claim{
		Binding: core.Binding{
			Metadata: request.Metadata, Team: teamOf(ctx), User: request.User,
			IdempotencyKey: key, RequestHash: request.Hash,
		},
		Lifetime: request.Timeout, IdleTimeout: request.IdleTimeout, MinBytes: request.MinBytes, Wait: wait,
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusCreated, a.toSandbox(s))
}

// createRequest is the checked body of a create.
type createRequest struct {
	TemplateID string
	// Timeout is the end from now, 0 for none.
	Timeout time.Duration
	// IdleTimeout is nil if the request has none, and 0 for no idle timeout.
	IdleTimeout *time.Duration
	// MinBytes is how many bytes a minute must move over an open connection to keep the sandbox, 0
	// for none; nil if the request does not say.
	MinBytes *uint64
	Metadata map[string]string
	User     string
	// Wait is nil if the request does not say.
	Wait *time.Duration
	// Hash is the hash of the body as it was sent.
	Hash [sha256.Size]byte
}

// createFields are the fields of a create as the client sent them. Timeouts are in seconds.
type createFields struct {
	templateID, user    string
	timeout, idle, wait *int64
	activity            *v1alpha1.Activity
	minBytes            *int64
	metadata            map[string]*string // a nil value is a JSON null
}

// decodeCreate reads the body of a create and applies its limits and defaults.
func (a *api) decodeCreate(body io.Reader) (*createRequest, error) {
	raw, err := read(body)
	if err != nil {
		return nil, err
	}
	f, err := decodeCreateFields(raw)
	if err != nil {
		return nil, err
	}
	request := createRequest{TemplateID: f.templateID, User: f.user, Hash: sha256.Sum256(raw)}
	if err := a.setTimes(&request, f); err != nil {
		return nil, err
	}
	if request.MinBytes, err = minBytesOf(f.activity, f.minBytes); err != nil {
		return nil, err
	}
	if len(request.User) > maxUser {
		return nil, invalid("user: %d bytes: at most %d", len(request.User), maxUser)
	}
	if request.Metadata, err = metadataOf(f.metadata); err != nil {
		return nil, err
	}
	return &request, nil
}

// decodeCreateFields decodes the fields and refuses unknown ones by name.
func decodeCreateFields(raw []byte) (f createFields, err error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return f, invalid("body: must be a JSON object: %v", err)
	}
	for _, known := range []struct {
		name string
		into any
	}{
		{"templateID", &f.templateID}, {"timeout", &f.timeout}, {"idleTimeout", &f.idle}, {"activity", &f.activity},
		{"minBytesPerMinute", &f.minBytes}, {"metadata", &f.metadata}, {"user", &f.user}, {"waitTimeout", &f.wait},
	} {
		if value, ok := fields[known.name]; ok {
			if err := json.Unmarshal(value, known.into); err != nil {
				return f, invalid("%s: %v", known.name, err)
			}
			delete(fields, known.name)
		}
	}
	var refused []string
	for name, value := range fields {
		if !empty(value) {
			refused = append(refused, name)
		}
	}
	if len(refused) > 0 {
		slices.Sort(refused)
		return f, notImplemented("%s: not supported by this version; leave it out", strings.Join(refused, ", "))
	}
	if f.templateID == "" {
		return f, invalid("templateID: required: the name of a SandboxPool")
	}
	return f, nil
}

// setTimes sets the timeouts of a claim and the time that it waits for a pod.
func (a *api) setTimes(request *createRequest, f createFields) (err error) {
	if f.idle != nil {
		d, err := a.idleTimeoutOf(*f.idle)
		if err != nil {
			return err
		}
		request.IdleTimeout = &d
	}
	switch {
	case f.timeout != nil:
		if request.Timeout, err = timeoutOf(*f.timeout); err != nil {
			return err
		}
	case request.IdleTimeout == nil || *request.IdleTimeout == 0: // every sandbox needs an end
		request.Timeout = defaultTimeout
	}
	if f.wait != nil {
		if *f.wait < 0 || *f.wait > int64(MaxWait/time.Second) {
			return invalid("waitTimeout: %d: must be 0 to %d seconds", *f.wait, int64(MaxWait/time.Second))
		}
		d := time.Duration(*f.wait) * time.Second
		request.Wait = &d
	}
	return nil
}

// metadataOf checks the metadata of a claim. It returns nil for none.
func metadataOf(metadata map[string]*string) (map[string]string, error) {
	if len(metadata) == 0 {
		return nil, nil
	}
	all, size := make(map[string]string, len(metadata)), 0
	for k, v := range metadata {
		if v == nil {
			return nil, invalid("metadata: %q: must be a string", k)
		}
		all[k] = *v
		size += len(k) + len(*v)
	}
	if size > maxMetadata {
		return nil, invalid("metadata: %d bytes: at most %d in all", size, maxMetadata)
	}
	return all, nil
}

// empty reports whether a JSON value is a default: SDKs send fields that their caller has not set.
func empty(value json.RawMessage) bool {
	switch strings.TrimSpace(string(value)) {
	case "null", "false", `""`, "{}", "[]":
		return true
	}
	return false
}
