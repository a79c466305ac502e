package client

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	mathrand "math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/api/openapi"
)

// Options configure a client. URL is required.
type Options struct {
	// URL is the address of the API, such as https://api.sandbox.example.com.
	URL string
	// Key authenticates the caller. An API without keys needs none.
	Key string
	// HTTP sends the requests to the API. Optional: the default follows no redirect.
	HTTP *http.Client
	// Gateway is the host:port to connect to for every sandbox, where their names do not resolve, as on a
	// development cluster. Optional: the names are resolved.
	Gateway string
}

// Client calls the API.
type Client struct {
	api  *openapi.Client
	base *url.URL
	http *http.Client
	key  string
	// sandboxes sends requests to sandboxes.
	sandboxes *http.Client
}

const (
	// maxRepeats bounds how often a call is repeated.
	maxRepeats = 3
	// firstPause is the pause before the first repeated call.
	firstPause = 100 * time.Millisecond
	// maxAnswer bounds an answer in bytes: 10,000 sandboxes are about 10 MiB.
	maxAnswer = 32 << 20
)

// New returns a client. It makes no call.
func New(o Options) (*Client, error) {
	base, err := url.Parse(o.URL)
	if err != nil || base.Host == "" || base.Scheme != "http" && base.Scheme != "https" {
		return nil, fmt.Errorf("%w: URL %q: must be a URL such as https://api.sandbox.example.com", ErrConfig, o.URL)
	}
	if strings.ContainsFunc(o.Key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, fmt.Errorf("%w: the key has characters other than printable ASCII", ErrConfig)
	}
	direct := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	c := &Client{base: base, http: cmp.Or(o.HTTP, direct), key: o.Key, sandboxes: direct}
	if o.Gateway != "" {
		if _, _, err := net.SplitHostPort(o.Gateway); err != nil {
			return nil, fmt.Errorf("%w: Gateway %q: must be host:port", ErrConfig, o.Gateway)
		}
		c.sandboxes = &http.Client{Transport: through(o.Gateway), CheckRedirect: direct.CheckRedirect}
	}
	c.api, err = openapi.NewClient(o.URL, openapi.WithHTTPClient(c.http), openapi.WithRequestEditorFn(c.authenticate))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return c, nil
}

// gatewayWait bounds a connection to the gateway.
const gatewayWait = 10 * time.Second

// through returns a transport that connects to the gateway, whatever the host.
func through(gateway string) *http.Transport {
	dialer := &net.Dialer{Timeout: gatewayWait}
	return &http.Transport{
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return dialer.DialContext(ctx, network, gateway)
		},
		ForceAttemptHTTP2: true, TLSHandshakeTimeout: gatewayWait, IdleConnTimeout: time.Minute,
	}
}

// Sandboxes returns what sends requests to the addresses that URL returns, by way of Options.Gateway if that is
// set. It does not send the key, and follows no redirect.
func (c *Client) Sandboxes() *http.Client { return c.sandboxes }

// Agent is NewAgent with requests by way of Options.Gateway if that is set, unless the options have an HTTP client.
func (c *Client) Agent(s *openapi.Sandbox, o AgentOptions) (*Agent, error) {
	o.HTTP = cmp.Or(o.HTTP, c.sandboxes)
	return NewAgent(s, o)
}

func (c *Client) authenticate(_ context.Context, r *http.Request) error {
	if c.key != "" {
		r.Header.Set("X-API-Key", c.key)
	}
	return nil
}

// Claim claims a sandbox. It waits for a warm pod for at most the claim's WaitTimeout.
func (c *Client) Claim(ctx context.Context, claim openapi.NewSandbox) (*openapi.Sandbox, error) {
	return c.ClaimOnce(ctx, rand.Text(), claim)
}

// ClaimOnce is Claim with an Idempotency-Key of the caller's, 1 to 255 printable ASCII characters.
// The same key and claim return the same sandbox while it is live and for ten minutes after.
func (c *Client) ClaimOnce(ctx context.Context, key string, claim openapi.NewSandbox) (*openapi.Sandbox, error) {
	return call[openapi.Sandbox](ctx, repeatable, func() (*http.Response, error) {
		return c.api.CreateSandbox(ctx, &openapi.CreateSandboxParams{IdempotencyKey: &key}, claim)
	})
}

