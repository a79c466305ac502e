package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

type demoCommand struct {
	Once bool `help:"End after the demonstration instead of staying up."`
}

// callTimeout bounds each request of the demonstration.
const callTimeout = 15 * time.Second

// demo shows Berth's functions step by step.
type demo struct {
	out   io.Writer
	began time.Time
	step  string
	env   *environment
	// client connects to Envoy for every host, so that the demonstration does not
	// depend on this machine's resolver.
	client *http.Client
}

// Run implements the command.
func (c *demoCommand) Run(ctx context.Context, o *output) (err error) {
	d := &demo{out: o.out, began: time.Now()}
	defer func() {
		if d.env != nil {
			d.printf("\nstopping\n")
			err = errors.Join(err, d.env.stop())
		}
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = nil // a person ends the demo with Ctrl-C
			if c.Once {
				err = errors.New("interrupted")
			}
		}
		if err != nil {
			err = fmt.Errorf("step %q failed: %w", d.step, err)
		}
	}()
	if d.env, err = startEnvironment(ctx, "", stack.Options{GatewayHosts: []string{"127.0.0.1"}}, o.err, d.begin); err != nil {
		return err
	}
	envoyAddr := d.env.stack.Gateways[0].Addr.String()
	d.client = &http.Client{Timeout: callTimeout, Transport: &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, network, envoyAddr)
		},
	}}
	defer d.client.CloseIdleConnections()
	if err := d.show(ctx); err != nil || c.Once {
		return err
	}
	return d.stay(ctx)
}

func (d *demo) printf(format string, args ...any) {
	fmt.Fprintf(d.out, format, args...)
}

// begin notes and prints the present step.
func (d *demo) begin(step string) {
	d.step = step
	d.printf("[%5.1fs] %s\n", time.Since(d.began).Seconds(), step)
}

// show claims a sandbox, uses it, and releases it.
func (d *demo) show(ctx context.Context) error {
	d.begin("claim a sandbox")
	s, took, err := d.claim(ctx)
	if err != nil {
		return err
	}
	d.printf("\n  claimed in   %v\n  URL          %s\n  try it       %s\n\n", took.Round(100*time.Microsecond), s.URL,
		d.curl(s.URL))

	d.begin("send a request to it, through Envoy")
	code, body, err := d.get(ctx, s.URL+"hello")
	if err != nil {
		return err
	}
	d.printf("\n  answer       %d %s\n\n", code, body)
	var answer struct {
		Pod string `json:"pod"`
	}
	if err := json.Unmarshal([]byte(body), &answer); err != nil || code != http.StatusOK || answer.Pod != s.PodName {
		return fmt.Errorf("expected an answer of pod %s, got %d %s", s.PodName, code, body)
	}

	d.begin("run a command in it, through its agent")
	output, err := d.run(ctx, s, "/bin/sh", "-c", "echo hello from $E2B_SANDBOX_ID, as $(id -un)")
	if err != nil {
		return err
	}
	d.printf("\n  output       %s\n\n", output)
	if !strings.Contains(output, "hello from "+s.SandboxID) {
		return fmt.Errorf("expected the ID of the sandbox, got %q", output)
	}

	d.begin("read the last-active dump of the router")
	_, dump, err := d.call(ctx, http.MethodGet, d.env.stack.Gateways[0].Admin+"/admin/last-active?format=text", "",
		http.DefaultClient)
	if err != nil {
		return err
	}
	d.printf("\n  last active  %s\n\n", dump)
	if !strings.Contains(dump, s.SandboxID) {
		return fmt.Errorf("the dump does not name the sandbox %s", s.SandboxID)
	}

	d.begin("release the sandbox")
	code, body, err = d.call(ctx, http.MethodDelete, d.env.stack.Allocators[0].API+"/sandboxes/"+s.SandboxID, "",
		http.DefaultClient)
	if err != nil {
		return err
	}
	d.printf("\n  released     %d\n\n", code)
	if code != http.StatusNoContent {
		return fmt.Errorf("expected 204, got %d %s", code, body)
	}

	d.begin("send the same request again")
	if code, body, err = d.get(ctx, s.URL+"hello"); err != nil {
		return err
	}
	d.printf("\n  answer       %d %s\n\n", code, body)
	if code != http.StatusGone {
		return fmt.Errorf("expected 410, got %d %s", code, body)
	}
	return nil
}

