package proc_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// parentEnv turns the test binary into a parent of supervised processes; its
// value is the directory to be removed at its death.
const parentEnv = "BERTH_PROC_TEST_PARENT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(parentEnv); dir != "" {
		if err := parent(dir, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	goleak.VerifyTestMain(m)
}

func newSupervisor(t *testing.T) *proc.Supervisor {
	t.Helper()
	s, err := proc.New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func start(t *testing.T, s *proc.Supervisor, script string) (*proc.Process, *bufio.Reader) {
	t.Helper()
	p, out, err := startScript(s, script)
	require.NoError(t, err)
	t.Cleanup(func() { out.Close() })
	return p, bufio.NewReader(out)
}

func startScript(s *proc.Supervisor, script string) (*proc.Process, *os.File, error) {
	r, w, err := os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	defer w.Close()
	cmd := exec.Command("/bin/sh", "-c", script)
	cmd.Stdout = w
	p, err := s.Start(cmd)
	if err != nil {
		r.Close()
		return nil, nil, err
	}
	return p, r, nil
}

func readInt(t *testing.T, r *bufio.Reader) int {
	t.Helper()
	line, err := r.ReadString('\n')
	require.NoError(t, err)
	n, err := strconv.Atoi(strings.TrimSpace(line))
	require.NoError(t, err)
	return n
}

func awaitDone(t *testing.T, p *proc.Process) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(20 * time.Second):
		t.Fatalf("process %d did not end", p.Pid())
	}
}

// alive reports whether pid runs. A zombie that its parent does not reap does not.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	return !strings.Contains("ZX", statFields(stat)[0])
}

// statFields returns the fields of /proc/PID/stat after the name, which may
// hold blanks: state, ppid, pgrp, ...
func statFields(stat []byte) []string {
	s := string(stat)
	return strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
}

func groupAlive(pgid int) (pids []int) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, f := range stats {
		stat, err := os.ReadFile(f)
		if err != nil {
			continue
		}
		if fields := statFields(stat); fields[2] == strconv.Itoa(pgid) && !strings.Contains("ZX", fields[0]) {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(f)))
			pids = append(pids, pid)
		}
	}
	return pids
}

func requireDead(t *testing.T, pid int) {
	t.Helper()
	require.Eventuallyf(t, func() bool { return !alive(pid) }, 20*time.Second, 5*time.Millisecond,
		"process %d is alive", pid)
}

func TestStopEndsTheWholeGroup(t *testing.T) {
	s := newSupervisor(t)
	p, out := start(t, s, `sleep 1000 & echo $!; wait`)
	sleeper := readInt(t, out)
	require.Nil(t, p.State())
	require.NoError(t, p.Stop(t.Context(), 20*time.Second))
	require.Equal(t, syscall.SIGTERM, p.State().Sys().(syscall.WaitStatus).Signal())
	requireDead(t, sleeper)
}

func TestStopKillsAfterGrace(t *testing.T) {
	s := newSupervisor(t)
	p, out := start(t, s, `trap '' TERM; echo 1; while :; do sleep 1000; done`)
	readInt(t, out)
	require.NoError(t, p.Stop(t.Context(), 10*time.Millisecond))
	require.Equal(t, syscall.SIGKILL, p.State().Sys().(syscall.WaitStatus).Signal())
}

func TestStopKillsWhenContextEnds(t *testing.T) {
	s := newSupervisor(t)
	p, out := start(t, s, `trap '' TERM; echo 1; while :; do sleep 1000; done`)
	readInt(t, out)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.NoError(t, p.Stop(ctx, time.Hour))
	require.Equal(t, syscall.SIGKILL, p.State().Sys().(syscall.WaitStatus).Signal())
}

func TestLeaderDeathEndsItsGroup(t *testing.T) {
	s := newSupervisor(t)
	p, out := start(t, s, `sleep 1000 & echo $!; exit 7`)
	sleeper := readInt(t, out)
	awaitDone(t, p)
	require.Equal(t, 7, p.State().ExitCode())
	requireDead(t, sleeper)
}

func TestSignalReachesTheGroupAndIsHarmlessAfterItsEnd(t *testing.T) {
	s := newSupervisor(t)
	p, out := start(t, s, `trap 'exit 3' USR1; echo 1; while :; do sleep 0.01; done`)
	readInt(t, out)
	require.NoError(t, p.Signal(syscall.SIGUSR1))
	awaitDone(t, p)
	require.NoError(t, p.Signal(syscall.SIGKILL))
	require.NoError(t, p.Stop(t.Context(), 0))
}

