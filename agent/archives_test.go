package agent

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
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/archive"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// files seals an order about files for the agent.
func (h *harness) files(o initbox.FilesOrder) []byte {
	h.t.Helper()
	sealed, err := h.sealer.For(h.o.Keys.PublicKey()).SealFilesOrder(&o)
	require.NoError(h.t, err)
	return sealed
}

// archiveOf is an order to archive the paths of sandbox "a".
func archiveOf(counter uint64, paths ...string) initbox.FilesOrder {
	return initbox.FilesOrder{SandboxID: "a", Kind: initbox.Archive, Term: 1, Counter: counter, Paths: paths,
		MaxBytes: 1 << 30, MaxFiles: 1000}
}

// restoreOf is an order to restore a stream for sandbox "a".
func restoreOf(stream []byte, paths ...string) initbox.FilesOrder {
	sum := sha256.Sum256(stream)
	return initbox.FilesOrder{SandboxID: "a", Kind: initbox.Restore, Paths: paths, MaxBytes: 1 << 30, MaxFiles: 1000,
		SHA256: hex.EncodeToString(sum[:]), Size: int64(len(stream))}
}

// prefixed is the body of a restore without its archive.
func prefixed(box []byte) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(box))), box...)
}

func (h *harness) restore(o initbox.FilesOrder, stream []byte) (int, string) {
	h.t.Helper()
	return h.call(http.MethodPost, initbox.RestorePath, append(prefixed(h.files(o)), stream...))
}

// frozen configures the agent for sandbox "a", and freezes that with this counter.
func (h *harness) frozen(counter uint64) {
	h.t.Helper()
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, body := h.order("a", initbox.Keep, counter)
	require.Equal(h.t, http.StatusOK, status, body)
}

// streamed returns the whole answer of an agent to an order to archive.
func (h *harness) streamed(o initbox.FilesOrder) (*http.Response, []byte) {
	h.t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodPost, initbox.ArchivePath, bytes.NewReader(h.files(o))))
	return w.Result(), w.Body.Bytes()
}

// archived returns a whole archive.
func (h *harness) archived(o initbox.FilesOrder) []byte {
	h.t.Helper()
	answer, stream := h.streamed(o)
	require.Equal(h.t, http.StatusOK, answer.StatusCode, string(stream))
	require.NotEmpty(h.t, answer.Trailer.Get(initbox.SummaryTrailer), answer.Trailer)
	return stream
}

// tree returns a directory with a file in it.
func tree(t *testing.T, text string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	dir = filepath.Join(dir, "tree")
	require.NoError(t, os.Mkdir(dir, 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte(text), 0o640))
	return dir
}

func requireFile(t *testing.T, dir, want string) {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "file"))
	require.NoError(t, err)
	require.Equal(t, want, string(text))
}

// Invariant: P31
func TestArchiveOfOneAgentIsRestoredByAnother(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	// An example with bytes that no header has.
	odd := filepath.Join(dir, "ünï\x01\xff🙂"+strings.Repeat("é", 100))
	require.NoError(t, os.WriteFile(odd, nil, 0o600))
	first := newHarness(t)
	first.frozen(7)
	server := httptest.NewServer(first)
	defer server.Close()
	box := first.files(archiveOf(7, dir))
	answer, err := server.Client().Post(server.URL+initbox.ArchivePath, "", bytes.NewReader(box))
	require.NoError(t, err)
	defer answer.Body.Close()
	stream, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, answer.StatusCode)
	require.Equal(t, "application/octet-stream", answer.Header.Get("Content-Type"))
	var sum initbox.Summary
	require.NoError(t, json.Unmarshal([]byte(answer.Trailer.Get(initbox.SummaryTrailer)), &sum))
	require.Equal(t, 3, sum.Entries)
	require.Equal(t, int64(len("archived")), sum.Bytes)
	require.NoError(t, sum.Check(1<<30, 1000))
	require.Empty(t, answer.Trailer.Get(initbox.FailureTrailer))

	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("changed"), 0o600))
	require.NoError(t, os.Remove(odd))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "new"), nil, 0o600))
	second := newHarness(t)
	status, body := second.restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusOK, status, body)
	var restored initbox.Summary
	require.NoError(t, json.Unmarshal([]byte(body), &restored))
	require.Equal(t, sum, restored)
	requireFile(t, dir, "archived")
	require.FileExists(t, odd)
	require.NoFileExists(t, filepath.Join(dir, "new"))

	status, body = second.call(http.MethodPost, initbox.Path, second.box(initbox.Config{SandboxID: "b", AccessToken: "t"}))
	require.Equal(t, http.StatusConflict, status, body)
	status, body = second.restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusConflict, status, body)
	second.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, body = second.restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusConflict, status, body)
	require.JSONEq(t, `{"code":409,"reason":"not_fresh","message":"the agent has a sandbox or files already: `+
		`files are restored once, before it is configured"}`, body)
}

