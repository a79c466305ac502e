package snapshots_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gocloud.dev/gcerrors"

	"github.com/berth-sandbox/berth/allocator/snapshots"
)

// data returns bytes that look random.
func data(size int) []byte {
	raw := make([]byte, size)
	_, _ = rand.NewChaCha8([32]byte{byte(size)}).Read(raw)
	return raw
}

func TestSnapshotIsReadAsItWasWritten(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		for name, size := range map[string]int{"one": 1, "small:v1": 100, "parts": 20 << 20} {
			made := write(t, s, "red", name, data(size))
			require.WithinDuration(t, time.Now(), made.CreatedAt, time.Minute)
			found, err := s.Get(t.Context(), "red", name)
			require.NoError(t, err)
			require.Equal(t, made, found)
			require.Equal(t, []string{"/home/user"}, found.Paths)
			require.Equal(t, map[string]int{"socket": 2}, found.LeftOut)
			requireArchive(t, s, found, data(size))
		}
		require.Equal(t, []string{"one:default", "parts:default", "small:v1"}, refs(t, s, "red"))
	})
}

func TestListHasPagesAndFilters(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		for _, name := range []string{"b:c.d", "b:c", "a", "b_", "c"} {
			write(t, s, "red", name, data(1))
		}
		var all []string
		page := snapshots.Page{}
		for first := true; first || page.Next != ""; first = false {
			var err error
			page, err = s.List(t.Context(), "red", snapshots.Filter{}, page.Next, 2)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page.Snapshots), 2)
			for _, one := range page.Snapshots {
				all = append(all, one.Ref())
			}
		}
		require.Equal(t, []string{"a:default", "b:c", "b:c.d", "b_:default", "c:default"}, all)
		for want, f := range map[int]snapshots.Filter{
			2: {Name: "b"}, 1: {SandboxID: "box-c"}, 0: {Name: "a", SandboxID: "box-c"},
		} {
			page, err := s.List(t.Context(), "red", f, "", 9)
			require.NoError(t, err)
			require.Len(t, page.Snapshots, want)
		}
		_, err := s.List(t.Context(), "red", snapshots.Filter{}, "", 0)
		require.ErrorIs(t, err, snapshots.ErrInvalid)
	})
}

// Invariant: P32
func TestOtherTeamsReachNoSnapshotOfATeam(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		kept := map[string]snapshots.Snapshot{}
		teams := []string{"red", "red-1", ""}
		for _, team := range teams {
			kept[team] = write(t, s, team, "only-"+team+"x", []byte(team+"!"))
		}
		for _, team := range teams {
			require.Equal(t, []string{kept[team].Ref()}, refs(t, s, team))
			for _, other := range teams {
				if other == team {
					continue
				}
				name := kept[other].Name
				for _, ref := range []string{name, other + "/" + name, other + "/" + name + ":default"} {
					if strings.HasPrefix(ref, "/") {
						continue
					}
					_, err := s.Get(t.Context(), team, ref)
					require.ErrorIs(t, err, snapshots.ErrNotFound, "%q of %q", ref, team)
					require.ErrorIs(t, s.Delete(t.Context(), team, ref), snapshots.ErrNotFound)
				}
				write(t, s, team, name, []byte("another"))
				require.NoError(t, s.Delete(t.Context(), team, name))
				stolen := kept[other]
				stolen.Team = team
				_, err := s.Open(t.Context(), stolen)
				require.ErrorIs(t, err, snapshots.ErrInvalid)
			}
		}
		for _, team := range teams {
			requireArchive(t, s, kept[team], []byte(team+"!"))
		}
	})
}

