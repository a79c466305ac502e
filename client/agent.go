package client

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/agentpb/filesystem"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/openapi"
)

const (
	// agentPort is the default port of agents, the only one that E2B's SDKs know.
	agentPort = 49983
	// withoutAgent is the envdVersion of a sandbox whose pool has no agent and names no version.
	withoutAgent = "0.1.0"
	tokenHeader  = "X-Access-Token"
	// killWait bounds the call that ends a command whose caller gives up.
	killWait = 5 * time.Second
	// maxInput is how many bytes of input one call carries.
	maxInput = 32 << 10
	// maxRefusal bounds the bytes that are read of a refusal.
	maxRefusal = 64 << 10
	// maxAgentMessage bounds a message of the agent. It sends output in pieces of 32 KiB.
	maxAgentMessage = 4 << 20
	// maxKept bounds what Run and ReadFile keep in memory.
	maxKept = 64 << 20
	// reasonHeader is in refusals of the gateway, which takes it out of what a sandbox answers.
	reasonHeader = "X-Berth-Reason"
)

// ErrTooLarge is in the error of Run and ReadFile for more than 64 MiB.
var ErrTooLarge = errors.New("more than 64 MiB")

// ErrNoAgent is in the error of NewAgent for a sandbox without an agent.
var ErrNoAgent = errors.New("the sandbox has no agent: enable spec.agent of its pool")

// AgentOptions configure an Agent. All fields are optional.
type AgentOptions struct {
	// User runs the commands and owns the files. "": the default user of the sandbox.
	User string
	// HTTP sends the requests. It needs no Timeout, because commands last. Redirects are not followed,
	// because a sandbox could lead the caller anywhere with them.
	HTTP *http.Client
}

// Agent runs commands and moves files in one sandbox. It speaks to the agent of the pod on port 49983, through
// the gateway. What runs in the sandbox may have replaced the agent, so its answers are bounded and not
// trusted. All methods may be called concurrently.
type Agent struct {
	processes   processpb.ProcessClient
	directories filesystempb.FilesystemClient
	files       *url.URL
	o           AgentOptions
	token       string
}

// NewAgent returns the agent of a sandbox that Claim, Get or Connect has answered. It makes no call.
func NewAgent(s *openapi.Sandbox, o AgentOptions) (*Agent, error) {
	switch {
	case s.EnvdVersion == withoutAgent:
		return nil, ErrNoAgent
	case s.EnvdAccessToken == nil:
		return nil, errors.New("the API does not show the token of the agent to this key; a key with the role member sees it")
	}
	base, err := URL(s, agentPort)
	if err != nil {
		return nil, err
	}
	u, err := url.Parse(base)
	if err != nil {
		return nil, fmt.Errorf("the address of the agent: %w", err)
	}
	a := &Agent{o: o, token: *s.EnvdAccessToken, files: u.JoinPath("files")}
	own := *cmp.Or(o.HTTP, &http.Client{})
	if own.Transport == nil {
		own.Transport = http.DefaultTransport
	}
	own.Transport = &withToken{own.Transport, a}
	own.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	a.o.HTTP = &own
	options := []connect.ClientOption{
		connect.WithReadMaxBytes(maxAgentMessage), connect.WithAcceptCompression("gzip", nil, nil),
	}
	a.processes = processpb.NewProcessClient(a.o.HTTP, strings.TrimSuffix(base, "/"), options...)
	a.directories = filesystempb.NewFilesystemClient(a.o.HTTP, strings.TrimSuffix(base, "/"), options...)
	return a, nil
}

// withToken adds the token and the user to requests, and makes an *Error of a refusal of the gateway.
type withToken struct {
	http.RoundTripper
	a *Agent
}

func (w *withToken) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set(tokenHeader, w.a.token)
	if w.a.o.User != "" {
		r.SetBasicAuth(w.a.o.User, "")
	}
	response, err := w.RoundTripper.RoundTrip(r)
	if err != nil || response.StatusCode < http.StatusBadRequest {
		return response, err
	}
	raw, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	_ = response.Body.Close()
	if err != nil {
		return nil, err
	}
	var refusal struct {
		Reason, Message, SandboxID string
	}
	named := response.Header.Get(reasonHeader)
	if named != "" && json.Unmarshal(raw, &refusal) == nil && refusal.Reason == named {
		return nil, &Error{
			Status: response.StatusCode, Reason: refusal.Reason, Message: refusal.Message, SandboxID: refusal.SandboxID,
		}
	}
	response.Body = io.NopCloser(bytes.NewReader(raw))
	return response, nil
}