// Invariant: P31
func TestFilesAreArchivedOnlyOfFrozenSandboxes(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	h := newHarness(t)
	refused := func(o initbox.FilesOrder, want int, reason initbox.Reason) {
		t.Helper()
		answer, body := h.streamed(o)
		require.Equal(t, want, answer.StatusCode, string(body))
		var refusal initbox.FilesRefusal
		require.NoError(t, json.Unmarshal(body, &refusal))
		require.Equal(t, reason, refusal.Reason)
	}
	refused(archiveOf(9, dir), http.StatusServiceUnavailable, "")
	h.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
	refused(archiveOf(9, dir), http.StatusConflict, initbox.NotFrozen)
	status, body := h.order("a", initbox.Keep, 7)
	require.Equal(t, http.StatusOK, status, body)
	refused(archiveOf(6, dir), http.StatusConflict, initbox.Superseded)
	other := archiveOf(9, dir)
	other.SandboxID = "b"
	refused(other, http.StatusMisdirectedRequest, "")
	h.archived(archiveOf(9, dir))
	h.archived(archiveOf(9, dir))
	refused(archiveOf(8, dir), http.StatusConflict, initbox.Superseded)
	status, body = h.order("a", initbox.Thaw, 8)
	require.Equal(t, http.StatusConflict, status, body)
	_, release, err := h.freezer.Hold(t.Context(), 1, 9)
	require.NoError(t, err)
	refused(archiveOf(9, dir), http.StatusConflict, initbox.Busy)
	release()
	status, body = h.order("a", initbox.Thaw, 9)
	require.Equal(t, http.StatusOK, status, body)
	refused(archiveOf(10, dir), http.StatusConflict, initbox.NotFrozen)
}

func TestOrdersOfOneKindAreNotObeyedAsAnother(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	h.frozen(1)
	archiving := h.files(archiveOf(1, "/a"))
	restoring := h.files(restoreOf([]byte("x"), "/a"))
	sleeping, err := h.sealer.For(h.o.Keys.PublicKey()).SealOrder(
		&initbox.Order{SandboxID: "a", Kind: initbox.Keep, Term: 1, Counter: 1})
	require.NoError(t, err)
	config := h.box(initbox.Config{SandboxID: "a", AccessToken: "t"})
	for name, c := range map[string]struct {
		path   string
		body   []byte
		status int
	}{
		"archive to sleep":      {initbox.SleepPath, archiving, 400},
		"restore to sleep":      {initbox.SleepPath, restoring, 400},
		"restore to archive":    {initbox.ArchivePath, restoring, 400},
		"sleep to archive":      {initbox.ArchivePath, sleeping, 400},
		"archive to restore":    {initbox.RestorePath, prefixed(archiving), 400},
		"sleep to restore":      {initbox.RestorePath, prefixed(sleeping), 400},
		"config to restore":     {initbox.RestorePath, prefixed(config), 401},
		"config to archive":     {initbox.ArchivePath, config, 401},
		"nothing to restore":    {initbox.RestorePath, nil, 400},
		"long box to restore":   {initbox.RestorePath, []byte{255, 255, 255, 255, 0}, 400},
		"short box to restore":  {initbox.RestorePath, prefixed(restoring)[:9], 400},
		"long box to archive":   {initbox.ArchivePath, make([]byte, initbox.MaxSealedOrder+1), 413},
		"no length for restore": {initbox.RestorePath, restoring, 400},
	} {
		status, body := h.call(http.MethodPost, c.path, c.body)
		require.Equal(t, c.status, status, "%s: %s", name, body)
	}
}

