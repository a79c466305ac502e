package proc

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// outputDelay bounds the wait for the end of a dead child's output when a
// process that escaped its group still holds the pipe.
const outputDelay = 2 * time.Second

// Supervisor starts processes and makes sure that they end. All methods may be
// called concurrently.
type Supervisor struct {
	forks chan func()   // never closed
	quit  chan struct{} // closed by Close, when no process is left
	ended chan struct{} // closed by the forking goroutine as it returns
	once  sync.Once
	err   error          // of Close; written once
	live  sync.WaitGroup // one per process; grows only under mu while not closed

	mu     sync.Mutex
	closed bool
	guard  *guard
	procs  map[*Process]struct{}
}

// New starts the guard. The caller must Close the supervisor.
func New() (*Supervisor, error) {
	g, err := startGuard()
	if err != nil {
		return nil, err
	}
	s := &Supervisor{
		forks: make(chan func()),
		quit:  make(chan struct{}),
		ended: make(chan struct{}),
		guard: g,
		procs: make(map[*Process]struct{}),
	}
	go s.forkLoop()
	return s, nil
}

// forkLoop owns the thread that forks. The kernel ties a child's parent death signal
// to the thread that forked it, so this thread must live as long as the children
// (golang.org/issue/27505).
func (s *Supervisor) forkLoop() {
	defer close(s.ended)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	for {
		select {
		case f := <-s.forks:
			f()
		case <-s.quit:
			return
		}
	}
}

// Start starts cmd as the leader of a new process group. It sets
// cmd.SysProcAttr.Setpgid and Pdeathsig and, when zero, cmd.WaitDelay; Setsid
// and Pgid must not be set. The caller must not call cmd.Wait.
func (s *Supervisor) Start(cmd *exec.Cmd) (p *Process, err error) {
	forked := make(chan struct{})
	select {
	case s.forks <- func() { defer close(forked); p, err = s.fork(cmd) }:
		<-forked
		return p, err
	case <-s.ended:
		return nil, ErrClosed
	}
}

func (s *Supervisor) fork(cmd *exec.Cmd) (*Process, error) {
	attr := syscall.SysProcAttr{}
	if cmd.SysProcAttr != nil {
		attr = *cmd.SysProcAttr
	}
	if attr.Setsid || attr.Pgid != 0 {
		return nil, fmt.Errorf("start %s: a supervised process leads its own group, Setsid and Pgid must not be set",
			cmd.Path)
	}
	attr.Setpgid = true
	attr.Pdeathsig = syscall.SIGKILL
	cmd.SysProcAttr = &attr
	if cmd.WaitDelay == 0 {
		cmd.WaitDelay = outputDelay
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, ErrClosed
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	p := &Process{cmd: cmd, pid: cmd.Process.Pid, done: make(chan struct{})}
	err := s.guard.addGroup(p.pid)
	s.procs[p] = struct{}{}
	s.live.Add(1)
	go s.own(p)
	if err != nil {
		_ = p.Signal(syscall.SIGKILL)
		return nil, fmt.Errorf("start %s: %w", cmd.Path, err)
	}
	return p, nil
}

// own waits for the leader's death and ends the rest of its group.
func (s *Supervisor) own(p *Process) {
	defer s.live.Done()
	p.awaitExit()
	p.bury()
	s.mu.Lock()
	delete(s.procs, p)
	// The leader is not reaped yet, so no other process has the PID while the guard
	// removes it. addGroup or Close reports a guard that has ended.
	_ = s.guard.removeGroup(p.pid)
	s.mu.Unlock()
	_ = p.cmd.Wait() // the outcome is in State
	close(p.done)
}

// TempDir makes a directory in parent, "" for the default one for temporary
// files, with a random name that begins with prefix. It is removed with its content
// after the last process is killed: by Close, or when this process dies.
func (s *Supervisor) TempDir(parent, prefix string) (string, error) {
	if parent == "" {
		parent = os.TempDir()
	}
	parent, err := filepath.Abs(parent)
	if err != nil {
		return "", fmt.Errorf("make a directory: %w", err)
	}
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails, see crypto/rand
	dir := filepath.Join(parent, prefix+hex.EncodeToString(random[:]))
	if strings.ContainsRune(dir, '\n') {
		return "", fmt.Errorf("make a directory %q: the name must be of one line", dir)
	}
	if _, err := os.Lstat(dir); err == nil {
		return "", fmt.Errorf("make directory %s: %w", dir, os.ErrExist)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return "", ErrClosed
	}
	// The guard first: this process may die at any moment.
	if err := s.guard.addDir(dir); err != nil {
		return "", err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return "", fmt.Errorf("make a directory: %w", err)
	}
	return dir, nil
}

// Close kills the remaining processes, has the registered directories removed and
// waits for both. Later calls return the error of the first one.
func (s *Supervisor) Close() error {
	s.once.Do(func() {
		s.mu.Lock()
		s.closed = true
		for p := range s.procs {
			_ = p.Signal(syscall.SIGKILL)
		}
		s.mu.Unlock()
		s.live.Wait()
		close(s.quit)
		<-s.ended
		s.err = s.guard.end()
	})
	return s.err
}
