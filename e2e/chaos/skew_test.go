package chaos

import (
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/internal/wait"
)

var skewFlag = flag.String("chaos.from", "",
	"commit of the previous minor version, for TestVersionsOfOneMinorServeTogether")

// Allocators and routers are replaced one by one by those of the previous minor version and back, twice, while callers
// live. It builds that version, for a minute or two, so only make test-long has it.
// Invariant: I5, I9
func TestVersionsOfOneMinorServeTogether(t *testing.T) {
	if *skewFlag == "" {
		t.Skip("without -chaos.from: make test-long has it")
	}
	old := buildCommit(t, *skewFlag)
	g := newGround(t, options{replicas: 2, lease: lease, bin: old})
	p := g.newPool("skewed", 30, nil)
	ctx, stop := context.WithCancel(g.ctx)
	defer stop()
	var living sync.WaitGroup
	lives := make([]int, 8)
	for i := range lives {
		living.Go(func() {
			for ; ctx.Err() == nil; lives[i]++ {
				p.life(fmt.Sprintf("skewed-%d-%d", i, lives[i]), i%2 == 0, func() {})
				wait.Sleep(ctx, 100*time.Millisecond)
			}
		})
	}
	for _, bin := range []string{binDir, old, binDir, old, binDir} {
		for _, a := range g.Stack.Allocators {
			g.Hold(a, true)
			g.replace(a.Server, bin)
			g.Hold(a, false)
			g.eventually(func() error { return proc.GetOK(g.ctx, http.DefaultClient, a.Admin+"/readyz") })
		}
		for _, gateway := range g.Stack.Gateways {
			g.replace(gateway.Router, bin)
		}
		time.Sleep(time.Second)
	}
	stop()
	living.Wait()
	t.Logf("lives of callers: %v", lives)
	g.judge()
}

// replace replaces a process by the program of the same name in another directory.
func (g *ground) replace(s *proc.Server, bin string) {
	g.Helper()
	g.Did(s.Name, "replace by "+bin)
	require.NoError(g, s.Stop(g.ctx, stopLimit))
	s.Argv[0] = filepath.Join(bin, filepath.Base(s.Argv[0]))
	require.NoError(g, s.Start(g.ctx))
}

// buildCommit builds the programs of a commit of this repository.
func buildCommit(t *testing.T, commit string) (bin string) {
	t.Helper()
	source := t.TempDir()
	bin = filepath.Join(source, "bin")
	run := func(dir, name string, args ...string) {
		t.Helper()
		c := exec.CommandContext(t.Context(), name, args...)
		c.Dir = dir
		out, err := c.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	archive := filepath.Join(source, "source.tar")
	run("../..", "git", "archive", "--output="+archive, commit)
	run(source, "tar", "-xf", archive)
	require.NoError(t, os.MkdirAll(bin, 0o755))
	run(source, "go", "build", "-o", bin+"/", "./cmd/allocator", "./cmd/extproc")
	return bin
}
