package accounts

import (
	"encoding/base64"
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

// files returns a root with these files in /etc.
func files(t *testing.T, etc map[string]string) string {
	t.Helper()
	root := t.TempDir()
	require.NoError(t, os.MkdirAll(filepath.Join(root, "etc"), 0o755))
	for name, text := range etc {
		require.NoError(t, os.WriteFile(filepath.Join(root, "etc", name), []byte(text), 0o644))
	}
	return root
}

func read(t *testing.T, root, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(root, name))
	require.NoError(t, err)
	return string(text)
}

func TestDefaultUserGetsTheFirstFreeNumber(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root may give a home directory to its user")
	}
	for name, c := range map[string]struct {
		etc                   map[string]string
		passwd, group, shadow string
	}{
		"no files": {nil, "user:x:1000:1000::/home/user:/bin/sh\n", "user:x:1000:\n", ""},
		"others": {map[string]string{"passwd": "root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh",
			"group": "root:x:0:\nmine:x:1001:\n", "shadow": "root:*:1::::::\n"},
			"root:x:0:0::/root:/bin/sh\nnode:x:1000:1000::/home/node:/bin/sh\nuser:x:1002:1002::/home/user:/bin/sh\n",
			"root:x:0:\nmine:x:1001:\nuser:x:1002:\n", "root:*:1::::::\nuser:*:20000:0:99999:7:::\n"},
	} {
		t.Run(name, func(t *testing.T) {
			root := files(t, c.etc)
			require.NoError(t, addDefault(root))
			require.Equal(t, c.passwd, read(t, root, "etc/passwd"))
			require.Equal(t, c.group, read(t, root, "etc/group"))
			if c.shadow != "" {
				require.Equal(t, c.shadow, read(t, root, "etc/shadow"))
			}
			require.DirExists(t, filepath.Join(root, "home/user"))
		})
	}
}

func TestAgentWithoutRightsActsAsItselfOnly(t *testing.T) {
	t.Parallel()
	d := &Directory{own: Account{Name: "12345", UID: 12345, Home: "/"}, fallback: "12345"}
	for _, name := range []string{"12345", DefaultName} {
		a, err := d.Lookup(name)
		require.NoError(t, err)
		require.Equal(t, d.own, a)
		require.Nil(t, a.Credential())
	}
	_, err := d.Lookup("root")
	require.ErrorAs(t, err, new(*UnknownError))
	require.EqualError(t, err, `this sandbox runs everything as its own user "12345": its agent may not act as "root"`)
	_, err = d.Lookup("no-such-user")
	require.ErrorAs(t, err, new(*UnknownError))
	require.EqualError(t, err, `the sandbox has no user "no-such-user"`)
}

func TestAgentWithRightsActsForEachAccount(t *testing.T) {
	t.Parallel()
	d := &Directory{own: Account{Name: "12345", UID: 12345}, fallback: "nobody", switches: true}
	a, err := d.Lookup("nobody")
	require.NoError(t, err)
	require.Equal(t, a.UID, a.Credential().Uid)
	require.Equal(t, a.GID, a.Credential().Gid)
	_, err = d.Lookup(DefaultName)
	require.ErrorAs(t, err, new(*UnknownError), "another user must not stand for it")
}

func header(values ...string) http.Header { return http.Header{"Authorization": values} }

func FuzzNamedUser(f *testing.F) {
	f.Add("Basic "+base64.StdEncoding.EncodeToString([]byte("user:")), "user")
	f.Add("Basic !", "a")
	f.Add("Bearer x", "root")
	f.Add("", "")
	f.Fuzz(func(t *testing.T, value, name string) {
		if got, err := Named(header(value)); err != nil {
			require.ErrorAs(t, err, new(*UnknownError))
			require.Empty(t, got)
		}
		r := http.Request{Header: http.Header{}}
		r.SetBasicAuth(name, "")
		got, err := Named(r.Header)
		require.NoError(t, err)
		want := name
		for i := range name { // the first colon ends the name
			if name[i] == ':' {
				want = name[:i]
				break
			}
		}
		require.Equal(t, want, got)
	})
}

func TestCallWithoutTheHeaderNamesNoUser(t *testing.T) {
	t.Parallel()
	name, err := Named(http.Header{})
	require.NoError(t, err)
	require.Empty(t, name)
}
