package archive_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestSmoke(t *testing.T) {
	h := home(t)
	put(t, filepath.Join(h, "a/b"), "hello")
	require.NoError(t, os.Symlink("b", filepath.Join(h, "a/l")))
	before := described(t, h)
	stream, s := write(t, limits(h))
	t.Logf("%+v %d", s, len(stream))
	require.NoError(t, os.RemoveAll(h))
	s, err := restore(t, stream, limits(h))
	require.NoError(t, err)
	t.Logf("%+v", s)
	require.Equal(t, before, described(t, h))
}
