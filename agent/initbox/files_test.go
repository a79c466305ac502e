package initbox_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

func archiveOrder() *initbox.FilesOrder {
	return &initbox.FilesOrder{SandboxID: "abc", Kind: initbox.Archive, Term: 3, Counter: 4, Paths: []string{"/work"},
		MaxBytes: 5, MaxFiles: 6}
}

func restoreOrder() *initbox.FilesOrder {
	return &initbox.FilesOrder{SandboxID: "abc", Kind: initbox.Restore, MaxBytes: 5, MaxFiles: 6,
		SHA256: strings.Repeat("ab", 32), Size: 7}
}

// Invariant: P31
func TestFilesOrderOpensAsItsKindOnly(t *testing.T) {
	s := sealer(t, 1)
	k := keys(t, s)
	for _, o := range []*initbox.FilesOrder{archiveOrder(), restoreOrder()} {
		sealed, err := s.For(k.PublicKey()).SealFilesOrder(o)
		require.NoError(t, err)
		got, err := k.OpenFilesOrder(sealed, o.Kind)
		require.NoError(t, err)
		require.Equal(t, o, got)
		other := map[initbox.Kind]initbox.Kind{initbox.Archive: initbox.Restore, initbox.Restore: initbox.Archive}[o.Kind]
		_, err = k.OpenFilesOrder(sealed, other)
		require.ErrorContains(t, err, "kind: must be "+string(other))
		_, err = k.OpenOrder(sealed)
		require.ErrorContains(t, err, "another version")
		_, err = keys(t, s).OpenFilesOrder(sealed, o.Kind)
		require.ErrorIs(t, err, initbox.ErrSealed, "another agent, or the same pod after a restart")
	}
	sealed, err := s.For(k.PublicKey()).SealOrder(order())
	require.NoError(t, err)
	_, err = k.OpenFilesOrder(sealed, initbox.Archive)
	require.ErrorContains(t, err, "kind: must be archive or restore")
}

func TestFilesOrderCheckNamesTheField(t *testing.T) {
	for want, change := range map[string]func(archive, restore *initbox.FilesOrder){
		"sandboxID: must be set":                func(a, _ *initbox.FilesOrder) { a.SandboxID = "" },
		"sandboxID: 1025 bytes, at most 1024":   func(a, _ *initbox.FilesOrder) { a.SandboxID = strings.Repeat("a", 1025) },
		"kind: must be archive or restore":      func(a, _ *initbox.FilesOrder) { a.Kind = initbox.Keep },
		"term: must be set":                     func(a, _ *initbox.FilesOrder) { a.Term = 0 },
		"size: must not be set for an archive":  func(a, _ *initbox.FilesOrder) { a.Size = 1 },
		"counter: must not be set for a rest":   func(_, r *initbox.FilesOrder) { r.Counter = 1 },
		"sha256: must have 64 hexadecimal dig":  func(_, r *initbox.FilesOrder) { r.SHA256 = strings.Repeat("a", 63) },
		"size: must be at least 1":              func(_, r *initbox.FilesOrder) { r.Size = 0 },
		"maxBytes and maxFiles: must be at lea": func(_, r *initbox.FilesOrder) { r.MaxBytes = -1 },
		"maxFiles: must be at least 1":          func(a, _ *initbox.FilesOrder) { a.MaxFiles = 0 },
		"paths: 17, at most 16":                 func(a, _ *initbox.FilesOrder) { a.Paths = make([]string, 17) },
		"paths[1]: must not be empty":           func(a, _ *initbox.FilesOrder) { a.Paths = []string{"/a", ""} },
		"paths[0]: 513 bytes, at most 512":      func(a, _ *initbox.FilesOrder) { a.Paths[0] = strings.Repeat("a", 513) },
		"paths[0]: is not UTF-8":                func(a, _ *initbox.FilesOrder) { a.Paths[0] = "/\xff" },
		"seal: 31 bytes, must have 32 or none":  func(a, _ *initbox.FilesOrder) { a.Seal = make([]byte, 31) },
		"seal: 33 bytes, must have 32 or none":  func(_, r *initbox.FilesOrder) { r.Seal = make([]byte, 33) },
	} {
		a, r := archiveOrder(), restoreOrder()
		change(a, r)
		k := keys(t, sealer(t, 1))
		_, errA := sealer(t, 1).For(k.PublicKey()).SealFilesOrder(a)
		_, errR := sealer(t, 1).For(k.PublicKey()).SealFilesOrder(r)
		require.Contains(t, fmt.Sprint(errA, errR), want)
	}
	paths := make([]string, 16)
	for i := range paths {
		paths[i] = strings.Repeat("\x01", 512)
	}
	largest := &initbox.FilesOrder{SandboxID: strings.Repeat("\x01", 1024), Kind: initbox.Archive, Term: math.MaxUint64,
		Counter: math.MaxUint64, Paths: paths, MaxBytes: math.MaxInt64, MaxFiles: math.MaxInt, Seal: make([]byte, 32)}
	k := keys(t, sealer(t, 1))
	sealed, err := sealer(t, 1).For(k.PublicKey()).SealFilesOrder(largest)
	require.NoError(t, err)
	got, err := k.OpenFilesOrder(sealed, initbox.Archive)
	require.NoError(t, err)
	require.Equal(t, largest, got)
}

