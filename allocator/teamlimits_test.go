package allocator

import (
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/teams"
)

func TestNamedTeamsInheritTheDefault(t *testing.T) {
	s, err := parseLimits([]byte(`
default: {maxSandboxes: 100, claimsPerSecond: 2.5, maxWaiting: 50}
named:
  ann: {maxSandboxes: 500}
  bob: {claimsPerSecond: 0, maxWaiting: 7}
  "": {}
`))
	require.NoError(t, err)
	common := teams.Limits{MaxSandboxes: 100, ClaimsPerSecond: 2.5, MaxWaiting: 50}
	require.Equal(t, teams.Settings{Default: common, Teams: map[string]teams.Limits{
		"ann": {MaxSandboxes: 500, ClaimsPerSecond: 2.5, MaxWaiting: 50}, "bob": {MaxSandboxes: 100, MaxWaiting: 7}, "": common,
	}}, s)
	s, err = parseLimits(nil)
	require.NoError(t, err)
	require.Zero(t, s.Default)
}

func TestWrongTeamLimitsAreNamed(t *testing.T) {
	for content, field := range map[string]string{
		"default: {maxSandbox: 1}":                    `"default.maxSandbox"`,
		"teams: {}":                                   `"teams"`,
		"default: {maxSandboxes: -1}":                 "default.maxSandboxes: -1",
		"named: {ann: {maxWaiting: -2}}":              "named.ann.maxWaiting: -2",
		"named: {ann: {claimsPerSecond: -0.5}}":       "named.ann.claimsPerSecond: -0.5",
		"named: {ann: {claimsPerSecond: 1e7}}":        "named.ann.claimsPerSecond: 1e+07",
		"default: {maxSandboxes: 1.5}":                "maxSandboxes",
		"default: {maxSandboxes: many}":               "maxSandboxes",
		"default: {maxWaiting: 1}\ndefault: {}":       "default",
		"default: {maxSandboxes: -1, maxWaiting: -1}": "default.maxWaiting: -1",
	} {
		_, err := parseLimits([]byte(content))
		require.ErrorContains(t, err, field, content)
	}
}

func TestTeamLimitsAreReadAgainWhenTheyChange(t *testing.T) {
	file := filepath.Join(t.TempDir(), "limits.yaml")
	write := func(content string) { require.NoError(t, os.WriteFile(file, []byte(content), 0o600)) }
	write("default: {maxSandboxes: 1}")
	logged, logs := observer.New(zapcore.ErrorLevel)
	l, err := newTeamLimits(file, zap.New(logged))
	require.NoError(t, err)
	require.Equal(t, 1, l.current().Default.MaxSandboxes)
	synctest.Test(t, func(t *testing.T) {
		events := make(chan core.Event)
		go l.run(t.Context(), func(ev core.Event) { events <- ev })
		synctest.Wait()
		write("default: {maxSandboxes: 2}")
		require.Equal(t, 2, (<-events).(core.TeamLimits).Settings.Default.MaxSandboxes)
		write("default: {maxSandboxes: many}")
		time.Sleep(2 * limitsEvery) // of the bubble
		synctest.Wait()
		require.NotZero(t, logs.Len())
		require.Contains(t, logs.All()[0].ContextMap()["error"], "maxSandboxes")
		require.Equal(t, 2, l.current().Default.MaxSandboxes)
		write("default: {maxSandboxes: 3}")
		require.Equal(t, 3, (<-events).(core.TeamLimits).Settings.Default.MaxSandboxes)
		require.NoError(t, os.Remove(file))
	})
}