// Command is a command in a sandbox.
type Command struct {
	// Args are the program, which is looked up in the PATH of the user, and its arguments.
	Args []string
	// Envs are added to the variables of the sandbox.
	Envs map[string]string
	// Dir is the working directory. "": that of the sandbox, else the home of the user.
	Dir string
	// Stdin, if set, is read until its end or the end of the command.
	Stdin io.Reader
	// Stdout and Stderr get the output. nil: it is thrown away. A terminal has Stdout only.
	Stdout, Stderr io.Writer
	// Terminal, if set, gives the command a terminal of this size.
	Terminal *TerminalSize
}

// TerminalSize is in characters.
type TerminalSize struct{ Columns, Rows int }

func (t *TerminalSize) pty() *processpb.PTY {
	if t == nil {
		return nil
	}
	size := &processpb.PTY_Size{Cols: uint32(t.Columns), Rows: uint32(t.Rows)} //nolint:gosec // the agent bounds them
	return &processpb.PTY{Size: size}
}

// Process is a command that was started.
type Process struct {
	PID    uint32
	a      *Agent
	c      Command
	stream *connect.ServerStreamForClient[processpb.StartResponse]
	// stop ends the goroutine that sends input.
	stop context.CancelFunc
}

// Start starts a command. When ctx ends, the command goes on without its caller. Call Wait.
func (a *Agent) Start(ctx context.Context, c Command) (*Process, error) {
	if len(c.Args) == 0 {
		return nil, errors.New("a command has a program at least")
	}
	request := &processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: c.Args[0], Args: c.Args[1:], Envs: c.Envs},
		Pty:     c.Terminal.pty(), Stdin: new(c.Stdin != nil),
	}
	if c.Dir != "" {
		request.Process.Cwd = &c.Dir
	}
	stream, err := a.processes.Start(ctx, connect.NewRequest(request))
	if err != nil {
		return nil, problem("start", err)
	}
	p := &Process{a: a, c: c, stream: stream}
	for p.PID == 0 {
		if !stream.Receive() {
			return nil, errors.Join(problem("start", cmp.Or(stream.Err(), io.ErrUnexpectedEOF)), stream.Close())
		}
		p.PID = stream.Msg().GetEvent().GetStart().GetPid()
	}
	ctx, p.stop = context.WithCancel(ctx)
	if c.Stdin != nil {
		go p.send(ctx)
	}
	return p, nil
}

func (p *Process) selector() *processpb.ProcessSelector {
	return &processpb.ProcessSelector{Selector: &processpb.ProcessSelector_Pid{Pid: p.PID}}
}

// send sends the input, until the command has ended.
func (p *Process) send(ctx context.Context) {
	buffer := make([]byte, maxInput)
	for {
		n, err := p.c.Stdin.Read(buffer)
		if n > 0 {
			input := &processpb.ProcessInput{Input: &processpb.ProcessInput_Stdin{Stdin: buffer[:n]}}
			if p.c.Terminal != nil {
				input.Input = &processpb.ProcessInput_Pty{Pty: buffer[:n]}
			}
			request := &processpb.SendInputRequest{Process: p.selector(), Input: input}
			if _, err := p.a.processes.SendInput(ctx, connect.NewRequest(request)); err != nil {
				return // the command has ended, or reads no more: as with a pipe, its end says what became of it
			}
		}
		if err != nil {
			if p.c.Terminal == nil {
				_, _ = p.a.processes.CloseStdin(ctx, connect.NewRequest(&processpb.CloseStdinRequest{Process: p.selector()}))
			}
			return
		}
	}
}