// stay keeps a sandbox for the person until ctx ends.
func (d *demo) stay(ctx context.Context) error {
	d.begin("claim another sandbox, which is yours until Ctrl-C")
	s, _, err := d.claim(ctx)
	if err != nil {
		return err
	}
	d.printf("\n  %s\n\n", d.curl(s.URL))
	d.printf("  console         %s\n", d.env.stack.Allocators[0].Console)
	d.printf("  claim another   curl -X POST -d '{\"templateID\":%q}' %s/sandboxes\n", demoPool,
		d.env.stack.Allocators[0].API)
	d.printf("  release         curl -X DELETE %s/sandboxes/%s\n", d.env.stack.Allocators[0].API, s.SandboxID)
	d.printf("  last active     curl '%s/admin/last-active?format=text'\n", d.env.stack.Gateways[0].Admin)
	d.printf("  kubectl         export KUBECONFIG=%s\n", d.env.cluster.Kubeconfig())
	d.printf("  logs            %s\n\n", d.env.cluster.Dir())
	d.begin("up; Ctrl-C ends it")
	<-ctx.Done()
	return nil
}

func (d *demo) claim(ctx context.Context) (openapi.Sandbox, time.Duration, error) {
	body := fmt.Sprintf(`{"templateID":%q,"timeout":%d}`, demoPool, int((24 * time.Hour).Seconds()))
	began := time.Now()
	code, answer, err := d.call(ctx, http.MethodPost, d.env.stack.Allocators[0].API+"/sandboxes", body, http.DefaultClient)
	took := time.Since(began)
	if err != nil {
		return openapi.Sandbox{}, 0, err
	}
	if code != http.StatusCreated {
		return openapi.Sandbox{}, 0, fmt.Errorf("expected 201, got %d %s", code, answer)
	}
	var s openapi.Sandbox
	return s, took, json.Unmarshal([]byte(answer), &s)
}

// run runs a command in a sandbox as E2B's SDKs do, and returns what it prints.
func (d *demo) run(ctx context.Context, s openapi.Sandbox, command string, args ...string) (string, error) {
	if s.EnvdAccessToken == nil {
		return "", errors.New("the answer to the claim has no token for the agent")
	}
	noInput := false
	r := connect.NewRequest(&processpb.StartRequest{Stdin: &noInput,
		Process: &processpb.ProcessConfig{Cmd: command, Args: args}})
	for name, value := range map[string]string{"E2b-Sandbox-Id": s.SandboxID,
		"E2b-Sandbox-Port": strconv.Itoa(sandboxaccess.AgentPort), sandboxaccess.AgentHeader: *s.EnvdAccessToken} {
		r.Header().Set(name, value)
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	stream, err := processpb.NewProcessClient(d.client, d.env.gatewayURL()).Start(ctx, r)
	if err != nil {
		return "", err
	}
	defer stream.Close() //nolint:errcheck // Err says what was wrong with it
	var output []byte
	code := int32(-1)
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		output = append(append(output, event.GetData().GetStdout()...), event.GetData().GetStderr()...)
		if end := event.GetEnd(); end != nil {
			code = end.GetExitCode()
		}
	}
	if err := stream.Err(); err != nil {
		return "", err
	}
	if code != 0 {
		return "", fmt.Errorf("expected exit code 0, got %d: %s", code, output)
	}
	return string(bytes.TrimSpace(output)), nil
}

func (d *demo) get(ctx context.Context, url string) (int, string, error) {
	return d.call(ctx, http.MethodGet, url, "", d.client)
}

func (d *demo) call(ctx context.Context, method, url, body string, client *http.Client) (int, string, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, url, strings.NewReader(body))
	if err != nil {
		return 0, "", err
	}
	response, err := client.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(response.Body, 1<<20))
	return response.StatusCode, string(bytes.TrimSpace(raw)), err
}

// curl is a command line that works without this machine's resolver.
func (d *demo) curl(target string) string {
	u, err := url.Parse(target)
	if err != nil {
		return "curl " + target
	}
	return fmt.Sprintf("curl --resolve %s:%s %s", u.Host, d.env.stack.Gateways[0].Addr.Addr(), target)
}
