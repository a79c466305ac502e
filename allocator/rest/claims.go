package rest

import (
	"net/http"
	"slices"
	"strings"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxid"
)

const (
	// maxBatchBytes bounds what the fields of the caller take in the records of a batch. The records of
	// 1,000 sandboxes and these fields fit into one write of the journal.
	maxBatchBytes = 128 << 10
	portBytes     = 3 // the longest port in a record
)

// claimBatch claims several sandboxes: all, at least so many, or none.
func (a *api) claimBatch(w *reply, r *http.Request) error {
	raw := bodyOf(r)
	var request openapi.NewClaims
	if err := decode(raw, &request); err != nil {
		return err
	}
	w.object = audited(request.Pool)
	from, err := a.sourceOf(r.Context(), request.Pool)
	if err != nil {
		return err
	}
	request.Pool = from.pool
	// The document gives both bodies the same options, so all of them are read in one place.
	one := openapi.NewSandbox{TemplateID: request.Pool}
	if err := decode(raw, &one); err != nil {
		return err
	}
	claim, err := a.claimOf(&one)
	if err != nil {
		return err
	}
	if claim.Binding.IdempotencyKey, err = idempotencyKey(r.Header); err != nil {
		return err
	}
	claim.Count, claim.AtLeast = request.Count, deref(request.AtLeast, request.Count)
	if err := checkBatch(claim); err != nil {
		return err
	}
	values, err := a.valuesOf(&one)
	if err != nil {
		return err
	}
	claim.Binding.RequestHash = a.hashOf(raw, values != nil || len(one.Mcp) > 0 || claim.SealHeaders != nil)
	if values = a.restore(from, &claim, values); values != nil {
		claim.Values = values
	}
	claim.Wait = lessWaited(r.Context(), claim.Wait)
	ctx, cancel := a.claimContext(r, claim.Wait+claim.Configuring)
	defer cancel()
	claim.Binding.Team = access.From(ctx).Team
	live, ended, err := a.Allocator.ClaimBatch(ctx, request.Pool, claim)
	if err != nil {
		return whyEnded(ctx, err)
	}
	answer := openapi.Claims{Sandboxes: make([]openapi.Sandbox, 0, len(live)), Ended: append([]string{}, ended...)}
	ids := slices.Clone(answer.Ended)
	for _, s := range live {
		answer.Sandboxes = append(answer.Sandboxes, a.withCredentials(ctx, a.toSandbox(s), &s))
		ids = append(ids, s.ID)
	}
	for i := range ids {
		ids[i] = sandboxid.Short(ids[i])
	}
	w.object = strings.Join(ids, " ")
	return writeJSON(w, http.StatusCreated, answer)
}

// checkBatch checks what the document's schema cannot express.
func checkBatch(c core.Claim) error {
	if c.AtLeast > c.Count {
		return invalid("atLeast: %d: must be count (%d) at most", c.AtLeast, c.Count)
	}
	size := len(c.Binding.User) + len(c.Binding.MaskHost) + portBytes*len(c.Binding.HTTPSPorts)
	size += (&network{c.Binding.Network, c.SealHeaders}).size()
	if c.Binding.Keyed() { // an internal one is short
		size += len(c.Binding.IdempotencyKey)
	}
	for k, v := range c.Binding.Metadata {
		size += len(k) + len(v)
	}
	if size*c.Count > maxBatchBytes {
		return invalid("metadata, user, network.maskRequestHost, network.httpsPorts, network.allowOut, network.denyOut, "+
			"network.rules and Idempotency-Key: %d bytes for each of %d sandboxes: at most %d in all", size, c.Count, maxBatchBytes)
	}
	return nil
}
