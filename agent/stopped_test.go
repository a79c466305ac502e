package agent

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// canary is a value that may be in nothing that leaves the agent in clear.
const canary = "canary-of-a-secret"

// brought is what the claim of sandbox "a" has brought. One file is in a directory.
func brought(dir string) initbox.Config {
	return initbox.Config{SandboxID: "a", AccessToken: "old", Envs: map[string]string{"A": "1"},
		Secrets: map[string]string{"KEY": canary}, Workdir: dir, Files: []initbox.File{
			{Path: filepath.Join(dir, "file"), Data: []byte("claimed")},
			{Path: "/etc/outside", Data: []byte(canary), Mode: 0o600},
			{Path: dir + "side", Data: []byte("beside")},
		}}
}

// stopOf is archiveOf for a sandbox that is to be stopped.
func stopOf(seal byte, paths ...string) initbox.FilesOrder {
	o := archiveOf(7, paths...)
	o.Seal = bytes.Repeat([]byte{seal}, initbox.SealSize)
	return o
}

// wakeOf is restoreOf for a sandbox that was stopped.
func wakeOf(seal byte, stream []byte, paths ...string) initbox.FilesOrder {
	o := restoreOf(stream, paths...)
	o.Seal = bytes.Repeat([]byte{seal}, initbox.SealSize)
	return o
}

// stopped returns the archive of sandbox "a", which had the configuration.
func stopped(t *testing.T, seal byte, c initbox.Config, dir string) []byte {
	t.Helper()
	h := newHarness(t)
	h.configure(c)
	status, body := h.order("a", initbox.Keep, 7)
	require.Equal(t, http.StatusOK, status, body)
	return h.archived(stopOf(seal, dir))
}

// woken is the configuration of a sandbox that was stopped.
func woken() initbox.Config {
	return initbox.Config{SandboxID: "a", AccessToken: "new", Public: true, Stopped: true}
}

func (h *harness) init(c initbox.Config) (int, string) {
	h.t.Helper()
	return h.call(http.MethodPost, initbox.Path, h.box(c))
}

// Invariant: P31, P37
func TestStoppedSandboxWakesWithItsConfiguration(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	before := brought(dir)
	before.Proxy = "http://a:old@10.96.0.9:3128"
	stream := stopped(t, 1, before, dir)
	require.NotContains(t, string(stream), canary)
	size := binary.BigEndian.Uint32(stream)
	kept, err := initbox.OpenConfig(bytes.Repeat([]byte{1}, initbox.SealSize), stream[4:4+size])
	require.NoError(t, err)
	require.Empty(t, kept.Proxy, "its credential is that of the pod")
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("of the image"), 0o600))

	// It is stopped and woken twice.
	for n := range 2 {
		next, again := newHarness(t), woken()
		if n == 0 {
			again.Proxy = "http://a:new@10.96.0.9:3128"
		}
		status, body := next.restore(wakeOf(1, stream, dir), stream)
		require.Equal(t, http.StatusOK, status, body)
		require.NotContains(t, body, canary)
		requireFile(t, dir, "archived")
		require.Nil(t, next.Config())
		for name, c := range map[string]initbox.Config{
			"of a claim":      {SandboxID: "a", AccessToken: "new"},
			"another sandbox": {SandboxID: "b", AccessToken: "new", Stopped: true},
		} {
			status, body = next.init(c)
			require.Equal(t, http.StatusConflict, status, "%s: %s", name, body)
			require.Nil(t, next.Config(), name)
		}
		next.configure(again)
		want := before
		want.AccessToken, want.Public, want.Proxy = "new", true, again.Proxy
		require.Equal(t, &want, next.Config())
		require.Equal(t, map[string]string{"/etc/outside": canary, dir + "side": "beside"}, next.written)
		next.configure(woken())
		require.Equal(t, &want, next.Config())
		status, body = next.order("a", initbox.Keep, 7)
		require.Equal(t, http.StatusOK, status, body)
		stream = next.archived(stopOf(1, dir))
	}
}

// Invariant: P31
func TestWidenedPathsKeepTheFilesOfTheClaim(t *testing.T) {
	t.Parallel()
	dir, added := tree(t, "archived"), tree(t, "of the image")
	before := brought(dir)
	before.Files = append(before.Files, initbox.File{Path: filepath.Join(added, "brought"), Data: []byte("claimed")})
	stream := stopped(t, 1, before, dir)

	// The pool archives another directory by now, which was not archived at the stop.
	h := newHarness(t)
	status, body := h.restore(wakeOf(1, stream, dir, added), stream)
	require.Equal(t, http.StatusOK, status, body)
	h.configure(woken())
	require.Equal(t, map[string]string{
		"/etc/outside": canary, dir + "side": "beside", filepath.Join(added, "brought"): "claimed",
	}, h.written)
	requireFile(t, dir, "archived")
	requireFile(t, added, "of the image")
}

// Invariant: P31
func TestAgentWithoutTheEarlierConfigurationIsNotConfigured(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	h := newHarness(t)
	status, body := h.init(woken())
	require.Equal(t, http.StatusConflict, status, body)
	require.Nil(t, h.Config())

	// The files of a snapshot are not those of a sandbox that was stopped.
	h.frozenWith(brought(dir))
	stream := h.archived(archiveOf(7, dir))
	h = newHarness(t)
	status, body = h.restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusOK, status, body)
	status, body = h.init(woken())
	require.Equal(t, http.StatusConflict, status, body)
	require.Contains(t, body, "stopped: must be set for an agent that has restored a configuration")
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	require.Empty(t, h.Config().Secrets)
}