// ClaimBatch claims several sandboxes of a pool: all, or at least AtLeast of them, or none.
func (c *Client) ClaimBatch(ctx context.Context, batch openapi.NewClaims) (*openapi.Claims, error) {
	return c.ClaimBatchOnce(ctx, rand.Text(), batch)
}

// ClaimBatchOnce is ClaimBatch with an Idempotency-Key of the caller's. The same key and batch return
// the same sandboxes while one of them is live and for ten minutes after.
func (c *Client) ClaimBatchOnce(ctx context.Context, key string, batch openapi.NewClaims) (*openapi.Claims, error) {
	return call[openapi.Claims](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ClaimBatch(ctx, &openapi.ClaimBatchParams{IdempotencyKey: &key}, batch)
	})
}

// Get returns a live sandbox.
func (c *Client) Get(ctx context.Context, id string) (*openapi.Sandbox, error) {
	return call[openapi.Sandbox](ctx, repeatable, func() (*http.Response, error) {
		return c.api.GetSandbox(ctx, id)
	})
}

// List returns live sandboxes, a page at a time. The sequence ends after an error. Sandboxes that
// are claimed or released meanwhile may be missing. Limit is the length of a page.
func (c *Client) List(ctx context.Context, filter openapi.ListSandboxesParams) iter.Seq2[openapi.Sandbox, error] {
	return paged[openapi.Sandbox](ctx, filter.NextToken, func(token *string) (*http.Response, error) {
		params := filter
		params.NextToken = token
		return c.api.ListSandboxes(ctx, &params)
	})
}

// paged returns a list that comes in pages. Each page names the next one in a header.
func paged[T any](
	ctx context.Context, first *string, send func(token *string) (*http.Response, error),
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		token := first
		for {
			var next string
			page, err := call[[]T](ctx, repeatable, func() (*http.Response, error) {
				response, err := send(token)
				if err == nil {
					next = response.Header.Get("X-Next-Token")
				}
				return response, err
			})
			if err != nil {
				yield(*new(T), err)
				return
			}
			for _, one := range *page {
				if !yield(one, nil) {
					return
				}
			}
			if next == "" {
				return
			}
			token = &next
		}
	}
}

// Kill releases a sandbox. It returns nil once the release is durable. A repeated call that finds
// the sandbox released counts as success.
func (c *Client) Kill(ctx context.Context, id string) error {
	return end(ctx, "sandbox_gone", func() (*http.Response, error) { return c.api.KillSandbox(ctx, id) })
}

// end makes a call that ends something. The reason gone says that it has ended. For a repeated call that is success.
func end(ctx context.Context, gone string, send func() (*http.Response, error)) error {
	attempts := 0
	_, err := call[none](ctx, repeatable, func() (*http.Response, error) {
		attempts++
		return send()
	})
	var e *Error
	if attempts > 1 && errors.As(err, &e) && e.Reason == gone {
		return nil
	}
	return err
}

// SetTimeout moves the end of a sandbox to a time from now, of whole seconds, at least one. It
// counts as use.
func (c *Client) SetTimeout(ctx context.Context, id string, timeout time.Duration) error {
	_, err := call[none](ctx, repeatable, func() (*http.Response, error) {
		return c.api.SetTimeout(ctx, id, openapi.SetTimeoutJSONRequestBody{Timeout: int64(timeout / time.Second)})
	})
	return err
}

// SetNetwork replaces what a sandbox may reach. Fields that are left out are taken away. It returns nil when every
// egress gateway has the new rules. An error with the reason "egress_pending" means that they hold, and that a gateway
// may still use those of before; the call is repeated then as others are, and each time waits for 10 s.
func (c *Client) SetNetwork(ctx context.Context, id string, to openapi.SandboxNetworkUpdate) error {
	_, err := call[none](ctx, repeatable, func() (*http.Response, error) { return c.api.UpdateNetwork(ctx, id, to) })
	return err
}

