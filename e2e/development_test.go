package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A newcomer pastes what "berth-dev up" prints, and runs the programs in examples. No name of a sandbox needs to
// resolve.
func TestProgramsRunWithWhatUpPrints(t *testing.T) {
	d := startDevelopment(t)
	repository, err := filepath.Abs("..")
	require.NoError(t, err)
	python, err := pythonExample()
	require.NoError(t, err)
	environment := slices.Concat(d.exports,
		[]string{"POOL=demo", "JOB=17", "PYTHONPATH=" + installed(t, python), "PYTHONDONTWRITEBYTECODE=1"})
	run := func(dir string, program ...string) string { return d.run(environment, dir, program...) }
	examples := filepath.Join(repository, "examples")

	require.Regexp(t, `^sandbox of job-17 ends in 5m0s\n200 OK \{.*"path":"/hello"`,
		run(repository, "go", "run", "./examples/go"))
	require.Equal(t, "plan: GET /plan\nbuild: GET /build\ntest: GET /test\n",
		run(filepath.Join(examples, "python"), "python3", "agent.py"))
	require.Equal(t, "plan: POST /plan\nbuild: POST /build\ntest: POST /test\n",
		run(compiled(t, filepath.Join(examples, "typescript"), run), "node", "agent.js"))

	claim := regexp.MustCompile(`(?m)^  (\S+ claim demo) +#`).FindStringSubmatch(d.output)
	require.NotNil(t, claim, d.output)
	id := strings.TrimSpace(run(repository, "sh", "-c", claim[1]+" -o name"))
	require.Regexp(t, "^[a-z0-9]{20}$", id)
	again := regexp.MustCompile(`(?m)^  (\S+ curl )SANDBOXID(/hello)`).FindStringSubmatch(d.output)
	require.NotNil(t, again, d.output)
	require.Contains(t, run(repository, "sh", "-c", again[1]+id+again[2]), `"path":"/hello"`)
	release := regexp.MustCompile(`(?m)^  (curl -X DELETE \S+/)SANDBOXID$`).FindStringSubmatch(d.output)
	require.NotNil(t, release, d.output)
	run(repository, "sh", "-c", release[1]+id)
}

// The domain leads the SDKs to the API behind the gateway, which has no keys and sees that they are on this machine.
func TestDomainAloneLeadsSDKsToADevelopmentCluster(t *testing.T) {
	d := startDevelopment(t, "--tls", "--code-interpreter")
	resolve, err := filepath.Abs(filepath.Join("sdk", "resolve"))
	require.NoError(t, err)
	var environment []string
	for _, variable := range d.exports {
		if !strings.HasPrefix(variable, "E2B_API_URL=") && !strings.HasPrefix(variable, "E2B_SANDBOX_URL=") {
			environment = append(environment, variable)
		}
	}
	for _, c := range newSDKs {
		dir := c.installed(t)
		all := slices.Concat(environment, []string{
			"PYTHONPATH=" + dir + ":" + resolve, "PYTHONDONTWRITEBYTECODE=1",
			"NODE_OPTIONS=--require=" + filepath.Join(resolve, "resolve.cjs"), "NODE_PATH=" + filepath.Join(dir, "node_modules"),
		})
		program := []string{"python3", "-c", `
from e2b import Sandbox
s = Sandbox.create("demo", timeout=60)
print(s.commands.run("echo hello").stdout, end="")
print(s.is_running(), s.kill(), s.is_running())`}
		if c.program[0] == "node" {
			program = []string{"node", "-e", `
const { Sandbox } = require('e2b')
Sandbox.create('demo', { timeoutMs: 60_000 }).then(async (s) => {
  process.stdout.write((await s.commands.run('echo hello')).stdout)
  console.log(await s.isRunning(), await s.kill(), await s.isRunning())
}).catch((error) => { console.error(error); process.exit(1) })`}
		}
		require.Equal(t, "hello\ntrue true false\n",
			strings.ReplaceAll(strings.ToLower(d.run(all, ".", program...)), "\r", ""))
	}
	clients, err := pythonClients()
	require.NoError(t, err)
	all := slices.Concat(environment,
		[]string{"PYTHONPATH=" + installed(t, clients) + ":" + resolve, "PYTHONDONTWRITEBYTECODE=1"})
	require.Equal(t, "2\n", d.run(all, ".", "python3", "-c", `
from e2b_code_interpreter import Sandbox
with Sandbox.create() as s: print(s.run_code("1 + 1").text)`))
}

// development is a cluster that "berth-dev up" has started.
type development struct {
	t      *testing.T
	output string
	// exports are the environment of a shell into which its exports were pasted.
	exports []string
}

func startDevelopment(t *testing.T, flags ...string) *development {
	t.Helper()
	onThisMachine(t, "runs berth-dev")
	turn(t, owners)
	d := &development{t: t}
	name := fmt.Sprintf("e2e-%d-%s", os.Getpid(), strings.ToLower(t.Name()[4:10]))
	t.Cleanup(func() {
		out, err := exec.Command(filepath.Join(binDir, "berth-dev"), "down", "--name", name).CombinedOutput()
		if !t.Failed() {
			require.NoError(t, err, "%s", out)
		}
	})
	d.output = d.run(os.Environ(), ".",
		append([]string{filepath.Join(binDir, "berth-dev"), "up", "--name", name}, flags...)...)
	d.exports = os.Environ()
	for _, line := range regexp.MustCompile(`(?m)^  export (\S+)$`).FindAllStringSubmatch(d.output, -1) {
		d.exports = append(d.exports, line[1])
	}
	require.Greater(t, len(d.exports), len(os.Environ())+4, d.output)
	return d
}

func (d *development) run(environment []string, dir string, program ...string) string {
	d.t.Helper()
	ctx, cancel := context.WithTimeout(d.t.Context(), 3*time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, program[0], program[1:]...)
	command.Dir, command.Env = dir, environment
	out, err := command.Output()
	var said string
	if failed, ok := err.(*exec.ExitError); ok { //nolint:errorlint // of this command
		said = string(failed.Stderr)
	}
	require.NoError(d.t, err, "%s%s", out, said)
	return string(out)
}