// Wait writes the output until the command ends, and returns its exit code: 128 and the number of the signal that
// has ended it, if one has. It does not wait for a Read of Stdin.
func (p *Process) Wait() (exitCode int, err error) {
	defer p.stop()
	defer p.stream.Close() //nolint:errcheck // the end was read, or there is an error
	for p.stream.Receive() {
		event := p.stream.Msg().GetEvent()
		data := event.GetData()
		for _, out := range []struct {
			to   io.Writer
			data []byte
		}{{p.c.Stdout, data.GetStdout()}, {p.c.Stdout, data.GetPty()}, {p.c.Stderr, data.GetStderr()}} {
			if out.to == nil || len(out.data) == 0 {
				continue
			}
			if _, err := out.to.Write(out.data); err != nil {
				return 0, err
			}
		}
		if end := event.GetEnd(); end != nil {
			switch code := end.GetExitCode(); {
			case !end.GetExited():
				return 128 + signalOf(end.GetStatus()), nil
			case code < 0 || code > 255:
				return 0, fmt.Errorf("the agent says that the command has exited with %d", code)
			default:
				return int(code), nil
			}
		}
	}
	return 0, problem("output", cmp.Or(p.stream.Err(), io.ErrUnexpectedEOF))
}

// signals are the names that Linux has for signals, from number 1 on. Those of the caller's system may have
// other numbers.
var signals = []string{
	"hangup", "interrupt", "quit", "illegal instruction", "trace/breakpoint trap", "aborted", "bus error",
	"floating point exception", "killed", "user defined signal 1", "segmentation fault", "user defined signal 2",
	"broken pipe", "alarm clock", "terminated", "stack fault", "child exited", "continued", "stopped (signal)",
	"stopped", "stopped (tty input)", "stopped (tty output)", "urgent I/O condition", "CPU time limit exceeded",
	"file size limit exceeded", "virtual timer expired", "profiling timer expired", "window changed",
	"I/O possible", "power failure", "bad system call",
}

// signalOf is the number of a signal, by the status of the process that it has ended, 0: it is unknown.
func signalOf(status string) int {
	name, ok := strings.CutPrefix(strings.TrimSuffix(status, " (core dumped)"), "signal: ")
	if !ok {
		return 0
	}
	if number, unnamed := strings.CutPrefix(name, "signal "); unnamed {
		n, err := strconv.ParseUint(number, 10, 6)
		if err != nil {
			return 0
		}
		return int(n) //nolint:gosec // of six bits
	}
	return slices.Index(signals, name) + 1
}

// Terminate sends SIGTERM to the command, or SIGKILL.
func (p *Process) Terminate(ctx context.Context, kill bool) error {
	signal := processpb.Signal_SIGNAL_SIGTERM
	if kill {
		signal = processpb.Signal_SIGNAL_SIGKILL
	}
	request := &processpb.SendSignalRequest{Process: p.selector(), Signal: signal}
	_, err := p.a.processes.SendSignal(ctx, connect.NewRequest(request))
	return problem("signal", err)
}

// Resize changes the size of the command's terminal.
func (p *Process) Resize(ctx context.Context, size TerminalSize) error {
	request := &processpb.UpdateRequest{Process: p.selector(), Pty: size.pty()}
	_, err := p.a.processes.Update(ctx, connect.NewRequest(request))
	return problem("resize", err)
}

// Output is what a command has written, and its exit code as Process.Wait returns it.
type Output struct {
	Stdout, Stderr []byte
	ExitCode       int
}

// kept keeps output up to a bound.
type kept struct{ bytes.Buffer }

func (k *kept) Write(b []byte) (int, error) {
	if k.Len()+len(b) > maxKept {
		return 0, ErrTooLarge
	}
	return k.Buffer.Write(b)
}

// Run runs a command to its end and keeps its output in memory. An exit code is no error. When ctx ends, or
// Stdout or Stderr have more than 64 MiB, the command is killed. Run then returns within 10 seconds.
func (a *Agent) Run(ctx context.Context, args ...string) (*Output, error) {
	var stdout, stderr kept
	code, err := a.RunCommand(ctx, Command{Args: args, Stdout: &stdout, Stderr: &stderr})
	return &Output{stdout.Bytes(), stderr.Bytes(), code}, err
}

// RunCommand runs a command to its end and returns its exit code, which is no error. When ctx ends, or a write to
// Stdout or Stderr fails, the command is killed. RunCommand then returns within 10 seconds.
func (a *Agent) RunCommand(ctx context.Context, c Command) (exitCode int, err error) {
	// A command that was asked for may run already when ctx ends, so the answer that names it is awaited.
	attached, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	defer context.AfterFunc(ctx, func() {
		select {
		case <-time.After(2 * killWait):
			cut()
		case <-attached.Done():
		}
	})()
	p, err := a.Start(attached, c)
	if err != nil {
		return 0, cmp.Or(context.Cause(ctx), err)
	}
	kill := func() error {
		call, cancel := context.WithTimeout(attached, killWait)
		defer cancel()
		return p.Terminate(call, true)
	}
	defer context.AfterFunc(ctx, func() { _ = kill() })() // if that fails, cut ends Wait
	code, err := p.Wait()
	switch {
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case err != nil:
		err = errors.Join(err, kill())
	}
	return code, err
}