func TestSummariesThatNoAgentMakesAreRefused(t *testing.T) {
	good := initbox.Summary{Entries: 3, Bytes: 5, Size: 9, LeftOut: map[string]initbox.LeftOut{"mount": {Count: 1}}}
	require.NoError(t, good.Check(9, 3))
	for name, change := range map[string]func(*initbox.Summary){
		"entries": func(s *initbox.Summary) { s.Entries = 4 }, "fewer": func(s *initbox.Summary) { s.Entries = -1 },
		"bytes": func(s *initbox.Summary) { s.Bytes = 10 }, "no bytes": func(s *initbox.Summary) { s.Bytes = -1 },
		"size":    func(s *initbox.Summary) { s.Size = 10 },
		"count":   func(s *initbox.Summary) { s.LeftOut = map[string]initbox.LeftOut{"mount": {}} },
		"reason":  func(s *initbox.Summary) { s.LeftOut = map[string]initbox.LeftOut{strings.Repeat("a", 21): {Count: 1}} },
		"example": func(s *initbox.Summary) { s.LeftOut = map[string]initbox.LeftOut{"a": {1, strings.Repeat("a", 121)}} },
		"reasons": func(s *initbox.Summary) {
			s.LeftOut = map[string]initbox.LeftOut{}
			for i := range 10 {
				s.LeftOut[fmt.Sprint(i)] = initbox.LeftOut{Count: 1}
			}
		},
	} {
		bad := good
		change(&bad)
		require.Error(t, bad.Check(9, 3), name)
	}
}

func TestFilesRefusalTellsWhatToDo(t *testing.T) {
	for reason, want := range map[initbox.Reason]string{
		initbox.NotFrozen: "only while all of them are stopped", initbox.Superseded: "newer order",
		initbox.Busy: "another archive", initbox.NotFresh: "before it is configured", initbox.TooLarge: "maxBytes",
		initbox.TooManyFiles: "maxFiles", initbox.Changed: "cannot be stopped", initbox.NotAllowed: "absolute",
		initbox.Damaged: "not the one", initbox.NoSpace: "is full", initbox.OtherVersion: "release",
		initbox.NotOpened: "another access key",
	} {
		r := &initbox.FilesRefusal{Reason: reason}
		require.ErrorContains(t, r, want)
		require.True(t, r.Known())
	}
	for _, reason := range []initbox.Reason{initbox.Failed, "canary", ""} {
		r := &initbox.FilesRefusal{Reason: reason}
		require.EqualError(t, r, "the agent could not archive or restore the files: its log says why")
		require.False(t, r.Known())
	}
}