// Invariant: P32
func TestNamesLeadOutOfNoTeam(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		write(t, s, "red", "kept", data(1))
		before := w.keys(t)
		for _, bad := range []string{
			"", ".", "..", ".a", "-a", "a b", "A", "ä", "a\x00", "a\n", "a%2fb", "../red/kept", "a:", "a:b:c", ":a", "a:../b",
			"blue/", "blue/../red/kept", "/kept", strings.Repeat("a", 64), "a:" + strings.Repeat("b", 64),
		} {
			_, err := s.Get(t.Context(), "blue", bad)
			require.Error(t, err, "%q", bad)
			require.Error(t, s.Delete(t.Context(), "blue", bad), "%q", bad)
			name, tag := named("blue", "a"), named("blue", "a")
			name.Name, tag.Tag = bad, bad
			for _, made := range []snapshots.Snapshot{name, tag} {
				_, err = s.Write(t.Context(), made, 1<<20, of(data(1)))
				require.ErrorIs(t, err, snapshots.ErrInvalid, "%q", bad)
			}
		}
		for _, team := range []string{"_", ".", "..", "blue/../red", "red/", "/red", "Red", "red\n", "re\x00d"} {
			_, err := s.Get(t.Context(), team, "kept")
			require.ErrorIs(t, err, snapshots.ErrInvalid, "%q", team)
			_, err = s.List(t.Context(), team, snapshots.Filter{}, "", 9)
			require.ErrorIs(t, err, snapshots.ErrInvalid, "%q", team)
			_, err = s.Write(t.Context(), named(team, "a"), 1<<20, of(data(1)))
			require.ErrorIs(t, err, snapshots.ErrInvalid, "%q", team)
			require.ErrorIs(t, s.Delete(t.Context(), team, "kept"), snapshots.ErrInvalid, "%q", team)
		}
		require.Equal(t, before, w.keys(t))
	})
}

func TestReferencesAreOfTheCallersTeam(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		team, text, name, tag string
		err                   error
	}{
		{"red", "a", "a", "default", nil},
		{"red", "a:b.c_d-1", "a", "b.c_d-1", nil},
		{"red", "red/a:b", "a", "b", nil},
		{"red", "red/a", "a", "default", nil},
		{"red", "blue/a:b", "", "", snapshots.ErrNotFound},
		{"", "red/a:b", "", "", snapshots.ErrNotFound},
		{"", "/a:b", "", "", snapshots.ErrNotFound},
		{"red", "red/blue/a", "blue/a", "default", snapshots.ErrInvalid},
		{"red", "a:", "a", "", snapshots.ErrInvalid},
	} {
		name, tag, err := snapshots.ParseRef(c.team, c.text)
		require.ErrorIs(t, err, c.err, "%+v", c)
		require.Equal(t, []string{c.name, c.tag}, []string{name, tag}, "%+v", c)
	}
	name, _, err := snapshots.ParseRef("", snapshots.NewName())
	require.NoError(t, err)
	require.Len(t, name, 20)
}

func TestArchiveWithoutBytesIsNoSnapshot(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		_, err := w.open(t, large).Write(t.Context(), snapshots.Snapshot{Name: "a", Tag: "b", Pool: "p", SandboxID: "s"}, 1<<20,
			func(context.Context, io.Writer) (snapshots.Contents, error) { return snapshots.Contents{}, nil })
		require.ErrorIs(t, err, snapshots.ErrInvalid)
		require.Empty(t, w.keys(t))
	})
}

// Invariant: P32
func TestFailedWriteLeavesTheEarlierSnapshotOnly(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		made := write(t, s, "red", "a", []byte("earlier"))
		before := w.keys(t)
		tooLarge := snapshots.ErrTooLarge
		for size, want := range map[int64]error{1 << 30: errAgent, 15 << 20: tooLarge, 10: tooLarge} {
			for _, err := range []error{errAgent, nil} {
				if errors.Is(want, errAgent) && err == nil {
					continue
				}
				archive := func(_ context.Context, w io.Writer) (contents, error) {
					_, _ = w.Write(data(20 << 20))
					_, _ = w.Write(nil)
					return contents{}, err
				}
				_, failed := s.Write(t.Context(), named("red", "a"), size, archive)
				require.ErrorIs(t, failed, want)
				require.Equal(t, before, w.keys(t))
			}
		}
		_, err := s.Write(t.Context(), named("red", "a"), 0, of(data(1)))
		require.ErrorIs(t, err, snapshots.ErrInvalid)
		found, err := s.Get(t.Context(), "red", "a")
		require.NoError(t, err)
		require.Equal(t, made, found)
		requireArchive(t, s, found, []byte("earlier"))
	})
}

func TestManifestThatIsTooLargeIsNotWritten(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		_, err := s.Write(t.Context(), named("red", "a"), 9, func(context.Context, io.Writer) (contents, error) {
			return contents{Paths: []string{"/" + strings.Repeat("a", 64<<10)}}, nil
		})
		require.ErrorIs(t, err, snapshots.ErrInvalid)
		require.Empty(t, refs(t, s, "red"))
	})
}

