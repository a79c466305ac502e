package rest

import (
	"context"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
)

const (
	keyOne = "one-0123456789abcdef"
	keyTwo = "two-0123456789abcdef"
)

// knownKeys are callers by their keys. notLoaded, as a key, is one that cannot be judged yet.
type knownKeys map[string]access.Caller

const notLoaded = "not-loaded"

func (k knownKeys) Caller(key string) (access.Caller, error) {
	c, ok := k[key]
	switch {
	case key == notLoaded:
		return c, access.ErrNotLoaded
	case !ok:
		return c, access.ErrUnknownKey
	}
	return c, nil
}

func (knownKeys) Current() context.Context { return context.Background() }

func (k knownKeys) Callers() []access.Caller {
	return slices.SortedFunc(maps.Values(k), func(a, b access.Caller) int { return strings.Compare(a.Team+a.Key, b.Team+b.Key) })
}

// keysIn are the keys of admins, each the only one of a team of its name.
func keysIn(keys map[string]string) knownKeys {
	k := knownKeys{}
	for name, key := range keys {
		k[key] = access.Caller{Key: name, Team: name, Role: access.Admin}
	}
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
	h := handlerWithKeys(t, f, keysIn(map[string]string{"one": keyOne, "two": keyTwo}))
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

func TestUnloadedKeysAreNotUnknown(t *testing.T) {
	h := handlerWithKeys(t, &fake{}, knownKeys{})
	w := callWith(h, "POST", "/sandboxes", http.Header{"X-Api-Key": {notLoaded}})
	refusal(t, w, http.StatusServiceUnavailable, apierror.APINotReady)
	require.Equal(t, "1", w.Header().Get("Retry-After"))
}

// Invariant: P6
func TestWaitingClaimEndsWithItsKey(t *testing.T) {
	for _, c := range [][2]string{{"/sandboxes", `{"templateID":"python"}`}, {"/v1/claims", `{"pool":"python","count":2}`}} {
		for name, change := range keyChanges {
			t.Run(c[0]+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					keys := newRevocable()
					f := &fake{block: true, blockClaims: true}
					h := handlerWithKeys(t, f, keys)
					answered := make(chan *httptest.ResponseRecorder, 1)
					go func() {
						w := httptest.NewRecorder()
						r := request(context.Background(), "POST", c[0], strings.NewReader(c[1]))
						r.Header.Set("X-Request-Id", "req-1")
						r.Header.Set("X-API-Key", keyOne)
						h.ServeHTTP(w, r)
						answered <- w
					}()
					synctest.Wait()
					keys.change(false)
					synctest.Wait()
					require.Empty(t, answered, "another key has changed")
					began := time.Now()
					change(keys)
					require.Contains(t, refusal(t, <-answered, http.StatusUnauthorized, apierror.Unauthorized).Message, "revoked or changed")
					require.Equal(t, began, time.Now(), "it did not wait")
				})
			})
		}
	}
}