// Pause has a sandbox fall asleep, and returns when it is asleep. It is not repeated: a sandbox that is asleep already
// is an error.
func (c *Client) Pause(ctx context.Context, id string) error {
	_, err := call[none](ctx, once, func() (*http.Response, error) {
		return c.api.PauseSandbox(ctx, id, openapi.PauseSandboxJSONRequestBody{})
	})
	return err
}

// Stop stops a sandbox, also one that is asleep: its files are archived, and its pod is deleted with its processes and
// its memory. It returns when that is durable, which takes seconds to 17 minutes. It is not repeated, as Pause.
func (c *Client) Stop(ctx context.Context, id string) error {
	_, err := call[none](ctx, once, func() (*http.Response, error) {
		return c.api.PauseSandbox(ctx, id, openapi.PauseSandboxJSONRequestBody{Memory: new(false)})
	})
	return err
}

// Resume wakes a sandbox if it is asleep or stopped, and returns when requests reach it. Its end is then a time from
// now at least. One that is stopped may wait minutes for a pod and for its files.
func (c *Client) Resume(ctx context.Context, id string, timeout time.Duration) (*openapi.Sandbox, error) {
	seconds := int64(timeout / time.Second)
	return call[openapi.Sandbox](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ConnectSandbox(ctx, id, openapi.ConnectSandboxJSONRequestBody{Timeout: &seconds})
	})
}

// KeepAlive counts as use of a sandbox.
func (c *Client) KeepAlive(ctx context.Context, id string) error {
	_, err := call[none](ctx, repeatable, func() (*http.Response, error) {
		return c.api.KeepAlive(ctx, id, openapi.KeepAliveJSONRequestBody{})
	})
	return err
}

// Snapshot makes a snapshot of the files of a sandbox, and returns when it can be claimed from, which takes seconds to
// 17 minutes. The name is NAME or NAME:TAG; with "" it is random. An earlier snapshot of the name and tag is replaced.
// The call is not repeated: when it fails without an answer, the snapshot may be made all the same.
func (c *Client) Snapshot(ctx context.Context, id, name string) (*openapi.Snapshot, error) {
	var body openapi.CreateSnapshotJSONRequestBody
	if name != "" {
		body.Name = &name
	}
	return call[openapi.Snapshot](ctx, once, func() (*http.Response, error) {
		return c.api.CreateSnapshot(ctx, id, body)
	})
}

// Snapshots returns the snapshots of the team by name, a page at a time, as List does.
func (c *Client) Snapshots(
	ctx context.Context, filter openapi.ListSnapshotsParams,
) iter.Seq2[openapi.Snapshot, error] {
	return paged[openapi.Snapshot](ctx, filter.NextToken, func(token *string) (*http.Response, error) {
		params := filter
		params.NextToken = token
		return c.api.ListSnapshots(ctx, &params)
	})
}

// DeleteSnapshot deletes a snapshot, NAME:TAG or NAME. Sandboxes that were made from it stay. A repeated call that
// finds no snapshot counts as success.
func (c *Client) DeleteSnapshot(ctx context.Context, ref string) error {
	return end(ctx, "snapshot_not_found", func() (*http.Response, error) { return c.api.DeleteSnapshot(ctx, ref) })
}

// Find returns sandboxes, also those that have ended, a page at a time, as List does.
func (c *Client) Find(ctx context.Context, filter openapi.FindSandboxesParams) iter.Seq2[openapi.SandboxRecord, error] {
	return func(yield func(openapi.SandboxRecord, error) bool) {
		params := filter
		for {
			page, err := call[openapi.SandboxRecords](ctx, repeatable, func() (*http.Response, error) {
				return c.api.FindSandboxes(ctx, &params)
			})
			if err != nil {
				yield(openapi.SandboxRecord{}, err)
				return
			}
			for _, s := range page.Sandboxes {
				if !yield(s, nil) {
					return
				}
			}
			if page.NextToken == "" {
				return
			}
			params.NextToken = &page.NextToken
		}
	}
}

