package extproc

import (
	"context"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	grpcmetadata "google.golang.org/grpc/metadata"

	"github.com/berth-sandbox/berth/api/metric"
)

// The decision of each request that Envoy samples is traced, with its outcome, and of no other request. What is no
// traceparent is ignored.
func TestOnlySampledRequestsAreTraced(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "s")
	o, sandboxes := newOptions(socket)
	var mu sync.Mutex
	var told []Traced
	o.Trace = func(d Traced) {
		mu.Lock()
		defer mu.Unlock()
		told = append(told, d)
	}
	server := serve(t, o)
	defer server.stop(soon)
	const id = "abcdefghijklmnopqrst"
	sandboxes.Put(id, podRoute)
	conn := dial(t, socket)
	asked := func(host, parent string) {
		t.Helper()
		ctx, cancel := context.WithCancel(grpcmetadata.AppendToOutgoingContext(within(t), "traceparent", parent))
		defer cancel()
		stream, err := extprocv3.NewExternalProcessorClient(conn).Process(ctx)
		require.NoError(t, err)
		require.NoError(t, stream.Send(get(host)))
		_, err = stream.Recv()
		require.NoError(t, err)
	}
	parent := "00-" + strings.Repeat("1a", 16) + "-" + strings.Repeat("2b", 8) + "-"
	began := time.Now()
	for _, none := range []string{parent + "00", parent + "0a", parent + "zz", parent + "01-more", "01", ""} {
		asked("8080-"+id+"."+domain, none)
	}
	mu.Lock()
	require.Empty(t, told)
	mu.Unlock()
	asked("8080-"+id+"."+domain, parent+"01")
	asked("8080-a."+domain+","+domain, parent+"03")
	mu.Lock()
	defer mu.Unlock()
	require.Len(t, told, 2)
	for i, want := range []Traced{
		{Parent: parent + "01", Outcome: "admitted", SandboxID: "abcde...", RequestID: "req-1"},
		{Parent: parent + "03", Outcome: "bad_host", RequestID: "req-1"},
	} {
		got := told[i]
		require.False(t, got.Began.Before(began) || got.Ended.Before(got.Began))
		got.Began, got.Ended = time.Time{}, time.Time{}
		require.Equal(t, want, got)
	}
	require.Equal(t, []string{strings.Repeat("1a", 16)},
		exemplars(t, o.Metrics.(prometheus.Gatherer), metric.AdmissionSeconds.Name), "of what was admitted")
}

// exemplars returns the traces that a histogram names.
func exemplars(t *testing.T, of prometheus.Gatherer, name string) (traces []string) {
	t.Helper()
	families, err := of.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, b := range f.Metric[0].GetHistogram().Bucket {
			for _, label := range b.GetExemplar().GetLabel() {
				require.Equal(t, metric.TraceID, label.GetName())
				traces = append(traces, label.GetValue())
			}
		}
	}
	return traces
}
