package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"testing"

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
