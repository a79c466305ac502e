package files

import (
	"path"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/accounts"
)

func TestPathsBeginAtHomeOrWorkdir(t *testing.T) {
	long := strings.Repeat("a", maxName)
	for _, c := range []struct {
		text, dir, want, wrong string
	}{
		{text: "", want: "/home/user"},
		{text: "", dir: "/app", want: "/app"},
		{text: "a/b", want: "/home/user/a/b"},
		{text: "a/b", dir: "/app", want: "/app/a/b"},
		{text: "./a//b/", want: "/home/user/a/b"},
		{text: "../x", want: "/home/x"},
		{text: "../../../../etc", want: "/etc"},
		{text: "/etc/../tmp/./a", want: "/tmp/a"},
		{text: "/", want: "/"},
		{text: "~", dir: "/app", want: "/home/user"},
		{text: "~/a", dir: "/app", want: "/home/user/a"},
		{text: "a~", want: "/home/user/a~"},
		{text: "x", dir: "relative", want: "/relative/x"},
		{text: "~root/a", wrong: "name user \"root\" in the call"},
		{text: "a\x00b", wrong: "NUL"},
		{text: "/" + long, want: "/" + long},
		{text: "/" + long + "a", wrong: "256 bytes"},
		{text: strings.Repeat("/a", 2050), wrong: "4100 bytes"},
		{text: "/" + strings.Repeat("b/../", 2000) + "x", want: "/x"},
	} {
		got, err := resolve(c.text, &accounts.Account{Home: "/home/user"}, c.dir)
		if c.wrong != "" {
			require.ErrorContains(t, err, c.wrong)
			require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
			continue
		}
		require.NoError(t, err)
		require.Equal(t, c.want, got, "%q in %q", c.text, c.dir)
	}
}

func FuzzResolve(f *testing.F) {
	for _, text := range []string{"", "~", "~/x", "~u", "a/../..", "/a//b", "\x00", "../etc", strings.Repeat("a", 300)} {
		f.Add(text, "/home/user", "")
		f.Add(text, "home", "work")
	}
	f.Fuzz(func(t *testing.T, text, home, dir string) {
		got, err := resolve(text, &accounts.Account{Home: home}, dir)
		if err != nil {
			require.Equal(t, connect.CodeInvalidArgument, connect.CodeOf(err))
			return
		}
		require.True(t, path.IsAbs(got))
		require.Equal(t, path.Clean(got), got)
		require.LessOrEqual(t, len(got), maxPath)
		again, err := resolve(got, &accounts.Account{Home: "/other"}, "/elsewhere")
		require.NoError(t, err)
		require.Equal(t, got, again, "a resolved path means itself")
	})
}
