package agents_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/internal/pipetest"
)

// realAgent is an agent in a pod without processes.
func realAgent(t *testing.T) http.HandlerFunc {
	t.Helper()
	return newAgent(t).ServeHTTP
}

func newAgent(t *testing.T) *agent.Agent {
	t.Helper()
	sealer, err := agents.SealerOf(clusterKey(t))
	require.NoError(t, err)
	keys, err := initbox.NewKeys(sealer.PublicKey())
	require.NoError(t, err)
	directory, err := accounts.New(false)
	require.NoError(t, err)
	freezer, err := freeze.New(freeze.Options{Children: children.New(), Hold: time.Hour})
	require.NoError(t, err)
	a, err := agent.New(agent.Options{Log: slog.New(slog.DiscardHandler), Keys: keys, Accounts: directory, Freezer: freezer,
		WriteFile: func(accounts.Account, initbox.File) error { return nil }})
	require.NoError(t, err)
	return a
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

func archiveOf(dir string) agents.Archive {
	return agents.Archive{Paths: []string{dir}, MaxBytes: 1 << 30, MaxFiles: 1000}
}

func restoreOf(dir string, stream []byte) agents.Restore {
	sum := sha256.Sum256(stream)
	return agents.Restore{Archive: archiveOf(dir), SHA256: hex.EncodeToString(sum[:]), Size: int64(len(stream))}
}

// sleeping is a sandbox with an agent that has frozen it.
func sleeping(t *testing.T, c *agents.Caller) core.Sandbox {
	t.Helper()
	s := pod(t, realAgent(t))
	s.Revision = core.Revision{Term: 3, Counter: 7}
	require.NoError(t, c.Configure(t.Context(), s, nil))
	require.NoError(t, c.Freeze(t.Context(), s, true))
	return s
}

// Invariant: P31
func TestFilesOfASandboxMoveToAnotherPod(t *testing.T) {
	dir, c := tree(t, "archived"), caller(t, always)
	s := sleeping(t, c)
	var stream bytes.Buffer
	sum, err := c.Archive(t.Context(), s, archiveOf(dir), &stream)
	require.NoError(t, err)
	require.Equal(t, 2, sum.Entries)
	require.Equal(t, int64(8), sum.Bytes)
	require.NoError(t, os.WriteFile(filepath.Join(dir, "file"), []byte("changed"), 0o600))

	next := pod(t, realAgent(t))
	restored, err := c.Restore(t.Context(), next, restoreOf(dir, stream.Bytes()), bytes.NewReader(stream.Bytes()))
	require.NoError(t, err)
	require.Equal(t, sum, restored)
	text, err := os.ReadFile(filepath.Join(dir, "file"))
	require.NoError(t, err)
	require.Equal(t, "archived", string(text))
	another := next
	another.ID = "other"
	require.ErrorContains(t, c.Configure(t.Context(), another, nil), "answered 409")
	require.NoError(t, c.Configure(t.Context(), next, nil))

	// The agent has started again, and has another key.
	again := pod(t, realAgent(t))
	again.Restarts++
	_, err = c.Restore(t.Context(), again, restoreOf(dir, stream.Bytes()), bytes.NewReader(stream.Bytes()))
	require.NoError(t, err)
}

// Invariant: P31
func TestStoppedSandboxWakesInAnotherPod(t *testing.T) {
	dir, c := tree(t, "archived"), caller(t, always)
	s := pod(t, realAgent(t))
	s.Revision = core.Revision{Term: 3, Counter: 7}
	values := &agents.Values{Envs: map[string]string{"A": "canary"}, Secrets: map[string]string{"KEY": "canary"},
		Files: []initbox.File{{Path: "/etc/a", Data: []byte("canary")}}}
	require.NoError(t, c.Configure(t.Context(), s, values))
	require.NoError(t, c.Freeze(t.Context(), s, true))
	var stream bytes.Buffer
	stop := archiveOf(dir)
	stop.Stop = "0-abc"
	_, err := c.Archive(t.Context(), s, stop, &stream)
	require.NoError(t, err)
	require.NotContains(t, stream.String(), "canary")

	wake := restoreOf(dir, stream.Bytes())
	wake.Stop = "0-abc"
	for name, change := range map[string]func(*core.Sandbox, *agents.Restore){
		"another archive": func(_ *core.Sandbox, r *agents.Restore) { r.Stop = "1-abc" },
		"another sandbox": func(s *core.Sandbox, _ *agents.Restore) { s.ID = "k3x8" },
	} {
		next, order := pod(t, realAgent(t)), wake
		change(&next, &order)
		_, err := c.Restore(t.Context(), next, order, bytes.NewReader(stream.Bytes()))
		requireRefused(t, err, initbox.NotOpened)
		next.Archive = "0-abc"
		require.ErrorContains(t, c.Configure(t.Context(), next, nil), "answered 409", name)
	}
	next := pod(t, realAgent(t))
	next.Archive = "0-abc"
	require.ErrorContains(t, c.Configure(t.Context(), next, nil), "answered 409", "it has restored nothing")

	a := newAgent(t)
	next = pod(t, a.ServeHTTP)
	_, err = caller(t, always).Restore(t.Context(), next, wake, bytes.NewReader(stream.Bytes()))
	require.NoError(t, err)
	require.ErrorContains(t, c.Configure(t.Context(), next, nil), "answered 409", "as after a claim")
	next.Archive, next.Agent.Public = "0-abc", false
	require.NoError(t, c.Configure(t.Context(), next, nil))
	require.Equal(t, &initbox.Config{SandboxID: s.ID, AccessToken: clusterKey(t).Secret(s.ID).AgentToken(s.ID),
		Envs: values.Envs, Secrets: values.Secrets, Files: values.Files}, a.Config())
}

func TestAgentOfAnEarlierReleaseIsNotStopped(t *testing.T) {
	s := pod(t, filesAgent(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadRequest) }))
	s.Revision = core.Revision{Term: 3, Counter: 7}
	for stop, want := range map[string]string{"0-abc": "has a version that cannot stop", "": "answered 400 to the order"} {
		a, r := archiveOf("/a"), restoreOf("/a", []byte("abc"))
		a.Stop, r.Stop = stop, stop
		_, err := caller(t, always).Archive(t.Context(), s, a, io.Discard)
		require.ErrorContains(t, err, want)
		_, err = caller(t, always).Restore(t.Context(), s, r, strings.NewReader("abc"))
		require.ErrorContains(t, err, want)
	}
}

