package support

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// Bounds of Lines.
const (
	lineBytes = 1 << 20
	mostLines = 10_000
)

// Line is a line that a container of Berth has written.
type Line struct {
	Time           time.Time
	Pod, Container string
	Text           string
}

// Logs says which logs are read.
type Logs struct {
	Config *rest.Config
	// Release is the namespace of Berth's pods. Empty: where there are such pods.
	Release string
	// Since is the age of the oldest line.
	Since time.Duration
	// Of is in every line: the ID of a sandbox, which Berth's programs shorten, or of a request.
	Of string
}

// Lines returns the lines of all of Berth's pods that have an ID, by time: at most 10,000 of each container. failed has the
// logs that could not be read to their end.
func Lines(ctx context.Context, l Logs) (lines []Line, failed []File, err error) {
	client, err := kubernetes.NewForConfig(l.Config)
	if err != nil {
		return nil, nil, err
	}
	pods, err := ownPods(ctx, client, l.Release)
	if err != nil {
		return nil, nil, err
	}
	if len(pods) == 0 {
		return nil, nil, fmt.Errorf("there are no pods of Berth in the cluster%s", inNamespace(l.Release))
	}
	turns := make(chan struct{}, atOnce)
	var reading sync.WaitGroup
	var mu sync.Mutex
	for _, p := range pods {
		for _, log := range logsOf(&p, l.Since) {
			turns <- struct{}{}
			reading.Go(func() {
				defer func() { <-turns }()
				found, err := l.read(ctx, client, &p, log)
				mu.Lock()
				defer mu.Unlock()
				if lines = append(lines, found...); err != nil {
					failed = append(failed, File{Name: p.Name + " " + log.Container, Error: err.Error()})
				}
			})
		}
	}
	reading.Wait()
	slices.SortStableFunc(lines, func(a, b Line) int { return cmp.Or(a.Time.Compare(b.Time), cmp.Compare(a.Pod, b.Pod)) })
	return lines, failed, ctx.Err()
}

func inNamespace(namespace string) string {
	if namespace == "" {
		return ""
	}
	return ", in namespace " + namespace
}

// read reads the log of one container.
func (l *Logs) read(
	ctx context.Context, client kubernetes.Interface, p *corev1.Pod, log corev1.PodLogOptions,
) (lines []Line, err error) {
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	stream, err := client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &log).Stream(ctx)
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	id := []byte(l.Of)
	if sandboxid.Valid(l.Of) {
		id = []byte(sandboxid.Short(l.Of))
	}
	all := bufio.NewScanner(stream)
	all.Buffer(nil, lineBytes)
	for all.Scan() {
		if !bytes.Contains(all.Bytes(), id) {
			continue
		}
		at, text, _ := strings.Cut(all.Text(), " ")
		when, err := time.Parse(time.RFC3339Nano, at)
		if err != nil {
			return lines, err
		}
		if lines = append(lines, Line{when, p.Name, log.Container, text}); len(lines) == mostLines {
			return lines, fmt.Errorf("more than %d lines", mostLines)
		}
	}
	return lines, all.Err()
}