// Invariant: P32
func TestServerThatEndsMidwayLeavesNoSnapshot(t *testing.T) {
	t.Parallel()
	w := newS3(t)
	s := w.open(t, large)
	gone := false
	_, err := s.Write(t.Context(), named("red", "a"), 1<<30, func(_ context.Context, out io.Writer) (contents, error) {
		_, _ = out.Write(data(20 << 20))
		gone = true
		w.with(func(http.ResponseWriter, *http.Request, http.Handler) { panic(http.ErrAbortHandler) })
		w.server.CloseClientConnections()
		_, err := out.Write(data(20 << 20))
		return contents{}, err
	})
	require.Error(t, err)
	require.True(t, gone)
	w.front.Store(nil)
	require.Empty(t, refs(t, s, "red"))
	s.SetSweepAge(-time.Minute)
	_, err = s.Sweep(t.Context())
	require.NoError(t, err)
	require.Empty(t, w.keys(t))
}

// Invariant: P32
func TestSnapshotWithAnArchiveOfAnotherSizeIsRefused(t *testing.T) {
	t.Parallel()
	w := newS3(t)
	s := w.open(t, large)
	w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodHead && strings.Contains(r.URL.Path, "/archives/") {
			out.Header().Set("Content-Length", "4")
			out.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
			return
		}
		next.ServeHTTP(out, r)
	})
	_, err := s.Write(t.Context(), named("red", "a"), 1<<30, of([]byte("five!")))
	require.ErrorIs(t, err, snapshots.ErrDamaged)
	require.ErrorContains(t, err, "it has 4 bytes, and 5 were written")
	require.Empty(t, refs(t, s, "red"))
}

// Invariant: P32
func TestArchiveIsNeverWrittenOverAnother(t *testing.T) {
	t.Parallel()
	w := newS3(t)
	s := w.open(t, large)
	var met, conditions []string
	w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
		key, found := strings.CutPrefix(r.URL.Path, "/bucket/archives/")
		// The server does not heed the condition at the end of an upload in parts.
		if ends := r.Method == http.MethodPost && r.URL.Query().Has("uploadId"); found && ends {
			conditions = append(conditions, r.Header.Get("If-None-Match"))
		}
		if found && r.Method == http.MethodPut && len(met) == 0 {
			met = append(met, "archives/"+key)
			_ = w.bucket.WriteAll(context.Background(), met[0], []byte("other"), nil)
		}
		next.ServeHTTP(out, r)
	})
	_, err := s.Write(t.Context(), named("red", "a"), 1<<30, of(data(5)))
	require.Equal(t, gcerrors.FailedPrecondition, gcerrors.Code(err), "%v", err)
	require.Equal(t, met, w.keys(t))
	raw, err := w.bucket.ReadAll(t.Context(), met[0])
	require.NoError(t, err)
	require.Equal(t, "other", string(raw))

	write(t, s, "red", "b", data(20<<20))
	require.Equal(t, []string{"*"}, conditions)
}

func TestArchiveThatChangedInTheStoreIsRefused(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		made := write(t, s, "red", "a", []byte("five!"))
		require.NoError(t, w.bucket.WriteAll(t.Context(), made.Archive, []byte("four"), nil))
		_, err := s.Open(t.Context(), made)
		require.ErrorIs(t, err, snapshots.ErrDamaged)
		require.ErrorContains(t, err, made.Archive)
		require.NoError(t, w.bucket.Delete(t.Context(), made.Archive))
		_, err = s.Open(t.Context(), made)
		require.ErrorIs(t, err, snapshots.ErrNotFound)
	})
}

func TestReplacedAndDeletedSnapshotsLeaveNothing(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		first := write(t, s, "red", "a", []byte("first"))
		second := write(t, s, "red", "a", []byte("second"))
		require.NotEqual(t, first.Archive, second.Archive)
		require.Equal(t, []string{second.Archive, "snapshots/red/a:default.json"}, w.keys(t))
		found, err := s.Get(t.Context(), "red", "a")
		require.NoError(t, err)
		requireArchive(t, s, found, []byte("second"))
		require.NoError(t, s.Delete(t.Context(), "red", "red/a"))
		require.Empty(t, w.keys(t))
		require.ErrorIs(t, s.Delete(t.Context(), "red", "a"), snapshots.ErrNotFound)
	})
}

