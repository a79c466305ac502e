package tracing_test

import (
	"context"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/internal/tracing"
)

func TestURLOfACollectorIsChecked(t *testing.T) {
	for _, good := range []string{"http://127.0.0.1:4317", "https://collector.observability.svc:4317", "http://[::1]:4317"} {
		require.NoError(t, tracing.CheckURL(good), good)
	}
	for _, bad := range []string{
		"collector:4317", "http://collector", "grpc://collector:4317", "http://collector:4317/v1/traces", "http://u@collector:4317", "",
	} {
		require.ErrorContains(t, tracing.CheckURL(bad), "must be http://host:port", bad)
	}
}

func TestTracerThatIsOffCostsNothing(t *testing.T) {
	off, err := tracing.New(t.Context(), tracing.Options{})
	require.NoError(t, err)
	require.Nil(t, off)
	require.Zero(t, testing.AllocsPerRun(100, func() {
		require.False(t, off.Chosen() || off.Asked())
		span := tracing.From(context.Background())
		span.Set("a", "b")
		span.End("")
	}))
	off.Close(t.Context())
}

// A collector that is away delays neither the spans nor the end.
func TestSpansWithoutACollectorBlockNothing(t *testing.T) {
	tracer, err := tracing.New(t.Context(), tracing.Options{
		To: "http://127.0.0.1:1", Percent: 0, Service: "test", Version: "0", Instance: "0", Log: zap.NewNop()})
	require.NoError(t, err)
	parent := "00-" + strings.Repeat("1a", 16) + "-" + strings.Repeat("2b", 8) + "-01"
	for range 5000 {
		ctx, span := tracer.Begin(t.Context(), "call", parent)
		require.Equal(t, strings.Repeat("1a", 16), tracing.From(ctx).TraceID())
		span.End("")
	}
	_, own := tracer.Begin(t.Context(), "call", "")
	require.Len(t, own.TraceID(), 32)
	require.NotEqual(t, strings.Repeat("1a", 16), own.TraceID())
	require.True(t, tracing.Sampled(own.Header()))
	over, cancel := context.WithCancel(t.Context())
	cancel()
	tracer.Close(over)
}

func TestTracesThatAreAskedForAreBounded(t *testing.T) {
	tracer, err := tracing.New(t.Context(), tracing.Options{
		To: "http://127.0.0.1:1", Service: "test", Version: "0", Instance: "0", Log: zap.NewNop()})
	require.NoError(t, err)
	asked := 0
	for range 100_000 {
		require.False(t, tracer.Chosen(), "the share is 0")
		if tracer.Asked() {
			asked++
		}
	}
	require.GreaterOrEqual(t, asked, 100)
	require.Less(t, asked, 50_000)
	over, cancel := context.WithCancel(t.Context())
	cancel()
	tracer.Close(over)
}