func requireRefused(t *testing.T, err error, reason initbox.Reason) {
	t.Helper()
	var refused *agents.RefusedError
	require.ErrorAs(t, err, &refused)
	require.Equal(t, reason, refused.Reason)
	require.Equal(t, (&initbox.FilesRefusal{Reason: reason}).Error(), refused.Why)
}

// Invariant: P31
func TestRefusedArchivesAndRestoresAreToldApart(t *testing.T) {
	dir, c := tree(t, strings.Repeat("archived", 1<<10)), caller(t, always)
	s := sleeping(t, c)
	old := s
	old.Revision.Counter--
	_, err := c.Archive(t.Context(), old, archiveOf(dir), io.Discard)
	require.ErrorIs(t, err, agents.ErrSuperseded)
	small := archiveOf(dir)
	small.MaxBytes = 4 << 10
	_, err = c.Archive(t.Context(), s, small, io.Discard)
	requireRefused(t, err, initbox.TooLarge)
	bad := archiveOf("relative")
	_, err = c.Archive(t.Context(), s, bad, io.Discard)
	requireRefused(t, err, initbox.NotAllowed)
	_, err = c.Archive(t.Context(), s, agents.Archive{MaxFiles: 1}, io.Discard)
	require.ErrorContains(t, err, "maxBytes and maxFiles: must be at least 1")
	var stream bytes.Buffer
	_, err = c.Archive(t.Context(), s, archiveOf(dir), &stream)
	require.NoError(t, err)
	s.Revision.Counter++
	require.NoError(t, c.Thaw(t.Context(), s))
	_, err = c.Archive(t.Context(), s, archiveOf(dir), io.Discard)
	requireRefused(t, err, initbox.NotFrozen)

	// A configured agent does not read the archive.
	noise := make([]byte, 32<<20)
	_, _ = rand.Read(noise)
	_, err = c.Restore(t.Context(), s, restoreOf(dir, noise), bytes.NewReader(noise))
	requireRefused(t, err, initbox.NotFresh)
	next := pod(t, realAgent(t))
	_, err = c.Restore(t.Context(), next, restoreOf(dir, noise), bytes.NewReader(noise))
	requireRefused(t, err, initbox.Damaged)
	require.ErrorContains(t, c.Configure(t.Context(), next, nil), "answered 409")
	next = pod(t, realAgent(t))
	_, err = c.Restore(t.Context(), next, restoreOf(dir, noise), bytes.NewReader(noise[:1<<10]))
	require.ErrorIs(t, err, io.ErrUnexpectedEOF)
}

