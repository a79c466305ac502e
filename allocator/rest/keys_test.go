package rest

import (
	"context"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
)

const (
	keyOne = "one-0123456789abcdef"
	keyTwo = "two-0123456789abcdef"
)

// keyDir writes a directory of keys the way that a Secret's volume looks.
func keyDir(t *testing.T, keys map[string]string) string {
	t.Helper()
	dir := t.TempDir()
	data := filepath.Join(dir, "..2030_01_01")
	require.NoError(t, os.Mkdir(data, 0o700))
	require.NoError(t, os.Symlink("..2030_01_01", filepath.Join(dir, "..data")))
	for name, key := range keys {
		require.NoError(t, os.WriteFile(filepath.Join(data, name), []byte(key), 0o600))
		require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)))
	}
	return dir
}

func keysIn(t *testing.T, keys map[string]string) *Keys {
	t.Helper()
	k, err := NewKeys(keyDir(t, keys), time.Now, zap.NewNop())
	require.NoError(t, err)
	return k
}

func callWith(h http.Handler, method, target string, headers http.Header) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	r := request(context.Background(), method, target, strings.NewReader(`{"templateID":"python"}`))
	for name, values := range headers {
		r.Header[name] = values
	}
	r.Header.Set("X-Request-Id", "req-1")
	h.ServeHTTP(w, r)
	return w
}

// Invariant: P6
func TestCallsWithoutAKeyAreRefused(t *testing.T) {
	f := &fake{}
	h := handlerWithKeys(t, f, keysIn(t, map[string]string{"one": keyOne + "\n", "two": keyTwo}))
	for _, headers := range []http.Header{
		nil,
		{"X-Api-Key": {""}},
		{"X-Api-Key": {"one"}},
		{"X-Api-Key": {keyOne[:19]}},
		{"X-Api-Key": {keyOne + " "}},
		{"X-Api-Key": {strings.ToUpper(keyOne)}},
		{"Authorization": {keyOne}},
		{"Authorization": {"Basic " + keyOne}},
		{"Authorization": {"Bearer"}},
		{"X-Api-Key": {"wrong", keyOne}}, // the first one counts
	} {
		for _, target := range append(calls, [2]string{"GET", "/nosuch"}, [2]string{"PUT", "/sandboxes/x"}) {
			w := callWith(h, target[0], target[1], headers)
			refusal(t, w, http.StatusUnauthorized, apierror.Unauthorized)
			require.Equal(t, "Bearer", w.Header().Get("WWW-Authenticate"))
			require.NotContains(t, w.Body.String(), keyOne)
		}
	}
	require.Empty(t, f.pool)
	require.Empty(t, f.released)

	for _, headers := range []http.Header{
		{"X-Api-Key": {keyOne}}, {"X-Api-Key": {keyTwo}}, {"Authorization": {"Bearer " + keyOne}}, {"Authorization": {"bearer  " + keyTwo}},
	} {
		require.Equal(t, http.StatusCreated, callWith(h, "POST", "/sandboxes", headers).Code, headers)
	}
}

func TestKeysAreReloaded(t *testing.T) {
	now := noon
	dir := keyDir(t, map[string]string{"one": keyOne})
	k, err := NewKeys(dir, func() time.Time { return now }, zap.NewNop())
	require.NoError(t, err)
	known := func(key string) bool { _, ok := k.Name(key); return ok }
	require.NoError(t, os.WriteFile(filepath.Join(dir, "..data", "one"), []byte(keyTwo), 0o600))
	require.True(t, known(keyOne), "not before its time")
	now = now.Add(keysEvery)
	require.False(t, known(keyOne))
	require.True(t, known(keyTwo))

	// What cannot be used changes nothing.
	for _, bad := range []func() error{
		func() error { return os.WriteFile(filepath.Join(dir, "..data", "one"), []byte("short"), 0o600) },
		func() error { return os.Remove(filepath.Join(dir, "..data", "one")) },
		func() error { return os.RemoveAll(dir) },
	} {
		require.NoError(t, bad())
		now = now.Add(keysEvery)
		require.True(t, known(keyTwo))
	}
}

func TestInvalidKeyFilesAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		keys map[string]string
		want string
	}{
		"none":            {nil, "put one file"},
		"too short":       {map[string]string{"good": keyOne, "bad": "0123456789abcde"}, "bad: must hold one key of 16"},
		"too long":        {map[string]string{"bad": strings.Repeat("x", 1025)}, "bad: "},
		"two lines":       {map[string]string{"bad": keyOne + "\n" + keyTwo}, "bad: "},
		"not ASCII":       {map[string]string{"bad": keyOne + "\u00e9"}, "bad: "},
		"twice":           {map[string]string{"a": keyOne, "b": keyOne}, "b: holds the same key as a"},
		"several at once": {map[string]string{"a": "x", "b": "y"}, "b: must hold"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := NewKeys(keyDir(t, c.keys), time.Now, zap.NewNop())
			require.ErrorContains(t, err, c.want)
			require.NotContains(t, err.Error(), keyOne)
		})
	}
	_, err := NewKeys(filepath.Join(t.TempDir(), "none"), time.Now, zap.NewNop())
	require.ErrorContains(t, err, "none")
}
