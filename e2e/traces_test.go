package e2e

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	attributes "go.opentelemetry.io/proto/otlp/common/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/envoy"
)

// receiver is a collector that keeps what it gets.
type receiver struct {
	collector.UnimplementedTraceServiceServer
	mu    sync.Mutex
	spans []received
}

// received is a span with the service that sent it.
type received struct {
	*otlp.Span
	service string
}

func (r *receiver) Export(
	_ context.Context, request *collector.ExportTraceServiceRequest,
) (*collector.ExportTraceServiceResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, of := range request.ResourceSpans {
		for _, scope := range of.ScopeSpans {
			for _, s := range scope.Spans {
				r.spans = append(r.spans, received{s, textOf(of.Resource.Attributes, "service.name")})
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

// of returns the spans of a trace.
func (r *receiver) of(trace string) (spans []received) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.spans {
		if hex.EncodeToString(s.TraceId) == trace {
			spans = append(spans, s)
		}
	}
	return spans
}

func textOf(all []*attributes.KeyValue, key string) string {
	for _, a := range all {
		if a.Key == key {
			return a.Value.GetStringValue()
		}
	}
	return ""
}

func startReceiver(t *testing.T) (r *receiver, address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r = &receiver{}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, r)
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() { server.Stop(); serving.Wait() })
	return r, l.Addr().String()
}

// buckets returns those of a histogram in a scrape in the OpenMetrics format.
func buckets(t *testing.T, admin string, of metric.Histogram) string {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin+"/metrics", http.NoBody)
	require.NoError(t, err)
	q.Header.Set("Accept", "application/openmetrics-text;version=1.0.0")
	a, err := http.DefaultClient.Do(q)
	require.NoError(t, err)
	defer a.Body.Close()
	body, err := io.ReadAll(a.Body)
	require.NoError(t, err)
	return strings.Join(slices.DeleteFunc(strings.Split(string(body), "\n"), func(line string) bool {
		return !strings.HasPrefix(line, of.BucketName())
	}), "\n")
}

// A request's trace has Envoy's span and the router's decision below it. A client neither chooses the trace nor whether
// there is one. A claim that asks for a trace gets one with its steps, through a follower too, and its write to the
// journal is linked to the batch.
//
// Invariant: P5
func TestTracesShowDecisionsAndStepsOfClaims(t *testing.T) {
	r, address := startReceiver(t)
	to, err := envoy.ParseEndpoint(address)
	require.NoError(t, err)
	url := "http://" + address
	e := startDamaging(t, owners, 2, stack.Options{
		Allocators: 2, Traces: &envoy.Traces{To: to, Percent: 100},
		AllocatorArgs: []string{"--traces-to=" + url, "--trace-percent=0"}, RouterArgs: []string{"--traces-to=" + url},
	})

	claim := func(api, header string) (openapi.Sandbox, string) {
		q, err := http.NewRequestWithContext(t.Context(), http.MethodPost, api+"/sandboxes",
			strings.NewReader(`{"templateID":"`+e.pool+`","waitTimeout":60}`))
		require.NoError(t, err)
		q.Header.Set("X-API-Key", e.site.key())
		q.Header.Set("traceparent", "00-11111111111111111111111111111111-2222222222222222-01")
		if header != "" {
			q.Header.Set("Berth-Trace", header)
		}
		a, err := http.DefaultClient.Do(q)
		require.NoError(t, err)
		defer a.Body.Close()
		require.Equal(t, http.StatusCreated, a.StatusCode)
		var s openapi.Sandbox
		require.NoError(t, json.NewDecoder(a.Body).Decode(&s))
		return s, a.Header.Get("Berth-Trace-Id")
	}
	leader, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	for _, a := range e.stack.Allocators { // the leader and a follower
		_, none := claim(a.API, "")
		require.Empty(t, none, "the share is 0, and a client's traceparent forces no trace")
		s, trace := claim(a.API, "1")
		require.Len(t, trace, 32)
		wanted := []string{"createSandbox", "wait for a pod and take it", "write to the journal", "push the route"}
		var spans []received
		require.Eventually(t, func() bool {
			spans = r.of(trace)
			for _, name := range wanted {
				if !slices.ContainsFunc(spans, func(s received) bool { return s.Name == name }) {
					return false
				}
			}
			return a == leader || len(spans) > len(wanted) // with the follower's span, which comes by itself
		}, 30*time.Second, 100*time.Millisecond, "%v", spans)
		require.Contains(t, buckets(t, leader.Admin, metric.ClaimSeconds), `{trace_id="`+trace+`"}`)
		require.Contains(t, buckets(t, a.Admin, metric.APICallSeconds), `{trace_id="`+trace+`"}`)
		for _, span := range spans {
			require.Equal(t, "berth-allocator", span.service)
			if span.Name == "write to the journal" {
				require.Len(t, span.Links, 1)
				batch := r.of(hex.EncodeToString(span.Links[0].TraceId))
				require.Len(t, batch, 1)
				require.Equal(t, "batch of the journal", batch[0].Name)
			}
			if span.Name == "createSandbox" {
				require.Contains(t, []string{"", s.SandboxID[:5] + "..."}, textOf(span.Attributes, "berth.object"))
			}
		}
	}

	s := e.claim()
	client := e.clientOf(e.site.front, 0)
	q, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://gateway/", http.NoBody)
	require.NoError(t, err)
	q.Host = e.host(8080, s.SandboxID)
	q.Header.Set("traceparent", "00-33333333333333333333333333333333-4444444444444444-01")
	a, err := client.Do(q)
	require.NoError(t, err)
	require.NoError(t, a.Body.Close())
	require.Equal(t, http.StatusOK, a.StatusCode)
	var decision received
	require.Eventually(t, func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		i := slices.IndexFunc(r.spans, func(one received) bool {
			return one.service == "berth-router" && textOf(one.Attributes, "berth.sandbox") == s.SandboxID[:5]+"..."
		})
		if i >= 0 {
			decision = r.spans[i]
		}
		return i >= 0
	}, 30*time.Second, 100*time.Millisecond)
	require.Equal(t, "admitted", textOf(decision.Attributes, "berth.outcome"))
	trace := hex.EncodeToString(decision.TraceId)
	require.NotEqual(t, strings.Repeat("3", 32), trace, "the client's")
	require.Eventually(t, func() bool {
		return slices.ContainsFunc(r.of(trace), func(s received) bool { return s.service == "berth-gateway" })
	}, 30*time.Second, 100*time.Millisecond)
	require.Contains(t, buckets(t, e.stack.Gateways[0].Admin, metric.AdmissionSeconds), `{trace_id="`+trace+`"}`)
	require.Empty(t, r.of(strings.Repeat("3", 32)))
	require.Empty(t, r.of(strings.Repeat("1", 32)))
}
