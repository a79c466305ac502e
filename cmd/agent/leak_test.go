package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/agentpb/filesystem"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// leaver is a client that goes away in the middle of its calls.
type leaver struct {
	t    *testing.T
	r    *running
	http *http.Client
	dir  string
	processpb.ProcessClient
	files filesystempb.FilesystemClient
}

// begun starts a process and returns when the stream has begun. leave breaks the connection.
func (l *leaver) begun(request *processpb.StartRequest) (pid uint32, leave func()) {
	ctx, cancel := context.WithCancel(l.t.Context())
	stream, err := l.Start(ctx, connect.NewRequest(request))
	if assert.NoError(l.t, err) && assert.True(l.t, stream.Receive(), "%v", stream.Err()) {
		pid = stream.Msg().GetEvent().GetStart().GetPid()
	}
	return pid, func() { cancel(); _ = stream.Close() }
}

// kill waits until the process is gone.
func (l *leaver) kill(pid uint32) {
	selector := &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: pid}}
	_, err := l.SendSignal(l.t.Context(), connect.NewRequest(&processpb.SendSignalRequest{
		Process: selector, Signal: processpb.Signal_SIGNAL_SIGKILL}))
	assert.NoError(l.t, err)
	if stream, err := l.Connect(l.t.Context(), connect.NewRequest(&processpb.ConnectRequest{Process: selector})); err == nil {
		for stream.Receive() {
		}
		_ = stream.Close()
	}
}

func shellOf(script string) *processpb.StartRequest {
	return &processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}}}
}

// leavings are calls that end early, each in another phase.
func (l *leaver) leavings() map[string]func() {
	run := func(request *processpb.StartRequest) func() {
		return func() {
			pid, leave := l.begun(request)
			leave()
			l.kill(pid)
		}
	}
	refused := func(request *processpb.StartRequest) func() {
		return func() {
			stream, err := l.Start(l.t.Context(), connect.NewRequest(request))
			if assert.NoError(l.t, err) {
				assert.False(l.t, stream.Receive())
				assert.Error(l.t, stream.Err())
				_ = stream.Close()
			}
		}
	}
	terminal, script := shellOf("exec sleep 1000"), filepath.Join(l.dir, "script")
	terminal.Pty = &processpb.PTY{}
	return map[string]func(){
		"silent":             run(shellOf("exec sleep 1000")),
		"in its output":      run(shellOf("while :; do echo 1234567890; done")),
		"with a background":  run(shellOf("sleep 1000 & sleep 1000")),
		"at a terminal":      run(terminal),
		"no such command":    refused(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: "no-such-command"}}),
		"no interpreter":     refused(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: script}}),
		"terminal refused":   refused(&processpb.StartRequest{Process: &processpb.ProcessConfig{Cmd: script}, Pty: &processpb.PTY{}}),
		"before the request": l.unfinished("POST /process.Process/Start", "application/connect+json"),
		"in an upload":       l.unfinished("POST /files?path="+filepath.Join(l.dir, "new"), "application/octet-stream"),
		"timeout": func() {
			ctx, cancel := context.WithTimeout(l.t.Context(), 20*time.Millisecond)
			defer cancel()
			if stream, err := l.Start(ctx, connect.NewRequest(shellOf("exec sleep 1000"))); err == nil {
				for stream.Receive() {
				}
				_ = stream.Close()
			}
		},
		"in a download": func() {
			r, err := http.NewRequestWithContext(l.t.Context(), http.MethodGet, l.r.url+"/files?path="+filepath.Join(l.dir, "large"), http.NoBody)
			assert.NoError(l.t, err)
			r.Header.Set("X-Access-Token", token)
			if answer, err := l.http.Do(r); assert.NoError(l.t, err) {
				_, err = io.CopyN(io.Discard, answer.Body, 100)
				assert.NoError(l.t, err)
				_ = answer.Body.Close()
			}
		},
		"in a watch": func() {
			ctx, cancel := context.WithCancel(l.t.Context())
			stream, err := l.files.WatchDir(ctx, connect.NewRequest(&filesystempb.WatchDirRequest{Path: l.dir, Recursive: true}))
			assert.True(l.t, err == nil && stream.Receive(), "%v", err)
			cancel()
			_ = stream.Close()
		},
	}
}

// unfinished sends the beginning of a request and goes.
func (l *leaver) unfinished(call, contentType string) func() {
	return func() {
		conn, err := net.Dial("tcp", strings.TrimPrefix(l.r.url, "http://"))
		if !assert.NoError(l.t, err) {
			return
		}
		_, err = fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: a\r\nContent-Type: %s\r\nContent-Length: 1000\r\nX-Access-Token: %s\r\n\r\nabc",
			call, contentType, token)
		assert.NoError(l.t, err)
		assert.NoError(l.t, conn.Close())
	}
}

// held returns what the agent's process has: the number of its open files, and its children and the uploads that
// are not complete.
func (l *leaver) held() (files int, left []string) {
	pid := l.r.cmd.Process.Pid
	open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	require.NoError(l.t, err)
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	require.NoError(l.t, err)
	for _, thread := range threads {
		of, _ := os.ReadFile(thread) // the thread has ended
		left = append(left, strings.Fields(string(of))...)
	}
	staged, err := filepath.Glob(filepath.Join(l.dir, ".berth-upload-*"))
	require.NoError(l.t, err)
	return len(open), append(left, staged...)
}

func TestClientsThatLeaveLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	r := start(t, 0)
	dir := t.TempDir()
	r.configure(initbox.Config{Workdir: dir})
	require.NoError(t, os.WriteFile(filepath.Join(dir, "script"), []byte("#!/no/such/interpreter\n"), 0o755))
	require.NoError(t, os.WriteFile(filepath.Join(dir, "large"), make([]byte, 16<<20), 0o644))
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	options := []connect.ClientOption{connect.WithProtoJSON(), connect.WithInterceptors(withToken{})}
	l := &leaver{t: t, r: r, http: client, dir: dir, ProcessClient: processpb.NewProcessClient(client, r.url, options...),
		files: filesystempb.NewFilesystemClient(client, r.url, options...)}
	const rounds, each = 4, 2
	before, files, left := 0, 0, []string(nil)
	for round := range rounds {
		var wg sync.WaitGroup
		for name, leave := range l.leavings() {
			for range each {
				wg.Go(func() {
					leave()
					assert.False(t, t.Failed(), name)
				})
			}
		}
		wg.Wait()
		if round == 0 { // it has opened what it keeps; what is still being closed is less than the rounds would leave
			require.Eventually(t, func() bool {
				before, _ = l.held()
				return before < each*len(l.leavings())
			}, time.Minute, 50*time.Millisecond)
		}
	}
	assert.Eventually(t, func() bool {
		files, left = l.held()
		return files <= before && len(left) == 0
	}, time.Minute, 50*time.Millisecond)
	t.Logf("%d files after the first round, then %d, and %q", before, files, left)
}
