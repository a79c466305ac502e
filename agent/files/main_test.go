package files

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/agent/accounts"
	pb "github.com/berth-sandbox/berth/agent/agentpb/filesystem"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// sandbox is a Service for one user, served over HTTP.
type sandbox struct {
	*Service
	t    *testing.T
	url  string
	home string
	// calls speaks protobuf, json JSON.
	calls, json pb.FilesystemClient
}

// self is the account of the test's process, with a home.
func self(home string) accounts.Account {
	return accounts.Account{Name: "me", UID: uint32(os.Getuid()), GID: uint32(os.Getgid()), Home: home}
}

func start(t *testing.T) *sandbox {
	t.Helper()
	return startFor(t, self(t.TempDir()))
}

// startFor serves the files of an account, which is also the default user.
func startFor(t *testing.T, account accounts.Account) *sandbox {
	t.Helper()
	s, err := New(Options{Account: func(name string) (accounts.Account, error) {
		if name != "" && name != account.Name {
			_, err := new(accounts.Directory).Lookup("no-such-user")
			return accounts.Account{}, err
		}
		return account, nil
	}})
	require.NoError(t, err)
	mux := http.NewServeMux()
	mux.Handle(Path, s.Files())
	mux.Handle(s.Filesystem())
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		require.NoError(t, s.Close())
		server.Close()
	})
	return &sandbox{
		Service: s, t: t, url: server.URL, home: account.Home,
		calls: pb.NewFilesystemClient(server.Client(), server.URL),
		json:  pb.NewFilesystemClient(server.Client(), server.URL, connect.WithProtoJSON()),
	}
}

// stranger returns the account nobody, in whose place the test can act as root only, with a home.
func stranger(t *testing.T) accounts.Account {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("acting for another user needs root")
	}
	u, err := user.Lookup("nobody")
	require.NoError(t, err)
	uid, err := strconv.Atoi(u.Uid)
	require.NoError(t, err)
	home := t.TempDir()
	// The directory above it is the test's alone otherwise.
	require.NoError(t, os.Chmod(filepath.Dir(home), 0o755))
	require.NoError(t, os.Chown(home, uid, uid))
	return accounts.Account{Name: "nobody", UID: uint32(uid), GID: uint32(uid), Home: home, Switched: true}
}

// call makes one call of filesystem.Filesystem.
func call[Q, A any](s *sandbox, f func(context.Context, *connect.Request[Q]) (*connect.Response[A], error), q *Q,
) (*A, error) {
	r, err := f(s.t.Context(), connect.NewRequest(q))
	if err != nil {
		return nil, err
	}
	return r.Msg, nil
}

func (s *sandbox) path(name string) string { return filepath.Join(s.home, name) }

func (s *sandbox) put(name, contents string) {
	s.t.Helper()
	require.NoError(s.t, os.MkdirAll(filepath.Dir(s.path(name)), 0o755))
	require.NoError(s.t, os.WriteFile(s.path(name), []byte(contents), 0o644))
}

func (s *sandbox) contents(name string) string {
	s.t.Helper()
	text, err := os.ReadFile(s.path(name))
	require.NoError(s.t, err)
	return string(text)
}
