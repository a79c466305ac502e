package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/hollow"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// axe finds what is hard to use in a page.
var axe = devcluster.NPM("axe-core", "4.14.1")

// browseConsole plays a scenario of browser/console.cjs.
func browseConsole(t *testing.T, scenario, console string, variables ...string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, "node", filepath.Join("browser", "console.cjs"),
		installed(t, devcluster.NPM("playwright-core", playwrightVersion)), scenario, installed(t, axe))
	command.Env = append(append(os.Environ(), "CHROMIUM="+os.Getenv("BERTH_E2E_CHROMIUM"), "CONSOLE="+console,
		"SHOTS="+os.Getenv("BERTH_E2E_SHOTS")), variables...)
	out, err := command.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("%s", out)
}

// consoleKey stores a key for a person who signs in.
func (e *env) consoleKey(role access.Role) string {
	key, _ := e.storeKey(access.Caller{Key: fmt.Sprintf("%s-%s", e.pool, role), Team: e.pool, Role: role})
	return key
}

// Invariant: P26
func TestConsoleFromSignInToTheEndOfASandboxInChromium(t *testing.T) {
	e := withBrowser(t, 0)
	pool := e.otherPool("agents", 3, agentPool)
	key := e.consoleKey(access.Admin)
	home := t.TempDir()
	// The shell's own user enters it.
	require.NoError(t, errors.Join(os.Chmod(filepath.Dir(home), 0o755), os.Chmod(home, 0o777)))
	s := sandboxOf(t, e.as(key, http.MethodPost, "/sandboxes", fmt.Sprintf(
		`{"templateID":%q,"timeout":900,"envVars":{"HOME":%q},"metadata":{"job":"17"}}`, pool, home)))
	browseConsole(t, "tour", e.stack.Allocators[0].Console, "KEY="+key, "POOL="+pool, "WARM=4", "SANDBOX="+s.SandboxID,
		"DIR="+filepath.Join(home, "work"), "DOMAIN="+browserDomain, "ADDRESS="+e.stack.Gateways[0].Addr.Addr().String())
	require.False(t, e.live(s))
}

func TestTerminalGoesOnAfterItsGatewayRestartedInChromium(t *testing.T) {
	e := withBrowser(t, 0)
	key := e.consoleKey(access.Member)
	pool := e.otherPool("agents", 1, agentPool)
	s := sandboxOf(t, e.as(key, http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":900}`, pool)))
	envoy := e.stack.Gateways[0].Envoy
	acts := map[string]func(context.Context) error{
		"/kill":   func(context.Context) error { return envoy.Kill() },
		"/start":  envoy.Start,
		"/pause":  func(context.Context) error { return envoy.Pause() },
		"/resume": func(context.Context) error { return envoy.Resume() },
	}
	gateway := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := acts[r.URL.Path](r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}))
	defer gateway.Close()
	browseConsole(t, "cut", e.stack.Allocators[0].Console, "KEY="+key, "SANDBOX="+s.SandboxID, "GATEWAY="+gateway.URL,
		"DOMAIN="+browserDomain, "ADDRESS="+e.stack.Gateways[0].Addr.Addr().String())
}

