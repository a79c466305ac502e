package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/apierror"
)

type fenceCommand struct {
	Ls          fenceLsCommand          `cmd:"" help:"List released sandboxes whose pods are kept, and which routers they wait for."`
	Sessions    fenceSessionsCommand    `cmd:"" help:"List routers, and how many released sandboxes wait for each."`
	DeclareDead fenceDeclareDeadCommand `cmd:"" help:"Wait no longer for a router that has ended together with its Envoy, when nothing proves that. If they live, requests may reach pods of other sandboxes."`
}

// apiFlags say how to reach the HTTP API.
type apiFlags struct {
	Allocator  string        `default:"http://127.0.0.1:8081" help:"URL of the HTTP API of any allocator."`
	APIKey     string        `name:"api-key" help:"Key for the API. Others on this machine can see arguments: set it in the environment, or use --api-key-file."`
	APIKeyFile string        `name:"api-key-file" help:"File that holds the key."`
	Timeout    time.Duration `default:"15s" help:"How long the call may take."`
}

// listFlags are those of lists.
type listFlags struct {
	Output string `short:"o" default:"table" enum:"table,json" help:"table or json."`
	Limit  int    `default:"100" placeholder:"ROWS" help:"How many to list, 1 to 1000."`
}

// maxAnswer bounds what is read of an answer: a list is at most about 10 MiB.
const maxAnswer = 32 << 20

// call makes a call of the API and returns the body of its answer.
func (f *apiFlags) call(ctx context.Context, method, path string, query url.Values, body any) ([]byte, error) {
	target, err := url.Parse(f.Allocator)
	if err != nil || target.Host == "" || target.Scheme != "http" && target.Scheme != "https" {
		return nil, fmt.Errorf("--allocator %q: must be a URL such as http://127.0.0.1:8081", f.Allocator)
	}
	target = target.JoinPath(path)
	target.RawQuery = query.Encode()
	key := f.APIKey
	if f.APIKeyFile != "" {
		if key != "" {
			return nil, errors.New("--api-key and --api-key-file: only one of them can be given")
		}
		raw, err := os.ReadFile(f.APIKeyFile)
		if err != nil {
			return nil, fmt.Errorf("--api-key-file: %w", err)
		}
		key = strings.TrimSpace(string(raw))
	}
	ctx, cancel := context.WithTimeout(ctx, f.Timeout)
	defer cancel()
	var content io.Reader = http.NoBody
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		content = bytes.NewReader(raw)
	}
	request, err := http.NewRequestWithContext(ctx, method, target.String(), content)
	if err != nil {
		return nil, fmt.Errorf("--allocator: %w", err)
	}
	if key != "" {
		request.Header.Set("X-API-Key", key)
	}
	if body != nil {
		request.Header.Set("Content-Type", "application/json")
	}
	// No other host may get the key.
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }, Transport: &http.Transport{
		Proxy: http.ProxyFromEnvironment, DisableKeepAlives: true,
	}}
	response, err := client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("call the allocator: %w", err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer))
	if err != nil {
		return nil, fmt.Errorf("call the allocator: %w", err)
	}
	if response.StatusCode != http.StatusOK {
		var refusal apierror.Error
		if json.Unmarshal(answer, &refusal) == nil && refusal.Reason != "" {
			return nil, fmt.Errorf("the allocator refuses: %w", &refusal)
		}
		return nil, fmt.Errorf("call the allocator: %s answers %s", f.Allocator, response.Status)
	}
	return answer, nil
}

// list calls for a list, and prints it as it came if that is asked for.
func (f *listFlags) list(ctx context.Context, o *output, a *apiFlags, path string, into any) (printed bool, err error) {
	return a.fetch(ctx, o, path, url.Values{"limit": {fmt.Sprint(f.Limit)}}, f.Output, into)
}