// Open opens a file of the sandbox for reading. The caller closes it. The path is absolute, or relative to the
// home of the user.
func (a *Agent) Open(ctx context.Context, path string) (io.ReadCloser, error) {
	return a.file(ctx, http.MethodGet, path, nil)
}

// ReadFile returns the contents of a file of the sandbox of at most 64 MiB. Use Open for larger ones.
func (a *Agent) ReadFile(ctx context.Context, path string) ([]byte, error) {
	file, err := a.Open(ctx, path)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	raw, err := io.ReadAll(io.LimitReader(file, maxKept+1))
	if err == nil && len(raw) > maxKept {
		return nil, fmt.Errorf("%s: %w", path, ErrTooLarge)
	}
	return raw, err
}

// WriteFile writes a file of the sandbox, and makes its directories. A reader of the file sees the old contents
// or the new ones.
func (a *Agent) WriteFile(ctx context.Context, path string, contents io.Reader) error {
	answer, err := a.file(ctx, http.MethodPost, path, contents)
	if err != nil {
		return err
	}
	return answer.Close()
}

// Entry is a file or directory of a sandbox.
type Entry struct {
	Path string `json:"path"`
	// Type is file, directory or other. It is that of the target, if the entry is a symbolic link.
	Type string `json:"type"`
	// Size in bytes.
	Size int64 `json:"size"`
	// Symlink is the target of a symbolic link, else "".
	Symlink string `json:"symlink,omitempty"`
}

// List lists a directory of the sandbox, and the directories below it to a depth of 1 or more. An answer of more
// than 4 MiB, which are some ten thousand entries, is an error.
func (a *Agent) List(ctx context.Context, path string, depth int) ([]Entry, error) {
	request := connect.NewRequest(&filesystempb.ListDirRequest{
		Path: path, Depth: uint32(max(depth, 0)), //nolint:gosec // not negative
	})
	answer, err := a.directories.ListDir(ctx, request)
	if err != nil {
		return nil, problem(path, err)
	}
	types := map[filesystempb.FileType]string{
		filesystempb.FileType_FILE_TYPE_FILE: "file", filesystempb.FileType_FILE_TYPE_DIRECTORY: "directory",
	}
	entries := []Entry{}
	for _, e := range answer.Msg.GetEntries() {
		entries = append(entries, Entry{e.GetPath(), cmp.Or(types[e.GetType()], "other"), e.GetSize(), e.GetSymlinkTarget()})
	}
	return entries, nil
}

func (a *Agent) file(ctx context.Context, method, path string, body io.Reader) (io.ReadCloser, error) {
	u, query := *a.files, url.Values{"path": {path}}
	if a.o.User != "" {
		query.Set("username", a.o.User)
	}
	u.RawQuery = query.Encode()
	r, err := http.NewRequestWithContext(ctx, method, u.String(), body)
	if err != nil {
		return nil, err
	}
	r.Header.Set("Accept-Encoding", "identity")
	if body != nil {
		r.Header.Set("Content-Type", "application/octet-stream")
	}
	response, err := a.o.HTTP.Do(r)
	if err != nil {
		return nil, problem(path, err)
	}
	if response.StatusCode == http.StatusOK {
		return response.Body, nil
	}
	defer response.Body.Close()
	answer := struct{ Message string }{"the agent answered " + strconv.Itoa(response.StatusCode)}
	raw, err := io.ReadAll(io.LimitReader(response.Body, maxRefusal))
	if err == nil {
		_ = json.Unmarshal(raw, &answer) // else the status says it
	}
	if !strings.HasPrefix(answer.Message, path+": ") { // the agent may have named it
		answer.Message = path + ": " + answer.Message
	}
	return nil, &Error{Status: response.StatusCode, Message: answer.Message}
}

// problem returns the *Error of a refusal, or the error of the agent with what failed.
func problem(what string, err error) error {
	var refusal *Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &refusal):
		return refusal
	}
	return fmt.Errorf("%s: %w", what, err)
}
