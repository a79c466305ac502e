package processnode

import (
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

// container is one container of a pod through all its runs. The fields that mu
// does not guard belong to the pod's worker.
type container struct {
	spec *corev1.Container

	run      *run                             // nil while nothing runs
	exited   *corev1.ContainerStateTerminated // how the latest run ended
	earlier  *corev1.ContainerStateTerminated // how the run before it ended
	waiting  *corev1.ContainerStateWaiting    // why it is not started now; nil: no reason
	restarts int32
	passed   bool // the readiness probe's last verdict on this run
	fresh    bool // the readiness probe has not been triggered for this run yet

	trigger chan struct{} // capacity 1; asks the probe to run before its next period

	mu     sync.Mutex
	target target // what the probe may know
}

// run is one start of a container's command.
type run struct {
	id        string
	cmd       *exec.Cmd
	proc      *proc.Process
	startedAt time.Time
	exit      *corev1.ContainerStateTerminated // set when the process has ended
	killer    *killer                          // set when the pod's end has begun
}

// errConfig marks what a kubelet reports as CreateContainerConfigError: the
// container cannot be made, so it is never started.
var errConfig = errors.New("container cannot be made")

// start runs the container's command with the pod's address in its environment.
// A started run is always returned with a nil error.
func (w *worker) start(c *container) (*run, error) {
	if len(c.spec.Command) == 0 {
		return nil, fmt.Errorf("%w: no command: a process node runs no image, so the command is required", errConfig)
	}
	env, err := environment(w.pod, c.spec, w.address.String(), hostIP)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errConfig, err)
	}
	argv := append(expandAll(c.spec.Command, env), expandAll(c.spec.Args, env)...)
	r := &run{id: newContainerID()}
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
	r.cmd, err = w.node.command(argv, w.node.environ(w.pod, env), home)
	if err != nil {
		return nil, err
	}
	r.cmd.Stdout, r.cmd.Stderr = log, log
	r.startedAt = time.Now()
	if r.proc, err = w.node.o.Supervisor.Start(r.cmd); err != nil {
		return nil, err
	}
	return r, nil
}

// command looks argv[0] up as a runtime does on the PATH of an image.
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

// environ adds the variables that a runtime sets to the container's own.
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

// ended says how a process ended, in the form in which a runtime reports it.
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

// failedStart is the state that containerd reports for a container whose process
// could not be started.
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

// groupGone returns when no process of the group is left, so that none of them
// listens on the pod's address. The processes that a dead leader leaves behind
// have been sent SIGKILL. The wait is bounded because a zombie whose parent does
// not reap it stays in the group. A zombie holds no sockets.
func groupGone(pgid int) {
	const limit, step = time.Second, time.Millisecond
	for deadline := time.Now().Add(limit); time.Now().Before(deadline); time.Sleep(step) {
		if errors.Is(syscall.Kill(-pgid, 0), syscall.ESRCH) {
			return
		}
	}
}

// removeHomes deletes the working directories of a pod that is gone. Its logs
// stay for a later look at a failed test.
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
