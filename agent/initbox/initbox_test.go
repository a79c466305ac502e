package initbox_test

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/crypto/nacl/box"

	"github.com/berth-sandbox/berth/agent/initbox"
)

func sealer(t testing.TB, private byte) *initbox.Sealer {
	t.Helper()
	s, err := initbox.NewSealer([32]byte{1: private})
	require.NoError(t, err)
	return s
}

func keys(t testing.TB, s *initbox.Sealer) *initbox.Keys {
	t.Helper()
	k, err := initbox.NewKeys(s.PublicKey())
	require.NoError(t, err)
	return k
}

func config() *initbox.Config {
	return &initbox.Config{
		SandboxID: "abc", AccessToken: "token", Public: true, DefaultUser: "user", Workdir: "/work",
		Envs: map[string]string{"A": "1=2", "EMPTY": ""}, Secrets: map[string]string{"KEY": "canary"},
		Files: []initbox.File{{Path: "/etc/x", Data: []byte{0, 255}, Mode: 0o600}, {Path: "a/b", Data: []byte{}}},
	}
}

func TestAgentOpensWhatAllocatorSealed(t *testing.T) {
	s := sealer(t, 1)
	k := keys(t, s)
	sealed, err := s.Seal(config(), k.PublicKey())
	require.NoError(t, err)
	got, err := k.Open(sealed)
	require.NoError(t, err)
	require.Equal(t, config(), got)
	again, err := s.Seal(config(), k.PublicKey())
	require.NoError(t, err)
	require.NotEqual(t, sealed, again, "a nonce is used once")
}

func TestBoxOpensForOneAgentOnly(t *testing.T) {
	s, other := sealer(t, 1), sealer(t, 2)
	k := keys(t, s)
	sealed, err := s.Seal(config(), k.PublicKey())
	require.NoError(t, err)
	_, err = keys(t, s).Open(sealed)
	require.ErrorIs(t, err, initbox.ErrSealed, "another agent, or the same pod after a restart")
	foreign, err := other.Seal(config(), k.PublicKey())
	require.NoError(t, err)
	_, err = k.Open(foreign)
	require.ErrorIs(t, err, initbox.ErrSealed, "not the allocator")
	for i := range sealed {
		changed := append([]byte(nil), sealed...)
		changed[i] ^= 1
		_, err := k.Open(changed)
		require.Error(t, err, i)
	}
	for i := range sealed {
		_, err := k.Open(sealed[:i])
		require.Error(t, err, i)
	}
	sealed[0]++
	_, err = k.Open(sealed)
	require.ErrorIs(t, err, initbox.ErrVersion)
	_, err = k.Open(make([]byte, initbox.MaxSealed+1))
	require.Error(t, err)
}

func TestWeakAllocatorKeyIsRefused(t *testing.T) {
	_, err := initbox.NewKeys(initbox.PublicKey{})
	require.ErrorContains(t, err, "low order")
}

// sealRaw seals what Seal would not.
func sealRaw(t *testing.T, text []byte) ([]byte, *initbox.Keys) {
	t.Helper()
	public, private, err := box.GenerateKey(rand.Reader)
	require.NoError(t, err)
	k, err := initbox.NewKeys(initbox.PublicKey(*public))
	require.NoError(t, err)
	nonce, peer := [24]byte{1}, [32]byte(k.PublicKey())
	return box.Seal(append([]byte{initbox.Version}, nonce[:]...), text, &nonce, &peer, private), k
}

func TestOpenRefusesUnknownFieldsWithoutValues(t *testing.T) {
	for text, want := range map[string]string{
		`{"sandboxID":"a","accessToken":"b","new":1}`:               "another version",
		`{"sandboxID":"a","accessToken":"b","envs":{"A":"\u0000"}}`: `envVars: the value of "A"`,
		`{"sandboxID":"a","accessToken":"b"} {"canary":1}`:          "after its end",
		`{"sandboxID":"a","accessToken":{"canary":1}}`:              "another version",
		`{}`: "must be set",
		``:   "another version",
	} {
		sealed, k := sealRaw(t, []byte(text))
		_, err := k.Open(sealed)
		require.ErrorContains(t, err, want, text)
		require.NotContains(t, err.Error(), "canary")
	}
}