// FindPage returns one page of Find. Its NextToken is for the filter of the next page.
func (c *Client) FindPage(ctx context.Context, filter openapi.FindSandboxesParams) (*openapi.SandboxRecords, error) {
	return call[openapi.SandboxRecords](ctx, repeatable, func() (*http.Response, error) {
		return c.api.FindSandboxes(ctx, &filter)
	})
}

// Caller says whose key the client has.
func (c *Client) Caller(ctx context.Context) (*openapi.Caller, error) {
	return call[openapi.Caller](ctx, repeatable, func() (*http.Response, error) { return c.api.GetCaller(ctx) })
}

// Teams returns at most limit teams with their limits and what they have of these, by name.
func (c *Client) Teams(ctx context.Context, limit int) (*openapi.TeamStatuses, error) {
	return call[openapi.TeamStatuses](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ListTeamStatuses(ctx, &openapi.ListTeamStatusesParams{Limit: &limit})
	})
}

// EventLog returns at most limit events of the log, of one sandbox or with "" of all, the newest first.
func (c *Client) EventLog(ctx context.Context, id string, limit int) ([]openapi.LifecycleEvent, error) {
	all, err := call[[]openapi.LifecycleEvent](ctx, repeatable, func() (*http.Response, error) {
		if id == "" {
			return c.api.ListEvents(ctx, &openapi.ListEventsParams{Limit: &limit})
		}
		return c.api.ListEventsOfSandbox(ctx, id, &openapi.ListEventsOfSandboxParams{Limit: &limit})
	})
	if err != nil {
		return nil, err
	}
	return *all, nil
}

// Metrics returns what a sandbox has used in the last hour, as far as that is known, the oldest measurement first.
// Without an agent it is at most one measurement.
func (c *Client) Metrics(ctx context.Context, id string) ([]openapi.SandboxMetric, error) {
	all, err := call[[]openapi.SandboxMetric](ctx, repeatable, func() (*http.Response, error) {
		return c.api.GetSandboxMetrics(ctx, id, &openapi.GetSandboxMetricsParams{})
	})
	if err != nil {
		return nil, err
	}
	return *all, nil
}

// Pools returns the pools, by name.
func (c *Client) Pools(ctx context.Context) ([]openapi.Pool, error) {
	all, err := call[openapi.Pools](ctx, repeatable, func() (*http.Response, error) { return c.api.ListPools(ctx) })
	if err != nil {
		return nil, err
	}
	return all.Pools, nil
}

// Pool returns a pool.
func (c *Client) Pool(ctx context.Context, name string) (*openapi.Pool, error) {
	return call[openapi.Pool](ctx, repeatable, func() (*http.Response, error) { return c.api.GetPool(ctx, name) })
}

// Scale changes how many pods a pool keeps warm, and how many it may have. With a generation it
// fails if the pool was changed since.
func (c *Client) Scale(ctx context.Context, name string, to openapi.ScalePoolJSONRequestBody) (*openapi.Pool, error) {
	p := repeatable
	if to.Generation != nil {
		p = once // the first call may have changed it
	}
	return call[openapi.Pool](ctx, p, func() (*http.Response, error) { return c.api.ScalePool(ctx, name, to) })
}

// Why says what is known of a sandbox, and why and until when it is alive.
func (c *Client) Why(ctx context.Context, id string) (*openapi.SandboxExplanation, error) {
	return call[openapi.SandboxExplanation](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ExplainSandbox(ctx, id)
	})
}

// Route says whether requests reach a sandbox, and otherwise why not.
func (c *Client) Route(ctx context.Context, id string) (*openapi.RouteExplanation, error) {
	return call[openapi.RouteExplanation](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ExplainRoute(ctx, id)
	})
}

// Diagnostics returns the pod of a sandbox, live or ended, as the API server has it now.
func (c *Client) Diagnostics(ctx context.Context, id string) (*openapi.SandboxDiagnostics, error) {
	return call[openapi.SandboxDiagnostics](ctx, repeatable, func() (*http.Response, error) {
		return c.api.DiagnoseSandbox(ctx, id)
	})
}

