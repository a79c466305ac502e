package snapshots_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/snapshots"
)

// stop writes the archive of a sandbox that is stopped.
func stop(t *testing.T, s *snapshots.Store, team, id string, data []byte) snapshots.Snapshot {
	t.Helper()
	made, err := s.WriteStopped(t.Context(), sandbox(team, id), 1<<30, ofStop(data))
	require.NoError(t, err)
	return made
}

func sandbox(team, id string) snapshots.Snapshot {
	return snapshots.Snapshot{Team: team, Pool: "pool", SandboxID: id}
}

func ofStop(data []byte) func(context.Context, string, io.Writer) (contents, error) {
	return func(ctx context.Context, _ string, w io.Writer) (contents, error) { return of(data)(ctx, w) }
}

// Invariant: P31
func TestStoppedSandboxIsReadAsItWasWritten(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		named := ""
		for team, size := range map[string]int{"": 1, "red": 20 << 20} {
			made, err := s.WriteStopped(t.Context(), sandbox(team, "box"), 1<<30,
				func(ctx context.Context, name string, w io.Writer) (contents, error) {
					named = name
					return of(data(size))(ctx, w)
				})
			require.NoError(t, err)
			require.Equal(t, named, made.Tag)
			require.Regexp(t, `^[a-z0-9]{26}$`, made.Tag)
			found, err := s.GetStopped(t.Context(), team, "box", made.Tag)
			require.NoError(t, err)
			require.Equal(t, made, found)
			require.Equal(t, []string{"box", team, "pool"}, []string{found.SandboxID, found.Team, found.Pool})
			requireArchive(t, s, found, data(size))
		}
	})
}

// Invariant: P31
func TestStoppedSandboxIsNoSnapshotAndItsTeamsOnly(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		made := stop(t, s, "red", "box", data(9))
		name := made.Tag
		require.Empty(t, refs(t, s, "red"))
		for _, ref := range []string{name, "box:" + name, "red/box:" + name, "box", "../stopped/red/box/" + name} {
			for _, team := range []string{"red", "blue", ""} {
				_, err := s.Get(t.Context(), team, ref)
				require.Error(t, err, ref)
				require.Error(t, s.Delete(t.Context(), team, ref), ref)
			}
		}
		for _, team := range []string{"blue", "", "red-1"} {
			_, err := s.GetStopped(t.Context(), team, "box", name)
			require.ErrorIs(t, err, snapshots.ErrGone)
			require.NoError(t, s.DropStopped(t.Context(), team, "box", name))
			stolen := made
			stolen.Team = team
			_, err = s.Open(t.Context(), stolen)
			require.ErrorIs(t, err, snapshots.ErrInvalid)
		}
		_, err := s.GetStopped(t.Context(), "red", "bo", name)
		require.ErrorIs(t, err, snapshots.ErrGone)
		require.NoError(t, s.DropStopped(t.Context(), "red", "bo", name))
		for _, bad := range []string{"", ".", "../box", "box/x", "Box", "a-b", strings.Repeat("a", 99)} {
			_, err := s.WriteStopped(t.Context(), sandbox("red", bad), 1, ofStop(data(1)))
			require.ErrorIs(t, err, snapshots.ErrInvalid, bad)
			_, err = s.GetStopped(t.Context(), "red", bad, name)
			require.ErrorIs(t, err, snapshots.ErrInvalid, bad)
			require.ErrorIs(t, s.DropStopped(t.Context(), "red", bad, name), snapshots.ErrInvalid, bad)
		}
		for _, bad := range []string{"", ".", "..", "/", name + ".json", "../box/" + name, "x" + name, name + "\n", "-" + name} {
			_, err = s.GetStopped(t.Context(), "red", "box", bad)
			require.ErrorIs(t, err, snapshots.ErrInvalid, bad)
			require.ErrorIs(t, s.DropStopped(t.Context(), "red", "box", bad), snapshots.ErrInvalid, bad)
		}
		_, err = s.WriteStopped(t.Context(), sandbox("red", "box"), 0, ofStop(data(1)))
		require.ErrorIs(t, err, snapshots.ErrInvalid)
		requireArchive(t, s, made, data(9))

		// A manifest of a snapshot that names it is damaged.
		raw, err := w.bucket.ReadAll(t.Context(), "stopped/red/box/"+name+".json")
		require.NoError(t, err)
		for key, text := range map[string]string{
			"snapshots/red/box:" + name + ".json": string(raw),
			"stopped/red/other/" + name + ".json": string(raw),
			"stopped/blue/box/" + name + ".json":  strings.Replace(string(raw), `"team":"red"`, `"team":"blue"`, 1),
		} {
			require.NoError(t, w.bucket.WriteAll(t.Context(), key, []byte(text), nil))
		}
		_, err = s.Get(t.Context(), "red", "box:"+name)
		require.ErrorIs(t, err, snapshots.ErrDamaged)
		_, err = s.GetStopped(t.Context(), "red", "other", name)
		require.ErrorIs(t, err, snapshots.ErrDamaged)
		_, err = s.GetStopped(t.Context(), "blue", "box", name)
		require.ErrorIs(t, err, snapshots.ErrDamaged)
	})
}

