package rest

import (
	"context"
	"net/http"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/internal/tracing"
)

const (
	// traceHeader asks for a trace of the call. Its value is "1".
	traceHeader = "Berth-Trace"
	// traceIDHeader of an answer names the trace of the call.
	traceIDHeader = "Berth-Trace-Id"
)

// trace begins the span of a call that is traced: one that another replica has passed on and traces, one whose caller
// asks for it, or a share of the others. Otherwise the span is nil. What a client says in traceparent forces no trace. It
// becomes a link.
func (a *api) trace(r *http.Request, o *openapi.Operation) (context.Context, *tracing.Span) {
	if a.Tracer == nil {
		return r.Context(), nil
	}
	parent := r.Header.Get(tracing.Header)
	passedOn := r.Header.Get(forwardedHeader) != ""
	asked := r.Header.Get(traceHeader) == "1"
	if passedOn { // says the caller, who may be no replica: so this is bounded too
		asked = tracing.Sampled(parent)
	}
	traced := asked && a.Tracer.Asked() || !passedOn && a.Tracer.Chosen()
	if !traced {
		return r.Context(), nil
	}
	var links []tracing.Link
	if !passedOn {
		links, parent = append(links, tracing.LinkToHeader(parent)), ""
	}
	ctx, span := a.Tracer.Begin(r.Context(), o.ID, parent, links...)
	c := access.From(ctx)
	span.Set("berth.key", c.Key)
	span.Set("berth.team", c.Team)
	span.Set("berth.request", audited(r.Header.Get("X-Request-Id")))
	span.Set("berth.object", objectOf(o, r))
	return ctx, span
}

// endTrace ends the span of a call whose answer is ready.
func endTrace(span *tracing.Span, p *reply) {
	if span == nil {
		return
	}
	span.Set("berth.object", p.object)
	outcome, failure := outcomeOf(p), ""
	span.Set("berth.outcome", outcome)
	if p.code >= http.StatusBadRequest {
		reason := string(reasonOf(p.held.buf.Bytes()))
		span.Set("berth.reason", reason)
		if p.code >= http.StatusInternalServerError {
			failure = reason
		}
	}
	p.header.Set(traceIDHeader, span.TraceID())
	span.End(failure)
}
