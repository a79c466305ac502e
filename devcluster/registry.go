package devcluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
)

// Each named cluster lives in a background process, its owner. Other processes find
// it through a directory per name in the cache:
//
//	dev/<name>/lock        locked by the owner while it lives
//	dev/<name>/state.json  the State that the owner has published
//	dev/<name>/cluster/    for Options.Dir; emptied by the next owner

var clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

// State describes a named cluster. The registry sets Name, PID, Process and Started.
type State struct {
	Name    string    `json:"name"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// Process tells the owner from a later process with the same PID.
	Process string `json:"process"`
	// Ready is true from the first Publish on.
	Ready      bool              `json:"ready"`
	Kubeconfig string            `json:"kubeconfig,omitempty"`
	URLs       map[string]string `json:"urls,omitempty"`
	Parts      []Part            `json:"parts,omitempty"`
}

// Part is a process that belongs to a named cluster.
type Part struct {
	Name string `json:"name"`
	// PID is that of the process started last.
	PID int `json:"pid"`
	// Process tells it from a later process with the same PID. The registry sets it.
	Process string `json:"process"`
	// Restarts is how often the owner has started the part again.
	Restarts int `json:"restarts"`
	// Running is read from the kernel by Lookup, so it is right even before the owner
	// has noticed an end.
	Running bool `json:"-"`
}

// Registration is the ownership of a name. It ends with Close or with the
// process.
type Registration struct {
	lock  *os.File
	dir   string
	state State
}

// Acquire makes this process the owner of a name. The error is ErrRunning when
// the name has one.
func Acquire(name string) (_ *Registration, err error) {
	dir, err := registryDir(name)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	lock, err := tryLock(filepath.Join(dir, "lock"))
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("cluster %s: %w; stop it first or choose another name", name, ErrRunning)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	process, err := processIdentity(os.Getpid())
	r := &Registration{lock: lock, dir: dir, state: State{Name: name, PID: os.Getpid(), Process: process,
		Started: time.Now().Round(0)}}
	if err == nil {
		err = r.write(r.state)
	}
	if err == nil {
		err = os.RemoveAll(r.Dir())
	}
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, errors.Join(err, lock.Close()))
	}
	return r, nil
}

// Dir is the directory for the cluster's own files; it does not exist yet.
func (r *Registration) Dir() string { return filepath.Join(r.dir, "cluster") }

// Publish replaces the state that Lookup returns. It may not be called concurrently.
func (r *Registration) Publish(s State) error {
	s.Name, s.PID, s.Process, s.Started, s.Ready = r.state.Name, r.state.PID, r.state.Process, r.state.Started, true
	s.Parts = slices.Clone(s.Parts)
	for i := range s.Parts {
		s.Parts[i].Process, _ = processIdentity(s.Parts[i].PID) // no identity: it has ended
	}
	return r.write(s)
}

// write replaces the state file atomically.
func (r *Registration) write(s State) error {
	b, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return fmt.Errorf("publish the state of cluster %s: %w", s.Name, err)
	}
	next := filepath.Join(r.dir, "state.json.next")
	if err := os.WriteFile(next, append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("publish the state of cluster %s: %w", s.Name, err)
	}
	if err := os.Rename(next, filepath.Join(r.dir, "state.json")); err != nil {
		return fmt.Errorf("publish the state of cluster %s: %w", s.Name, err)
	}
	return nil
}

// Close gives the name up. Calls of RequestStop that wait for it then return.
func (r *Registration) Close() error { return r.lock.Close() }

// Lookup returns the state of a running cluster, or ErrNotRunning.
func Lookup(name string) (State, error) {
	dir, err := registryDir(name)
	if err != nil {
		return State{}, err
	}
	locked, err := isLocked(filepath.Join(dir, "lock"))
	if err != nil {
		return State{}, fmt.Errorf("cluster %s: %w", name, err)
	}
	if !locked {
		return State{}, fmt.Errorf("cluster %s: %w", name, ErrNotRunning)
	}
	b, err := os.ReadFile(filepath.Join(dir, "state.json"))
	if errors.Is(err, os.ErrNotExist) {
		return State{Name: name}, nil // the owner has only just locked
	}
	if err != nil {
		return State{}, fmt.Errorf("cluster %s: %w", name, err)
	}
	var s State
	if err := json.Unmarshal(b, &s); err != nil {
		return State{}, fmt.Errorf("cluster %s: read its state: %w", name, err)
	}
	if process, err := processIdentity(s.PID); err != nil || process != s.Process {
		return State{Name: name}, nil // a former owner's; the present one has only just locked
	}
	for i, p := range s.Parts {
		process, err := processIdentity(p.PID)
		s.Parts[i].Running = err == nil && process == p.Process
	}
	return s, nil
}

// List returns the states of all running clusters, by name.
func List() ([]State, error) {
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Join(cache, "dev"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the clusters: %w", err)
	}
	var states []State
	for _, e := range entries {
		s, err := Lookup(e.Name())
		if errors.Is(err, ErrNotRunning) {
			continue
		}
		if err != nil {
			return nil, err
		}
		states = append(states, s)
	}
	return states, nil
}

// RequestStop sends SIGTERM to the owner of a name and waits until the name is
// free. It never signals a process that is not the owner.
func RequestStop(ctx context.Context, name string) error {
	dir, err := registryDir(name)
	if err != nil {
		return err
	}
	// Only the present owner is stopped. Another owner that follows within one poll
	// shows that the first one has ended.
	var asked State
	err = wait.PollUntilContextCancel(ctx, lockPoll, true, func(context.Context) (bool, error) {
		s, err := Lookup(name)
		switch {
		case errors.Is(err, ErrNotRunning) && asked.PID != 0:
			return true, nil
		case err != nil || s.PID == 0:
			return false, err
		case asked.PID == 0:
			asked = s
			return false, terminate(s)
		}
		return s.Process != asked.Process, nil
	})
	if ctx.Err() != nil {
		return fmt.Errorf("stop cluster %s: %w; its process is %d, its log is in %s", name, err, asked.PID, dir)
	}
	return err
}

// terminate signals the process that wrote s and no later one with the same PID. It
// takes the process handle before it compares the identity, and a handle stays with
// its process.
func terminate(s State) error {
	p, err := os.FindProcess(s.PID)
	if err != nil {
		return err
	}
	defer func() { _ = p.Release() }()
	if process, err := processIdentity(s.PID); err != nil || process != s.Process {
		return nil // it has ended
	}
	if err := p.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("signal process %d: %w", s.PID, err)
	}
	return nil
}

// processIdentity tells processes with the same PID apart. It is the start time
// (proc_pid_stat(5), field 22) and the ID of the boot from which that time counts. A
// process that has ended has no identity, even if its parent has not reaped it.
func processIdentity(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", fmt.Errorf("identify process %d: %w", pid, err)
	}
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("identify process %d: %w", pid, err)
	}
	// The name, field 2, may hold blanks and parentheses. The state is next.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 20 {
		return "", fmt.Errorf("identify process %d: unexpected %q", pid, stat)
	}
	if state := fields[0]; state == "Z" || state == "X" {
		return "", fmt.Errorf("identify process %d: it has ended", pid)
	}
	return strings.TrimSpace(string(boot)) + "/" + fields[22-3], nil
}

func registryDir(name string) (string, error) {
	if !clusterName.MatchString(name) {
		return "", fmt.Errorf("cluster name %q: up to 40 of a-z, 0-9 and -, not - at the ends", name)
	}
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(cache, "dev", name), nil
}
