package soak

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/internal/wait"
)

// stoppers have sandboxes stopped and connect to them again, under all faults. Each has a pool of its own, and one
// sandbox at a time: the pods of a process node share the files of the machine, so a restore writes where the test can
// look.
const stoppers = 2

// stopper has one sandbox after the other stopped and woken some times, until ctx ends. What the sandbox had in its
// file when it was stopped must be there when it runs again.
func (g *ground) stopper(ctx context.Context, i int) {
	name := fmt.Sprintf("soak-stop-%d", i)
	random, file := g.Random(name), filepath.Join(g.stopDir(i), "file")
	for ctx.Err() == nil {
		var s openapi.Sandbox
		body := fmt.Sprintf(`{"templateID":%q,"timeout":3600,"waitTimeout":3}`, name)
		if g.repeat(ctx, random, http.MethodPost, "/sandboxes", body, &s, http.StatusCreated) == 0 {
			continue
		}
		for range 1 + random.IntN(3) {
			if !g.stopAndWake(ctx, random, s.SandboxID, file) {
				break
			}
			g.stopped.Add(1)
		}
		g.repeat(ctx, random, http.MethodDelete, "/sandboxes/"+s.SandboxID, "", nil,
			http.StatusNoContent, http.StatusNotFound)
	}
}

// stopAndWake reports whether a sandbox was stopped and runs again. Its pod may have been deleted meanwhile.
func (g *ground) stopAndWake(ctx context.Context, random *rand.Rand, id, file string) bool {
	content := fmt.Sprintf("%016x", random.Uint64())
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		g.Error(err)
		return false
	}
	path := "/sandboxes/" + id
	switch g.repeat(ctx, random, http.MethodPost, path+"/pause", `{"memory":false}`, nil,
		http.StatusNoContent, http.StatusNotFound, http.StatusConflict) {
	case http.StatusNoContent:
	case http.StatusConflict: // an earlier call whose answer was lost
		var s openapi.Sandbox
		if g.repeat(ctx, random, http.MethodGet, path, "", &s, http.StatusOK) == 0 || s.Phase != openapi.SandboxPhaseStopped {
			return false
		}
	default:
		return false
	}
	if err := os.WriteFile(file, []byte("of another sandbox"), 0o600); err != nil {
		g.Error(err)
	}
	code := g.repeat(ctx, random, http.MethodPost, path+"/connect", `{"timeout":3600}`, nil,
		http.StatusOK, http.StatusCreated, http.StatusNotFound)
	if code != http.StatusOK && code != http.StatusCreated {
		if code == http.StatusNotFound {
			g.Errorf("sandbox %s was stopped, and does not exist any more", id)
		}
		return false
	}
	if got, err := os.ReadFile(file); err != nil || string(got) != content {
		g.Errorf("sandbox %s was stopped with %q in its file, and woke with %q: %v", id, content, got, err)
	}
	return true
}

// repeat calls the API until it gives one of these answers, and reads that. It returns 0 when ctx has ended.
func (g *ground) repeat(ctx context.Context, random *rand.Rand, method, path, body string, into any, codes ...int) int {
	for ctx.Err() == nil {
		call, cancel := context.WithTimeout(ctx, time.Minute)
		a, err := harness.Do(call, g.HTTP, method, g.AnyAPI(random)+path, "", body)
		cancel()
		for _, code := range codes {
			if err == nil && a.Code == code {
				if into != nil {
					require.NoError(g, json.Unmarshal(a.Body, into))
				}
				return code
			}
		}
		wait.Sleep(ctx, 100*time.Millisecond+harness.Within(random, time.Second))
	}
	return 0
}

func (g *ground) stopDir(i int) string { return filepath.Join(g.stopDirs, fmt.Sprint(i)) }

// createStopPools creates the pools of the stoppers.
func (g *ground) createStopPools() {
	g.Helper()
	for i := range stoppers {
		require.NoError(g, os.MkdirAll(g.stopDir(i), 0o700))
		g.CreatePool(fmt.Sprintf("soak-stop-%d", i), 2, func(p *v1alpha1.SandboxPool) {
			p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
			p.Spec.Snapshot = &v1alpha1.PoolSnapshot{Paths: []string{g.stopDir(i)}}
			g.record(p)
		})
	}
}
