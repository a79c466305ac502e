package e2e

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// toolSDKs use commands, files, watches, terminals and git.
var toolSDKs = []stockSDK{
	{"2.51.0", devcluster.NPM, []string{"node", "tools.cjs"}},
	{"2.63.0", devcluster.PyPI, []string{"python3", "tools.py", "sync"}},
	{"2.63.0", devcluster.PyPI, []string{"python3", "tools.py", "async"}},
}

func TestStockSDKsUseTheAgent(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	e.useTools("", e.overHTTP())
}

// useTools runs a part of the programs with toolSDKs side by side, on a pool with agents. "" is all of them.
func (e *env) useTools(part string, environment []string) {
	e.t.Helper()
	e.eachTool(environment, func(t *testing.T, c stockSDK, dir string, environment []string) {
		c.run(t, dir, part, environment)
	})
}

// eachTool calls f for each of toolSDKs, with the directory of the SDK, side by side on a pool with agents.
func (e *env) eachTool(environment []string, f func(t *testing.T, c stockSDK, dir string, environment []string)) {
	e.t.Helper()
	pool := e.otherPool("tools", int32(len(toolSDKs)), func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, NewFiles: v1alpha1.NewFilesAnywhere}
	})
	e.t.Run("tools", func(t *testing.T) {
		for _, c := range toolSDKs {
			dir := c.installed(t)
			t.Run(strings.Join(c.program, " "), func(t *testing.T) {
				t.Parallel()
				place := t.TempDir()
				require.NoError(t, os.Chmod(filepath.Dir(place), 0o755)) // other users enter it
				f(t, c, dir, append(slices.Clip(environment), "POOL="+pool, "DIR="+place))
			})
		}
	})
}

// e2bCLI is E2B's command line.
var e2bCLI = devcluster.NPM("@e2b/cli", "2.19.0")

func TestCommandLineOfE2BUsesSandboxes(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("line", 1, agentPool)
	program := filepath.Join(installed(t, e2bCLI), "node_modules", ".bin", "e2b")
	environment := append(e.overHTTP(), "HOME="+t.TempDir())
	run := func(code int, args ...string) string {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		command := exec.CommandContext(ctx, program, args...)
		command.Env = environment
		out, err := command.CombinedOutput()
		require.Equal(t, code, command.ProcessState.ExitCode(), "%v: %v\n%s", args, err, out)
		return string(out)
	}
	require.Contains(t, run(0, "template", "list"), pool)
	id := strings.TrimSpace(run(0, "sandbox", "create", pool, "--detach"))
	require.Regexp(t, "^[a-z0-9]{20}$", id)
	require.Contains(t, run(0, "sandbox", "list"), id)
	require.Contains(t, run(0, "sandbox", "info", id), pool)
	require.Contains(t, run(3, "sandbox", "exec", id, "--", "echo out; exit 3"), "out\n")
	require.Contains(t, run(0, "sandbox", "metrics", id), "CPU")
	require.Contains(t, run(1, "sandbox", "logs", id), "read the log where the pod runs")
	run(0, "sandbox", "pause", id)
	require.Contains(t, run(0, "sandbox", "list", "--state", "paused"), id)
	run(0, "sandbox", "resume", id)
	require.Contains(t, run(0, "sandbox", "exec", id, "--", "echo again"), "again\n")
	require.Contains(t, run(1, "sandbox", "snapshot", "create", id), "no object store for snapshots")
	run(0, "sandbox", "kill", id)
	require.NotContains(t, run(0, "sandbox", "list"), id)
}

var loopsFlag = flag.Duration("e2e.loops", 0, "for how long the SDKs use the agent again and again; 0: not at all")

// What the SDKs have done leaves neither memory nor descriptors in the agent.
func TestAgentDoesNotGrowUnderTheSDKs(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	if *loopsFlag == 0 {
		t.Skip("takes minutes: -e2e.loops says how many")
	}
	// A busy machine must not end the allocators: this is about the agent.
	e := startLongAlone(t, 0, stack.Options{LeaseDuration: time.Minute})
	e.eachTool(e.overHTTP(), func(t *testing.T, c stockSDK, dir string, environment []string) {
		all := c.loop(t, dir, environment)
		require.Greater(t, len(all), 8, "too few rounds for a comparison")
		warm, end := peak(all[len(all)/4:len(all)/2]), peak(all[3*len(all)/4:])
		t.Logf("%d rounds: first %v, second quarter at most %v, last quarter at most %v", len(all), all[0], warm, end)
		require.Less(t, end.memory, warm.memory+warm.memory/4+8<<20, "the agent's memory grows")
		require.Less(t, end.descriptors, warm.descriptors+16, "the agent's descriptors grow")
	})
}

// loop uses one sandbox again and again. It returns what its agent held after each round.
func (c stockSDK) loop(t *testing.T, dir string, environment []string) (all []held) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), *loopsFlag+5*time.Minute)
	defer cancel()
	args := append([]string{filepath.Join("sdk", c.program[1]), dir}, c.program[2:]...)
	command := exec.CommandContext(ctx, c.program[0], append(args, "loop")...)
	command.Env = slices.Concat(environment, []string{fmt.Sprintf("SECONDS=%d", *loopsFlag/time.Second)})
	var errors strings.Builder
	command.Stderr = &errors
	out, err := command.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, command.Start())
	agent := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		switch what, pid, _ := strings.Cut(lines.Text(), " "); what {
		case "agent":
			agent = pid
		case "round":
			all = append(all, heldBy(t, agent))
		}
	}
	require.NoError(t, command.Wait(), "%s", &errors)
	return all
}

// held is what a process holds.
type held struct {
	memory      int // resident, in bytes
	descriptors int
}

func (h held) String() string {
	return fmt.Sprintf("%.1f MiB, %d descriptors", float64(h.memory)/(1<<20), h.descriptors)
}

func heldBy(t *testing.T, pid string) (h held) {
	t.Helper()
	open, err := os.ReadDir("/proc/" + pid + "/fd")
	require.NoError(t, err)
	status, err := os.ReadFile("/proc/" + pid + "/status")
	require.NoError(t, err)
	_, rest, _ := strings.Cut(string(status), "VmRSS:")
	kilobytes, err := strconv.Atoi(strings.Fields(rest)[0])
	require.NoError(t, err)
	return held{kilobytes << 10, len(open)}
}

// peak returns the most of each.
func peak(all []held) (h held) {
	for _, one := range all {
		h.memory, h.descriptors = max(h.memory, one.memory), max(h.descriptors, one.descriptors)
	}
	return h
}
