// Package children starts the processes of the agent and reaps every process that ends.
//
// Processes that have lost their parent become children of process 1, or of a subreaper. The agent is
// one of these, so it has to reap processes that it has not started. wait4(2) for any child would take
// the status of a child from another goroutine that waits for it. So a [Table] is the only part of the
// process that waits: it keeps the status of those that it has started, and drops the others.
//
// # Guarantees
//
//   - The status of a process that [Table.Start] has started is never lost, however soon it ends.
//   - [Child.Signal] and [Child.SignalGroup] never reach another process that has got the number of an
//     ended one: a number is free only once its process is reaped, and both keep it from being reaped.
//   - An orphan is reaped as soon as the agent gets SIGCHLD, but not during [Table.Keep].
//   - No process is started between [Table.Pause] and [Table.Resume].
//
// Package os/exec in the same process breaks the first: its Wait fails with ECHILD. A file system that does not
// answer stalls everything here while a program on it is started: nothing is reaped or signalled then.
package children

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ErrEnded is the error of a signal to a process that has ended.
var ErrEnded = errors.New("the process has ended")

// ErrPaused is the error of a start between Pause and Resume.
var ErrPaused = errors.New("the sandbox is asleep and starts no process")

// Table holds the processes that were started and are not reaped. Its methods may be called concurrently.
type Table struct {
	// starting is held for reading from before a process is started until it is in the table, and while
	// one is signalled. It is held for writing while processes are reaped.
	starting sync.RWMutex
	// paused: nothing is started. kept: nothing is reaped. Both are guarded by starting.
	paused, kept bool
	mu           sync.Mutex
	// started has the processes by their number.
	started map[int]*Child
}

// Child is a process. Its methods may be called concurrently.
type Child struct {
	// PID is the number of the process.
	PID   int
	table *Table
	done  chan struct{}
	// status is set before done is closed.
	status syscall.WaitStatus
}

// New returns an empty table.
func New() *Table { return &Table{started: make(map[int]*Child)} }

// Run reaps until ctx ends. Without it no process is seen to end. It also makes this process the parent
// of the orphans among its descendants, as process 1 is without being asked.
func (t *Table) Run(ctx context.Context) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl", err)
	}
	ended := make(chan os.Signal, 1)
	signal.Notify(ended, syscall.SIGCHLD)
	defer signal.Stop(ended)
	for {
		t.reap()
		select {
		case <-ended:
		case <-ctx.Done():
			return nil
		}
	}
}

// Pause has Start fail with ErrPaused until Resume. What was being started is there when it returns.
func (t *Table) Pause() { t.pause(true) }

// Resume ends a Pause.
func (t *Table) Resume() { t.pause(false) }

func (t *Table) pause(paused bool) {
	t.starting.Lock()
	defer t.starting.Unlock()
	t.paused = paused
}

// Keep has no process reaped until release is called, so that everything that ends meanwhile can be seen to have been
// there.
func (t *Table) Keep() (release func()) {
	t.keep(true)
	return func() {
		t.keep(false)
		t.reap()
	}
}

func (t *Table) keep(kept bool) {
	t.starting.Lock()
	defer t.starting.Unlock()
	t.kept = kept
}

// Start starts a process, as syscall.ForkExec does.
func (t *Table) Start(path string, argv []string, attr *syscall.ProcAttr) (*Child, error) {
	t.starting.RLock()
	defer t.starting.RUnlock()
	if t.paused {
		return nil, ErrPaused
	}
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return nil, err
	}
	c := &Child{PID: pid, table: t, done: make(chan struct{})}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.started[pid] = c
	return c, nil
}

// reap takes the status of every child that has ended.
func (t *Table) reap() {
	t.starting.Lock()
	defer t.starting.Unlock()
	for !t.kept {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, syscall.WNOHANG, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil || pid <= 0 { // no child, or none that has ended
			return
		}
		if c := t.started[pid]; c != nil {
			delete(t.started, pid)
			c.status = status
			close(c.done)
		}
	}
}

// KillAll kills all descendants of this process, and returns when there are none or the limit has passed.
// Run must run, and Start must not be called any more.
func (t *Table) KillAll(limit time.Duration) {
	for until := time.Now().Add(limit); t.killChildren() && time.Now().Before(until); {
		// Their children become those of this process.
		time.Sleep(time.Millisecond)
	}
}

// killChildren reports whether there were any.
func (t *Table) killChildren() bool {
	// None is reaped meanwhile, so that no number becomes that of another process.
	t.starting.RLock()
	defer t.starting.RUnlock()
	entries, _ := os.ReadDir("/proc")
	found := false
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil || parent(pid) != os.Getpid() {
			continue
		}
		found = true
		_ = syscall.Kill(pid, syscall.SIGKILL) // it has ended, or has another user
	}
	return found
}

// parent returns the number of the parent of a process, 0 if there is no such process.
func parent(pid int) int {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	// proc_pid_stat(5): the name is in parentheses and can have any byte; state and parent follow.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) < 2 {
		return 0
	}
	n, _ := strconv.Atoi(fields[1]) // the kernel writes a number
	return n
}

// Done is closed when the process has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Status says how the process has ended. Call it after Done is closed.
func (c *Child) Status() syscall.WaitStatus { return c.status }

// Signal sends a signal to the process. The error is ErrEnded if it has ended.
func (c *Child) Signal(s syscall.Signal) error { return c.kill(c.PID, s) }

// SignalGroup sends a signal to the process group that the process leads.
func (c *Child) SignalGroup(s syscall.Signal) error { return c.kill(-c.PID, s) }

func (c *Child) kill(target int, s syscall.Signal) error {
	c.table.starting.RLock()
	defer c.table.starting.RUnlock()
	select {
	case <-c.done:
		return ErrEnded
	default:
	}
	return syscall.Kill(target, s)
}