// frozenWith is frozen with a configuration of sandbox "a".
func (h *harness) frozenWith(c initbox.Config) {
	h.t.Helper()
	h.configure(c)
	status, body := h.order("a", initbox.Keep, 7)
	require.Equal(h.t, http.StatusOK, status, body)
}

// Invariant: P31
func TestArchiveOfASnapshotHasNoConfiguration(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	with, without := newHarness(t), newHarness(t)
	with.frozenWith(brought(dir))
	without.frozenWith(initbox.Config{SandboxID: "a", AccessToken: "t"})
	require.Equal(t, without.archived(archiveOf(7, dir)), with.archived(archiveOf(7, dir)), "they have the same files")

	stream := with.archived(archiveOf(7, dir))
	stop := with.archived(stopOf(1, dir))
	require.Greater(t, len(stop), len(stream)+len(canary))
	for name, c := range map[string]struct {
		order  initbox.FilesOrder
		stream []byte
	}{
		"a snapshot as a stop": {wakeOf(1, stream, dir), stream},
		"a stop as a snapshot": {restoreOf(stop, dir), stop},
	} {
		h := newHarness(t)
		status, body := h.restore(c.order, c.stream)
		require.Equal(t, http.StatusUnprocessableEntity, status, "%s: %s", name, body)
		require.Contains(t, body, `"reason":"damaged"`, name)
		for _, config := range []initbox.Config{woken(), {SandboxID: "a", AccessToken: "t"}} {
			status, body = h.init(config)
			require.Equal(t, http.StatusConflict, status, "%s: %s", name, body)
		}
	}
}

// Invariant: P31
func TestConfigurationThatCannotBeOpenedSpoilsTheAgent(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	stream := stopped(t, 1, brought(dir), dir)
	length := int(binary.BigEndian.Uint32(stream))
	changed := func(i int, by byte) []byte {
		c := bytes.Clone(stream)
		c[i] ^= by
		return c
	}
	c := brought(dir)
	c.SandboxID = "b"
	sealed, err := initbox.SealConfig(bytes.Repeat([]byte{1}, initbox.SealSize), &c)
	require.NoError(t, err)
	swapped := append(binary.BigEndian.AppendUint32(nil, uint32(len(sealed))), sealed...)
	swapped = append(swapped, stream[4+length:]...)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("of the image"), 0o640))
	for name, c := range map[string]struct {
		seal   byte
		stream []byte
		reason initbox.Reason
	}{
		"another key":          {2, stream, initbox.NotOpened},
		"a flipped bit":        {1, changed(4+length-1, 1), initbox.NotOpened},
		"another version":      {1, changed(4, 2), initbox.NotOpened},
		"of another sandbox":   {1, swapped, initbox.NotOpened},
		"a length of nothing":  {1, append(make([]byte, 4), stream[4+length:]...), initbox.NotOpened},
		"a huge length":        {1, changed(0, 255), initbox.Damaged},
		"cut off in the box":   {1, stream[:4+length/2], initbox.Damaged},
		"cut off before it":    {1, stream[:3], initbox.Damaged},
		"nothing but the box":  {1, stream[:4+length], initbox.Damaged},
		"only the archive":     {1, stream[4+length:], initbox.Damaged},
		"a flipped bit behind": {1, changed(4+length+1, 1), initbox.Damaged},
	} {
		h := newHarness(t)
		status, body := h.restore(wakeOf(c.seal, c.stream, dir), c.stream)
		require.Equal(t, http.StatusUnprocessableEntity, status, "%s: %s", name, body)
		require.Contains(t, body, fmt.Sprintf(`"reason":%q`, c.reason), name)
		for _, config := range []initbox.Config{woken(), {SandboxID: "a", AccessToken: "t"}} {
			status, body = h.init(config)
			require.Equal(t, http.StatusConflict, status, "%s: %s", name, body)
		}
		require.Nil(t, h.Config(), name)
		require.Empty(t, h.written, name)
	}
	requireFile(t, dir, "of the image")
}

// Invariant: P33
func TestArchiveOfAStopIsOverWhenItWasSent(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		dir := tree(t, "archived")
		h := newHarness(t)
		h.frozen(7)
		require.Nil(t, h.Stopping())
		h.archived(archiveOf(7, dir))
		require.Nil(t, h.Stopping(), "it was one of a snapshot")

		began := time.Now()
		h.archived(stopOf(1, dir))
		require.True(t, <-h.Stopping().Ended)
		require.Equal(t, storeWait, time.Since(began))
		h.streamed(stopOf(1, "relative"))
		require.False(t, <-h.Stopping().Ended)

		h.archived(stopOf(1, dir))
		stop := h.Stopping()
		h.freezer.Wake()
		<-stop.Awake
		require.Nil(t, h.Stopping())
		h.order("a", initbox.Keep, 8)
		require.Nil(t, h.Stopping(), "it is of an earlier sleep")
	})
}