// fetch calls for something, and prints it as it came if the format is json.
func (a *apiFlags) fetch(ctx context.Context, o *output, path string, query url.Values, format string, into any) (printed bool, err error) {
	raw, err := a.call(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(raw, into); err != nil {
		return false, fmt.Errorf("call the allocator: its answer cannot be read: %w", err)
	}
	if format == "json" {
		_, err = fmt.Fprintf(o.out, "%s\n", bytes.TrimSpace(raw))
		return true, err
	}
	return false, nil
}

type fenceLsCommand struct {
	apiFlags
	listFlags
}

// Run implements the command.
func (c *fenceLsCommand) Run(ctx context.Context, o *output) error {
	var all rest.Fences
	if printed, err := c.list(ctx, o, &c.apiFlags, "/v1/fences", &all); printed || err != nil {
		return err
	}
	t := newTable(o.out, "SANDBOX", "POOL", "POD", "ADDRESS", "RELEASED", "REASON", "WAITS FOR", "WHY")
	for _, f := range all.Fences {
		released := f.ReleasedAt.UTC().Format(time.RFC3339)
		row := func(who, why string) {
			t.row(f.SandboxID, f.Pool, f.PodName, f.PodIP, released, f.Reason, who, why)
		}
		switch {
		case f.ConnectWindowEndsInSeconds != nil:
			row("connect window", fmt.Sprintf("no router can admit a request any more; those admitted may connect for %s", span(*f.ConnectWindowEndsInSeconds)))
		case len(f.WaitsFor) == 0:
			row("?", f.Phase)
		}
		for _, a := range f.WaitsFor {
			row(a.SessionID, why(a))
		}
		if f.WaitsForOthers > 0 {
			row(fmt.Sprintf("%d more", f.WaitsForOthers), "")
		}
	}
	return t.end(all.Truncated)
}

// why says what a router is waited for to do.
func why(a rest.Awaited) string {
	if a.Until == rest.UntilAcknowledged {
		return fmt.Sprintf("connected, %s; has acknowledged message %d, not yet %d", heard(a.Session), a.Acknowledged, a.Needed)
	}
	return fmt.Sprintf("not connected, %s; may know the route for %s", heard(a.Session), span(a.ExpiresInSeconds))
}

type fenceSessionsCommand struct {
	apiFlags
	listFlags
}

// Run implements the command.
func (c *fenceSessionsCommand) Run(ctx context.Context, o *output) error {
	var all rest.Sessions
	if printed, err := c.list(ctx, o, &c.apiFlags, "/v1/sessions", &all); printed || err != nil {
		return err
	}
	t := newTable(o.out, "SESSION", "ADDRESS", "CONNECTED", "LAST HEARD", "ACKNOWLEDGED", "EXPIRES IN", "FENCES")
	for _, s := range all.Sessions {
		connected, acknowledged, last := "no", "-", "not by this leader"
		if s.LastHeardSeconds != nil {
			last = span(*s.LastHeardSeconds) + " ago"
		}
		if s.Connected {
			connected, acknowledged = "yes", fmt.Sprintf("%d of %d", s.Acknowledged, s.Sent)
		}
		t.row(s.SessionID, or(s.Address), connected, last, acknowledged, span(s.ExpiresInSeconds), fmt.Sprint(s.Fences))
	}
	return t.end(all.Truncated)
}

type fenceDeclareDeadCommand struct {
	apiFlags
	Session string `arg:"" help:"The router's session, as \"berth fence ls\" shows it."`
	Reason  string `required:"" env:"-" help:"How you know that it has ended. It is logged and journaled with the name of the key."`
	Gone    bool   `required:"" env:"-" help:"Says that you know that router and Envoy have ended and cannot go on, as when their machine is gone."`
}

// Run implements the command.
func (c *fenceDeclareDeadCommand) Run(ctx context.Context, o *output) error {
	if !c.Gone {
		return errors.New("--gone: router and Envoy must have ended; if they can be reached, stop them, and no fence waits for them")
	}
	raw, err := c.call(ctx, http.MethodPost, "/v1/sessions/"+url.PathEscape(c.Session)+"/declare-dead", nil, map[string]string{"reason": c.Reason})
	if err != nil {
		return err
	}
	var done rest.DeclaredDead
	if err := json.Unmarshal(raw, &done); err != nil {
		return fmt.Errorf("call the allocator: its answer cannot be read: %w", err)
	}
	_, err = fmt.Fprintf(o.out, "%s is waited for no more; %d released sandboxes waited for it.\n"+
		"WARNING: if this router or its Envoy goes on after all, requests may reach pods of other sandboxes. Make sure that its machine does not come back with it.\n", done.SessionID, done.Fences)
	return err
}

// span shows seconds for people.
func span(seconds float64) string {
	return time.Duration(seconds * float64(time.Second)).Round(time.Second).String()
}

// heard says when a router was heard last.
func heard(s rest.Session) string {
	if s.LastHeardSeconds == nil {
		return "not heard by this leader"
	}
	return "heard " + span(*s.LastHeardSeconds) + " ago"
}

func or(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

// table prints aligned columns.
type table struct {
	out   io.Writer
	tabs  *tabwriter.Writer
	names []string
	rows  int
}

func newTable(out io.Writer, names ...string) *table {
	return &table{out: out, tabs: tabwriter.NewWriter(out, 0, 0, 2, ' ', 0), names: names}
}

func (t *table) row(cells ...string) {
	if t.rows == 0 {
		fmt.Fprintln(t.tabs, strings.Join(t.names, "\t"))
	}
	t.rows++
	fmt.Fprintln(t.tabs, strings.Join(cells, "\t"))
}

// end prints what was gathered, and how much is left out.
func (t *table) end(truncated int) error {
	if t.rows == 0 {
		_, err := fmt.Fprintln(t.out, "none")
		return err
	}
	if err := t.tabs.Flush(); err != nil {
		return err
	}
	if truncated > 0 {
		_, err := fmt.Fprintf(t.out, "%d more; see --limit\n", truncated)
		return err
	}
	return nil
}
