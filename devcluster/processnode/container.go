package processnode

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// run is one start of the container's command. The fields from passed on belong to the
// goroutine of the worker.
type run struct {
	id        string
	cmd       *exec.Cmd
	proc      *proc.Process
	startedAt time.Time

	passed   bool                             // the readiness probe's last verdict
	exit     *corev1.ContainerStateTerminated // set when the process has ended
	stopping bool                             // kill has begun
	stopped  bool                             // kill is over
}

// start runs the container's command with the pod's address in its environment.
func (w *worker) start() (*run, error) {
	path := slices.Concat(w.node.o.Path, filepath.SplitList(os.Getenv("PATH")))
	argv := commandOf(w.spec, w.address)
	command, err := lookUp(argv[0], path)
	if err != nil {
		return nil, err
	}
	home := filepath.Join(w.node.o.Dir, w.pod.Namespace+"_"+w.pod.Name+"_"+string(w.pod.UID))
	if err := os.MkdirAll(home, 0o755); err != nil {
		return nil, err
	}
	log, err := os.Create(filepath.Join(home, fmt.Sprintf("%d.log", w.restarts)))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	r := &run{id: newContainerID(), startedAt: time.Now(), passed: w.spec.ReadinessProbe == nil}
	r.cmd = &exec.Cmd{
		Path: command, Args: argv, Dir: home, Stdout: log, Stderr: log,
		// A later variable of one name wins.
		Env: append([]string{"PATH=" + strings.Join(path, string(os.PathListSeparator)), "HOSTNAME=" + w.pod.Name},
			environment(w.pod, w.spec, w.address.String())...),
	}
	if r.proc, err = w.node.o.Supervisor.Start(r.cmd); err != nil {
		return nil, err
	}
	return r, nil
}

// lookUp finds a command as a runtime does on the PATH of an image.
func lookUp(command string, path []string) (string, error) {
	if strings.Contains(command, "/") {
		return command, nil
	}
	for _, dir := range path {
		if found, err := exec.LookPath(filepath.Join(dir, command)); err == nil {
			return found, nil
		}
	}
	return "", fmt.Errorf("exec: %q: executable file not found in $PATH", command)
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