// Invariant: P31
func TestArchiveThatIsNotWholeSaysWhy(t *testing.T) {
	t.Parallel()
	dir := tree(t, strings.Repeat("archived", 1<<10))
	link := filepath.Join(filepath.Dir(dir), "link")
	require.NoError(t, os.Symlink(dir, link))
	h := newHarness(t)
	h.frozen(7)
	for name, c := range map[string]struct {
		reason initbox.Reason
		change func(*initbox.FilesOrder)
	}{
		"bytes":             {initbox.TooLarge, func(o *initbox.FilesOrder) { o.MaxBytes = 8 << 10 }},
		"files":             {initbox.TooManyFiles, func(o *initbox.FilesOrder) { o.MaxFiles = 1 }},
		"files of a kernel": {initbox.NotAllowed, func(o *initbox.FilesOrder) { o.Paths = []string{"/proc/self"} }},
		"a symbolic link":   {initbox.NotAllowed, func(o *initbox.FilesOrder) { o.Paths = []string{link} }},
	} {
		o := archiveOf(7, dir)
		c.change(&o)
		answer, _ := h.streamed(o)
		require.Equal(t, http.StatusOK, answer.StatusCode, name)
		require.Equal(t, string(c.reason), answer.Trailer.Get(initbox.FailureTrailer), name)
		require.Empty(t, answer.Trailer.Get(initbox.SummaryTrailer), name)
	}
}

// noise makes a file larger than what sockets buffer, which does not compress.
func noise(t *testing.T, dir string) {
	t.Helper()
	text := make([]byte, 32<<20)
	_, _ = rand.Read(text)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "noise"), text, 0o600))
}

// Invariant: P31
func TestThawCutsOffAnArchiveWithoutWaiting(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	noise(t, dir)
	h := newHarness(t)
	h.frozen(7)
	server := httptest.NewServer(h)
	defer server.Close()
	box := h.files(archiveOf(7, dir))
	answer, err := server.Client().Post(server.URL+initbox.ArchivePath, "", bytes.NewReader(box))
	require.NoError(t, err)
	defer answer.Body.Close()
	require.Equal(t, http.StatusOK, answer.StatusCode)
	refused, body := h.streamed(archiveOf(7, dir))
	require.Equal(t, http.StatusConflict, refused.StatusCode, string(body))
	status, text := h.order("a", initbox.Thaw, 8)
	require.Equal(t, http.StatusOK, status, text)
	stream, err := io.ReadAll(answer.Body)
	require.NoError(t, err)
	require.Equal(t, string(initbox.NotFrozen), answer.Trailer.Get(initbox.FailureTrailer))
	require.Empty(t, answer.Trailer.Get(initbox.SummaryTrailer))

	// It can be taken again, and what was sent is no archive.
	status, text = h.order("a", initbox.Keep, 9)
	require.Equal(t, http.StatusOK, status, text)
	require.Eventually(t, func() bool {
		_, release, err := h.freezer.Hold(t.Context(), 1, 9)
		if err == nil {
			release()
		}
		return err == nil
	}, time.Minute, time.Millisecond)
	status, text = newHarness(t).restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusUnprocessableEntity, status, text)
}

// Invariant: P31
func TestOtherStreamThanTheArchivedOneSpoilsTheAgent(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	h := newHarness(t)
	h.frozen(7)
	stream := h.archived(archiveOf(7, dir))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("other"), 0o640))
	other := h.archived(archiveOf(7, dir))
	elsewhere := tree(t, "elsewhere")
	for name, c := range map[string]struct {
		order  initbox.FilesOrder
		stream []byte
		reason initbox.Reason
	}{
		"another whole archive": {func() initbox.FilesOrder {
			o := restoreOf(stream, dir)
			o.Size = int64(len(other))
			return o
		}(), other, initbox.Damaged},
		"a shorter one": {restoreOf(stream, dir), stream[:len(stream)-1], initbox.Damaged},
		"a longer one": {func() initbox.FilesOrder {
			o := restoreOf(stream, dir)
			o.Size++
			return o
		}(), stream, initbox.Damaged},
		"of other paths": {restoreOf(stream, elsewhere), stream, initbox.NotAllowed},
		"more files": {func() initbox.FilesOrder {
			o := restoreOf(stream, dir)
			o.MaxFiles = 1
			return o
		}(), stream, initbox.TooManyFiles},
	} {
		h := newHarness(t)
		status, body := h.restore(c.order, c.stream)
		require.Equal(t, http.StatusUnprocessableEntity, status, "%s: %s", name, body)
		require.Contains(t, body, fmt.Sprintf(`"reason":%q`, c.reason), name)
		status, body = h.call(http.MethodPost, initbox.Path, h.box(initbox.Config{SandboxID: "a", AccessToken: "t"}))
		require.Equal(t, http.StatusConflict, status, "%s: %s", name, body)
		status, body = h.restore(restoreOf(stream, dir), stream)
		require.Equal(t, http.StatusConflict, status, "%s: %s", name, body)
	}
	requireFile(t, elsewhere, "elsewhere")
	_, err := archive.Restore(t.Context(), bytes.NewReader(stream),
		archive.Options{Paths: []string{dir}, MaxBytes: 1 << 30, MaxFiles: 9})
	require.NoError(t, err, "the stream itself is good")
}

