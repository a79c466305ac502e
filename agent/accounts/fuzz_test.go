package accounts

import (
	"encoding/base64"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func FuzzNamed(f *testing.F) {
	f.Add("Basic " + base64.StdEncoding.EncodeToString([]byte("user:")))
	f.Add("Basic dXNlcg==")
	f.Add("Bearer x")
	f.Add("basic  ")
	f.Fuzz(func(t *testing.T, value string) {
		name, err := Named(http.Header{"Authorization": {value}})
		if err != nil {
			require.True(t, errors.As(err, new(*UnknownError)), "%v", err)
			return
		}
		require.NotContains(t, name, ":")
		_, text, _ := strings.Cut(value, " ")
		raw, err := base64.StdEncoding.DecodeString(text)
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(string(raw), name+":"))
	})
}

// FuzzLookup looks up any name. It is the name of an account in /etc/passwd, or it is refused.
func FuzzLookup(f *testing.F) {
	for _, name := range []string{"root", "nobody", "user", "", "root:x", "0", "root\n", "\x00", "../root", "-"} {
		f.Add(name)
	}
	d, err := New(false)
	require.NoError(f, err)
	f.Fuzz(func(t *testing.T, name string) {
		a, err := d.Lookup(name)
		if err != nil {
			require.True(t, errors.As(err, new(*UnknownError)), "%v", err)
			return
		}
		require.True(t, a.Name == name || name == DefaultName, "%q is %q", name, a.Name)
	})
}

// FuzzAddDefault adds the default user to accounts of any text: nothing is lost, and its number was free.
func FuzzAddDefault(f *testing.F) {
	f.Add("root:x:0:0:root:/root:/bin/sh\n", "root:x:0:\n")
	f.Add("a:x:1000:1000::/:\nb:x: 1001 :1::/:", "c:x:1002:")
	f.Add("\n:::\nuser", "\x00::1000\r\n")
	if os.Getuid() != 0 {
		f.Skip("the home of another user needs root")
	}
	f.Fuzz(func(t *testing.T, passwd, group string) {
		root := t.TempDir()
		require.NoError(t, os.Mkdir(filepath.Join(root, "etc"), 0o755))
		write := func(name, text string) {
			require.NoError(t, os.WriteFile(filepath.Join(root, name), []byte(text), 0o644))
		}
		write("etc/passwd", passwd)
		write("etc/group", group)
		require.NoError(t, addDefault(root))
		for name, before := range map[string]string{"etc/passwd": passwd, "etc/group": group} {
			text, err := os.ReadFile(filepath.Join(root, name))
			require.NoError(t, err)
			added, ok := strings.CutPrefix(string(text), before)
			require.True(t, ok)
			field := strings.Split(strings.TrimSpace(added), ":")
			require.Equal(t, DefaultName, field[0])
			for line := range strings.Lines(before) {
				if f := strings.Split(line, ":"); len(f) > 2 {
					require.NotEqual(t, field[2], f[2])
				}
			}
		}
	})
}