func TestExpiredSnapshotsAreAbsentAndSwept(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, snapshots.Options{MaxPerTeam: 2, MaxBytesPerTeam: 1 << 30})
		kept := write(t, s, "red", "kept", data(5))
		short := named("red", "short")
		short.ExpiresAt = time.Now().Add(2 * time.Hour)
		_, err := s.Write(t.Context(), short, 1<<20, of(data(9)))
		require.NoError(t, err)
		_, err = s.Write(t.Context(), named("red", "third"), 1<<20, of(data(1)))
		require.ErrorIs(t, err, snapshots.ErrFull)

		now := short.ExpiresAt
		s.SetNow(func() time.Time { return now })
		_, err = s.Get(t.Context(), "red", "short")
		require.ErrorIs(t, err, snapshots.ErrNotFound)
		require.ErrorIs(t, s.Delete(t.Context(), "red", "short"), snapshots.ErrNotFound)
		require.Equal(t, []string{"kept:default"}, refs(t, s, "red"))
		write(t, s, "red", "third", data(1))

		swept, err := s.Sweep(t.Context())
		require.NoError(t, err)
		require.Equal(t, snapshots.Swept{Snapshots: 1, Archives: 1, Bytes: 9}, swept)
		requireArchive(t, s, kept, data(5))
		require.Len(t, w.keys(t), 4)
	})
}

func TestTeamHasAtMostItsSnapshotsAndBytes(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, snapshots.Options{MaxPerTeam: 3, MaxBytesPerTeam: 100})
		write(t, s, "red", "a", data(40))
		write(t, s, "red", "a", data(90)) // what is replaced does not count
		_, err := s.Write(t.Context(), named("red", "b"), 50, of(data(11)))
		require.ErrorIs(t, err, snapshots.ErrFull)
		require.ErrorContains(t, err, "10 are left")
		write(t, s, "red", "b", data(10))
		_, err = s.Write(t.Context(), named("red", "c"), 50, of(nil))
		require.ErrorIs(t, err, snapshots.ErrFull)
		write(t, s, "red", "a", data(1))
		write(t, s, "red", "c", data(1))
		_, err = s.Write(t.Context(), named("red", "d"), 50, of(nil))
		require.ErrorIs(t, err, snapshots.ErrFull)
		require.ErrorContains(t, err, "it has 3, and may have 3")
		write(t, s, "blue", "d", data(100))

		// One that is being written counts with what it may have.
		begun, end := hold(t, s, "green", "a", 60)
		<-begun
		_, err = s.Write(t.Context(), named("green", "b"), 60, of(data(41)))
		require.ErrorIs(t, err, snapshots.ErrFull)
		end()
	})
}

// hold begins a Write, closes begun when its archive has begun, and ends it when end is called.
func hold(t *testing.T, s *snapshots.Store, team, name string, size int64) (begun chan struct{}, end func()) {
	begun, ended, done := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		_, err := s.Write(t.Context(), named(team, name), size, func(_ context.Context, w io.Writer) (contents, error) {
			close(begun)
			<-ended
			return of(data(1))(t.Context(), w)
		})
		done <- err
	}()
	return begun, func() {
		close(ended)
		require.NoError(t, <-done)
	}
}

func TestNoTeamTakesAllPlacesToWrite(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		var ends []func()
		for _, at := range []string{"red/a", "red/b", "blue/a"} {
			team, name, _ := strings.Cut(at, "/")
			begun, end := hold(t, s, team, name, 9)
			<-begun
			ends = append(ends, end)
		}
		for _, team := range []string{"red", "blue"} {
			_, err := s.Write(t.Context(), named(team, "c"), 9, of(nil))
			require.ErrorIs(t, err, snapshots.ErrBusy)
		}
		begun, end := hold(t, s, "", "a", 9)
		<-begun
		ends = append(ends, end)
		_, err := s.Write(t.Context(), named("green", "a"), 9, of(nil))
		require.ErrorIs(t, err, snapshots.ErrBusy)
		for _, end := range ends {
			end()
		}
		begun, end = hold(t, s, "red", "a", 9)
		<-begun
		_, err = s.Write(t.Context(), named("red", "a"), 9, of(nil))
		require.ErrorIs(t, err, snapshots.ErrBusy, "the same name")
		end()
	})
}

