package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/apierror"
)

// newKey stores a key for the test, of a team of its own. It returns the key and what takes it away.
func (e *env) newKey(team string, role access.Role) (key string, revoke func()) {
	e.t.Helper()
	name := fmt.Sprintf("%s-%s-%s", e.pool, team, role)
	return e.storeKey(access.Caller{Key: name, Team: e.pool + team, Role: role})
}

// storeKey stores a key of a caller.
func (e *env) storeKey(caller access.Caller) (key string, revoke func()) {
	e.t.Helper()
	namespace := keysNamespace
	if e.processes != nil {
		namespace = e.site.namespace()
	}
	key = access.NewKey()
	require.NoError(e.t, createKey(e.t.Context(), e.clients, namespace, key, caller))
	secrets := e.clients.Kubernetes.CoreV1().Secrets(namespace)
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		_ = secrets.Delete(ctx, caller.Key, metav1.DeleteOptions{}) // may be revoked
	})
	return key, func() { require.NoError(e.t, secrets.Delete(e.t.Context(), caller.Key, metav1.DeleteOptions{})) }
}

// as makes a call with a key, once every replica that answers knows it.
func (e *env) as(key, method, path, body string) (a answer) {
	e.t.Helper()
	e.eventually(func() (err error) {
		a, err = e.callAPI(method, path, body, key)
		if err == nil && (a.code == http.StatusUnauthorized || a.code == http.StatusServiceUnavailable) {
			err = fmt.Errorf("%d %s", a.code, a.body)
		}
		return err
	})
	return a
}

func TestKeysOfTeamsAreApartUntilRevoked(t *testing.T) {
	e := start(t, 1)
	e.waitWarm(1)
	member, revoke := e.newKey("a", access.Member)
	reader, _ := e.newKey("a", access.ReadOnly)
	stranger, _ := e.newKey("b", access.Member)
	s := sandboxOf(t, e.as(member, http.MethodPost, "/sandboxes", `{"templateID":"`+e.pool+`"}`))
	for _, path := range []string{"/sandboxes", "/v1/last-active"} {
		require.Contains(t, e.as(reader, http.MethodGet, path, "").body, s.SandboxID)
		require.NotContains(t, e.as(stranger, http.MethodGet, path, "").body, s.SandboxID)
	}
	const never = "zzzzzzzzzzzzzzzzzzzz"
	theirs := e.as(stranger, http.MethodDelete, "/sandboxes/"+s.SandboxID, "")
	unknown := e.as(stranger, http.MethodDelete, "/sandboxes/"+never, "")
	require.Equal(t, http.StatusNotFound, theirs.code)
	require.Equal(t, strings.ReplaceAll(unknown.body, never, s.SandboxID), theirs.body)
	require.Equal(t, apierror.Forbidden, e.as(reader, http.MethodDelete, "/sandboxes/"+s.SandboxID, "").refusal(t).Reason)
	live := e.as(reader, http.MethodGet, "/sandboxes/"+s.SandboxID, "")
	require.Equal(t, http.StatusOK, live.code, "it was not released")

	revoke()
	e.eventually(func() error {
		a, err := e.callAPI(http.MethodGet, "/sandboxes/"+s.SandboxID, "", member)
		if err == nil && a.code != http.StatusUnauthorized {
			err = fmt.Errorf("%d with a revoked key", a.code)
		}
		return err
	})
	byAdmin := e.api(http.MethodDelete, "/sandboxes/"+s.SandboxID, "")
	require.Equal(t, http.StatusNoContent, byAdmin.code)
	if e.processes == nil {
		return
	}
	// The audit has the claim and the refused release, and no key.
	var all strings.Builder
	for _, a := range e.stack.Allocators {
		raw, err := os.ReadFile(a.Log)
		require.NoError(t, err)
		all.Write(raw)
	}
	for _, want := range []string{
		`"logger":"audit","msg":"call","key":"` + e.pool + `-a-member","team":"` + e.pool + `a","role":"member",` +
			`"operation":"createSandbox","status":201`,
		`"logger":"audit","msg":"call refused","key":"` + e.pool + `-a-read-only"`,
	} {
		require.Contains(t, all.String(), want)
	}
	for _, key := range []string{member, reader, stranger, processesKey} {
		require.False(t, strings.Contains(all.String(), key), "the log shows a key")
	}
}
