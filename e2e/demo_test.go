package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster"
)

// demoRun is a "berth-dev demo" under way.
type demoRun struct {
	cmd *exec.Cmd
	// dir is its temporary directory. Every process that it starts has dir in its
	// command line or works in it.
	dir    string
	lines  *bufio.Scanner
	output bytes.Buffer
}

func startDemo(t *testing.T, args ...string) *demoRun {
	t.Helper()
	onThisMachine(t, "runs berth-dev")
	turn(t, owners)
	dir, err := os.MkdirTemp("", "bd-") // short: unix sockets lie in it
	require.NoError(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	d := &demoRun{cmd: exec.Command(filepath.Join(binDir, "berth-dev"), append([]string{"demo"}, args...)...), dir: dir}
	d.cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	d.cmd.Stderr = os.Stderr
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := d.cmd.StdoutPipe()
	require.NoError(t, err)
	d.lines = bufio.NewScanner(io.TeeReader(out, &d.output))
	require.NoError(t, d.cmd.Start())
	return d
}

// until reads the output up to a line that contains text.
func (d *demoRun) until(t *testing.T, text string) {
	t.Helper()
	for d.lines.Scan() {
		if strings.Contains(d.lines.Text(), text) {
			return
		}
	}
	t.Fatalf("the demo ended before it said %q:\n%s", text, d.output.String())
}

// wait reads the rest of the output and returns how the demo ended.
func (d *demoRun) wait() error {
	for d.lines.Scan() {
		continue // keeps the pipe from filling up
	}
	return d.cmd.Wait()
}

// left lists the processes that the demo started and that still run.
func (d *demoRun) left() []string {
	var left []string
	entries, _ := filepath.Glob("/proc/[0-9]*")
	for _, p := range entries {
		cmdline, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		cwd, _ := os.Readlink(filepath.Join(p, "cwd"))
		if bytes.Contains(cmdline, []byte(d.dir)) || strings.HasPrefix(cwd, d.dir) {
			left = append(left, fmt.Sprintf("%s: %q in %s", p, cmdline, cwd))
		}
	}
	return left
}

func (d *demoRun) requireNothingLeft(t *testing.T) {
	t.Helper()
	e := &env{t: t}
	e.eventually(func() error { // after SIGKILL the guard needs a moment
		if left := d.left(); len(left) > 0 {
			return fmt.Errorf("still running: %s", strings.Join(left, "\n"))
		}
		files, err := os.ReadDir(d.dir)
		if err != nil {
			return err
		}
		if len(files) > 0 {
			return fmt.Errorf("left behind: %v", files)
		}
		return nil
	})
}

func TestDemoOnceShowsEveryStepAndLeavesNothing(t *testing.T) {
	d := startDemo(t, "--once")
	require.NoError(t, d.wait(), d.output.String())
	out := d.output.String()
	for _, want := range []string{"URL          http://8080-", "curl --resolve", "answer       200",
		"output       hello from ", "last active",
		"released     204", "answer       410", "sandbox_gone"} {
		require.Contains(t, out, want)
	}
	d.requireNothingLeft(t)
}

func TestDemoStaysUpAndItsCurlLineWorks(t *testing.T) {
	d := startDemo(t)
	d.until(t, "up; Ctrl-C ends it")
	lines := regexp.MustCompile(`curl --resolve (\S+):(\d+):(\S+) (\S+)`).FindAllStringSubmatch(d.output.String(), -1)
	require.NotEmpty(t, lines, d.output.String())
	line := lines[len(lines)-1]
	// What curl makes of these arguments: connect to that address, ask for that URL.
	transport := &http.Transport{DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
		require.Equal(t, line[1]+":"+line[2], addr, "the name that is resolved is the URL's")
		return (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(line[3], line[2]))
	}}
	defer transport.CloseIdleConnections()
	a, err := do(t.Context(), &http.Client{Transport: transport, Timeout: 30 * time.Second}, http.MethodGet, line[4], "",
		"")
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.NotEmpty(t, a.identity(t).Pod)

	require.NoError(t, d.cmd.Process.Signal(os.Interrupt))
	require.NoError(t, d.wait(), "Ctrl-C is how a demo ends")
	d.requireNothingLeft(t)
}

// Each step is interrupted by one of two signals, with -e2e.long by both.
func TestInterruptedDemoLeavesNothingBehind(t *testing.T) {
	onThisMachine(t, "runs berth-dev") // else it passes with nothing but skipped parts
	t.Parallel()                       // else its parts would have ended before other tests begin
	signals := []syscall.Signal{syscall.SIGKILL, syscall.SIGINT}
	steps := []string{"cluster: etcd", "Berth: Envoy", "pool ", "claim a sandbox", "send the same request"}
	for i, step := range steps {
		for k, signal := range signals {
			if !*longFlag && i%len(signals) != k {
				continue
			}
			t.Run(fmt.Sprintf("%v at %s", signal, step), func(t *testing.T) {
				d := startDemo(t)
				d.until(t, step)
				require.NoError(t, d.cmd.Process.Signal(signal))
				_ = d.wait() // how it ends depends on the signal; what it leaves must not
				d.requireNothingLeft(t)
			})
		}
	}
}

func TestDemoNamesTheStepThatFailed(t *testing.T) {
	t.Parallel()
	onThisMachine(t, "runs berth-dev")
	cmd := exec.Command(filepath.Join(binDir, "berth-dev"), "demo", "--once")
	cmd.Env = append(os.Environ(), "ENVOY_BIN=/nonexistent/envoy")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	var exit *exec.ExitError
	require.ErrorAs(t, err, &exit)
	require.Equal(t, 1, exit.ExitCode())
	require.Contains(t, string(out), `step "programs: etcd, kube-apiserver, Envoy" failed`)
	require.Contains(t, string(out), "ENVOY_BIN")
}

