package bench

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
)

// BenchmarkStop: what it costs to stop a sandbox that is asleep ("stop"), and to wake it in another pod ("wake"), with
// a file of 100 MB ("large"), with 5,000 small files ("many"), and with one small file ("small"), which is the control.
// The three take turns. The object store is a directory, so the upload is a copy on this machine. A wake ends with the
// answer to the call: the files are restored then, and the sandbox runs.
func BenchmarkStop(b *testing.B) {
	const rounds = 5
	bin, store := b.TempDir(), b.TempDir()
	require.NoError(b, stack.Build(b.Context(), bin, false, "allocator", "extproc", "demo-sandbox", "agent"))
	berth := harness.NewRun(b, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{bin}},
		Stack: stack.Options{BinDir: bin, LeaseDuration: 15 * time.Second,
			AllocatorArgs: []string{"--snapshots=file://" + store}},
	})
	first := berth.Stack.Allocators[0]
	g := &ground{B: b, berth: berth, http: &http.Client{Timeout: time.Minute}, api: first.API, admin: first.Admin}
	fill := map[string]func(dir string){
		"small": func(dir string) { put(b, filepath.Join(dir, "notes.txt"), []byte("notes\n")) },
		"large": func(dir string) { put(b, filepath.Join(dir, "large"), text(100<<20)) },
		"many": func(dir string) {
			for i := range 5000 {
				name := filepath.Join(dir, fmt.Sprintf("d%d/f%d", i/50, i))
				put(b, name, bytes.Repeat([]byte(name+"\n"), 1+i%60))
			}
		},
	}
	kinds := []string{"small", "large", "many"}
	dirs := map[string]string{}
	for _, kind := range kinds {
		dirs[kind] = filepath.Join(b.TempDir(), kind)
		berth.CreatePool(kind, 2, func(p *v1alpha1.SandboxPool) {
			p.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
			p.Spec.Snapshot = &v1alpha1.PoolSnapshot{Paths: []string{dirs[kind]}}
		})
		g.full(kind, 2)
		fill[kind](dirs[kind])
	}
	took := map[string][]time.Duration{}
	timed := func(what string, code int, path, body string) {
		began := time.Now()
		got, answer, err := g.call(http.MethodPost, path, body)
		require.NoError(b, err)
		require.Equal(b, code, got, string(answer))
		took[what] = append(took[what], time.Since(began))
	}
	b.ResetTimer()
	for range b.N {
		for range rounds {
			for _, kind := range kinds {
				id, err := g.claim(kind)
				require.NoError(b, err)
				path := "/sandboxes/" + id
				timed("sleep_"+kind, http.StatusNoContent, path+"/pause", "{}")
				timed("stop_"+kind, http.StatusNoContent, path+"/pause", `{"memory":false}`)
				require.NoError(b, os.RemoveAll(dirs[kind])) // sandboxes here share the files of this machine
				timed("wake_"+kind, http.StatusCreated, path+"/connect", `{"timeout":600}`)
				require.NoError(b, g.release(id))
				require.Eventually(b, func() bool {
					pool, err := berth.ReadPool(b.Context(), kind)
					return err == nil && pool.Status.Warm == 2
				}, time.Minute, 200*time.Millisecond)
			}
		}
	}
	b.StopTimer()
	for _, kind := range kinds {
		for _, what := range []string{"stop_" + kind, "wake_" + kind} {
			b.ReportMetric(ms(quantile(took[what], 0.5)), what+"_p50_ms")
			b.ReportMetric(ms(quantile(took[what], 1)), what+"_most_ms")
		}
	}
}

func put(b *testing.B, file string, contents []byte) {
	b.Helper()
	require.NoError(b, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(b, os.WriteFile(file, contents, 0o644))
}

// text is n bytes that compress about as source code does.
func text(n int) []byte {
	r := rand.New(rand.NewPCG(1, 2))
	words := make([][]byte, 2000)
	for i := range words {
		words[i] = fmt.Appendf(nil, "%x ", r.Uint32N(1<<(4+i%28)))
	}
	all := make([]byte, 0, n+16)
	for len(all) < n {
		all = append(all, words[r.IntN(1+r.IntN(len(words)))]...)
	}
	return all[:n]
}