// Invariant: P31
func TestAgentIsNotConfiguredWhileItRestores(t *testing.T) {
	t.Parallel()
	dir := tree(t, "archived")
	h := newHarness(t)
	h.frozen(7)
	stream := h.archived(archiveOf(7, dir))
	second := newHarness(t)
	body, w := io.Pipe()
	answer := make(chan *httptest.ResponseRecorder)
	go func() {
		recorder := httptest.NewRecorder()
		second.ServeHTTP(recorder, httptest.NewRequest(http.MethodPost, initbox.RestorePath, body))
		answer <- recorder
	}()
	_, err := w.Write(prefixed(second.files(restoreOf(stream, dir))))
	require.NoError(t, err)
	_, err = w.Write(stream[:9])
	require.NoError(t, err)
	config := second.box(initbox.Config{SandboxID: "a", AccessToken: "t"})
	status, text := second.call(http.MethodPost, initbox.Path, config)
	require.Equal(t, http.StatusConflict, status, text)
	status, text = second.restore(restoreOf(stream, dir), stream)
	require.Equal(t, http.StatusConflict, status, text)
	_, err = w.Write(stream[9:])
	require.NoError(t, err)
	require.NoError(t, w.Close())
	recorder := <-answer
	require.Equal(t, http.StatusOK, recorder.Code, recorder.Body.String())
	second.configure(initbox.Config{SandboxID: "a", AccessToken: "t"})
}

// The default of both is the home of the account that the agent acts for by default.
func TestOrdersWithoutPathsAreForTheHome(t *testing.T) {
	t.Parallel()
	h := newHarness(t)
	account, err := h.o.Accounts.Lookup(h.o.Accounts.Default())
	require.NoError(t, err)
	for _, o := range []initbox.FilesOrder{archiveOf(1), restoreOf([]byte("x"))} {
		options, err := h.archiveOptions(&o)
		require.NoError(t, err)
		require.Equal(t, archive.Options{Paths: []string{account.Home}, MaxBytes: 1 << 30, MaxFiles: 1000}, options)
	}
}

func TestArchiveThatIsNotReadEnds(t *testing.T) {
	dir := tree(t, "archived")
	noise(t, dir)
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		h.frozen(7)
		box := h.files(archiveOf(7, dir))
		c := h.listening(t)()
		_, err := fmt.Fprintf(c, "POST /archive HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(box), box)
		require.NoError(t, err)
		time.Sleep(streamWait - time.Second)
		_, _, err = h.freezer.Hold(t.Context(), 1, 7)
		require.ErrorIs(t, err, freeze.ErrHeld)
		time.Sleep(2 * time.Second)
		_, release, err := h.freezer.Hold(t.Context(), 1, 7)
		require.NoError(t, err)
		release()
	})
}

func TestRestoreSaysThatItWorksUntilTheStreamStops(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t)
		box := prefixed(h.files(restoreOf(make([]byte, 100), "/nothing/here")))
		c := h.listening(t)()
		begun := time.Now()
		_, err := fmt.Fprintf(c, "POST /restore HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%s", len(box)+100, box)
		require.NoError(t, err)
		from := c
		buffer, text := make([]byte, 1<<10), ""
		for !strings.Contains(text, "422") {
			n, err := from.Read(buffer)
			require.NoError(t, err, text)
			text += string(buffer[:n])
		}
		require.Equal(t, streamWait, time.Since(begun))
		require.GreaterOrEqual(t, strings.Count(text, "102 Processing"), 2)
		require.Equal(t, part, h.restored)
	})
}