// PoolDiagnostics returns a pool, those of its pods that are not ready, and those that have failed last.
func (c *Client) PoolDiagnostics(ctx context.Context, name string) (*openapi.PoolDiagnostics, error) {
	return call[openapi.PoolDiagnostics](ctx, repeatable, func() (*http.Response, error) {
		return c.api.DiagnosePool(ctx, name)
	})
}

// Logs returns lines of the log of a live sandbox's first container: the latest ones, or with a Cursor
// those from then on. The API bounds an answer to 1,000 lines and 1 MiB.
func (c *Client) Logs(
	ctx context.Context, id string, filter openapi.GetSandboxLogsV2Params,
) ([]openapi.SandboxLogEntry, error) {
	answer, err := call[openapi.SandboxLogsV2](ctx, repeatable, func() (*http.Response, error) {
		return c.api.GetSandboxLogsV2(ctx, id, &filter)
	})
	if err != nil {
		return nil, err
	}
	return answer.Logs, nil
}

// LastActive returns when live sandboxes were last used. The API may leave some out, and says how
// many.
func (c *Client) LastActive(ctx context.Context, filter openapi.LastActiveParams) (*openapi.LastActive, error) {
	filter.Format = nil
	return call[openapi.LastActive](ctx, repeatable, func() (*http.Response, error) {
		return c.api.LastActive(ctx, &filter)
	})
}

// History returns what happened in the last hour, as far as the leader has counted.
func (c *Client) History(ctx context.Context) (*openapi.History, error) {
	return call[openapi.History](ctx, repeatable, func() (*http.Response, error) { return c.api.GetHistory(ctx) })
}

// Fences returns at most limit released sandboxes whose pods are kept, and what they wait for.
func (c *Client) Fences(ctx context.Context, limit int) (*openapi.Fences, error) {
	return call[openapi.Fences](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ListFences(ctx, &openapi.ListFencesParams{Limit: &limit})
	})
}

// Sessions returns at most limit routers that run, or may still run.
func (c *Client) Sessions(ctx context.Context, limit int) (*openapi.Sessions, error) {
	return call[openapi.Sessions](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ListSessions(ctx, &openapi.ListSessionsParams{Limit: &limit})
	})
}

// DeclareDead ends every wait for a router that has ended together with its Envoy. If either still
// runs, requests may reach the pod of another sandbox.
func (c *Client) DeclareDead(ctx context.Context, session, reason string) (*openapi.DeadDeclared, error) {
	return call[openapi.DeadDeclared](ctx, once, func() (*http.Response, error) {
		return c.api.DeclareDead(ctx, session, openapi.DeclareDeadJSONRequestBody{Reason: reason})
	})
}

// Webhooks returns the webhooks of the team, or of all teams for an admin.
func (c *Client) Webhooks(ctx context.Context) ([]openapi.Webhook, error) {
	all, err := call[[]openapi.Webhook](ctx, repeatable, func() (*http.Response, error) { return c.api.ListWebhooks(ctx) })
	if err != nil {
		return nil, err
	}
	return *all, nil
}

// CreateWebhook has events sent to a URL.
func (c *Client) CreateWebhook(ctx context.Context, w openapi.NewWebhook) (*openapi.Webhook, error) {
	return call[openapi.Webhook](ctx, once, func() (*http.Response, error) { return c.api.CreateWebhook(ctx, w) })
}

// UpdateWebhook changes what is not nil.
func (c *Client) UpdateWebhook(ctx context.Context, id string, change openapi.WebhookChange) (*openapi.Webhook, error) {
	return call[openapi.Webhook](ctx, repeatable, func() (*http.Response, error) {
		return c.api.UpdateWebhook(ctx, id, change)
	})
}

// DeleteWebhook deletes a webhook. When it returns, nothing is sent any more.
func (c *Client) DeleteWebhook(ctx context.Context, id string) error {
	_, err := call[none](ctx, once, func() (*http.Response, error) { return c.api.DeleteWebhook(ctx, id) })
	return err
}