// Invariant: P31
func TestFailedStopLeavesTheEarlierArchive(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		made := stop(t, s, "red", "box", data(9))
		before := w.keys(t)
		_, err := s.WriteStopped(t.Context(), sandbox("red", "box"), 1<<30,
			func(_ context.Context, _ string, w io.Writer) (contents, error) {
				_, _ = w.Write(data(20 << 20))
				return contents{}, errAgent
			})
		require.ErrorIs(t, err, errAgent)
		_, err = s.WriteStopped(t.Context(), sandbox("red", "box"), 10, ofStop(data(11)))
		require.ErrorIs(t, err, snapshots.ErrTooLarge)
		require.Equal(t, before, w.keys(t))
		requireArchive(t, s, made, data(9))
	})
}

// Invariant: P31
func TestArchiveOfAStopThatIsCutOffIsRefused(t *testing.T) {
	w := newS3(t)
	s := w.open(t, large)
	w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/stopped/") && !strings.HasSuffix(r.URL.Path, ".json") {
			r.Body, r.ContentLength = io.NopCloser(bytes.NewReader(data(3))), 3
			r.Header = http.Header{"Content-Length": {"3"}}
		}
		next.ServeHTTP(out, r)
	})
	_, err := s.WriteStopped(t.Context(), sandbox("red", "box"), 1<<30, ofStop(data(9)))
	require.Error(t, err)
	for _, key := range w.keys(t) {
		require.NotContains(t, key, ".json")
	}
	w.front.Store(nil)
	made := stop(t, s, "red", "box", data(9))
	require.NoError(t, w.bucket.WriteAll(t.Context(), made.Archive, data(8), nil))
	_, err = s.Open(t.Context(), made)
	require.ErrorIs(t, err, snapshots.ErrDamaged)
	require.NoError(t, w.bucket.Delete(t.Context(), made.Archive))
	_, err = s.Open(t.Context(), made)
	require.ErrorIs(t, err, snapshots.ErrNotFound)
}

func TestStoppedSandboxesCountInTheBytesOfTheirTeam(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, snapshots.Options{MaxPerTeam: 1, MaxBytesPerTeam: 10_000})
		a, b := stop(t, s, "red", "a", data(4000)), stop(t, s, "red", "b", data(4000))
		_, err := s.Write(t.Context(), named("red", "x"), 1<<20, of(data(4000)))
		require.ErrorIs(t, err, snapshots.ErrFull)
		_, err = s.WriteStopped(t.Context(), sandbox("red", "c"), 1<<20, ofStop(data(4000)))
		require.ErrorIs(t, err, snapshots.ErrFull)
		require.ErrorContains(t, err, "stopped sandboxes")
		next := stop(t, s, "red", "a", data(4000)) // it replaces the earlier one
		stop(t, s, "blue", "c", data(4000))
		for _, made := range []snapshots.Snapshot{a, next} {
			require.NoError(t, s.DropStopped(t.Context(), "red", "a", made.Tag))
		}
		write(t, s, "red", "x", data(4000))
		require.NoError(t, s.DropStopped(t.Context(), "red", "b", b.Tag))
		_, err = s.Write(t.Context(), named("red", "y"), 1<<20, of(data(1)))
		require.ErrorIs(t, err, snapshots.ErrFull, "the number of snapshots")
		stop(t, s, "red", "c", data(4000)) // it is none
	})
}

