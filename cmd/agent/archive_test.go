package main

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// filesBox seals an order about the files in a directory.
func (r *running) filesBox(o initbox.FilesOrder, dir string) []byte {
	r.t.Helper()
	_, text := r.request(http.MethodGet, initbox.Path, nil)
	var hello initbox.Hello
	require.NoError(r.t, json.Unmarshal([]byte(text), &hello))
	o.SandboxID, o.Paths, o.MaxBytes, o.MaxFiles = "abc", []string{dir}, 1<<30, 1000
	sealed, err := r.sealer.For(hello.PublicKey).SealFilesOrder(&o)
	require.NoError(r.t, err)
	return sealed
}

// Invariant: P31
func TestFilesOfARunningCommandAreArchivedWhileItSleeps(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	r := start(t, 0, "sh", "-c", fmt.Sprintf(
		`while :; do n=$((n+1)); echo $n > %[1]s/a; echo $n > %[1]s/b; [ $n = 100 ] && echo begun; done`, dir))
	require.Equal(t, "begun", r.line())
	r.configure(initbox.Config{})
	box := r.filesBox(initbox.FilesOrder{Kind: initbox.Archive, Term: 1, Counter: 1}, dir)
	status, text := r.request(http.MethodPost, initbox.ArchivePath, box)
	require.Equal(t, http.StatusConflict, status, text)

	r.order(initbox.Keep, 1)
	archive := func() []byte {
		answer, err := http.Post(r.url+initbox.ArchivePath, "", bytes.NewReader(box))
		require.NoError(t, err)
		defer answer.Body.Close()
		stream, err := io.ReadAll(answer.Body)
		require.NoError(t, err)
		require.NotEmpty(t, answer.Trailer.Get(initbox.SummaryTrailer), answer.Trailer)
		return stream
	}
	stream := archive()
	require.Equal(t, stream, archive(), "nothing changes the files")
	sum := sha256.Sum256(stream)

	// The next pod has the same paths.
	want := contents(t, dir)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "a"), []byte("image"), 0o600))
	next := start(t, 0)
	box = next.filesBox(initbox.FilesOrder{Kind: initbox.Restore, SHA256: hex.EncodeToString(sum[:]), Size: int64(len(stream))}, dir)
	body := append(binary.BigEndian.AppendUint32(nil, uint32(len(box))), box...)
	status, text = next.request(http.MethodPost, initbox.RestorePath, append(body, stream...))
	require.Equal(t, http.StatusOK, status, text)
	require.Equal(t, want, contents(t, dir))
	next.configure(initbox.Config{})
}

func contents(t *testing.T, dir string) (texts [2]string) {
	t.Helper()
	for i, name := range []string{"a", "b"} {
		text, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		texts[i] = string(text)
	}
	return texts
}

// Invariant: P33
func TestToldToEndTheAgentWaitsForAStop(t *testing.T) {
	t.Parallel()
	const told = 9
	for name, c := range map[string]struct {
		snapshot bool // the archive is not one of a stop
		then     func(r *running, archive *http.Response)
		code     int
	}{
		"that becomes whole": {then: func(_ *running, archive *http.Response) {
			_, err := io.Copy(io.Discard, archive.Body)
			require.NoError(t, err)
			require.NotEmpty(t, archive.Trailer.Get(initbox.SummaryTrailer), archive.Trailer)
		}},
		"that breaks off":       {then: func(_ *running, archive *http.Response) { _ = archive.Body.Close() }, code: told},
		"that an order ends":    {then: func(r *running, _ *http.Response) { r.order(initbox.Thaw, 2) }, code: told},
		"but for no second one": {then: func(r *running, _ *http.Response) { _ = r.cmd.Process.Signal(syscall.SIGTERM) }, code: told},
		"and for no snapshot":   {snapshot: true, then: func(*running, *http.Response) {}, code: told},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, pid, archive := archiving(t, c.snapshot)
			defer archive.Body.Close()
			require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
			if !c.snapshot {
				require.Never(t, func() bool { return state(t, pid) != "T" }, 200*time.Millisecond, 20*time.Millisecond)
			}
			c.then(r, archive)
			require.Equal(t, c.code, r.wait())
		})
	}
}

// archiving starts an agent that archives more than its connection holds, and whose command exits with 9 at SIGTERM.
func archiving(t *testing.T, snapshot bool) (r *running, pid int, archive *http.Response) {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	large := make([]byte, 64<<20)
	_, _ = rand.Read(large)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "large"), large, 0o600))
	r = start(t, 0, "sh", "-c", "trap 'exit 9' TERM; echo $$; while :; do sleep 0.01; done")
	pid, err = strconv.Atoi(r.line())
	require.NoError(t, err)
	r.configure(initbox.Config{})
	r.order(initbox.Keep, 1)
	o := initbox.FilesOrder{Kind: initbox.Archive, Term: 1, Counter: 1}
	if !snapshot {
		o.Seal = make([]byte, initbox.SealSize)
	}
	archive, err = http.Post(r.url+initbox.ArchivePath, "", bytes.NewReader(r.filesBox(o, dir)))
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, archive.StatusCode)
	return r, pid, archive
}

// Invariant: P33
func TestStoppedSandboxEndsWithoutRunningAgain(t *testing.T) {
	t.Parallel()
	for _, woken := range []bool{false, true} {
		t.Run(fmt.Sprint(woken), func(t *testing.T) {
			t.Parallel()
			r, pid, archive := archiving(t, false)
			defer archive.Body.Close()
			_, err := io.Copy(io.Discard, archive.Body)
			require.NoError(t, err)
			want := 0
			if woken {
				r.order(initbox.Thaw, 2)
				r.order(initbox.Keep, 3)
				want = 9
			}
			require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
			require.Equal(t, want, r.wait())
			gone(t, pid)
		})
	}
}
