package mcpserver

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/sandboxid"
	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/internal/printable"
)

// Bounds of calls.
const (
	// callWait is the time of a call beside that of its command. A claim waits for poolWait seconds for a warm pod.
	callWait = time.Minute
	poolWait = 10
	// maxRun bounds a command. Common HTTP clients wait five minutes for an answer.
	maxRun = 4 * time.Minute
	// maxPiped bounds the output of a command, with what is thrown away.
	maxPiped = 64 << 20
	// maxOffset bounds how much of a file is read to no use.
	maxOffset  = 64 << 20
	maxListed  = 1000
	maxNames   = 256 << 10 // bytes of paths in a list
	maxProblem = 2 << 10   // bytes of an error
)

// caller is who calls tools.
type caller struct {
	api       *client.Client
	sandboxes *http.Client
	// life ends when no answer is awaited any more. The context of a call over HTTP goes on then.
	life context.Context

	mu sync.Mutex
	// created are the sandboxes to kill at the end. nil: they are not kept.
	created map[string]bool
}

// agent returns the agent of a sandbox.
func (c *caller) agent(ctx context.Context, id string) (*client.Agent, error) {
	s, err := c.sandbox(ctx, id)
	if err != nil {
		return nil, err
	}
	return client.NewAgent(s, client.AgentOptions{HTTP: c.sandboxes})
}

func (c *caller) sandbox(ctx context.Context, id string) (*openapi.Sandbox, error) {
	if err := known(id); err != nil {
		return nil, err
	}
	return c.api.Get(ctx, id)
}

func known(id string) error {
	if !sandboxid.Valid(id) {
		return errors.New("sandboxID: must be an ID that create_sandbox or list_sandboxes has answered")
	}
	return nil
}

type inSandbox struct {
	SandboxID string `json:"sandboxID"`
}

type atPath struct {
	inSandbox
	Path string `json:"path" jsonschema:"absolute, or relative to the home of the sandbox's user"`
}

type createArgs struct {
	Pool     string            `json:"pool,omitempty" jsonschema:"name of the pool; it can be left out if there is only one"`
	Timeout  int64             `json:"timeout,omitempty" jsonschema:"seconds from now until the sandbox ends, in use or not"`
	Envs     map[string]string `json:"envs,omitempty" jsonschema:"environment variables of all commands in it"`
	Metadata map[string]string `json:"metadata,omitempty" jsonschema:"names and values kept with the sandbox, 2 KiB in all"`
	Access   string            `json:"access,omitempty" jsonschema:"who may send requests to its ports: public, token or team; that of the pool if it is left out"`
}

type sandboxInfo struct {
	SandboxID string            `json:"sandboxID"`
	Pool      string            `json:"pool"`
	Phase     string            `json:"phase"`
	Access    string            `json:"access" jsonschema:"who may send requests to its ports"`
	StartedAt time.Time         `json:"startedAt"`
	EndAt     time.Time         `json:"endAt" jsonschema:"when it ends, in use or not"`
	Metadata  map[string]string `json:"metadata,omitempty"`
}

func infoOf(s *openapi.Sandbox) sandboxInfo {
	return sandboxInfo{s.SandboxID, s.TemplateID, string(s.Phase), string(s.Access), s.StartedAt, s.EndAt, s.Metadata}
}

