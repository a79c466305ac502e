// Package tracing sends spans to an OpenTelemetry collector, by OTLP over gRPC.
//
// A nil *Tracer is valid and off: it starts no span and costs no allocation. The caller decides which call is traced,
// before it begins a span. So there are no spans that are begun and then dropped.
//
// # Guarantees
//
//   - A collector that is away or slow delays no caller. At most 2,048 spans wait. Further ones are dropped.
//   - Close ends within its context.
package tracing

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/url"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"go.uber.org/zap"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/credentials"

	"github.com/berth-sandbox/berth/internal/loglimit"
)

// Header carries a span from one process to another (W3C Trace Context).
const Header = "traceparent"

const (
	// exportTime bounds one call to the collector.
	exportTime = 10 * time.Second
	// askedPerSecond bounds the calls that are traced because a caller or another replica asks for it.
	askedPerSecond = 100
)

// Options configure a Tracer. All are required but Percent.
type Options struct {
	// To is the collector: http://host:port or https://host:port.
	To string
	// Percent is the share of calls that Chosen chooses, 0 to 100.
	Percent float64
	// Service, Version and Instance name this process.
	Service, Version, Instance string
	Log                        *zap.Logger
}

// Tracer makes spans. Its methods may be called concurrently.
type Tracer struct {
	provider *sdk.TracerProvider
	tracer   trace.Tracer
	share    float64
	asked    *rate.Limiter
}

// CheckURL returns an error that says what the URL of a collector must be.
func CheckURL(to string) error {
	u, err := url.Parse(to)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" || u.Port() == "" ||
		u.Path != "" || u.RawQuery != "" || u.User != nil {
		return fmt.Errorf("%q: must be http://host:port or https://host:port of an OTLP receiver (gRPC, usually port 4317)", to)
	}
	return nil
}

// New returns a Tracer, nil for no collector. It does not connect yet.
func New(ctx context.Context, o Options) (*Tracer, error) {
	if o.To == "" {
		return nil, nil //nolint:nilnil // off
	}
	if err := CheckURL(o.To); err != nil {
		return nil, err
	}
	u, err := url.Parse(o.To)
	if err != nil {
		return nil, err
	}
	secure := otlptracegrpc.WithTLSCredentials(credentials.NewClientTLSFromCert(nil, ""))
	if u.Scheme == "http" {
		secure = otlptracegrpc.WithInsecure()
	}
	exporter, err := otlptracegrpc.New(ctx, otlptracegrpc.WithEndpoint(u.Host), secure, otlptracegrpc.WithTimeout(exportTime))
	if err != nil {
		return nil, err
	}
	log := loglimit.PerMessage(o.Log, 1, time.Minute)
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) { log.Warn("spans were not sent", zap.Error(err)) }))
	provider := sdk.NewTracerProvider(
		sdk.WithBatcher(exporter, sdk.WithExportTimeout(exportTime)),
		sdk.WithResource(resource.NewSchemaless(
			attribute.String("service.name", o.Service), attribute.String("service.version", o.Version),
			attribute.String("service.instance.id", o.Instance),
		)),
	)
	return &Tracer{
		provider: provider, tracer: provider.Tracer("berth"), share: o.Percent / 100,
		asked: rate.NewLimiter(askedPerSecond, askedPerSecond),
	}, nil
}

// Close sends what waits.
func (t *Tracer) Close(ctx context.Context) {
	if t != nil {
		_ = t.provider.Shutdown(ctx) // the error handler has logged it
	}
}

// Chosen reports whether a call is among the share that is traced.
func (t *Tracer) Chosen() bool { return t != nil && t.share > 0 && rand.Float64() < t.share }

// Asked reports whether one more call may be traced because its caller asks for it.
func (t *Tracer) Asked() bool { return t != nil && t.asked.Allow() }

// Span is a span that has begun. A nil *Span is valid: the call is not traced.
type Span struct {
	tracer *Tracer
	span   trace.Span
}

type spanKey struct{}

