package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// killLimit bounds the wait after SIGKILL. The kernel needs microseconds; only
// a process stuck in an uninterruptible call takes longer.
const killLimit = 15 * time.Second

// stopLimit bounds the wait after SIGSTOP, likewise.
const stopLimit = 5 * time.Second

// Process is a started child and its process group. All methods may be called
// concurrently.
type Process struct {
	cmd  *exec.Cmd
	pid  int           // also the process group
	done chan struct{} // closed by the supervisor when the leader is reaped

	mu     sync.Mutex
	buried bool // set before the leader is reaped; after that another process may get the PID
}

// Pid returns the leader's process ID, which is its process group ID too.
func (p *Process) Pid() int { return p.pid }

// Done is closed when the leader was reaped and its group killed.
func (p *Process) Done() <-chan struct{} { return p.done }

// State returns how the leader ended. It is nil before Done is closed.
func (p *Process) State() *os.ProcessState {
	select {
	case <-p.done:
		return p.cmd.ProcessState
	default:
		return nil
	}
}

// Signal sends sig to the whole group. It returns nil if the group is gone. For
// SIGSTOP it returns when every thread of the leader has stopped, because a busy
// thread stops a little after the system call.
func (p *Process) Signal(sig os.Signal) error {
	s, ok := sig.(syscall.Signal)
	if !ok {
		return fmt.Errorf("signal process group %d: %v is not a system signal", p.pid, sig)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.buried {
		return nil
	}
	if err := syscall.Kill(-p.pid, s); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("signal process group %d with %v: %w", p.pid, s, err)
	}
	if s == syscall.SIGSTOP {
		for began := time.Now(); !standsStill(p.pid) && time.Since(began) < stopLimit; {
			time.Sleep(time.Millisecond)
		}
	}
	return nil
}

// standsStill reports whether every thread of a process is stopped or gone.
func standsStill(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return true
	}
	for _, thread := range threads {
		raw, err := os.ReadFile(thread)
		if err != nil {
			continue
		}
		// The name in parentheses may have any character. The state follows it.
		if after := raw[bytes.LastIndexByte(raw, ')')+1:]; len(after) > 1 && after[1] != 'T' && after[1] != 't' &&
			after[1] != 'Z' {
			return false
		}
	}
	return true
}

// Stop sends SIGTERM to the group and waits for the leader. When grace has passed
// or ctx ends, it sends SIGKILL. A non-nil error means that the process may still
// exist.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	if err := p.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-p.done:
		return nil
	case <-t.C:
	case <-ctx.Done():
	}
	if err := p.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	t.Reset(killLimit)
	select {
	case <-p.done:
		return nil
	case <-t.C:
		return fmt.Errorf("process %d is still there %v after SIGKILL", p.pid, killLimit)
	}
}

// awaitExit returns when the leader is dead. It does not reap it, so that the PID
// stays taken and signals to the group cannot reach another process.
func (p *Process) awaitExit() {
	for {
		err := unix.Waitid(unix.P_PID, p.pid, nil, unix.WEXITED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return
		}
	}
}

// bury kills the processes that the dead leader has left in its group. No signal is
// sent after it.
func (p *Process) bury() {
	p.mu.Lock()
	defer p.mu.Unlock()
	_ = syscall.Kill(-p.pid, syscall.SIGKILL)
	p.buried = true
}
