package processnode

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// container is one container of a pod through all its runs. What mu does not
// guard belongs to the pod's worker.
type container struct {
	spec *corev1.Container
	init bool

	run      *run                             // nil while nothing runs
	exited   *corev1.ContainerStateTerminated // how the latest run ended
	earlier  *corev1.ContainerStateTerminated // how the one before it ended
	waiting  *corev1.ContainerStateWaiting    // why it is not started now; nil: no reason to give
	restarts int32
	again    bool       // an init container that must run again although it ended well
	since    *time.Time // end of the run that back-off counts from; nil: none
	results  [probeKinds]outcome
	fresh    bool // its run is to be asked out of turn whether it is ready

	mu      sync.Mutex
	target  target // what the probes may know
	visible *run   // what exec probes may run in; nil: nothing

	triggers [probeKinds]chan struct{} // capacity 1; a readiness probe asked for out of turn
}

// run is one start of a container's command.
type run struct {
	id        string
	cmd       *exec.Cmd
	proc      *proc.Process
	ctx       context.Context // ends with the run: what was executed in it ends too
	end       context.CancelFunc
	startedAt time.Time
	environ   []string
	exit      *corev1.ContainerStateTerminated // set when the process is gone
	killer    *killer                          // set when its end was asked for
}

// errConfig marks what a kubelet reports as CreateContainerConfigError: the
// container cannot be made, so it was never started.
var errConfig = errors.New("container cannot be made")

// start runs the container's command with the pod's address in its environment.
// A started run is always returned with a nil error.
func (w *worker) start(c *container) (*run, error) {
	if len(c.spec.Command) == 0 {
		return nil, fmt.Errorf("%w: no command specified: a process node runs no image, so the container must name its command", errConfig)
	}
	env, err := environment(w.pod, c.spec, w.address.String(), hostIP)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errConfig, err)
	}
	argv := append(expandAll(c.spec.Command, env), expandAll(c.spec.Args, env)...)
	r := &run{id: newContainerID(), environ: w.node.environ(w.pod, env)}
	dir := filepath.Join(w.dir(), c.spec.Name)
	home := filepath.Join(dir, fmt.Sprintf("%d", c.restarts))
	if err := os.MkdirAll(home, 0o755); err != nil {
		return nil, fmt.Errorf("%w: %w", errConfig, err)
	}
	log, err := os.OpenFile(home+".log", os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errConfig, err)
	}
	defer log.Close()
	if wd := c.spec.WorkingDir; wd != "" {
		if info, err := os.Stat(wd); err == nil && info.IsDir() {
			home = wd
		}
	}
	r.cmd, err = w.node.command(argv, r.environ, home)
	if err != nil {
		return nil, err
	}
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.startedAt = time.Now()
	if r.proc, err = w.node.o.Supervisor.Start(r.cmd); err != nil {
		return nil, err
	}
	r.ctx, r.end = context.WithCancel(w.ctx)
	return r, nil
}

// command finds argv[0] as a container would on the PATH of its image.
func (n *Node) command(argv, environ []string, dir string) (*exec.Cmd, error) {
	path := argv[0]
	if !strings.Contains(path, "/") {
		found := false
		for _, d := range append(slices.Clone(n.o.Path), filepath.SplitList(os.Getenv("PATH"))...) {
			if info, err := os.Stat(filepath.Join(d, path)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				path, found = filepath.Join(d, path), true
				break
			}
		}
		if !found {
			return nil, fmt.Errorf("exec: %q: executable file not found in $PATH", argv[0])
		}
	}
	return &exec.Cmd{Path: path, Args: argv, Env: environ, Dir: dir}, nil
}

// environ is what a runtime gives besides the container's own variables.
func (n *Node) environ(pod *corev1.Pod, env map[string]string) []string {
	all := map[string]string{
		"PATH":     strings.Join(append(slices.Clone(n.o.Path), os.Getenv("PATH")), string(os.PathListSeparator)),
		"HOSTNAME": pod.Name,
	}
	for k, v := range env {
		all[k] = v
	}
	out := make([]string, 0, len(all))
	for k, v := range all {
		out = append(out, k+"="+v)
	}
	return out
}

func newContainerID() string {
	var b [32]byte
	_, _ = rand.Read(b[:]) // never fails
	return "process://" + hex.EncodeToString(b[:])
}

// ended tells how a finished process ended, as a runtime reports it.
func (r *run) ended(at time.Time) *corev1.ContainerStateTerminated {
	t := &corev1.ContainerStateTerminated{
		Reason:      "Completed",
		ContainerID: r.id,
		StartedAt:   metav1.NewTime(r.startedAt),
		FinishedAt:  metav1.NewTime(at),
	}
	if s, ok := r.proc.State().Sys().(syscall.WaitStatus); ok && s.Signaled() {
		t.ExitCode = 128 + int32(s.Signal())
	} else {
		t.ExitCode = int32(r.proc.State().ExitCode())
	}
	if t.ExitCode != 0 {
		t.Reason = "Error"
	}
	return t
}

// failedStart is the state containerd gives a container whose process could not
// be started.
func failedStart(err error) *corev1.ContainerStateTerminated {
	return &corev1.ContainerStateTerminated{
		ExitCode:    128,
		Reason:      "StartError",
		Message:     "failed to create containerd task: unable to start container process: " + err.Error(),
		ContainerID: newContainerID(),
		StartedAt:   metav1.Unix(0, 0),
		FinishedAt:  metav1.Now(),
	}
}

// execute runs a command beside the container's process, as exec probes and
// hooks do. It ends with ctx, and with the run.
func (w *worker) execute(ctx context.Context, r *run, argv []string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	cmd, err := w.node.command(argv, r.environ, r.cmd.Dir)
	if err != nil {
		return err
	}
	p, err := w.node.o.Supervisor.Start(cmd)
	if err != nil {
		return err
	}
	select {
	case <-p.Done():
	case <-ctx.Done():
		if err := p.Signal(syscall.SIGKILL); err != nil {
			return err
		}
		<-p.Done()
		return ctx.Err()
	}
	if code := p.State().ExitCode(); code != 0 {
		return fmt.Errorf("command %q ended with %s", argv, p.State())
	}
	return nil
}

// groupGone returns when no process of the group is left, so that nothing
// listens on the pod's address any more. What a dead leader leaves behind was
// sent SIGKILL; it needs a moment, or for ever as a zombie nobody reaps, which
// holds no sockets: hence the limit.
func groupGone(pgid int) {
	const limit, step = time.Second, time.Millisecond
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(step) {
		if errors.Is(syscall.Kill(-pgid, 0), syscall.ESRCH) {
			return
		}
	}
}

// removeHomes deletes the working directories of a pod that is gone; its logs
// stay, as evidence.
func (w *worker) removeHomes() error {
	return filepath.WalkDir(w.dir(), func(path string, d fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil
		case err != nil:
			return err
		}
		if rel, _ := filepath.Rel(w.dir(), path); d.IsDir() && strings.Count(rel, "/") == 1 {
			if err := os.RemoveAll(path); err != nil {
				return err
			}
			return filepath.SkipDir
		}
		return nil
	})
}