// Begin begins the first span of a trace, or a span below a parent of another process, if that is valid and sampled.
// It is in the context that Begin returns.
func (t *Tracer) Begin(ctx context.Context, name, parent string, links ...Link) (context.Context, *Span) {
	root := trace.WithNewRoot()
	if of := contextOf(parent); of.IsSampled() {
		ctx, root = trace.ContextWithRemoteSpanContext(ctx, of), trace.WithAttributes()
	}
	ctx, span := t.tracer.Start(ctx, name, root, trace.WithSpanKind(trace.SpanKindServer), trace.WithLinks(linked(links)...))
	s := &Span{t, span}
	return context.WithValue(ctx, spanKey{}, s), s
}

// Sampled reports whether a traceparent is valid and its trace is kept.
func Sampled(parent string) bool { return contextOf(parent).IsSampled() }

func contextOf(parent string) trace.SpanContext {
	if parent == "" {
		return trace.SpanContext{}
	}
	ctx := propagation.TraceContext{}.Extract(context.Background(), propagation.MapCarrier{Header: parent})
	return trace.SpanContextFromContext(ctx)
}

// From returns the span of a context, nil for none.
func From(ctx context.Context) *Span {
	s, _ := ctx.Value(spanKey{}).(*Span)
	return s
}

// TraceID returns the ID of the trace, "" if the call is not traced.
func (s *Span) TraceID() string {
	if s == nil {
		return ""
	}
	return s.span.SpanContext().TraceID().String()
}

// Header returns the span as a traceparent, "" if the call is not traced.
func (s *Span) Header() string {
	if s == nil {
		return ""
	}
	carrier := propagation.MapCarrier{}
	propagation.TraceContext{}.Inject(trace.ContextWithSpan(context.Background(), s.span), carrier)
	return carrier[Header]
}

// Link is a span of another trace.
type Link struct{ of trace.SpanContext }

// LinkTo returns the link to a span, and LinkToHeader that to a traceparent. Without one there is no link.
func LinkTo(s *Span) Link {
	if s == nil {
		return Link{}
	}
	return Link{s.span.SpanContext()}
}

// LinkToHeader is LinkTo for a traceparent.
func LinkToHeader(parent string) Link { return Link{contextOf(parent)} }

func linked(links []Link) (all []trace.Link) {
	for _, l := range links {
		if l.of.IsValid() {
			all = append(all, trace.Link{SpanContext: l.of})
		}
	}
	return all
}

// Set adds a text to a span. Empty texts are left out.
func (s *Span) Set(name, text string) {
	if s != nil && text != "" {
		s.span.SetAttributes(attribute.String(name, text))
	}
}

// Part adds a span below s for a part that has ended.
func (s *Span) Part(name string, began, ended time.Time, links ...Link) {
	if s == nil || began.IsZero() || ended.IsZero() {
		return
	}
	ctx := trace.ContextWithSpan(context.Background(), s.span)
	_, part := s.tracer.tracer.Start(ctx, name, trace.WithTimestamp(began), trace.WithLinks(linked(links)...))
	part.End(trace.WithTimestamp(ended))
}

// Tell adds one span of a decision that has ended, below a parent of another process.
func (t *Tracer) Tell(name, parent string, began, ended time.Time, attributes ...[2]string) {
	of := contextOf(parent)
	if t == nil || !of.IsSampled() {
		return
	}
	ctx := trace.ContextWithRemoteSpanContext(context.Background(), of)
	_, span := t.tracer.Start(ctx, name, trace.WithTimestamp(began), trace.WithSpanKind(trace.SpanKindServer))
	s := Span{t, span}
	for _, a := range attributes {
		s.Set(a[0], a[1])
	}
	span.End(trace.WithTimestamp(ended))
}

// End ends a span. failure is why the call has failed, "" if it has not.
func (s *Span) End(failure string) {
	if s == nil {
		return
	}
	if failure != "" {
		s.span.SetStatus(codes.Error, failure)
	}
	s.span.End()
}
