package proc

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// startLimit bounds how long a server may take to be ready. On an idle machine
	// kube-apiserver takes 3 s.
	startLimit = 2 * time.Minute
	// checkLimit bounds each check.
	checkLimit = 5 * time.Second
	checkEvery = 20 * time.Millisecond
	tailBytes  = 4000
)

// Server is a program that can be ended in any way and started again with the same
// command. Its methods may be called concurrently.
type Server struct {
	// Name is what it is called in errors.
	Name       string
	Supervisor *Supervisor
	// Argv is the program's path and its arguments.
	Argv []string
	// LaunchArgs, if set, returns further arguments at each start.
	LaunchArgs func() []string
	// Log is the file to which its output is appended. The server works in that file's
	// folder.
	Log string
	// Check returns nil once the server is ready.
	Check func(context.Context) error

	mu      sync.Mutex
	current *Process
}

// Start starts the server and waits until it is ready. It fails if the server runs.
func (s *Server) Start(ctx context.Context) error {
	if err := s.Launch(); err != nil {
		return err
	}
	if err := s.Wait(ctx, s.Check); err != nil {
		return fmt.Errorf("start %s: %w", s.Name, err)
	}
	return nil
}

// Launch starts the server and does not wait for anything. It fails if the server runs.
func (s *Server) Launch() (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("start %s: %w", s.Name, err)
		}
	}()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.current != nil && s.current.State() == nil {
		return errors.New("it is running")
	}
	log, err := os.OpenFile(s.Log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	args := slices.Clone(s.Argv[1:])
	if s.LaunchArgs != nil {
		args = append(args, s.LaunchArgs()...)
	}
	cmd := exec.Command(s.Argv[0], args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = filepath.Dir(s.Log)
	started, err := s.Supervisor.Start(cmd)
	if err != nil {
		return err
	}
	s.current = started
	return nil
}

// Wait calls check until it returns nil. It gives up when the latest process ends, when
// ctx ends, or after two minutes. The error holds the end of the log.
func (s *Server) Wait(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, startLimit, fmt.Errorf("it took longer than %v", startLimit))
	defer cancel()
	current := s.Last()
	var last error
	err := wait.PollUntilContextCancel(ctx, checkEvery, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, checkLimit)
		defer cancel()
		if last = check(ctx); last == nil {
			return true, nil
		}
		if state := current.State(); state != nil {
			return false, fmt.Errorf("it ended (%v)", state)
		}
		return false, nil
	})
	if ctx.Err() != nil {
		err = fmt.Errorf("%w; last: %w", context.Cause(ctx), last)
	}
	if err != nil {
		return fmt.Errorf("%w; the end of its log:\n%s", err, s.LogTail())
	}
	return nil
}

// LogTail is the end of the log.
func (s *Server) LogTail() string {
	raw, err := os.ReadFile(s.Log)
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-tailBytes):])
}

// Stop sends SIGTERM, and SIGKILL after grace, and waits.
func (s *Server) Stop(ctx context.Context, grace time.Duration) error {
	if current := s.running(); current != nil {
		return current.Stop(ctx, grace)
	}
	return nil
}

// Kill ends the server by SIGKILL and waits.
func (s *Server) Kill() error {
	current := s.running()
	if current == nil {
		return nil
	}
	if err := current.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-current.Done()
	return nil
}

// Pause stops the server with SIGSTOP. Resume undoes that.
func (s *Server) Pause() error { return s.signal(syscall.SIGSTOP) }

// Resume undoes Pause.
func (s *Server) Resume() error { return s.signal(syscall.SIGCONT) }

func (s *Server) signal(sig syscall.Signal) error {
	if current := s.running(); current != nil {
		return current.Signal(sig)
	}
	return fmt.Errorf("%s is not running", s.Name)
}

// Last returns the latest process, which may have ended. It is nil before the first
// start.
func (s *Server) Last() *Process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// Running reports whether the server runs.
func (s *Server) Running() bool { return s.running() != nil }

// Pid is the ID of the server's process, 0 if it does not run.
func (s *Server) Pid() int {
	if current := s.running(); current != nil {
		return current.Pid()
	}
	return 0
}

func (s *Server) running() *Process {
	if current := s.Last(); current != nil && current.State() == nil {
		return current
	}
	return nil
}

// getTimeout bounds GetOK: a process that is paused accepts connections and does not answer.
const getTimeout = 2 * time.Second

// GetOK sends a GET request and returns nil if the answer is 200. It waits for at most 2 s.
func GetOK(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusOK {
		return fmt.Errorf("%s answers %s", url, response.Status)
	}
	return nil
}
