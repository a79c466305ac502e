package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// browserDomain is a domain that dev servers do not know, unlike those below localhost.
const browserDomain = "sandbox.test"

// withBrowser returns a Berth with TLS for a test with Chromium. "make browser-e2e" installs
// Chromium and runs these tests.
func withBrowser(t *testing.T, warm int32) *env {
	t.Helper()
	if os.Getenv("BERTH_E2E_CHROMIUM") == "" {
		t.Skip("needs Chromium: make browser-e2e")
	}
	return startAlone(t, warm, stack.Options{TLS: true, Domain: browserDomain})
}

// browse plays a scenario of browser/browser.cjs.
func (e *env) browse(scenario string, variables ...string) {
	e.t.Helper()
	dir := installed(e.t, devcluster.NPM("playwright-core", playwrightVersion))
	ctx, cancel := context.WithTimeout(e.t.Context(), 2*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "node", filepath.Join("browser", "browser.cjs"), dir, scenario)
	command.Env = append(append(os.Environ(), "CHROMIUM="+os.Getenv("BERTH_E2E_CHROMIUM"), "DOMAIN="+browserDomain,
		"ADDRESS="+e.stack.Gateways[0].Addr.Addr().String()), variables...)
	out, err := command.CombinedOutput()
	require.NoError(e.t, err, "%s", out)
}

// urlOf is the address of a port of a sandbox.
func (e *env) urlOf(port int, id string) string {
	return fmt.Sprintf("https://%d-%s.%s:%d/", port, id, browserDomain, e.stack.Gateways[0].Addr.Port())
}

func TestDevServerReloadsInChromiumThroughEnvoy(t *testing.T) {
	const port = 5173
	e := withBrowser(t, 0)
	vite := installed(t, devcluster.NPM("vite", viteVersion))
	project := t.TempDir()
	require.NoError(t, os.CopyFS(project, os.DirFS(filepath.Join("..", "examples", "vite"))))
	require.NoError(t, os.Symlink(filepath.Join(vite, "node_modules"), filepath.Join(project, "node_modules")))

	pool := e.newPool(e.pool+"-vite", 2)
	pool.Spec.DefaultPort = port
	container := &pool.Spec.Template.Spec.Containers[0]
	container.Command = []string{"sh", "-c", fmt.Sprintf(
		`cd %s && exec node node_modules/vite/bin/vite.js --port %d --strictPort --host "$POD_IP"`, project, port)}
	container.Args = nil
	container.ReadinessProbe.HTTPGet = &corev1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(port)}
	e.createPool(pool)

	plain, _ := e.claimOf(pool.Name, `"timeout":300`)
	e.browse("refused", "URL="+e.urlOf(port, plain.SandboxID))
	// It is private, so that the page, its modules and its WebSocket need the cookie.
	masked, _ := e.claimOf(pool.Name, `"timeout":300,"access":"token","network":{"maskRequestHost":"localhost:${PORT}"}`)
	e.browse("reload", "URL="+e.linkTo(port, masked.SandboxID, "/"), "FILE="+filepath.Join(project, "greeting.js"))
}

func TestLinkOpensAPrivateSandboxInChromium(t *testing.T) {
	e := withBrowser(t, 1)
	s, _ := e.claimOf(e.pool, `"timeout":300,"access":"token"`)
	e.browse("link", "URL="+e.urlOf(8080, s.SandboxID), "OTHER_PORT="+e.urlOf(8081, s.SandboxID),
		"LINK="+e.linkTo(8080, s.SandboxID, "/hello"))
}

// linkTo makes a link that opens a path of a port.
func (e *env) linkTo(port int, id, path string) string {
	e.t.Helper()
	a := e.api(http.MethodPost, "/v1/sandboxes/"+id+"/links", fmt.Sprintf(`{"port":%d,"path":%q}`, port, path))
	require.Equal(e.t, http.StatusCreated, a.code, a.body)
	var link openapi.Link
	require.NoError(e.t, json.Unmarshal([]byte(a.body), &link))
	return link.URL
}

// Invariant: P15
func TestSiblingUsesNoCookieOfAPersonInChromium(t *testing.T) {
	e := withBrowser(t, 3)
	sibling := e.claim()
	mine, _ := e.claimOf(e.pool, `"timeout":300,"access":"token"`)
	masked, _ := e.claimOf(e.pool, `"timeout":300,"access":"token","network":{"maskRequestHost":"localhost:${PORT}"}`)
	links, err := json.Marshal(map[string]string{
		"MINE": e.linkTo(8080, mine.SandboxID, "/"), "API": e.linkTo(8081, mine.SandboxID, "/"),
		"MASKED": e.linkTo(8080, masked.SandboxID, "/"),
	})
	require.NoError(t, err)
	e.browse("siblings", "LINKS="+string(links), "SIBLING="+e.urlOf(8080, sibling.SandboxID),
		"MINE="+e.urlOf(8080, mine.SandboxID), "API="+e.urlOf(8081, mine.SandboxID),
		"MASKED="+e.urlOf(8080, masked.SandboxID))
}

// Invariant: P15
func TestStockSDKWorksOnAPageInChromium(t *testing.T) {
	e := withBrowser(t, 0)
	pool := e.otherPool("page", 1, func(s *v1alpha1.SandboxPoolSpec) { s.Agent = &v1alpha1.PoolAgent{Enabled: true} })
	e.browse("sdk", "VITE="+installed(t, devcluster.NPM("vite", viteVersion)), "SDK="+toolSDKs[0].installed(t),
		"POOL="+pool, "DIR="+t.TempDir(), "KEY="+e.site.key(),
		fmt.Sprintf("E2B_DOMAIN=%s:%d", browserDomain, e.stack.Gateways[0].Addr.Port()))
}

func TestPagesSpeakToPeopleInChromium(t *testing.T) {
	e := withBrowser(t, 2)
	live, ended := e.claim(), e.claim()
	require.Equal(t, http.StatusNoContent, e.api(http.MethodDelete, "/sandboxes/"+ended.SandboxID, "").code)
	domain := fmt.Sprintf("https://%s:%d/", browserDomain, e.stack.Gateways[0].Addr.Port())
	api := fmt.Sprintf("https://api.%s:%d/", browserDomain, e.stack.Gateways[0].Addr.Port())
	pages, err := json.Marshal([][]any{
		{domain, http.StatusOK, "Berth"},
		{api, http.StatusOK, "Berth"},
		{e.urlOf(8080, "abcdefghijklmnopqrst"), http.StatusNotFound, "no such sandbox"},
		{e.urlOf(8080, ended.SandboxID), http.StatusGone, "has ended"},
		{e.urlOf(9, live.SandboxID), http.StatusBadGateway, "listen"},
	})
	require.NoError(t, err)
	e.browse("pages", "PAGES="+string(pages))
}
