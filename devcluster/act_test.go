package devcluster

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

const testLimit = time.Minute

// actor is this test binary run as another process.
type actor struct {
	cmd *exec.Cmd
	out *bufio.Reader
}

// startActor runs an act in a process group of its own, as a shell would.
func startActor(t *testing.T, act string, env ...string) *actor {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(exe)
	cmd.Env = append(append(os.Environ(), actEnv+"="+act), env...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	a := &actor{cmd, bufio.NewReader(out)}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return a
}

func (a *actor) line(t *testing.T) string {
	t.Helper()
	s, err := a.out.ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(s)
}

// awaitEnd returns when the actor and all that held its output are gone.
func (a *actor) awaitEnd(t *testing.T) {
	t.Helper()
	_, err := io.Copy(io.Discard, a.out)
	require.NoError(t, err)
	_ = a.cmd.Wait()
}

// running reports whether pid is there and no zombie.
func running(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	s := string(stat)
	return !strings.Contains("ZX", strings.Fields(s[strings.LastIndexByte(s, ')')+1:])[0])
}
