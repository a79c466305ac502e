package stack

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

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// Process is one of Berth's processes. It can be ended in any way and started
// again with the same flags. Methods may be called concurrently.
type Process struct {
	// Name is what it is called in logs and errors.
	Name string

	supervisor *proc.Supervisor
	argv       []string
	logFile    string
	// launchArgs, if set, returns further flags at each start.
	launchArgs func() []string
	// ready returns nil once the process is ready.
	ready func(context.Context) error

	mu      sync.Mutex
	current *proc.Process
}

// startWait bounds how long a process may take to be ready.
const startWait = 60 * time.Second

// Start starts the process and waits until it is ready. It fails if it runs.
func (p *Process) Start(ctx context.Context) error {
	if err := p.Launch(); err != nil {
		return err
	}
	if err := p.Wait(ctx, p.ready); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	return nil
}

// Launch starts the process and does not wait for anything. It fails if it runs.
func (p *Process) Launch() error {
	if err := p.launch(); err != nil {
		return fmt.Errorf("start %s: %w", p.Name, err)
	}
	return nil
}

func (p *Process) launch() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current != nil && !ended(p.current) {
		return errors.New("it is running")
	}
	log, err := os.OpenFile(p.logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	args := slices.Clone(p.argv[1:])
	if p.launchArgs != nil {
		args = append(args, p.launchArgs()...)
	}
	cmd := exec.Command(p.argv[0], args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Dir = filepath.Dir(p.logFile)
	if p.current, err = p.supervisor.Start(cmd); err != nil {
		return err
	}
	return nil
}

func ended(p *proc.Process) bool {
	select {
	case <-p.Done():
		return true
	default:
		return false
	}
}

// Wait calls check until it returns nil, the process ends, or time runs out.
func (p *Process) Wait(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, startWait)
	defer cancel()
	p.mu.Lock()
	current := p.current
	p.mu.Unlock()
	ticker := time.NewTicker(20 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w\n%s", context.Cause(ctx), err, p.logTail())
		case <-current.Done():
			return fmt.Errorf("it ended: %v\n%s", current.State(), p.logTail())
		case <-ticker.C:
		}
	}
}

// logTail is the end of the log.
func (p *Process) logTail() string {
	raw, err := os.ReadFile(p.logFile)
	if err != nil {
		return err.Error()
	}
	return string(raw[max(0, len(raw)-4000):])
}

// Ready returns nil once the process is ready.
func (p *Process) Ready(ctx context.Context) error { return p.ready(ctx) }

// Stop sends SIGTERM, and SIGKILL after grace, and waits.
func (p *Process) Stop(ctx context.Context, grace time.Duration) error {
	if current := p.running(); current != nil {
		return current.Stop(ctx, grace)
	}
	return nil
}

// Kill ends the process by SIGKILL and waits.
func (p *Process) Kill() error {
	current := p.running()
	if current == nil {
		return nil
	}
	if err := current.Signal(syscall.SIGKILL); err != nil {
		return err
	}
	<-current.Done()
	return nil
}

// Pause stops the process with SIGSTOP. Resume undoes that.
func (p *Process) Pause() error { return p.signal(syscall.SIGSTOP) }

// Resume undoes Pause.
func (p *Process) Resume() error { return p.signal(syscall.SIGCONT) }

func (p *Process) signal(s syscall.Signal) error {
	if current := p.running(); current != nil {
		return current.Signal(s)
	}
	return fmt.Errorf("%s is not running", p.Name)
}

// Last returns the latest process, which may have ended. It is nil before the first
// start.
func (p *Process) Last() *proc.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.current
}

// Running reports whether the process runs.
func (p *Process) Running() bool { return p.running() != nil }

// Pid is the process's ID, 0 if it does not run.
func (p *Process) Pid() int {
	if current := p.running(); current != nil {
		return current.Pid()
	}
	return 0
}

func (p *Process) running() *proc.Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.current == nil || ended(p.current) {
		return nil
	}
	return p.current
}

// getOK asks url and returns nil if the answer is 200.
func getOK(ctx context.Context, client *http.Client, url string) error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
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
