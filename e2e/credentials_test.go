package e2e

import (
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/credentials"
)

// secretValues are secrets that are searched for.
type secretValues struct{ claim, changed, pool string }

func (c secretValues) all() []string { return []string{c.claim, c.changed, c.pool} }

// secureOrigin is a host that wants credentials over TLS. It returns the headers that it has got since the last call.
func (e *egressEnv) secureOrigin() (port string, headers func() []http.Header) {
	var mu sync.Mutex
	var seen []http.Header
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen = append(seen, r.Header)
		mu.Unlock()
		_, _ = io.WriteString(w, "secure origin")
	}))
	certificate, err := tls.LoadX509KeyPair(e.stack.Egress.Origin.CertFile, e.stack.Egress.Origin.KeyFile)
	require.NoError(e.t, err)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{certificate}}
	server.StartTLS()
	e.t.Cleanup(server.Close)
	at, err := url.Parse(server.URL)
	require.NoError(e.t, err)
	return at.Port(), func() []http.Header {
		mu.Lock()
		defer mu.Unlock()
		all := seen
		seen = nil
		return all
	}
}

// Secrets of a claim and of a pool reach the host that they are for, and are nowhere in clear: not in the sandbox, the
// cluster's objects, the journal, logs, metrics or answers.
//
// Invariant: P38
func TestSecretsReachTheirHostAndNothingElse(t *testing.T) {
	e := startEgress(t)
	secret := secretValues{claim: "canary-claim-7f3a", changed: "canary-changed-81b2", pool: "canary-pool-c4d9"}
	port, headers := e.secureOrigin()
	secrets := e.clients.Kubernetes.CoreV1().Secrets(e.site.namespace())
	value := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: "egress-canary"}, Type: credentials.SecretType,
		StringData: map[string]string{"key": secret.pool},
	}
	e.patchPool(e.pool, fmt.Sprintf(
		`{"spec":{"egress":{"ports":[%s,%s],"credentials":[`+
			`{"host":"api.origin.example","port":%s,"header":"X-Pool-Key","secret":{"name":%q,"key":"key"}}]}}}`,
		e.port, port, port, value.Name))
	rules := func(value string) string {
		return fmt.Sprintf(`{"allowOut":["*.origin.example"],"denyOut":["0.0.0.0/0"],`+
			`"rules":{"api.origin.example:%s":[{"transform":{"headers":{"Authorization":"Bearer %s"}}}]}}`, port, value)
	}
	s, ip := e.claimed(rules(secret.claim))
	get := func(host string) string { return e.call(s, ip, "get", host+":"+port) }
	e.eventually(func() error { // the change of the pool is on its way
		if out := get("api.origin.example"); !strings.Contains(out, "egress_no_credential") {
			return fmt.Errorf("without the Secret: %s", out)
		}
		return nil
	})
	require.Empty(t, headers(), "no request went without the header")
	_, err := secrets.Create(t.Context(), value, metav1.CreateOptions{})
	require.NoError(t, err)
	e.eventually(func() error {
		if out := get("api.origin.example"); !strings.Contains(out, "secure origin") {
			return fmt.Errorf("with the Secret: %s", out)
		}
		return nil
	})
	got := headers()
	require.Len(t, got, 1)
	require.Equal(t, []string{"Bearer " + secret.claim}, got[0]["Authorization"])
	require.Equal(t, []string{secret.pool}, got[0]["X-Pool-Key"])
	require.NotContains(t, get("other.origin.example"), "secure origin", "it speaks plain HTTP to other hosts")
	require.Empty(t, headers())

	answer := e.api(http.MethodPut, "/sandboxes/"+s.SandboxID+"/network", rules(secret.changed))
	require.Equal(t, http.StatusNoContent, answer.code)
	require.Contains(t, get("api.origin.example"), "secure origin")
	require.Equal(t, []string{"Bearer " + secret.changed}, headers()[0]["Authorization"])
	leader, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	require.NoError(t, leader.Kill())
	require.NoError(t, leader.Start(t.Context()))
	require.NoError(t, e.stack.Egress.Router.Kill())
	require.NoError(t, e.stack.Egress.Router.Start(t.Context()))
	e.eventually(func() error {
		if out := get("api.origin.example"); !strings.Contains(out, "secure origin") {
			return fmt.Errorf("after a restart of all: %s", out)
		}
		return nil
	})
	require.Equal(t, []string{"Bearer " + secret.changed}, headers()[0]["Authorization"], "the next leader has it")

	shown := e.api(http.MethodGet, "/sandboxes/"+s.SandboxID, "").body
	require.Contains(t, shown, `"name":"authorization"`)
	e.holdsNone(secret, shown, e.bash(s, "", "env; cat /proc/*/environ /proc/*/cmdline 2>/dev/null | tr '\\0' '\\n'").out)
	e.release(s.SandboxID)
	require.NoError(t, secrets.Delete(t.Context(), value.Name, metav1.DeleteOptions{}))
}

// holdsNone searches texts, all objects of the cluster but the one Secret, its etcd, and the files of all programs.
func (e *egressEnv) holdsNone(secret secretValues, texts ...string) {
	t := e.t
	t.Helper()
	absent := func(where string, raw []byte) {
		t.Helper()
		for _, word := range secret.all() {
			encode := base64.StdEncoding.EncodeToString
			for _, form := range []string{word, encode([]byte(word)), encode([]byte("Bearer " + word))} {
				require.False(t, bytes.Contains(raw, []byte(form)), "%s has %s", where, word)
			}
		}
	}
	for i, text := range texts {
		absent(fmt.Sprint("text ", i), []byte(text))
	}
	for _, resource := range []string{"sandboxes", "sandboxpools", "journalslots", "eventsegments"} {
		raw, err := e.clients.Berth.Get().Namespace(e.site.namespace()).Resource(resource).Do(t.Context()).Raw()
		require.NoError(t, err)
		absent(resource, raw)
	}
	pods, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	raw, err := json.Marshal(pods)
	require.NoError(t, err)
	absent("pods", raw)
	events, err := e.clients.Kubernetes.CoreV1().Events("").List(t.Context(), metav1.ListOptions{})
	require.NoError(t, err)
	raw, err = json.Marshal(events)
	require.NoError(t, err)
	absent("events", raw)
	for name, admin := range map[string]string{"egress router": e.stack.Egress.Admin} {
		for _, page := range []string{"/metrics", "/routes"} {
			response, err := http.Get(admin + page)
			require.NoError(t, err)
			raw, err := io.ReadAll(response.Body)
			require.NoError(t, err)
			require.NoError(t, response.Body.Close())
			absent(name+page, raw)
		}
	}
	require.NoError(t, filepath.WalkDir(e.cluster.Dir(), func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() || strings.Contains(path, "etcd") { // the Secret of the pool is in there
			return err
		}
		raw, err := os.ReadFile(path)
		if err == nil {
			absent(path, raw)
		}
		return nil
	}))
}
