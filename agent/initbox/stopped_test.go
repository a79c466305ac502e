package initbox_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// Invariant: P31
func TestSealedConfigurationOpensWithItsKeyOnly(t *testing.T) {
	key, other := bytes.Repeat([]byte{1}, initbox.SealSize), bytes.Repeat([]byte{2}, initbox.SealSize)
	sealed, err := initbox.SealConfig(key, config())
	require.NoError(t, err)
	got, err := initbox.OpenConfig(key, sealed)
	require.NoError(t, err)
	require.Equal(t, config(), got)
	again, err := initbox.SealConfig(key, config())
	require.NoError(t, err)
	require.NotEqual(t, sealed, again, "the same nonce was used twice")
	for _, wrong := range [][]byte{other, key[1:], nil} {
		_, err = initbox.OpenConfig(wrong, sealed)
		require.ErrorIs(t, err, initbox.ErrSealed)
	}
	for i := range sealed {
		changed := bytes.Clone(sealed)
		changed[i] ^= 1
		_, err := initbox.OpenConfig(key, changed)
		require.Error(t, err, i)
		_, err = initbox.OpenConfig(key, sealed[:i])
		require.Error(t, err, i)
	}
	_, err = initbox.OpenConfig(key, make([]byte, initbox.MaxSealed+1))
	require.Error(t, err)
	_, err = initbox.SealConfig(key[1:], config())
	require.ErrorContains(t, err, "wrong length")
	_, err = initbox.SealConfig(key, &initbox.Config{})
	require.ErrorContains(t, err, "must be set")
}

func TestLargestConfigurationFitsInFrontOfAnArchive(t *testing.T) {
	key := make([]byte, initbox.SealSize)
	largest := &initbox.Config{SandboxID: "a", AccessToken: "b",
		Envs: map[string]string{"A": strings.Repeat("\x01", initbox.MaxValues-1)}}
	sealed, err := initbox.SealConfig(key, largest)
	require.NoError(t, err)
	require.LessOrEqual(t, len(sealed), initbox.MaxSealed)
	got, err := initbox.OpenConfig(key, sealed)
	require.NoError(t, err)
	require.Equal(t, largest, got)
}

func TestConfigurationOfAStoppedSandboxBringsNothing(t *testing.T) {
	bare := initbox.Config{SandboxID: "a", AccessToken: "b", Public: true, Stopped: true}
	require.NoError(t, bare.Check())
	for name, change := range map[string]func(*initbox.Config){
		"envs":    func(c *initbox.Config) { c.Envs = map[string]string{"A": "canary"} },
		"secrets": func(c *initbox.Config) { c.Secrets = map[string]string{"A": "canary"} },
		"files":   func(c *initbox.Config) { c.Files = []initbox.File{{Path: "/a"}} },
		"user":    func(c *initbox.Config) { c.DefaultUser = "root" },
		"workdir": func(c *initbox.Config) { c.Workdir = "/" },
	} {
		c := bare
		change(&c)
		err := c.Check()
		require.ErrorContains(t, err, "stopped: envVars, secrets, files, defaultUser and workdir come from the archive", name)
		require.NotContains(t, err.Error(), "canary", name)
	}
	// An agent of an earlier release refuses what it does not know. The fields are left out where they are not used.
	for _, value := range []any{config(), archiveOrder(), restoreOrder()} {
		raw, err := json.Marshal(value)
		require.NoError(t, err)
		require.NotContains(t, string(raw), "stopped")
		require.NotContains(t, string(raw), "seal")
	}
}
