package snapshots_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"gocloud.dev/blob"

	"github.com/berth-sandbox/berth/allocator/snapshots"
	_ "github.com/berth-sandbox/berth/allocator/snapshots/drivers"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var large = snapshots.Options{MaxPerTeam: 1000, MaxBytesPerTeam: 1 << 40}

// world is an object store. Those that speak S3 have a server, and front sees each of its requests first.
type world struct {
	address string
	bucket  *blob.Bucket // without a Store
	server  *httptest.Server
	front   atomic.Pointer[func(w http.ResponseWriter, r *http.Request, next http.Handler)]
}

// each runs a test with each kind of store.
func each(t *testing.T, test func(t *testing.T, w *world)) {
	t.Run("directory", func(t *testing.T) {
		t.Parallel()
		w := &world{address: "file://" + t.TempDir() + "/made?prefix=a/b/"}
		test(t, w)
	})
	t.Run("S3", func(t *testing.T) {
		t.Parallel()
		test(t, newS3(t))
	})
}

func newS3(t *testing.T) *world {
	backend := s3mem.New()
	require.NoError(t, backend.CreateBucket("bucket"))
	return serve(t, gofakes3.New(backend).Server())
}

// serve is a store of which next answers requests.
func serve(t *testing.T, next http.Handler) *world {
	w := &world{}
	w.server = httptest.NewServer(http.HandlerFunc(func(out http.ResponseWriter, r *http.Request) {
		if front := w.front.Load(); front != nil {
			(*front)(out, r, next)
			return
		}
		next.ServeHTTP(out, r)
	}))
	t.Cleanup(w.server.Close)
	w.address = "s3://bucket?region=us-east-1&use_path_style=true&anonymous=true&endpoint=" + w.server.URL
	return w
}

// with has front see each request, until the test ends or another front does.
func (w *world) with(front func(w http.ResponseWriter, r *http.Request, next http.Handler)) {
	w.front.Store(&front)
}

func (w *world) open(t *testing.T, o snapshots.Options) *snapshots.Store {
	t.Helper()
	s, err := snapshots.Open(t.Context(), w.address, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	if w.bucket == nil {
		address := w.address
		if w.server == nil {
			address += "&metadata=skip&no_tmp_dir=1"
		}
		w.bucket, err = blob.OpenBucket(context.WithoutCancel(t.Context()), address)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, w.bucket.Close()) })
	}
	return s
}

// keys returns the keys of all objects, in order.
func (w *world) keys(t *testing.T) (all []string) {
	t.Helper()
	for list := w.bucket.List(nil); ; {
		o, err := list.Next(t.Context())
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		all = append(all, o.Key)
	}
}

type contents = snapshots.Contents

var errAgent = errors.New("the agent failed")

// of writes data as an archive.
func of(data []byte) func(context.Context, io.Writer) (contents, error) {
	return func(_ context.Context, w io.Writer) (contents, error) {
		_, err := io.Copy(w, struct{ io.Reader }{bytes.NewReader(data)})
		return contents{
			Entries: 3, Bytes: 7, LeftOut: map[string]int{"socket": 2}, Paths: []string{"/home/user"},
		}, err
	}
}

// write makes a snapshot with a name.
func write(t *testing.T, s *snapshots.Store, team, name string, data []byte) snapshots.Snapshot {
	t.Helper()
	made, err := s.Write(t.Context(), named(team, name), 1<<30, of(data))
	require.NoError(t, err)
	return made
}

func named(team, name string) snapshots.Snapshot {
	name, tag, _ := strings.Cut(name, ":")
	if tag == "" {
		tag = snapshots.DefaultTag
	}
	return snapshots.Snapshot{Name: name, Tag: tag, Team: team, Pool: "pool", SandboxID: "box-" + name}
}

// requireArchive checks that a snapshot has these bytes.
func requireArchive(t *testing.T, s *snapshots.Store, made snapshots.Snapshot, data []byte) {
	t.Helper()
	in, err := s.Open(t.Context(), made)
	require.NoError(t, err)
	defer in.Close()
	read, err := io.ReadAll(in)
	require.NoError(t, err)
	require.True(t, bytes.Equal(data, read), "the archive is another one")
	sum := sha256.Sum256(data)
	require.Equal(t, hex.EncodeToString(sum[:]), made.SHA256)
	require.EqualValues(t, len(data), made.Size)
}

// refs returns the references of all snapshots of a team.
func refs(t *testing.T, s *snapshots.Store, team string) (all []string) {
	t.Helper()
	page, err := s.List(t.Context(), team, snapshots.Filter{}, "", 1000)
	require.NoError(t, err)
	require.Empty(t, page.Damaged)
	for _, one := range page.Snapshots {
		require.Equal(t, team, one.Team)
		all = append(all, one.Ref())
	}
	return all
}
