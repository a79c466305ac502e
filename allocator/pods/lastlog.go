package pods

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
)

const (
	// logWait bounds one attempt to read a log. It is shorter than the connect window, which passes between a
	// release and the deletion of the pod.
	logWait = 2 * time.Second
	// logRead bounds what is read of a log. It has room for 100 lines of the kubelet's log files, which divide
	// a line after 16 KiB. logKept bounds what is kept, in bytes.
	logRead = 2 << 20
	logKept = 8 << 10
)

// ReadLog reads the last lines of the log of a sandbox that has ended, and submits them to the core. No pod and
// no lines are no error.
func (w *Writer) ReadLog(ctx context.Context, e core.ReadLog, lines int) error {
	ctx, cancel := context.WithTimeout(ctx, logWait)
	defer cancel()
	s := e.Sandbox
	p, gone, err := w.read(ctx, s.Pod)
	if err != nil || gone || KeyOf(p) != s.Pod {
		return err
	}
	tail, most := int64(lines), int64(logRead)
	options := &corev1.PodLogOptions{TailLines: &tail, LimitBytes: &most}
	options.Container, options.Previous = logOf(p, s.Reason)
	log, err := w.o.Clients.Kubernetes.CoreV1().Pods(s.Pod.Namespace).GetLogs(s.Pod.Name, options).Stream(ctx)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("read the log of pod %s: %w", s.Pod.Name, err)
	}
	defer log.Close()
	raw, err := io.ReadAll(io.LimitReader(log, logRead))
	if err != nil {
		return fmt.Errorf("read the log of pod %s: %w", s.Pod.Name, err)
	}
	text := string(raw)
	if strings.HasPrefix(text, noLog) && !strings.Contains(text, "\n") {
		return fmt.Errorf("read the log of pod %s: the kubelet has removed it", s.Pod.Name)
	}
	if s.Pod.Life != 0 { // the log may be that of another life
		if p, gone, err := w.read(ctx, s.Pod); err != nil || gone || KeyOf(p) != s.Pod {
			return err
		}
	}
	w.o.Submit(core.LogRead{ID: s.ID, Lines: lastLines(text, lines)})
	return nil
}

// noLog begins what a kubelet answers, with 200, in place of the log of a container that it is removing.
const noLog = "unable to retrieve container logs for "

// logOf returns the container that has the last words of a sandbox: the one whose end is the reason, or else the
// first one. previous: it was started again since.
func logOf(p *corev1.Pod, reason string) (container string, previous bool) {
	switch reason {
	case fact.ReasonUnexpectedRestart, fact.ReasonOOMKilled, fact.ReasonFailed, fact.ReasonCompleted:
		if end := endOf(p); end != nil {
			at := slices.IndexFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == end.container })
			return end.container, p.Status.ContainerStatuses[at].State.Terminated == nil
		}
	}
	return p.Spec.Containers[0].Name, false
}

// lastLines returns at most so many lines from the end of a text, and at most logKept bytes of them. What is not
// UTF-8 is replaced. A line that was cut has a mark at its beginning.
func lastLines(text string, lines int) []string {
	const mark = "..."
	text = strings.TrimSuffix(strings.ToValidUTF8(text, string(utf8.RuneError)), "\n")
	if text == "" {
		return nil
	}
	if len(text) > logKept {
		text = text[len(text)-logKept+len(mark):]
		for !utf8.RuneStart(text[0]) {
			text = text[1:]
		}
		text = mark + text
	}
	all := strings.Split(text, "\n")
	return all[max(0, len(all)-lines):]
}
