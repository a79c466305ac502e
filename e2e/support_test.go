package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/access"
)

// A secret is in every place from which the archive is made: in a Secret, in the environment and the annotations of a
// pool's pods, in the metadata of a claim, in an event, in a call with an unknown key, and in requests.
//
// Invariant: P6
func TestSupportArchiveHoldsNoSecret(t *testing.T) {
	e := start(t, 0)
	canary, word := access.NewKey(), "canary-of-the-archive"
	_, err := e.clients.Kubernetes.CoreV1().Secrets(e.site.namespace()).Create(t.Context(), &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: e.pool + "-canary"}, StringData: map[string]string{"password": word},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	pool := e.newPool(e.pool+"-canary", 1)
	template := &pool.Spec.Template
	template.Metadata.Annotations = map[string]string{"note": word}
	container := &template.Spec.Containers[0]
	container.Env = append(container.Env,
		corev1.EnvVar{Name: "KEY", Value: canary}, corev1.EnvVar{Name: "NOTE", Value: word})
	e.createPool(pool)
	var a answer
	e.eventually(func() error { // the API may not have seen the pool yet
		a = e.api(http.MethodPost, "/sandboxes",
			`{"templateID":"`+pool.Name+`","waitTimeout":60,"metadata":{"task":"`+canary+word+`"}}`)
		if a.code != http.StatusCreated {
			return errors.New(a.body)
		}
		return nil
	})
	var s struct{ SandboxID string }
	require.NoError(t, json.Unmarshal([]byte(a.body), &s))
	_, err = e.clients.Kubernetes.CoreV1().Events(e.site.namespace()).Create(t.Context(), &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: e.pool + "-canary"}, Type: "Warning",
		Message:        "it said token=" + word + " " + canary,
		InvolvedObject: corev1.ObjectReference{Namespace: e.site.namespace(), Kind: "Pod", Name: "p"},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	refused, err := e.callAPI(http.MethodGet, "/sandboxes/"+canary, "", canary)
	require.NoError(t, err)
	require.Equal(t, http.StatusUnauthorized, refused.code)
	client := e.clientOf(e.site.front, 0)
	for _, target := range []string{"http://gateway/?token=" + word + "&key=" + canary, "http://gateway/" + canary} {
		_, err = do(t.Context(), client, http.MethodGet, target, e.host(8080, s.SandboxID), "")
		require.NoError(t, err)
	}

	c := e.commandLine()
	var config string
	if shared == nil {
		config = e.cluster.Kubeconfig()
	} else {
		config = shared.kubeconfig
		lines := c.run(0, "logs", "--of", s.SandboxID, "--kubeconfig", config)
		require.Regexp(t, `berth-allocator-\S+ allocator .*createSandbox`, lines)
		require.Contains(t, c.run(2, "logs", "--of", s.SandboxID, s.SandboxID), "not both")
	}
	wanted := []string{"journal.json", "version.json", "kubernetes-version.json", "state/fences.json",
		"state/sessions.json", "state/last-active.json"}
	for _, kind := range []string{"sandboxpools", "sandboxes", "pods", "events", "secrets", "leases"} {
		wanted = append(wanted, path.Join("objects", e.site.namespace(), kind+".json"))
	}
	if shared != nil { // the pods that are ready before the archive is made
		for component, names := range map[string][]string{
			"allocator": {"log.txt", "metrics.txt"},
			"router": {"log.txt", "metrics.txt", "routes.json", "last-active.json",
				"envoy-config.json", "envoy-stats.txt", "envoy-info.json"},
			"envoy": {"log.txt"},
		} {
			of := "gateway"
			if component == "allocator" {
				of = component
			}
			pods, err := shared.ready(t.Context(), of)
			require.NoError(t, err)
			for _, p := range pods {
				for _, name := range names {
					wanted = append(wanted, path.Join("pods", p.Namespace, p.Name, component, name))
				}
			}
		}
	}
	file := filepath.Join(t.TempDir(), "archive.tar.gz")
	out := c.run(0, "support", "--kubeconfig", config, "-n", e.site.namespace(), "-o", file)
	require.Contains(t, out, "sources")
	files := unpack(t, file)
	for name, content := range files {
		require.NotContains(t, content, canary, name)
		require.NotContains(t, content, word, name)
		require.NotContains(t, content, e.site.key(), name)
		require.NotContains(t, content, s.SandboxID, name)
	}
	require.NotContains(t, files["index.json"], "error", "a source has failed")
	require.Contains(t, files[path.Join("objects", e.site.namespace(), "sandboxpools.json")], `"NOTE"`)
	for _, name := range wanted {
		require.NotEmpty(t, files[name], name)
	}
	short := s.SandboxID[:5] + "..."
	require.Contains(t, files["journal.json"], short)
	require.Contains(t, files["state/sandboxes.json"], short)
	require.Contains(t, c.run(2, "support", "--kubeconfig", config, "-o", file), "exist", "an archive is not replaced")
}

// unpack returns the files of an archive, by their paths in its directory.
func unpack(t *testing.T, file string) map[string]string {
	t.Helper()
	raw, err := os.ReadFile(file)
	require.NoError(t, err)
	packed, err := gzip.NewReader(bytes.NewReader(raw))
	require.NoError(t, err)
	files := map[string]string{}
	for archive := tar.NewReader(packed); ; {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		require.NoError(t, err)
		content, err := io.ReadAll(archive)
		require.NoError(t, err)
		_, name, _ := strings.Cut(h.Name, "/")
		require.NotContains(t, files, name)
		files[name] = string(content)
	}
}