func TestCheckNamesTheFieldWithoutItsValue(t *testing.T) {
	for want, change := range map[string]func(*initbox.Config){
		"sandboxID and accessToken: must be set":    func(c *initbox.Config) { c.AccessToken = "" },
		"workdir: must not have a zero byte":        func(c *initbox.Config) { c.Workdir = "/\x00" },
		"defaultUser: 1025 bytes, at most 1024":     func(c *initbox.Config) { c.DefaultUser = strings.Repeat("u", 1025) },
		"envVars: a name must not be empty":         func(c *initbox.Config) { c.Envs[""] = "canary" },
		`envVars: the name "A=B" must be UTF-8 and`: func(c *initbox.Config) { c.Envs["A=B"] = "canary" },
		`secrets: the value of "S" must not have`:   func(c *initbox.Config) { c.Secrets["S"] = "canary\x00" },
		`secrets: the value of "S" is not UTF-8`:    func(c *initbox.Config) { c.Secrets["S"] = "canary\xff" },
		"files[1].path: is not UTF-8":               func(c *initbox.Config) { c.Files[1].Path = "/a\xff" },
		"secrets: a name of 1025 bytes":             func(c *initbox.Config) { c.Secrets[strings.Repeat("n", 1025)] = "" },
		"files[1].path: must not be empty":          func(c *initbox.Config) { c.Files[1].Path = "" },
		"files[1].path: must not have a zero byte":  func(c *initbox.Config) { c.Files[1].Path = "/a\x00" },
		`files[1].path: "/a/" names a directory`:    func(c *initbox.Config) { c.Files[1].Path = "/a/" },
		`files[1].path: ".." names a directory`:     func(c *initbox.Config) { c.Files[1].Path = ".." },
		`files[1].path: "/etc//x" is there twice`:   func(c *initbox.Config) { c.Files[1].Path = "/etc//x" },
		"files[0].mode: 04755 has more than":        func(c *initbox.Config) { c.Files[0].Mode = 0o4755 },
		"files[1].path: 4097 bytes, at most 4096":   func(c *initbox.Config) { c.Files[1].Path = strings.Repeat("p", 4097) },
		"envVars, secrets and files: 262145 bytes":  func(c *initbox.Config) { fill(c, initbox.MaxValues+1) },
		"envVars, secrets and files: 1001 in all":   func(c *initbox.Config) { count(c, 1001) },
	} {
		c := config()
		change(c)
		err := c.Check()
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "canary")
		_, err = sealer(t, 1).Seal(c, keys(t, sealer(t, 1)).PublicKey())
		require.ErrorContains(t, err, want)
	}
}

// fill makes the values of c as large as this, in bytes. All of them escape to six bytes in JSON.
func fill(c *initbox.Config, size int) {
	c.Secrets, c.Files = nil, nil
	c.Envs = map[string]string{"A": strings.Repeat("\x01", size-1)}
}

func count(c *initbox.Config, n int) {
	c.Secrets, c.Files, c.Envs = nil, nil, map[string]string{}
	for i := range n {
		c.Envs[fmt.Sprint(i)] = ""
	}
}

func TestLargestConfigurationFitsTheBox(t *testing.T) {
	s := sealer(t, 1)
	k := keys(t, s)
	for name, grow := range map[string]func(*initbox.Config){
		"values": func(c *initbox.Config) { fill(c, initbox.MaxValues) },
		"number": func(c *initbox.Config) { count(c, initbox.MaxEntries) },
		"empty files": func(c *initbox.Config) {
			c.Envs, c.Secrets, c.Files = nil, nil, nil
			for i := range initbox.MaxEntries {
				c.Files = append(c.Files, initbox.File{Path: fmt.Sprint(i), Data: []byte{}, Mode: 0o777})
			}
		},
	} {
		c := config()
		grow(c)
		sealed, err := s.Seal(c, k.PublicKey())
		require.NoError(t, err, name)
		require.LessOrEqual(t, len(sealed), initbox.MaxSealed, name)
		got, err := k.Open(sealed)
		require.NoError(t, err, name)
		require.Equal(t, c, got, name)
	}
	var large *initbox.TooLargeError
	c := config()
	fill(c, initbox.MaxValues+1)
	require.ErrorAs(t, c.Check(), &large)
}

func TestHelloCarriesThePublicKey(t *testing.T) {
	want := initbox.Hello{
		Version: initbox.Version, PublicKey: sealer(t, 1).PublicKey(), Sandbox: initbox.SandboxDigest("abc"),
	}
	raw, err := json.Marshal(want)
	require.NoError(t, err)
	var got initbox.Hello
	require.NoError(t, json.Unmarshal(raw, &got))
	require.Equal(t, want, got)
	for _, bad := range []string{`{"publicKey":""}`, `{"publicKey":"AAAA"}`, `{"publicKey":"?"}`} {
		require.ErrorContains(t, json.Unmarshal([]byte(bad), &got), "not a public key", bad)
	}
}

func FuzzOpen(f *testing.F) {
	s := sealer(f, 1)
	k := keys(f, s)
	sealed, err := s.Seal(config(), k.PublicKey())
	require.NoError(f, err)
	f.Add(sealed)
	f.Add([]byte{})
	f.Add([]byte{initbox.Version})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := k.Open(b); err == nil && string(b) != string(sealed) {
			t.Fatal("a box opens that was never sealed")
		}
	})
}

// FuzzOpenContents fuzzes what is in a box: the allocator may have another version.
func FuzzOpenContents(f *testing.F) {
	raw, err := json.Marshal(config())
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"sandboxID":"a","accessToken":"b","files":[{"path":"/a","data":null}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		sealed, k := sealRaw(t, b)
		if c, err := k.Open(sealed); err == nil {
			require.NoError(t, c.Check())
			again, err := sealer(t, 1).Seal(c, k.PublicKey())
			require.NoError(t, err)
			require.LessOrEqual(t, len(again), initbox.MaxSealed)
		}
	})
}