func TestStopsAndSnapshotsShareThePlaces(t *testing.T) {
	w := newS3(t)
	s := w.open(t, snapshots.Options{MaxPerTeam: 1, MaxBytesPerTeam: 1 << 40})
	release, ended := make(chan struct{}), make(chan error, 2)
	began := make(chan struct{}, 2)
	for _, id := range []string{"a", "b"} {
		go func() {
			_, err := s.WriteStopped(t.Context(), sandbox("red", id), 1<<20,
				func(ctx context.Context, _ string, w io.Writer) (contents, error) {
					began <- struct{}{}
					<-release
					return of(data(9))(ctx, w)
				})
			ended <- err
		}()
		<-began
	}
	_, err := s.Write(t.Context(), named("red", "x"), 1<<20, of(data(1)))
	require.ErrorIs(t, err, snapshots.ErrBusy)
	_, err = s.WriteStopped(t.Context(), sandbox("red", "c"), 1<<20, ofStop(data(1)))
	require.ErrorIs(t, err, snapshots.ErrBusy)
	stop(t, s, "blue", "c", data(1))
	close(release)
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
}

// Invariant: P31
func TestDropDeletesTheNamedArchiveOnly(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		made, next := stop(t, s, "red", "box", data(9)), stop(t, s, "red", "box", data(9))
		other, snapshot := stop(t, s, "blue", "box", data(9)), write(t, s, "red", "box", data(9))
		for range 2 {
			require.NoError(t, s.DropStopped(t.Context(), "red", "box", made.Tag))
			_, err := s.GetStopped(t.Context(), "red", "box", made.Tag)
			require.ErrorIs(t, err, snapshots.ErrGone)
		}
		for _, kept := range []snapshots.Snapshot{next, other, snapshot} {
			requireArchive(t, s, kept, data(9))
		}
		require.Len(t, w.keys(t), 6)
	})
}

// Invariant: P31
func TestSweepKeepsTheArchivesThatSandboxesName(t *testing.T) {
	each(t, func(t *testing.T, w *world) {
		s := w.open(t, large)
		kept, left := stop(t, s, "red", "box", data(9)), stop(t, s, "red", "box", data(7))
		stop(t, s, "", "gone", data(5))
		snapshot := write(t, s, "red", "box", data(9))
		before := w.keys(t)
		unasked := func(context.Context, []string) (map[string]string, error) { panic("asked") }
		done, err := s.SweepStopped(t.Context(), unasked)
		require.NoError(t, err)
		require.Equal(t, snapshots.Swept{}, done, "all are new")

		s.SetNow(func() time.Time { return time.Now().Add(2 * time.Hour) })
		_, err = s.SweepStopped(t.Context(), func(context.Context, []string) (map[string]string, error) {
			return nil, errAgent
		})
		require.ErrorIs(t, err, errAgent)
		require.Equal(t, before, w.keys(t))
		var late snapshots.Snapshot
		done, err = s.SweepStopped(t.Context(), func(_ context.Context, ids []string) (map[string]string, error) {
			require.ElementsMatch(t, []string{"box", "gone"}, ids)
			late = stop(t, s, "red", "late", data(3)) // it was not listed
			return map[string]string{"box": kept.Tag, "gone": ""}, nil
		})
		require.NoError(t, err)
		require.Equal(t, snapshots.Swept{Archives: 2, Bytes: 12}, done)
		for _, made := range []snapshots.Snapshot{kept, late, snapshot} {
			requireArchive(t, s, made, data(int(made.Size)))
		}
		_, err = s.GetStopped(t.Context(), "red", "box", left.Tag)
		require.ErrorIs(t, err, snapshots.ErrGone)
		_, err = s.GetStopped(t.Context(), "", "gone", left.Tag)
		require.ErrorIs(t, err, snapshots.ErrGone)
		require.Len(t, w.keys(t), 6)

		// The sweep of snapshots leaves them.
		_, err = s.Sweep(t.Context())
		require.NoError(t, err)
		require.Len(t, w.keys(t), 6)
	})
}

func TestStoreThatFailsDropsAndSweepsNothingMore(t *testing.T) {
	w := newS3(t)
	s := w.open(t, large)
	made := stop(t, s, "red", "box", data(9))
	w.with(func(out http.ResponseWriter, r *http.Request, next http.Handler) {
		if r.Method == http.MethodDelete {
			out.WriteHeader(http.StatusForbidden)
			return
		}
		next.ServeHTTP(out, r)
	})
	require.ErrorIs(t, s.DropStopped(t.Context(), "red", "box", made.Tag), snapshots.ErrStore)
	s.SetSweepAge(-time.Hour)
	_, err := s.SweepStopped(t.Context(), func(context.Context, []string) (map[string]string, error) { return nil, nil })
	require.ErrorIs(t, err, snapshots.ErrStore)
	require.False(t, errors.Is(err, snapshots.ErrGone))
	requireArchive(t, s, made, data(9))
}