func TestCallersDoNotSeeWhatTheStoreHasSaid(t *testing.T) {
	const said = "arn:aws:iam::123456789012:role/berth"
	w := newS3(t)
	s := w.open(t, large)
	made := write(t, s, "red", "a", []byte("red"))
	calls := map[string]func() error{
		"get":  func() error { _, err := s.Get(t.Context(), "red", "a"); return err },
		"list": func() error { _, err := s.List(t.Context(), "red", snapshots.Filter{}, "", 9); return err },
		"open": func() error { _, err := s.Open(t.Context(), made); return err },
		"write": func() error {
			_, err := s.Write(t.Context(), named("red", "b"), 1<<30, of(make([]byte, 20<<20)))
			return err
		},
		"delete": func() error { return s.Delete(t.Context(), "red", "a") },
	}
	for name, call := range calls {
		w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
			if name == "write" && !strings.Contains(r.URL.Path, "/archives/") {
				next.ServeHTTP(out, r) // else it would not get to the archive
				return
			}
			out.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(out, "<Error><Code>AccessDenied</Code><Message>"+said+"</Message></Error>")
		})
		err := call()
		require.ErrorIs(t, err, snapshots.ErrStore, name)
		require.ErrorContains(t, err, said, name)
		require.NotContains(t, snapshots.Public(err).Error(), said, name)
	}
}

func TestNoTeamTakesAllPlacesToRead(t *testing.T) {
	s := newS3(t).open(t, large)
	var open []io.Closer
	reads := func(made snapshots.Snapshot) (n int) {
		for ; ; n++ {
			in, err := s.Open(t.Context(), made)
			if err != nil {
				require.ErrorIs(t, err, snapshots.ErrBusy)
				return n
			}
			open = append(open, in)
		}
	}
	red, blue := write(t, s, "red", "a", []byte("red")), write(t, s, "blue", "a", []byte("blue"))
	require.Equal(t, 32, reads(red))
	require.Equal(t, 16, reads(blue))
	for _, in := range open {
		require.NoError(t, in.Close())
		require.NoError(t, in.Close(), "again, which gives no other place back")
	}
	gone := red
	gone.Archive = "archives/red/" + strings.Repeat("a", 26)
	_, err := s.Open(t.Context(), gone)
	require.ErrorIs(t, err, snapshots.ErrNotFound)
	require.Equal(t, 32, reads(red))
	for _, in := range open {
		_ = in.Close()
	}
}

func TestDamagedManifestHidesNoOtherSnapshot(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		good := write(t, s, "red", "good", []byte("good"))
		other := write(t, s, "blue", "other", data(1))
		key, goodKey := "snapshots/red/bad:default.json", "snapshots/red/good:default.json"
		raw, err := w.bucket.ReadAll(t.Context(), goodKey)
		require.NoError(t, err)
		text := strings.ReplaceAll(string(raw), `"name":"good"`, `"name":"bad"`)
		for what, bad := range map[string]string{
			"empty":         "",
			"cut off":       text[:len(text)-1],
			"two":           text + text,
			"other name":    string(raw),
			"other version": strings.Replace(text, `"version":1`, `"version":2`, 1),
			"other team":    strings.Replace(text, `"team":"red"`, `"team":"blue"`, 1),
			"no team":       strings.Replace(text, `"team":"red",`, ``, 1),
			"other archive": strings.Replace(text, good.Archive, other.Archive, 1),
			"no archive":    strings.Replace(text, good.Archive, "archives/red/../blue/a", 1),
			"no sum":        strings.Replace(text, good.SHA256, "", 1),
			"size":          strings.Replace(text, `"size":4`, `"size":-4`, 1),
			"new field":     strings.Replace(text, `"size":4`, `"size":4,"mode":1`, 1),
			"large":         text + strings.Repeat(" ", 64<<10),
		} {
			require.NotEqual(t, text, bad, what)
			require.NoError(t, w.bucket.WriteAll(t.Context(), key, []byte(bad), nil))
			_, err := s.Get(t.Context(), "red", "bad")
			require.ErrorIs(t, err, snapshots.ErrDamaged, what)
			require.ErrorContains(t, err, key)
			page, err := s.List(t.Context(), "red", snapshots.Filter{}, "", 9)
			require.NoError(t, err)
			require.Equal(t, []snapshots.Snapshot{good}, page.Snapshots, what)
			require.Len(t, page.Damaged, 1)
			require.ErrorContains(t, page.Damaged[0], key)
		}
		require.NoError(t, w.bucket.WriteAll(t.Context(), "archives/red/left-over", data(3), nil))
		s.SetSweepAge(-time.Minute)
		swept, err := s.Sweep(t.Context())
		require.NoError(t, err)
		require.Len(t, swept.Damaged, 1)
		require.Zero(t, swept.Archives)

		require.NoError(t, s.Delete(t.Context(), "red", "bad"))
		swept, err = s.Sweep(t.Context())
		require.NoError(t, err)
		require.Equal(t, snapshots.Swept{Archives: 1, Bytes: 3}, swept)
		requireArchive(t, s, good, []byte("good"))
	})
}

