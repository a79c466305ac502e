package archive_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/archive"
)

// theirHome returns a home of the unprivileged user, which root can make only.
func theirHome(t *testing.T) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root makes files of others")
	}
	h := home(t)
	for d := filepath.Dir(h); d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o755))
	}
	require.NoError(t, os.Chown(h, unprivileged, unprivileged))
	return h
}

// give gives files to the unprivileged user.
func give(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		require.NoError(t, os.Lchown(name, unprivileged, unprivileged))
	}
}

// Invariant: P30
func TestAgentThatIsNotRootKeepsTheSame(t *testing.T) {
	dir := theirHome(t)
	const tests = "^(TestFilesOfEveryKind|TestWhatIsNotKept|TestSeveralPaths|TestFlipped)"
	cmd := command(program(t), unprivileged, "-test.run", tests, "-test.v")
	cmd.Env = append(cmd.Env, "TMPDIR="+dir)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, string(out))
	require.Equal(t, 4, bytes.Count(out, []byte("--- PASS")), string(out))
}

// Invariant: P30
func TestFilesOfOthersAreCountedWhereTheAgentIsNotRoot(t *testing.T) {
	h := theirHome(t)
	for _, name := range []string{"mine", "readable", "unreadable", "closed/file", "setuid"} {
		put(t, filepath.Join(h, name), name)
	}
	give(t, h+"/mine")
	require.NoError(t, os.Chmod(h+"/unreadable", 0o600))
	require.NoError(t, os.Chmod(h+"/closed", 0o700))
	require.NoError(t, os.Chmod(h+"/setuid", 0o755|os.ModeSetuid|os.ModeSetgid))
	require.NoError(t, os.Symlink("x", h+"/link"))
	exe := program(t)
	stream, wrote, err := inProcess(t, exe, "write", h, unprivileged, nil)
	require.NoError(t, err)
	require.Equal(t, 2, wrote.Summary.LeftOut[archive.Unreadable].Count)
	require.Len(t, wrote.Summary.LeftOut, 1)
	require.Equal(t, 6, wrote.Summary.Entries)

	require.NoError(t, os.RemoveAll(h))
	require.NoError(t, os.Mkdir(h, 0o755))
	give(t, h)
	_, restored, err := inProcess(t, exe, "restore", h, unprivileged, bytes.NewReader(stream))
	require.NoError(t, err)
	require.Equal(t, 4, restored.Summary.LeftOut[archive.Owner].Count)
	require.Len(t, restored.Summary.LeftOut, 1)
	require.Equal(t, 6, restored.Summary.Entries)
	for name, mode := range map[string]uint32{"mine": 0o644, "readable": 0o644, "closed": 0o700, "setuid": 0o755} {
		s := stat(t, filepath.Join(h, name))
		require.Equal(t, mode, s.Mode&0o7777, name)
		require.EqualValues(t, unprivileged, s.Uid, name)
	}
	require.NoFileExists(t, h+"/unreadable")
	require.NoFileExists(t, h+"/closed/file")
}

// Invariant: P30
func TestFilesOfOthersStayWhereTheAgentIsNotRoot(t *testing.T) {
	h := theirHome(t)
	for _, name := range []string{"mine", "replaced", "theirs/file", "theirs/deep/file", "hidden/file"} {
		put(t, filepath.Join(h, name), name)
	}
	give(t, h+"/mine")
	exe := program(t)
	stream, _, err := inProcess(t, exe, "write", h, unprivileged, nil)
	require.NoError(t, err)

	// The image of the new pod has files of root too, and one of them is in the way.
	require.NoError(t, os.Remove(h+"/mine"))
	require.NoError(t, os.WriteFile(h+"/theirs/new", nil, 0o644))
	require.NoError(t, os.Remove(h+"/theirs/file"))
	require.NoError(t, os.Chmod(h+"/hidden", 0o700))
	theirs := described(t, h+"/theirs", h+"/hidden")
	_, restored, err := inProcess(t, exe, "restore", h, unprivileged, bytes.NewReader(stream))
	require.NoError(t, err)
	require.Equal(t, theirs, described(t, h+"/theirs", h+"/hidden"))
	require.NotZero(t, restored.Summary.LeftOut[archive.Foreign].Count)
	require.Equal(t, 1, restored.Summary.LeftOut[archive.Owner].Count, "of the file of root that was not in the way")
	require.Equal(t, 9, restored.Summary.Entries)
	for _, name := range []string{"mine", "replaced"} {
		text, err := os.ReadFile(filepath.Join(h, name))
		require.NoError(t, err)
		require.Equal(t, name, string(text))
		require.EqualValues(t, unprivileged, stat(t, filepath.Join(h, name)).Uid)
	}
}

func TestDirectoriesWithoutRightsAreReplaced(t *testing.T) {
	h := theirHome(t)
	put(t, h+"/a/file", "x")
	give(t, h+"/a", h+"/a/file")
	exe := program(t)
	stream, _, err := inProcess(t, exe, "write", h, unprivileged, nil)
	require.NoError(t, err)
	before := described(t, h)
	put(t, h+"/b/c/file", "x")
	put(t, h+"/b/d/file", "x")
	give(t, h+"/b", h+"/b/c", h+"/b/c/file", h+"/b/d", h+"/b/d/file")
	for name, mode := range map[string]os.FileMode{"b/c": 0, "b/d": 0o100, "b": 0o500, "a": 0, "": 0o500} {
		require.NoError(t, os.Chmod(filepath.Join(h, name), mode))
	}
	_, restored, err := inProcess(t, exe, "restore", h, unprivileged, bytes.NewReader(stream))
	require.NoError(t, err)
	require.Nil(t, restored.Summary.LeftOut)
	require.Equal(t, before, described(t, h))
}
