package envoy_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
)

func TestTheLogsNameSaysItsFlushInterval(t *testing.T) {
	for _, flush := range []time.Duration{time.Second, 1500 * time.Millisecond, 5 * time.Second, time.Hour} {
		got, ok := envoy.AccessLogFlush(envoy.AccessLogName(flush))
		require.True(t, ok)
		require.Equal(t, flush, got)
	}
	require.Equal(t, "berth flush=5s", envoy.AccessLogName(envoy.DefaultAccessLogFlush))
	for _, name := range []string{"", "berth", "berth flush=", "berth flush=soon", "berth flush=-1s", "berth flush=0s", "other flush=1s"} {
		_, ok := envoy.AccessLogFlush(name)
		require.False(t, ok, name)
	}
}