// Deliveries returns at most limit attempts to deliver events to a webhook, the newest first.
func (c *Client) Deliveries(ctx context.Context, id string, limit int) ([]openapi.WebhookDelivery, error) {
	all, err := call[[]openapi.WebhookDelivery](ctx, repeatable, func() (*http.Response, error) {
		return c.api.ListDeliveries(ctx, id, &openapi.ListDeliveriesParams{Limit: &limit})
	})
	if err != nil {
		return nil, err
	}
	return *all, nil
}

// Link makes a link that opens one port of a sandbox in a browser until it expires.
func (c *Client) Link(ctx context.Context, id string, link openapi.NewLink) (*openapi.Link, error) {
	return call[openapi.Link](ctx, repeatable, func() (*http.Response, error) { return c.api.MakeLink(ctx, id, link) })
}

// Team returns the team of the key, "" for none.
func (c *Client) Team(ctx context.Context) (string, error) {
	teams, err := call[[]openapi.Team](ctx, repeatable, func() (*http.Response, error) { return c.api.ListTeams(ctx) })
	if err != nil || len(*teams) == 0 {
		return "", err
	}
	return (*teams)[0].TeamID, nil
}

// URL returns the address of a port of a sandbox. 0 is its default port. Client.Sandboxes reaches it.
func URL(s *openapi.Sandbox, port int) (string, error) {
	u, err := url.Parse(s.URL)
	if err != nil {
		return "", fmt.Errorf("the address of sandbox %s: %w", s.SandboxID, err)
	}
	if port == 0 {
		return u.String(), nil
	}
	_, rest, ok := strings.Cut(u.Host, "-")
	if !ok || port < 1 || port > 65535 {
		return "", fmt.Errorf("the address of port %d of sandbox %s: its URL is %q", port, s.SandboxID, s.URL)
	}
	u.Host = strconv.Itoa(port) + "-" + rest
	return u.String(), nil
}

// none is the answer of a call that has no body.
type none struct{}

type policy bool

const (
	repeatable policy = true
	once       policy = false
)

// call makes a call, repeats it where that is safe and helps, and decodes its answer.
func call[T any](ctx context.Context, p policy, send func() (*http.Response, error)) (*T, error) {
	for repeats := 0; ; repeats++ {
		into := new(T)
		err := answer(send, into)
		if err == nil {
			return into, nil
		}
		pause, again := repeatAfter(err, repeats)
		if p != repeatable || !again || repeats == maxRepeats || ctx.Err() != nil {
			return nil, err
		}
		if deadline, ok := ctx.Deadline(); ok && time.Until(deadline) < pause {
			return nil, err
		}
		timer := time.NewTimer(pause)
		select {
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		case <-timer.C:
		}
	}
}

// repeatAfter returns the pause before a call is repeated, or false if a repeated call does not
// help.
func repeatAfter(err error, repeats int) (time.Duration, bool) {
	pause := firstPause << repeats
	pause -= time.Duration(mathrand.Int64N(int64(pause) / 2))
	var e *Error
	if errors.As(err, &e) {
		switch {
		case e.Status == http.StatusBadGateway, e.Status == http.StatusServiceUnavailable,
			e.Status == http.StatusGatewayTimeout, e.Reason == "rate_limited":
			return max(pause, e.RetryAfter), true
		}
		return 0, false
	}
	var untrusted *tls.CertificateVerificationError
	return pause, !errors.Is(err, context.Canceled) && !errors.As(err, &untrusted)
}

func answer(send func() (*http.Response, error), into any) error {
	response, err := send()
	if err != nil {
		return fmt.Errorf("call the API: %w", err)
	}
	defer response.Body.Close()
	body, err := io.ReadAll(io.LimitReader(response.Body, maxAnswer+1))
	switch {
	case err != nil:
		return fmt.Errorf("call the API: read the answer: %w", err)
	case len(body) > maxAnswer:
		return fmt.Errorf("call the API: the answer is larger than %d bytes", maxAnswer)
	case response.StatusCode >= 300:
		return newError(response, body)
	}
	if _, empty := into.(*none); empty {
		return nil
	}
	if err := json.Unmarshal(body, into); err != nil {
		return &Error{Status: response.StatusCode, Message: fmt.Sprintf("the answer is not Berth's: %v", err)}
	}
	return nil
}