func TestErrorsOfReadersAndWritersAreReturned(t *testing.T) {
	dir, c := tree(t, "archived"), caller(t, always)
	broken := errors.New("the store is away")
	_, err := c.Archive(t.Context(), sleeping(t, c), archiveOf(dir), writerFunc(func([]byte) (int, error) { return 0, broken }))
	require.ErrorIs(t, err, broken)
	next := pod(t, realAgent(t))
	_, err = c.Restore(t.Context(), next, restoreOf(dir, []byte("abc")), iotest.ErrReader(broken))
	require.ErrorIs(t, err, broken)
	require.ErrorContains(t, c.Configure(t.Context(), next, nil), "answered 409")
	_, err = caller(t, func() bool { return false }).Archive(t.Context(), next, archiveOf(dir), io.Discard)
	require.ErrorIs(t, err, agents.ErrDeposed)
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// filesAgent is an agent that answers orders about files with answer.
func filesAgent(t *testing.T, answer http.HandlerFunc) http.HandlerFunc {
	keys := newSleeper(t).keys
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == initbox.Path {
			_ = json.NewEncoder(w).Encode(initbox.Hello{Version: initbox.Version, PublicKey: keys.PublicKey()})
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		answer(w, r)
	}
}

// Invariant: P31
func TestNothingOfAHostileAgentIsTakenForAnArchive(t *testing.T) {
	trailer := func(name, value string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "canary")
			_ = http.NewResponseController(w).Flush()
			w.Header().Set(http.TrailerPrefix+name, value)
		}
	}
	answer := func(code int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(code)
			_, _ = io.WriteString(w, text)
		}
	}
	var sent atomic.Int64
	for name, c := range map[string]struct {
		answer http.HandlerFunc
		want   string
	}{
		"no trailer":         {answer(200, "canary"), "a part of an archive"},
		"unknown reason":     {trailer(initbox.FailureTrailer, "canary"), "a part of an archive"},
		"known reason":       {trailer(initbox.FailureTrailer, "not_frozen"), "the processes of the sandbox run"},
		"no summary":         {trailer(initbox.SummaryTrailer, "canary"), "impossible"},
		"impossible summary": {trailer(initbox.SummaryTrailer, `{"entries":1001}`), "impossible"},
		"huge trailer": {trailer(initbox.SummaryTrailer, `{"canary":"`+strings.Repeat("canary", 20<<10)+`"}`),
			"cut off"},
		"cut off": {func(w http.ResponseWriter, _ *http.Request) {
			_, _ = io.WriteString(w, "canary")
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}, "cut off"},
		"endless": {func(w http.ResponseWriter, _ *http.Request) {
			for {
				n, err := w.Write(make([]byte, 64<<10))
				sent.Add(int64(n))
				if err != nil {
					return
				}
			}
		}, "longer than maxBytes"},
		"no error":       {answer(204, ""), "answered 204 to the order archive"},
		"conflict":       {answer(409, "canary"), "answered 409 to the order archive"},
		"known conflict": {answer(409, `{"message":"canary","reason":"busy"}`), "another archive"},
		"long conflict":  {answer(409, strings.Repeat("canary", 9<<10)), "cannot be read"},
		"old version":    {answer(404, "canary"), "knows no archives"},
	} {
		s := pod(t, filesAgent(t, c.answer))
		s.Revision = core.Revision{Term: 3, Counter: 7}
		a := archiveOf("/a")
		a.MaxBytes = 1 << 20
		_, err := caller(t, always).Archive(t.Context(), s, a, io.Discard)
		require.ErrorContains(t, err, c.want, name)
		require.NotContains(t, err.Error(), "canary", name)
	}
	require.Less(t, sent.Load(), int64(32<<20))
}

func TestNothingOfAHostileAgentIsTakenForARestore(t *testing.T) {
	for want, answer := range map[string]http.HandlerFunc{
		"impossible": func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "canary") },
		"cannot be read": func(w http.ResponseWriter, _ *http.Request) {
			for range 1 << 14 { // 400 KB
				w.WriteHeader(http.StatusProcessing)
			}
		},
		"answered 422 to the order restore": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"reason":"canary"}`, http.StatusUnprocessableEntity)
		},
		"is full": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"reason":"no_space","message":"canary"}`, http.StatusUnprocessableEntity)
		},
	} {
		s := pod(t, filesAgent(t, answer))
		_, err := caller(t, always).Restore(t.Context(), s, restoreOf("/a", []byte("abc")), strings.NewReader("abc"))
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "canary")
	}
}

func TestStillAgentsEndAndWorkingOnesDoNot(t *testing.T) {
	for name, c := range map[string]struct {
		works bool
		took  time.Duration
	}{"still": {false, 30 * time.Second}, "working": {true, 10 * time.Minute}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				listener := pipetest.Listen()
				server := &http.Server{Handler: filesAgent(t, func(w http.ResponseWriter, r *http.Request) {
					for range 60 {
						select {
						case <-time.After(10 * time.Second):
						case <-r.Context().Done():
							return
						}
						if c.works {
							w.WriteHeader(http.StatusProcessing)
						}
					}
					fmt.Fprint(w, `{"entries":1}`)
				})}
				served := make(chan error, 1)
				go func() { served <- server.Serve(listener) }()
				defer func() {
					listener.HangUp()
					require.NoError(t, server.Close())
					<-served
				}()
				caller, err := agents.New(agents.Options{Key: clusterKey(t), Leads: always,
					Dial: func(context.Context, string, string) (net.Conn, error) { return listener.Connect(), nil }})
				require.NoError(t, err)
				begun := time.Now()
				s := core.Sandbox{Binding: core.Binding{ID: "k3x9"}, IP: netip.IPv6Loopback()}
				_, err = caller.Restore(t.Context(), s, restoreOf("/a", []byte("abc")), strings.NewReader("abc"))
				require.Equal(t, c.works, err == nil, err)
				require.Equal(t, c.took, time.Since(begun))
			})
		})
	}
}