func TestDevClustersAreFoundAndEnded(t *testing.T) {
	onThisMachine(t, "runs berth-dev")
	turn(t, owners)
	name := fmt.Sprintf("e2e-%d", os.Getpid())
	berthDev := func(args ...string) (string, error) {
		out, err := exec.Command(filepath.Join(binDir, "berth-dev"), args...).CombinedOutput()
		return string(out), err
	}
	out, err := berthDev("up", "--name", name, "--tls")
	require.NoError(t, err, out)
	t.Cleanup(func() { _, _ = berthDev("down", "--name", name) }) // ended already, if all went well
	requirePastedLinesWork(t, out)
	out, err = berthDev("up", "--name", name)
	require.Error(t, err)
	require.Contains(t, out, "is running")
	out, _ = berthDev("status") // it fails if a part of another cluster on this machine is down
	require.Contains(t, out, name+" is up")
	require.NotContains(t, out, name+": ")
	t.Run("parts that end are started again", func(t *testing.T) { testPartsAreStartedAgain(t, name, berthDev) })
	out, err = berthDev("down", "--name", name)
	require.NoError(t, err, out)
	out, err = berthDev("down", "--name", name)
	require.Error(t, err)
	require.Contains(t, out, "no cluster of this name is running")
}

// requirePastedLinesWork uses a cluster with TLS as a program does that has the variables in its
// environment and does not resolve names below localhost.
func requirePastedLinesWork(t *testing.T, up string) {
	t.Helper()
	pasted := map[string]string{}
	for _, line := range regexp.MustCompile(`export ([A-Z0-9_]+)=(\S+)`).FindAllStringSubmatch(up, -1) {
		pasted[line[1]] = line[2]
	}
	require.FileExists(t, pasted["KUBECONFIG"])
	a, err := do(t.Context(), http.DefaultClient, http.MethodPost, pasted["BERTH_API_URL"]+"/sandboxes", "",
		`{"templateID":"demo"}`)
	require.NoError(t, err)
	require.Equal(t, http.StatusCreated, a.code, a.body)
	var s openapi.Sandbox
	require.NoError(t, json.Unmarshal([]byte(a.body), &s))
	require.Contains(t, s.URL, "https://8080-"+s.SandboxID+".sandbox.localhost:")

	ca, err := os.ReadFile(pasted["SSL_CERT_FILE"])
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(ca))
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}}}
	defer client.CloseIdleConnections()
	a, err = do(t.Context(), client, http.MethodGet, pasted["E2B_SANDBOX_URL"]+"/", "", "", "E2b-Sandbox-Id", s.SandboxID)
	require.NoError(t, err)
	require.Equal(t, http.StatusOK, a.code, a.body)
	require.NotEmpty(t, a.identity(t).Pod)
}

// testPartsAreStartedAgain kills all parts of a cluster until all are down at once.
func testPartsAreStartedAgain(t *testing.T, name string, berthDev func(args ...string) (string, error)) {
	cache, err := devcluster.CacheDir()
	require.NoError(t, err)
	cluster, err := devcluster.Lookup(name)
	require.NoError(t, err)
	parts := map[string]bool{}
	for _, p := range cluster.Parts {
		require.True(t, p.Running, p.Name)
		parts[p.Name] = true
	}
	require.Equal(t,
		map[string]bool{"etcd": true, "kube-apiserver": true, "allocator-0": true, "envoy-0": true, "router-0": true}, parts)

	// The pause before a restart grows with each end, so in the end all are down for a while.
	e := &env{t: t}
	e.eventually(func() error {
		cluster, err := devcluster.Lookup(name)
		require.NoError(t, err)
		for _, p := range cluster.Parts {
			if p.Running {
				_ = syscall.Kill(p.PID, syscall.SIGKILL) // it may have just ended
			}
		}
		out, err := berthDev("status")
		for part := range parts {
			if err == nil || !strings.Contains(out, fmt.Sprintf("%s: %s is down", name, part)) {
				return fmt.Errorf("%s is not down (%w):\n%s", part, err, out)
			}
		}
		return nil
	})

	e.eventually(func() error {
		cluster, err = devcluster.Lookup(name)
		if err != nil {
			return err
		}
		for _, p := range cluster.Parts {
			if !p.Running || p.Restarts == 0 {
				return fmt.Errorf("%s is not started again", p.Name)
			}
		}
		a, err := do(t.Context(), http.DefaultClient, http.MethodPost, cluster.URLs["api"]+"/sandboxes", "",
			`{"templateID":"demo"}`)
		if err == nil && a.code != http.StatusCreated {
			err = fmt.Errorf("%d %s", a.code, a.body)
		}
		return err
	})
	e.eventually(func() error { // it is written when the part is ready, which may be later than that it works
		log, err := os.ReadFile(filepath.Join(cache, "dev", name, "cluster", "parts.log"))
		require.NoError(t, err)
		for part := range parts {
			for _, line := range []string{`part ended\t\{"part": "` + part + `".*signal: killed`,
				`part started again\t\{"part": "` + part + `"`} {
				if !regexp.MustCompile(line).Match(log) {
					return fmt.Errorf("%q is not in the log:\n%s", line, log)
				}
			}
		}
		return nil
	})
}
