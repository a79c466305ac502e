package e2e

import (
	"context"
	rand2 "math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/rand"
)

// commandsOf returns the first block of commands below a heading of a page that has a text.
func commandsOf(t *testing.T, page, heading, text string) string {
	t.Helper()
	raw, err := os.ReadFile(filepath.Join("..", page))
	require.NoError(t, err)
	_, section, found := strings.Cut(string(raw), "\n"+heading+"\n")
	require.True(t, found, "%s has no %q", page, heading)
	for _, block := range regexp.MustCompile(`(?:(?m)^    .*\n)+`).FindAllString(section, -1) {
		if strings.Contains(block, text) {
			return block
		}
	}
	require.Fail(t, "no such block", "%s, %s: %s", page, heading, text)
	return ""
}

// freeNodePort returns a port of this machine that is free, and may be a NodePort.
func freeNodePort(t *testing.T) string {
	t.Helper()
	for {
		port := strconv.Itoa(30000 + rand2.IntN(2768))
		if l, err := net.Listen("tcp", "127.0.0.1:"+port); err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
}

// The commands are run as the pages have them. Only the port, the name of the cluster and the image of its node are the
// test's, and what "make" makes is there.
func TestInstallAndUninstallWorkAsThePagesSay(t *testing.T) {
	onACluster(t, "makes a kind cluster")
	if where, err := provider(); err != nil || where != onKind {
		t.Skip("makes a kind cluster")
	}
	t.Parallel() // it has a cluster of its own
	const made = "    make build image-archives"
	install := commandsOf(t, "README.md", "## Install", "kind create cluster")
	require.True(t, strings.HasPrefix(install, made), install)
	_, install, _ = strings.Cut(install, "\n")
	const file = "charts/berth/values-kind.yaml"
	require.Contains(t, install, file)
	values, err := os.ReadFile(filepath.Join("..", file))
	require.NoError(t, err)
	dir, port := t.TempDir(), freeNodePort(t)
	ownFile := filepath.Join(dir, "values-kind.yaml")
	require.NoError(t, os.WriteFile(ownFile, []byte(strings.ReplaceAll(string(values), "30080", port)), 0o600))
	install = strings.ReplaceAll(strings.ReplaceAll(install, "30080", port), file, ownFile)
	if image := os.Getenv(envNodeImage); image != "" {
		install = strings.Replace(install, "kind create cluster", "kind create cluster --image "+image, 1)
	}
	uninstall := commandsOf(t, "docs/operations.md", "## Uninstall", "helm uninstall")
	createCluster, again, found := strings.Cut(install, "    kubectl create namespace")
	require.True(t, found, install)
	again = "    kubectl create namespace" + again

	environment := append(os.Environ(),
		"KIND_CLUSTER_NAME=berth-pages-"+rand.String(5), "KUBECONFIG="+filepath.Join(dir, "kubeconfig"),
		"KUBECACHEDIR="+dir, "HELM_CACHE_HOME="+dir)
	run := func(limit time.Duration, commands string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(context.Background(), limit)
		defer cancel()
		shell := exec.CommandContext(ctx, "bash", "-euo", "pipefail", "-c", commands)
		shell.Dir, shell.Env, shell.WaitDelay = "..", environment, time.Second
		began := time.Now()
		out, err := shell.CombinedOutput()
		require.NoError(t, err, "%s\n%s", commands, out)
		t.Logf("%v:\n%s\n%s", time.Since(began).Round(time.Second), commands, out)
		return string(out)
	}
	t.Cleanup(func() { run(2*time.Minute, "kind delete cluster") })
	const answer = `"pod":"own-image-`
	run(3*time.Minute, createCluster)
	// The namespace of a cluster that has just begun has no account yet.
	run(2*time.Minute, "kubectl -n kube-system wait deploy/coredns --for=condition=Available --timeout=2m")
	require.Contains(t, run(5*time.Minute, again), answer)
	// A sandbox with an idempotency key has just ended.
	key := strings.ReplaceAll(lineOf(t, again, "KEY="), "name first", "name second")
	run(time.Minute, key+"\nAPI=http://api.sandbox.localhost:"+port+`/sandboxes
ID=$(curl -sS -H "X-API-Key: $KEY" -H "Idempotency-Key: k" -d '{"templateID":"own-image","waitTimeout":30}' $API |
  grep -o '"sandboxID":"[^"]*' | cut -d'"' -f4)
curl -sS -X DELETE -H "X-API-Key: $KEY" $API/$ID`)
	run(3*time.Minute, uninstall)
	require.Contains(t, run(5*time.Minute, again), answer, "installed again")
}

// lineOf returns the line of a block of commands that has a text.
func lineOf(t *testing.T, block, text string) string {
	t.Helper()
	for line := range strings.Lines(block) {
		if strings.Contains(line, text) {
			return line
		}
	}
	require.Fail(t, "no such line", "%s in %s", text, block)
	return ""
}