func TestCloseKillsWhatIsLeftAndRemovesDirectories(t *testing.T) {
	s, err := proc.New()
	require.NoError(t, err)
	around := t.TempDir()
	dir, err := s.TempDir(around, "a dir * with 'signs")
	require.NoError(t, err)
	require.NoError(t, os.Mkdir(filepath.Join(dir, "sub"), 0o755))
	beside := filepath.Join(around, "a dir of another")
	require.NoError(t, os.Mkdir(beside, 0o755))
	p, out := start(t, s, `trap '' TERM; sleep 1000 & echo $!; wait`)
	sleeper := readInt(t, out)
	require.NoError(t, s.Close())
	require.NoError(t, s.Close())
	require.NotNil(t, p.State())
	requireDead(t, sleeper)
	require.NoDirExists(t, dir)
	require.DirExists(t, beside)
	_, err = s.Start(exec.Command("/bin/true"))
	require.ErrorIs(t, err, proc.ErrClosed)
	_, err = s.TempDir(around, "x")
	require.ErrorIs(t, err, proc.ErrClosed)
}

func TestEscapedProcessDoesNotBlockTheOwner(t *testing.T) {
	s := newSupervisor(t)
	pidFile := filepath.Join(t.TempDir(), "pid")
	cmd := exec.Command("/bin/sh", "-c", `setsid sh -c 'echo $$ >"$0.tmp"; mv "$0.tmp" "$0"; exec sleep 1000' "$0" & while [ ! -e "$0" ]; do sleep 0.01; done`, pidFile)
	cmd.Stderr = &strings.Builder{} // not a file: exec copies through a pipe that the sleeper inherits
	cmd.WaitDelay = 10 * time.Millisecond
	p, err := s.Start(cmd)
	require.NoError(t, err)
	awaitDone(t, p)
	b, err := os.ReadFile(pidFile)
	require.NoError(t, err)
	escaped, err := strconv.Atoi(strings.TrimSpace(string(b)))
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(escaped, syscall.SIGKILL))
}

func TestStartRefuses(t *testing.T) {
	s := newSupervisor(t)
	_, err := s.Start(exec.Command("/nonexistent/program"))
	require.ErrorIs(t, err, os.ErrNotExist)
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	_, err = s.Start(cmd)
	require.ErrorContains(t, err, "Setsid")
	_, err = s.TempDir(t.TempDir(), "two\nlines")
	require.ErrorContains(t, err, "one line")
	_, err = s.TempDir("/nonexistent", "x")
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestNothingOutlivesAKilledParent is the reason for this package.
func TestNothingOutlivesAKilledParent(t *testing.T) {
	for _, tt := range []struct {
		name string
		kill func(pid int) error
	}{
		{"alone", func(pid int) error { return syscall.Kill(pid, syscall.SIGKILL) }},
		{"with its process group", func(pid int) error { return syscall.Kill(-pid, syscall.SIGKILL) }},
		{"interrupted with its process group", func(pid int) error { return syscall.Kill(-pid, syscall.SIGINT) }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			around := t.TempDir()
			exe, err := os.Executable()
			require.NoError(t, err)
			cmd := exec.Command(exe)
			cmd.Env = append(os.Environ(), parentEnv+"="+around)
			cmd.Stderr = os.Stderr
			cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
			stdout, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			defer cmd.Wait()
			out := bufio.NewReader(stdout)
			ended := readInt(t, out)
			groups := []int{readInt(t, out), readInt(t, out)}
			require.Empty(t, groupAlive(ended))
			for _, g := range groups {
				require.GreaterOrEqual(t, len(groupAlive(g)), 2, "a shell and its sleeper")
			}
			require.NoError(t, tt.kill(cmd.Process.Pid))
			for _, g := range groups {
				require.Eventuallyf(t, func() bool { return len(groupAlive(g)) == 0 }, 20*time.Second, 5*time.Millisecond,
					"group %d", g)
			}
			require.Eventually(t, func() bool {
				left, err := os.ReadDir(around)
				return err == nil && len(left) == 0
			}, 20*time.Second, 5*time.Millisecond)
			// Nothing of ours holds the parent's output open.
			_, err = io.Copy(io.Discard, out)
			require.NoError(t, err)
		})
	}
}

// parent starts groups of a shell and a sleeper, prints the IDs of one that has
// ended and two that run, and waits to be killed.
func parent(around string, out io.Writer) error {
	s, err := proc.New()
	if err != nil {
		return err
	}
	dir, err := s.TempDir(around, "work-")
	if err != nil {
		return err
	}
	ended, stdout, err := startScript(s, `exit 0`)
	if err != nil {
		return err
	}
	stdout.Close()
	<-ended.Done()
	fmt.Fprintln(out, ended.Pid())
	for range 2 {
		// The shells ignore what a terminal may send, and write into dir.
		p, stdout, err := startScript(s, `trap '' INT TERM HUP; sleep 1000 & echo ready; while :; do date >"`+dir+`/$$"; done`)
		if err != nil {
			return err
		}
		if _, err := bufio.NewReader(stdout).ReadString('\n'); err != nil {
			return err
		}
		if err := p.Signal(syscall.Signal(0)); err != nil {
			return err
		}
		fmt.Fprintln(out, p.Pid())
	}
	<-make(chan struct{})
	return nil
}
