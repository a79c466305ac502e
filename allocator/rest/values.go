package rest

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// maxMCP bounds the field mcp of a claim, in bytes of JSON. E2B's SDKs put it into one argument of a command, which
// has 128 KiB at most, with quotes and escapes.
const maxMCP = 64 << 10

// valuesOf reads what a claim brings for the agent, nil if that is nothing. No error quotes a value.
func (a *api) valuesOf(request *openapi.NewSandbox) (*agents.Values, error) {
	var field string
	switch {
	case len(request.EnvVars) > 0:
		field = "envVars"
	case len(request.Secrets) > 0:
		field = "secrets"
	case len(request.Files) > 0:
		field = "files"
	}
	pool, ok := a.Allocator.Pool(request.TemplateID)
	without := ok && pool.Spec.AgentEnabled() == nil
	if len(request.Mcp) > 0 {
		text, _ := json.Marshal(request.Mcp) // it was decoded from JSON
		switch {
		case len(text) > maxMCP:
			return nil, apierror.New(apierror.BodyTooLarge, "mcp: %d bytes, at most %d", len(text), maxMCP)
		case without:
			return nil, notImplemented("mcp: the pods of this pool have no agent, through which E2B's SDKs start the MCP gateway; enable spec.agent of the pool")
		}
	}
	switch {
	case field == "":
		return nil, nil
	case without:
		return nil, notImplemented("%s: the pods of this pool have no agent that takes them; enable spec.agent of the pool, put variables into its pod template, or send them to a postStart hook as metadata", field)
	}
	for _, m := range []struct {
		field  string
		values map[string]string
	}{{"envVars", request.EnvVars}, {"secrets", request.Secrets}} {
		for _, name := range slices.Sorted(maps.Keys(m.values)) {
			if name != "" && len(validation.IsEnvVarName(name)) > 0 { // the rule of Kubernetes for pods
				return nil, invalid("%s: the name %.100q must have letters, digits, _, - and . only, and no digit at its beginning", m.field, name)
			}
		}
	}
	v := &agents.Values{Envs: request.EnvVars, Secrets: request.Secrets}
	for i, f := range request.Files {
		file := initbox.File{Path: f.Path, Data: []byte(f.Content)}
		if f.Encoding != nil && *f.Encoding == openapi.Base64 {
			data, err := base64.StdEncoding.DecodeString(f.Content)
			if err != nil {
				return nil, invalid("files[%d].content: not standard base64", i)
			}
			file.Data = data
		}
		if f.Mode != nil {
			mode, err := strconv.ParseUint(*f.Mode, 8, 32)
			if err != nil {
				return nil, invalid("files[%d].mode: must be octal digits", i)
			}
			file.Mode = uint32(mode)
		}
		v.Files = append(v.Files, file)
	}
	if err := v.Check(); errors.As(err, new(*initbox.TooLargeError)) {
		return nil, apierror.New(apierror.BodyTooLarge, "%v", err)
	} else if err != nil {
		return nil, invalid("%v", err)
	}
	return v, nil
}

// hashOf returns the hash of the body of a claim, which is kept with its idempotency key. That of a body with
// secrets is made with the cluster's key, so that a reader of the journal cannot test guesses of them against it.
func (a *api) hashOf(raw []byte, secret bool) [sha256.Size]byte {
	if !secret || a.AccessKey == nil {
		return sha256.Sum256(raw)
	}
	key := a.AccessKey.Derive("hash of a claim 1")
	h := hmac.New(sha256.New, key[:])
	_, _ = h.Write(raw) // never fails, see hash.Hash
	return [sha256.Size]byte(h.Sum(nil))
}