func (c *caller) create(ctx context.Context, in createArgs) (out sandboxInfo, err error) {
	if in.Pool == "" {
		if in.Pool, err = c.onlyPool(ctx); err != nil {
			return out, err
		}
	}
	claim := openapi.NewSandbox{
		TemplateID: in.Pool, Timeout: &in.Timeout, WaitTimeout: new(int64(poolWait)), EnvVars: in.Envs, Metadata: in.Metadata,
	}
	if in.Access != "" {
		claim.Access = new(openapi.Access(in.Access))
	}
	s, err := c.api.Claim(ctx, claim)
	if err != nil {
		return out, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.created != nil {
		c.created[s.SandboxID] = true
	}
	return infoOf(s), nil
}

func (c *caller) onlyPool(ctx context.Context) (string, error) {
	pools, err := c.api.Pools(ctx)
	if err != nil {
		return "", err
	}
	var names []string
	for _, p := range pools {
		names = append(names, p.Name)
	}
	if len(names) == 1 {
		return names[0], nil
	}
	return "", fmt.Errorf("pool: name one of the pools: %s", cmp.Or(strings.Join(names, ", "), "there is none yet"))
}

type runArgs struct {
	inSandbox
	Command   string            `json:"command" jsonschema:"command line for /bin/sh"`
	Dir       string            `json:"dir,omitempty" jsonschema:"working directory; that of the sandbox if it is left out"`
	Envs      map[string]string `json:"envs,omitempty" jsonschema:"environment variables of this command"`
	Timeout   int64             `json:"timeout,omitempty" jsonschema:"seconds after which the command is killed; start longer work in the background and write its output to a file"`
	MaxOutput int64             `json:"maxOutput,omitempty" jsonschema:"bytes to answer of each of stdout and stderr; of more, the middle is left out"`
}

type runResult struct {
	ExitCode *int   `json:"exitCode,omitempty" jsonschema:"128 and the number of the signal that has ended the command, if one has; absent if the command was killed, see killed"`
	Killed   string `json:"killed,omitempty" jsonschema:"why the command was killed before its end"`
	Stdout   stream `json:"stdout"`
	Stderr   stream `json:"stderr"`
}

type stream struct {
	Text    string `json:"text" jsonschema:"the output, or its beginning if something was left out; bytes that are not UTF-8 are replaced"`
	Omitted int64  `json:"omittedBytes,omitempty" jsonschema:"how many bytes were left out after text"`
	End     string `json:"end,omitempty" jsonschema:"the output after what was left out"`
}

// ends keeps the beginning and the end of what is written.
type ends struct {
	head, tail []byte
	half       int
	total      int64
}

var errPiped = fmt.Errorf("it has written more than %d MiB; write to a file, and read a part of it", maxPiped>>20)

func (e *ends) Write(b []byte) (int, error) {
	e.total += int64(len(b))
	n := min(e.half-len(e.head), len(b))
	e.head = append(e.head, b[:n]...)
	e.tail = append(e.tail, b[n:]...)
	if len(e.tail) > 2*e.half {
		e.tail = append(e.tail[:0], e.tail[len(e.tail)-e.half:]...)
	}
	if e.total > maxPiped {
		return 0, errPiped
	}
	return len(b), nil
}

func (e *ends) stream() stream {
	tail := e.tail[max(0, len(e.tail)-e.half):]
	omitted := e.total - int64(len(e.head)+len(tail))
	if omitted == 0 {
		return stream{Text: strings.ToValidUTF8(string(e.head)+string(tail), "\uFFFD")}
	}
	return stream{strings.ToValidUTF8(string(e.head), "\uFFFD"), omitted, strings.ToValidUTF8(string(tail), "\uFFFD")}
}

var errTimeout = errors.New("its timeout has passed")

func (c *caller) run(ctx context.Context, in runArgs) (out runResult, err error) {
	a, err := c.agent(ctx, in.SandboxID)
	if err != nil {
		return out, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Duration(in.Timeout)*time.Second, errTimeout)
	defer cancel()
	half := int(in.MaxOutput+1) / 2
	stdout, stderr := &ends{half: half}, &ends{half: half}
	code, err := a.RunCommand(ctx, client.Command{
		Args: []string{"/bin/sh", "-c", in.Command}, Dir: in.Dir, Envs: in.Envs, Stdout: stdout, Stderr: stderr,
	})
	switch {
	case errors.Is(err, errTimeout):
		out.Killed = errTimeout.Error()
	case errors.Is(err, errPiped):
		out.Killed = errPiped.Error()
	case err != nil:
		return out, err
	default:
		out.ExitCode = &code
	}
	out.Stdout, out.Stderr = stdout.stream(), stderr.stream()
	return out, nil
}

type readArgs struct {
	atPath
	Offset   int64 `json:"offset,omitempty" jsonschema:"bytes to skip"`
	MaxBytes int64 `json:"maxBytes,omitempty" jsonschema:"bytes to answer"`
}

type contents struct {
	Content    string `json:"content"`
	Encoding   string `json:"encoding" jsonschema:"utf-8, or base64 if the bytes are not UTF-8"`
	NextOffset int64  `json:"nextOffset,omitempty" jsonschema:"the offset of what was left out after the content; absent at the end of the file"`
}

func (c *caller) readFile(ctx context.Context, in readArgs) (out contents, err error) {
	a, err := c.agent(ctx, in.SandboxID)
	if err != nil {
		return out, err
	}
	file, err := a.Open(ctx, in.Path)
	if err != nil {
		return out, err
	}
	defer file.Close()
	if _, err := io.CopyN(io.Discard, file, in.Offset); err != nil && !errors.Is(err, io.EOF) {
		return out, err
	}
	raw, err := io.ReadAll(io.LimitReader(file, in.MaxBytes+1))
	if err != nil {
		return out, err
	}
	if int64(len(raw)) > in.MaxBytes {
		raw = raw[:in.MaxBytes]
		for cut := range utf8.UTFMax { // a character is not divided
			if whole := raw[:len(raw)-cut]; utf8.Valid(whole) {
				raw = whole
				break
			}
		}
		out.NextOffset = in.Offset + int64(len(raw))
	}
	if out.Content, out.Encoding = string(raw), "utf-8"; !utf8.Valid(raw) {
		out.Content, out.Encoding = base64.StdEncoding.EncodeToString(raw), "base64"
	}
	return out, nil
}

type writeArgs struct {
	atPath
	Content  string `json:"content"`
	Encoding string `json:"encoding,omitempty" jsonschema:"what content is: utf-8 or base64"`
}

type written struct {
	Bytes int `json:"bytes"`
}

func (c *caller) writeFile(ctx context.Context, in writeArgs) (out written, err error) {
	raw := []byte(in.Content)
	if in.Encoding == "base64" {
		if raw, err = base64.StdEncoding.DecodeString(in.Content); err != nil {
			return out, fmt.Errorf("content: must be base64, with padding, because encoding says so: %w", err)
		}
	}
	a, err := c.agent(ctx, in.SandboxID)
	if err != nil {
		return out, err
	}
	return written{len(raw)}, a.WriteFile(ctx, in.Path, bytes.NewReader(raw))
}

type listArgs struct {
	atPath
	Depth int64 `json:"depth,omitempty" jsonschema:"1: its own entries; more: those of its directories too"`
}

type entries struct {
	Entries []client.Entry `json:"entries"`
	Omitted int            `json:"omitted,omitempty" jsonschema:"how many further entries were left out"`
}

func (c *caller) listFiles(ctx context.Context, in listArgs) (out entries, err error) {
	a, err := c.agent(ctx, in.SandboxID)
	if err != nil {
		return out, err
	}
	if out.Entries, err = a.List(ctx, in.Path, int(in.Depth)); err != nil {
		return out, err
	}
	names := 0
	for i, e := range out.Entries {
		if names += len(e.Path) + len(e.Symlink); i == maxListed || names > maxNames {
			out.Entries, out.Omitted = out.Entries[:i], len(out.Entries)-i
			break
		}
	}
	return out, nil
}

type filterArgs struct {
	Pool string `json:"pool,omitempty" jsonschema:"only sandboxes of this pool"`
}

type sandboxes struct {
	Sandboxes []sandboxInfo `json:"sandboxes"`
	More      bool          `json:"more,omitempty" jsonschema:"whether there are further, older ones"`
}

func (c *caller) list(ctx context.Context, in filterArgs) (out sandboxes, err error) {
	const most = 100
	filter := openapi.ListSandboxesParams{Order: new(openapi.ListSandboxesParamsOrder("desc")), Limit: new(most)}
	if in.Pool != "" {
		filter.Template = &in.Pool
	}
	out.Sandboxes = []sandboxInfo{}
	for s, err := range c.api.List(ctx, filter) {
		if err != nil {
			return out, err
		}
		if out.More = len(out.Sandboxes) == most; out.More {
			break
		}
		out.Sandboxes = append(out.Sandboxes, infoOf(&s))
	}
	return out, nil
}

type killed struct {
	Killed string `json:"killed" jsonschema:"the ID of the sandbox"`
}

func (c *caller) kill(ctx context.Context, in inSandbox) (out killed, err error) {
	if err := known(in.SandboxID); err != nil {
		return out, err
	}
	if err := c.api.Kill(ctx, in.SandboxID); err != nil {
		return out, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.created, in.SandboxID)
	return killed{in.SandboxID}, nil
}

type portArgs struct {
	inSandbox
	Port int64 `json:"port" jsonschema:"where a program in the sandbox listens, on all addresses"`
}

type address struct {
	URL     string            `json:"url"`
	Access  string            `json:"access" jsonschema:"public: every request; token: requests with the headers; team: requests with an API key of the team"`
	Headers map[string]string `json:"headers,omitempty" jsonschema:"what each request needs"`
}

func (c *caller) exposePort(ctx context.Context, in portArgs) (out address, err error) {
	s, err := c.sandbox(ctx, in.SandboxID)
	if err != nil {
		return out, err
	}
	out.Access = string(s.Access)
	switch s.Access {
	case openapi.AccessToken:
		if s.TrafficAccessToken == nil {
			return out, errors.New("the API does not show the token of the sandbox to this key; a key with the role member sees it")
		}
		out.Headers = map[string]string{sandboxaccess.TokenHeader: *s.TrafficAccessToken}
	case openapi.AccessTeam:
		out.Headers = map[string]string{sandboxaccess.KeyHeader: "<an API key of the team>"}
	}
	out.URL, err = client.URL(s, int(in.Port))
	return out, err
}

// text is JSON for people and models, in which HTML stays as it is.
func text(v any) (string, error) {
	var b bytes.Buffer
	encoder := json.NewEncoder(&b)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(v)
	return string(printable.JSON(bytes.TrimSuffix(b.Bytes(), []byte("\n")))), err
}
