package envoy

import (
	"flag"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/encoding/protojson"
)

var update = flag.Bool("update", false, "write the golden files anew")

func defaults() Settings {
	return Settings{
		Listen:       netip.MustParseAddrPort("0.0.0.0:8080"),
		RouterSocket: "/run/berth/router.sock",
		AdminSocket:  "/run/berth/envoy-admin.sock",
	}
}

func withHealth() Settings {
	s := defaults()
	s.HealthListen = netip.MustParseAddrPort("0.0.0.0:8082")
	return s
}

func TestBootstrapIsTheGoldenFile(t *testing.T) {
	for golden, settings := range map[string]Settings{"testdata/default.yaml": defaults(), "testdata/health.yaml": withHealth()} {
		got, err := YAML(settings)
		require.NoError(t, err)
		if *update {
			require.NoError(t, os.WriteFile(golden, got, 0o644))
		}
		want, err := os.ReadFile(golden)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "run go test ./envoy -update and read the difference")
	}
}

// Nothing else may differ: the sandboxes' traffic has nothing to do with it.
func TestHealthIsOneListenerAndOneClusterMore(t *testing.T) {
	without, err := Bootstrap(defaults())
	require.NoError(t, err)
	with, err := Bootstrap(withHealth())
	require.NoError(t, err)
	listeners, clusters := with.StaticResources.Listeners, with.StaticResources.Clusters
	require.Equal(t, "health", listeners[len(listeners)-1].Name)
	require.Equal(t, clusterAdmin, clusters[len(clusters)-1].Name)
	with.StaticResources.Listeners, with.StaticResources.Clusters = listeners[:len(listeners)-1], clusters[:len(clusters)-1]
	want, err := protojson.Marshal(without)
	require.NoError(t, err)
	got, err := protojson.Marshal(with)
	require.NoError(t, err)
	require.JSONEq(t, string(want), string(got)) // the order of maps inside packed messages is not fixed
}

func TestSettingsNameTheFieldThatIsWrong(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*Settings)
		want   string
	}{
		"no listen address":            {func(s *Settings) { s.Listen = netip.AddrPort{} }, "listen address"},
		"health where clients connect": {func(s *Settings) { s.HealthListen = s.Listen }, "health listen address 0.0.0.0:8080"},
		"relative router socket":       {func(s *Settings) { s.RouterSocket = "router.sock" }, "router socket"},
		"no admin socket":              {func(s *Settings) { s.AdminSocket = "" }, "admin socket"},
		"flush too short":              {func(s *Settings) { s.AccessLogFlush = time.Millisecond }, "access log flush"},
	} {
		t.Run(name, func(t *testing.T) {
			s := defaults()
			c.change(&s)
			_, err := YAML(s)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestWindowCoversEveryAttemptToConnect(t *testing.T) {
	require.Equal(t, 5*time.Second, Window, "the default that design and documentation state")
	require.Greater(t, Window, (1+Retries)*ConnectTimeout+Retries*retryBackOffMax)
}