// Invariant: P26
func TestPageOfASandboxDoesNothingWithTheConsoleInChromium(t *testing.T) {
	e := withBrowser(t, 2)
	key := e.consoleKey(access.Admin)
	mine := sandboxOf(t, e.as(key, http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":900}`, e.pool)))
	evil := e.claim()
	browseConsole(t, "stranger", e.stack.Allocators[0].Console, "KEY="+key, "SANDBOX="+mine.SandboxID,
		"EVIL="+e.urlOf(8080, evil.SandboxID), "DOMAIN="+browserDomain, "ADDRESS="+e.stack.Gateways[0].Addr.Addr().String())
	require.True(t, e.live(mine))
}

// A picture shows what happened in an hour, so the load lasts longer for one.
func TestConsoleChartsShowLoadOfTheHourInChromium(t *testing.T) {
	if os.Getenv("BERTH_E2E_CHROMIUM") == "" {
		t.Skip("needs Chromium: make browser-e2e")
	}
	lasts := 40 * time.Second
	if os.Getenv("BERTH_E2E_SHOTS") != "" {
		lasts = 12 * time.Minute
	}
	run := harness.NewRun(t, history.Settings{}, "")
	b := run.Start(harness.Options{
		Hollow: &hollow.Options{Nodes: 4, StartTime: func() time.Duration { return 3 * time.Second }},
		Stack:  stack.Options{BinDir: binDir, LeaseDuration: 15 * time.Second},
	})
	b.CreatePool("agents", 10, func(p *v1alpha1.SandboxPool) { p.Spec.MaxPods = new(int32(200)) })
	first := b.Stack.Allocators[0]
	harness.Eventually(t, time.Minute, func(ctx context.Context) error {
		p, err := b.ReadPool(ctx, "agents")
		if err == nil && p.Status.Warm < 10 {
			err = fmt.Errorf("%d pods are warm", p.Status.Warm)
		}
		return err
	})
	random, began := run.Random("load"), time.Now()
	end := began.Add(lasts)
	var calls sync.WaitGroup
	for ; time.Now().Before(end); time.Sleep(time.Second) {
		due := 0.5 + 0.4*math.Sin(time.Since(began).Minutes()) // claims in this second
		if random.IntN(100) == 0 {
			due = 20
		}
		for ; random.Float64() < due; due-- {
			life := `"timeout":90`
			if random.IntN(3) == 0 {
				life = `"idleTimeout":30`
			}
			released := time.Now().Add(lasts/40 + time.Duration(random.Int64N(int64(lasts/5))))
			calls.Go(func() {
				var s openapi.Sandbox
				a, err := do(t.Context(), http.DefaultClient, http.MethodPost, first.API+"/sandboxes", "",
					fmt.Sprintf(`{"templateID":"agents","waitTimeout":20,%s}`, life))
				if err == nil && a.code == http.StatusCreated {
					err = json.Unmarshal([]byte(a.body), &s)
				}
				if assert.NoError(t, err) && s.SandboxID != "" && released.Before(end) {
					time.Sleep(time.Until(released))
					_, err = do(t.Context(), http.DefaultClient, http.MethodDelete, first.API+"/sandboxes/"+s.SandboxID, "", "")
					assert.NoError(t, err)
				}
			})
		}
	}
	calls.Wait()
	browseConsole(t, "charts", first.Console, "KEY=", "DOMAIN=localhost", "ADDRESS=127.0.0.1")
}

// The pods have no processes. This API has no keys, and so no sign-in.
func TestListOfThousandsOfSandboxesIsBoundedInChromium(t *testing.T) {
	if os.Getenv("BERTH_E2E_CHROMIUM") == "" {
		t.Skip("needs Chromium: make browser-e2e")
	}
	const all, batch = 5000, 1000
	run := harness.NewRun(t, history.Settings{}, "")
	b := run.Start(harness.Options{
		Hollow: &hollow.Options{Nodes: 10}, Stack: stack.Options{BinDir: binDir, LeaseDuration: 15 * time.Second},
	})
	b.CreatePool("many", batch, func(p *v1alpha1.SandboxPool) { p.Spec.MaxPods = new(int32(all)) })
	first := b.Stack.Allocators[0]
	var last string
	for claimed := 0; claimed < all; {
		body := fmt.Sprintf(`{"pool":"many","count":%d,"atLeast":1,"timeout":3600,"waitTimeout":60,"metadata":{"job":"17"}}`,
			min(batch, all-claimed))
		var got openapi.Claims
		require.NoError(t, harness.Wait(t.Context(), func(ctx context.Context) error {
			a, err := do(ctx, http.DefaultClient, http.MethodPost, first.API+"/v1/claims", "", body)
			if err == nil && a.code != http.StatusCreated { // the pool is not known yet, or has no pod
				err = fmt.Errorf("%d %s", a.code, a.body)
			}
			if err != nil {
				return err
			}
			return json.Unmarshal([]byte(a.body), &got)
		}))
		claimed += len(got.Sandboxes)
		last = got.Sandboxes[0].SandboxID
	}
	browseConsole(t, "many", first.Console, "KEY=", "SANDBOX="+last, "DOMAIN=localhost", "ADDRESS=127.0.0.1")
}
