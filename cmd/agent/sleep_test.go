package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// order gives the agent an order that it obeys, and returns how many processes that took.
func (r *running) order(kind initbox.Kind, counter uint64) int {
	r.t.Helper()
	_, text := r.request(http.MethodGet, initbox.Path, nil)
	var hello initbox.Hello
	require.NoError(r.t, json.Unmarshal([]byte(text), &hello))
	sealed, err := r.sealer.For(hello.PublicKey).SealOrder(&initbox.Order{SandboxID: "abc", Kind: kind, Term: 1, Counter: counter})
	require.NoError(r.t, err)
	status, text := r.request(http.MethodPost, initbox.SleepPath, sealed)
	require.Equal(r.t, http.StatusOK, status, text)
	var obeyed initbox.Obeyed
	require.NoError(r.t, json.Unmarshal([]byte(text), &obeyed))
	return obeyed.Processes
}

// state returns the letter for what a process does.
func state(t *testing.T, pid int) string {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	require.NoError(t, err)
	return strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))[0]
}

// Invariant: P28
func TestSignalReachesASleepingCommandAtOnce(t *testing.T) {
	t.Parallel()
	r := start(t, 0, "sh", "-c", `trap 'echo usr' USR1; trap 'exit 9' TERM; echo $$; while :; do sleep 0.01; done`)
	pid, err := strconv.Atoi(r.line())
	require.NoError(t, err)
	r.configure(initbox.Config{})
	require.Positive(t, r.order(initbox.Keep, 1))
	require.Equal(t, "T", state(t, pid))
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGUSR1))
	require.Equal(t, "usr", r.line())
	require.Positive(t, r.order(initbox.Keep, 2))
	require.Equal(t, "T", state(t, pid))
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	require.Equal(t, 9, r.wait())
}

// Invariant: P28
func TestSleepingAgentWithoutCommandEndsOnSignal(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	r.configure(initbox.Config{})
	stream, err := r.Start(t.Context(), connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", "trap 'echo ended; exit' TERM; echo begun; while :; do sleep 0.01; done"}}}))
	require.NoError(t, err)
	defer stream.Close()
	said := func(text string) {
		for stream.Receive() {
			if strings.Contains(string(stream.Msg().GetEvent().GetData().GetStdout()), text) {
				return
			}
		}
		require.Fail(t, "not said", text)
	}
	said("begun")
	require.Positive(t, r.order(initbox.Keep, 1))
	require.NoError(t, r.cmd.Process.Signal(syscall.SIGTERM))
	said("ended") // and was not killed
	require.Equal(t, 0, r.wait())
}

// Invariant: P28
func TestEndOfASleepingCommandEndsTheAgent(t *testing.T) {
	t.Parallel()
	r := start(t, 0, "sh", "-c", "echo $$; while :; do sleep 1000; done")
	pid, err := strconv.Atoi(r.line())
	require.NoError(t, err)
	r.configure(initbox.Config{})
	require.Positive(t, r.order(initbox.Keep, 1))
	require.NoError(t, syscall.Kill(pid, syscall.SIGKILL)) // as the kernel does for want of memory
	require.Equal(t, 137, r.wait())
}

// Invariant: P28
func TestSleepingAgentCountsAsNotBusy(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	r.configure(initbox.Config{})
	stream, err := r.Start(t.Context(), connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "sleep", Args: []string{"1000"}}}))
	require.NoError(t, err)
	defer stream.Close()
	require.True(t, stream.Receive())
	r.order(initbox.Keep, 1)
	status, _ := r.request(http.MethodGet, "/busy", nil)
	require.Equal(t, http.StatusNoContent, status)
	r.order(initbox.Thaw, 2)
	status, _ = r.request(http.MethodGet, "/busy", nil)
	require.Equal(t, http.StatusOK, status)
}

// Invariant: P28
func TestProcessesFromOutsideOfTheContainerAreStopped(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("only root makes namespaces")
	}
	address := freeAddress(t)
	sealer, err := initbox.NewSealer([32]byte{1: 1})
	require.NoError(t, err)
	r := &running{t: t, sealer: sealer, url: "http://" + address}
	// unshare is the parent of process 1 of the namespace, and ends it. Process 1 makes an account: not in the machine's files.
	self, err := os.Executable()
	require.NoError(t, err)
	r.cmd = exec.Command("unshare", "--pid", "--fork", "--mount-proc", "--kill-child",
		"sh", "-c", `mount -t tmpfs none /etc && mount -t tmpfs none /home && exec "$@"`, "sh",
		self, "run", "--listen="+address, "--", "sleep", "1000")
	r.cmd.Env = append(os.Environ(), asAgent+"=1", initbox.PublicKeyEnv+"="+sealer.PublicKey().String())
	r.cmd.Stderr = os.Stderr
	require.NoError(t, r.cmd.Start())
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill()
		_ = r.cmd.Wait()
	})
	r.configure(initbox.Config{})
	inner, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", r.cmd.Process.Pid))
	require.NoError(t, err)
	// nsenter stops when its child does, and its child is continued alone.
	session := exec.Command("nsenter", "--target", strings.TrimSpace(string(inner)), "--pid", "--mount", "sh", "-c", "sleep 1001 & echo $!; wait")
	session.Env = os.Environ()
	out, err := session.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, session.Start())
	t.Cleanup(func() {
		_ = r.cmd.Process.Kill() // and thereby the namespace
		_ = session.Process.Kill()
		_ = session.Wait()
	})
	_, err = out.Read(make([]byte, 1))
	require.NoError(t, err)
	begun := time.Now()
	require.Equal(t, 3, r.order(initbox.Freeze, 1))
	t.Logf("frozen in %v", time.Since(begun))
	require.Equal(t, "T", state(t, childOf(t, session.Process.Pid)))
	require.Equal(t, 3, r.order(initbox.Thaw, 2))
	require.NotEqual(t, "T", state(t, childOf(t, session.Process.Pid)))
}

// childOf returns the child of a process.
func childOf(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pid))
	require.NoError(t, err)
	child, err := strconv.Atoi(strings.TrimSpace(string(text)))
	require.NoError(t, err)
	return child
}