// Invariant: P32
func TestSweepKeepsEachArchiveThatAManifestNames(t *testing.T) {
	t.Parallel()
	// A snapshot is made between any two requests of a sweep. The age of archives protects none.
	for at := range 12 {
		w := newS3(t)
		s := w.open(t, large)
		s.SetSweepAge(-time.Minute)
		kept := []snapshots.Snapshot{write(t, s, "red", "a", data(1)), write(t, s, "", "b", data(1))}
		require.NoError(t, w.bucket.WriteAll(t.Context(), "archives/red/left-over", data(3), nil))
		requests, inside := 0, false
		var mu sync.Mutex
		w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
			mu.Lock()
			meet := requests == at && !inside
			if !inside {
				requests++
			}
			inside = inside || meet
			mu.Unlock()
			if meet {
				made, err := s.Write(t.Context(), named("red", "new"), 9, of(data(2)))
				if err == nil {
					kept = append(kept, made)
				}
				mu.Lock()
				inside = false
				mu.Unlock()
			}
			next.ServeHTTP(out, r)
		})
		swept, err := s.Sweep(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, swept.Archives)
		w.front.Store(nil)
		for _, made := range kept {
			found, err := s.Get(t.Context(), made.Team, made.Ref())
			require.NoError(t, err)
			requireArchive(t, s, found, data(int(made.Size)))
		}
	}
}

// Invariant: P32
func TestSweepAndWritesAtOnceLoseNothing(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		// A Write takes 2 s at most, as it takes less than an hour otherwise.
		const age = 5 * time.Second
		s.SetBounds(500*time.Millisecond, 500*time.Millisecond, time.Second)
		s.SetSweepAge(age)
		require.NoError(t, w.bucket.WriteAll(t.Context(), "archives/red/left-over", data(3), nil))
		ctx, cancel := context.WithTimeout(t.Context(), age+time.Second)
		defer cancel()
		var all sync.WaitGroup
		for i := range 6 {
			all.Go(func() {
				for n := 0; ctx.Err() == nil; n++ {
					team, name := fmt.Sprint("team", i%3), fmt.Sprint("name", n%3)
					_, _ = s.Write(t.Context(), named(team, name), 1<<20, of(data(n%2000)))
					if n%7 == 0 {
						_ = s.Delete(t.Context(), team, name)
					}
					time.Sleep(time.Millisecond)
				}
			})
		}
		all.Go(func() {
			for ctx.Err() == nil {
				_, _ = s.Sweep(t.Context())
				time.Sleep(5 * time.Millisecond)
			}
		})
		all.Wait()
		s.SetBounds(30*time.Second, 30*time.Second, time.Minute)
		_, err := s.Sweep(t.Context())
		require.NoError(t, err)
		require.NotContains(t, w.keys(t), "archives/red/left-over")
		found := 0
		for i := range 3 {
			page, err := s.List(t.Context(), fmt.Sprint("team", i), snapshots.Filter{}, "", 100)
			require.NoError(t, err)
			require.Empty(t, page.Damaged)
			for _, made := range page.Snapshots {
				requireArchive(t, s, made, data(int(made.Size)))
				found++
			}
		}
		require.Positive(t, found)
	})
}

func TestStoreThatHangsEndsEachCall(t *testing.T) {
	t.Parallel()
	w := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		<-r.Context().Done()
	}))
	s := w.open(t, large)
	s.SetBounds(50*time.Millisecond, 50*time.Millisecond, time.Minute)
	made := named("red", "a")
	made.Archive, made.Size = "archives/red/"+strings.Repeat("a", 26), 9
	for what, call := range map[string]func() error{
		"Write":  func() error { _, err := s.Write(t.Context(), made, 9, of(nil)); return err },
		"Get":    func() error { _, err := s.Get(t.Context(), "red", "a"); return err },
		"Open":   func() error { _, err := s.Open(t.Context(), made); return err },
		"List":   func() error { _, err := s.List(t.Context(), "red", snapshots.Filter{}, "", 9); return err },
		"Delete": func() error { return s.Delete(t.Context(), "red", "a") },
		"Sweep":  func() error { _, err := s.Sweep(t.Context()); return err },
	} {
		require.ErrorIs(t, call(), snapshots.ErrTimeout, what)
	}
}

