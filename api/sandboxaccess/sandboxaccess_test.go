package sandboxaccess_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

var noon = time.Unix(1_900_000_000, 0)

func key(t *testing.T, text string) *sandboxaccess.Key {
	t.Helper()
	k, err := sandboxaccess.NewKey([]byte(strings.Repeat(text, 32)))
	require.NoError(t, err)
	return k
}

func TestKeyIsReadWithoutWhiteSpace(t *testing.T) {
	file := filepath.Join(t.TempDir(), "key")
	require.NoError(t, os.WriteFile(file, []byte("\n "+strings.Repeat("k", 32)+"\n"), 0o600))
	k, err := sandboxaccess.ReadKey(file)
	require.NoError(t, err)
	require.Equal(t, key(t, "k").Token("abc"), k.Token("abc"))
	require.NoError(t, os.WriteFile(file, []byte(strings.Repeat("k", 31)+"\n"), 0o600))
	_, err = sandboxaccess.ReadKey(file)
	require.ErrorContains(t, err, file+": 31 bytes")
	_, err = sandboxaccess.ReadKey(file + "x")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestTokenBelongsToOneSandboxAndKey(t *testing.T) {
	k := key(t, "k")
	token, secret := k.Token("abc"), k.Secret("abc")
	require.Len(t, token, 64)
	require.Equal(t, token, k.Token("abc"), "every leader answers the same token")
	require.True(t, secret.IsToken(token))
	for name, wrong := range map[string]string{
		"none": "", "of another sandbox": k.Token("abd"), "of another key": key(t, "l").Token("abc"),
		"in upper case": strings.ToUpper(token), "too long": token + "0", "cut": token[:63],
		"the secret": string(secret[:]), "the agent's": secret.AgentToken("abc"),
	} {
		require.False(t, secret.IsToken(wrong), name)
	}
}

func TestAgentTokenIsNoToken(t *testing.T) {
	k := key(t, "k")
	secret := k.Secret("abc")
	require.True(t, secret.IsAgentToken("abc", secret.AgentToken("abc")))
	require.False(t, secret.IsAgentToken("abc", k.Token("abc")))
	require.False(t, secret.IsAgentToken("abc", k.Secret("abd").AgentToken("abd")))
	require.False(t, secret.IsAgentToken("abc", ""))
}

func TestLinkOpensOnePortUntilItExpires(t *testing.T) {
	s := key(t, "k").Secret("abc")
	link := s.Link("abc", 8080, noon.Add(500*time.Millisecond), "/a?b=c&d")
	open := func(s sandboxaccess.Secret, id string, port uint16, link string, now time.Time) error {
		path, expires, err := s.OpenLink(id, port, link, now)
		if err == nil {
			require.Equal(t, "/a?b=c&d", path)
			require.Equal(t, noon, expires)
		}
		return err
	}
	require.True(t, strings.HasPrefix(link, sandboxaccess.LinkPath+"?"))
	require.NoError(t, open(s, "abc", 8080, link, noon.Add(-time.Nanosecond)))
	for name, err := range map[string]error{
		"expired":            open(s, "abc", 8080, link, noon),
		"another port":       open(s, "abc", 8081, link, noon.Add(-time.Hour)),
		"another sandbox":    open(s, "abd", 8080, link, noon.Add(-time.Hour)),
		"another secret":     open(key(t, "l").Secret("abc"), "abc", 8080, link, noon.Add(-time.Hour)),
		"longer":             open(s, "abc", 8080, strings.Replace(link, "1900000000", "1900000001", 1), noon.Add(-time.Hour)),
		"other spelling":     open(s, "abc", 8080, strings.Replace(link, "1900000000", "01900000000x", 1), noon.Add(-time.Hour)),
		"no signature":       open(s, "abc", 8080, sandboxaccess.LinkPath+"?expires=1900000000", noon.Add(-time.Hour)),
		"two signatures":     open(s, "abc", 8080, link+"&signature=x", noon.Add(-time.Hour)),
		"two moments":        open(s, "abc", 8080, link+"&expires=1", noon.Add(-time.Hour)),
		"two paths":          open(s, "abc", 8080, link+"&to=/", noon.Add(-time.Hour)),
		"a malformed query":  open(s, "abc", 8080, link+"&%zz", noon.Add(-time.Hour)),
		"no query":           open(s, "abc", 8080, sandboxaccess.LinkPath, noon.Add(-time.Hour)),
		"the zero secret's":  open(sandboxaccess.Secret{}, "abc", 8080, sandboxaccess.Secret{}.Link("abc", 8080, noon, "/"), noon.Add(-time.Hour)),
		"a cookie's content": open(s, "abc", 8080, sandboxaccess.LinkPath+"?expires=1900000000&signature="+s.Cookie("abc", 8080, noon)[11:], noon.Add(-time.Hour)),
	} {
		require.ErrorIs(t, err, sandboxaccess.ErrDenied, name)
	}
}

func TestCookieOpensOnePortUntilItExpires(t *testing.T) {
	s := key(t, "k").Secret("abc")
	value, before := s.Cookie("abc", 8080, noon), noon.Add(-time.Hour)
	require.True(t, s.IsCookie("abc", 8080, value, before))
	require.False(t, s.IsCookie("abc", 8080, value, noon), "expired")
	require.False(t, s.IsCookie("abc", 8081, value, before), "another port")
	require.False(t, s.IsCookie("abd", 8080, value, before), "another sandbox")
	require.False(t, s.IsCookie("abc", 8080, strings.Replace(value, "19", "29", 1), before), "longer")
	require.False(t, s.IsCookie("abc", 8080, "", before))
	require.False(t, sandboxaccess.Secret{}.IsCookie("abc", 8080, sandboxaccess.Secret{}.Cookie("abc", 8080, noon), before))
	require.False(t, sandboxaccess.Secret{}.IsAgentToken("abc", sandboxaccess.Secret{}.AgentToken("abc")))
}

func TestRedirectionStaysOnTheHost(t *testing.T) {
	for _, good := range []string{"/", "/a/b?c=d#e", "/a//b", "/%5cevil.example", "/@evil.example", "/.//evil.example", "/?to=//x"} {
		require.NoError(t, sandboxaccess.CheckPath(good), good)
	}
	for _, bad := range []string{
		"", "a", "//evil.example", "///evil.example", `/\evil.example`, `\\evil.example`, "/a\\b", "https://evil.example/", "javascript:alert(1)",
		"/\t/evil.example", "\t//evil.example", "/\n/evil.example", "/a\r\nSet-Cookie: a=b", "/a b", "/é", " /", "/" + strings.Repeat("a", 2048),
	} {
		require.Error(t, sandboxaccess.CheckPath(bad), "%q", bad)
	}
	s := key(t, "k").Secret("abc")
	link := s.Link("abc", 8080, noon, "/")
	_, _, err := s.OpenLink("abc", 8080, link+"&to=//evil.example", noon.Add(-time.Hour))
	require.ErrorContains(t, err, "one slash")
}

func TestDerivedKeysDifferByLabelAndKey(t *testing.T) {
	k := key(t, "k")
	require.Equal(t, k.Derive("a"), key(t, "k").Derive("a"), "every replica derives the same")
	require.NotEqual(t, k.Derive("a"), k.Derive("b"))
	require.NotEqual(t, k.Derive("a"), key(t, "l").Derive("a"))
}