// Invariant: P32
func TestWriteThatHangsMakesNoSnapshot(t *testing.T) {
	t.Parallel()
	for _, hangs := range []string{"PUT /bucket/archives/", "HEAD /bucket/archives/", "PUT /bucket/snapshots/"} {
		w := newS3(t)
		s := w.open(t, large)
		s.SetBounds(500*time.Millisecond, 500*time.Millisecond, time.Minute)
		w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.HasPrefix(r.Method+" "+r.URL.Path, hangs) {
				_, _ = io.Copy(io.Discard, r.Body)
				<-r.Context().Done()
				return
			}
			next.ServeHTTP(out, r)
		})
		_, err := s.Write(t.Context(), named("red", "a"), 9, of(data(9)))
		require.ErrorIs(t, err, snapshots.ErrTimeout, hangs)
		w.front.Store(nil)
		s.SetBounds(30*time.Second, 0, 0)
		require.Empty(t, refs(t, s, "red"), hangs)
	}
}

func TestArchiveWithoutProgressEnds(t *testing.T) {
	t.Parallel()
	w := newS3(t)
	s := w.open(t, large)
	made := write(t, s, "red", "a", data(4<<20))

	s.SetBounds(0, 50*time.Millisecond, 0)
	_, err := s.Write(t.Context(), named("red", "b"), 9, func(ctx context.Context, _ io.Writer) (contents, error) {
		<-ctx.Done()
		return contents{}, ctx.Err()
	})
	require.ErrorIs(t, err, snapshots.ErrTimeout)
	require.ErrorContains(t, err, "no progress")

	s.SetBounds(0, time.Minute, 50*time.Millisecond)
	_, err = s.Write(t.Context(), named("red", "b"), 1<<30, func(_ context.Context, w io.Writer) (c contents, err error) {
		for err == nil {
			_, err = w.Write(data(100))
		}
		return c, err
	})
	require.ErrorIs(t, err, snapshots.ErrTimeout)
	require.ErrorContains(t, err, "more than 50ms")

	s.SetBounds(0, time.Second, time.Minute)
	w.with(func(out http.ResponseWriter, r *http.Request, _ http.Handler) {
		out.Header().Set("Content-Length", fmt.Sprint(made.Size))
		out.Header().Set("Last-Modified", time.Now().UTC().Format(http.TimeFormat))
		_, _ = out.Write(data(1 << 20))
		_ = http.NewResponseController(out).Flush()
		<-r.Context().Done()
	})
	in, err := s.Open(t.Context(), made)
	require.NoError(t, err)
	time.Sleep(1200 * time.Millisecond) // a reader that takes its time ends nothing
	n, err := io.Copy(io.Discard, in)
	require.ErrorIs(t, err, snapshots.ErrTimeout)
	require.EqualValues(t, 1<<20, n)
	require.NoError(t, in.Close())
}

func TestOpenNamesWhatIsWrongWithAnAddress(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"":                     "unknown scheme",
		"bucket":               "unknown scheme",
		"ftp://bucket":         "must be s3://BUCKET, gs://BUCKET, azblob://CONTAINER or file:///DIRECTORY",
		"mem://":               "unknown scheme",
		"s3://":                "must be s3://BUCKET",
		"s3://bucket/a":        "?prefix=DIRECTORY/",
		"s3://bucket?prefix=a": "must end with /",
		"s3://bucket?key=a":    "use prefix",
		"s3://bucket?regoin=a": "regoin",
		"file://a/b":           "must be file:///DIRECTORY",
		"file:///":             "must be file:///DIRECTORY",
		"file:///dev/null":     "not a directory",
	} {
		_, err := snapshots.Open(t.Context(), address, large)
		require.ErrorContains(t, err, want, address)
	}
	_, err := snapshots.Open(t.Context(), "file://"+t.TempDir(), snapshots.Options{})
	require.ErrorContains(t, err, "snapshots.Options.MaxPerTeam is required")
}
