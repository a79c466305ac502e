package agents

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/internal/options"
)

// maxAnswer bounds the bytes that are read of an answer, headers and body together, and maxSeries those of a series.
const (
	maxAnswer = 8 << 10
	maxSeries = 64 << 10
)

// ErrDeposed is returned if this process is not certain to hold the lease.
var ErrDeposed = errors.New("this process may no longer hold the lease")

// ErrUnreachable is returned if there is no connection to an agent.
var ErrUnreachable = errors.New("no connection to the agent")

// Values are what a claim brings. The core carries them from the claim to the configuration.
type Values struct {
	Envs, Secrets map[string]string
	Files         []initbox.File
	// Restore is the archive that is restored before; nil: none. Open opens it.
	Restore *Restore
	Open    func(context.Context) (io.ReadCloser, error)
}

// RestoreFor bounds the time of a restore.
const RestoreFor = 2 * time.Minute

// Check returns the error of initbox.CheckValues.
func (v *Values) Check() error { return initbox.CheckValues(v.Envs, v.Secrets, v.Files) }

// String does not show the values.
func (v *Values) String() string { return "values of a claim" }

// GoString does not show the values.
func (v *Values) GoString() string { return v.String() }

// Options configure a Caller.
type Options struct {
	// Key is the cluster's key. Required.
	Key *sandboxaccess.Key
	// Dial connects to a pod's address. Optional: the default uses the network of this machine.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Leads reports whether this process certainly holds the lease. Required.
	Leads func() bool
	// EgressProxy is the address of the egress gateway, http://<host>:<port>. Optional: without it no agent is configured
	// whose pod reaches nothing else. Lookup looks up its host. Optional: the default asks the resolver of this machine.
	EgressProxy string
	Lookup      func(ctx context.Context, host string) ([]netip.Addr, error)
}

// Caller calls agents. Its methods may be called concurrently.
type Caller struct {
	o      Options
	sealer *initbox.Sealer
	// Run asks the expected agents for their keys, and known has what seals for them.
	expected chan idle
	known    *lru.Cache[incarnation, *initbox.Peer]
	proxy    *proxy // nil: there is no egress gateway
}

// New returns a Caller, or an error that names the missing options.
func New(o Options) (*Caller, error) {
	if err := options.Require(o, "Key", "Leads"); err != nil {
		return nil, err
	}
	if o.Dial == nil {
		o.Dial = (&net.Dialer{}).DialContext
	}
	sealer, err := SealerOf(o.Key)
	if err != nil {
		return nil, err
	}
	proxy, err := newProxy(o.EgressProxy, o.Lookup)
	if err != nil {
		return nil, err
	}
	known, err := lru.New[incarnation, *initbox.Peer](maxKnown)
	return &Caller{o, sealer, make(chan idle, maxExpected), known, proxy}, err
}

// SealerOf returns the sealer of the cluster with this key.
func SealerOf(key *sandboxaccess.Key) (*initbox.Sealer, error) {
	return initbox.NewSealer(key.Derive("agent configuration 1"))
}

// Configure has the agent of a sandbox configured with the values of its claim, which may be nil. That of one that was
// stopped takes the configuration that it has restored, and refuses to be configured if it has none. Configure
// returns nil when the agent has answered that it is configured for this sandbox.
func (c *Caller) Configure(ctx context.Context, s core.Sandbox, values *Values) error {
	if values == nil || s.Archive != "" {
		values = &Values{}
	}
	proxy, err := c.proxyOf(ctx, s)
	if err != nil {
		return err
	}
	config := &initbox.Config{
		SandboxID: s.ID, AccessToken: c.o.Key.Secret(s.ID).AgentToken(s.ID), Public: s.Agent.Public, Proxy: proxy,
		Envs: values.Envs, Secrets: values.Secrets, Files: values.Files, Stopped: s.Archive != "",
	}
	before := incarnation{s.Pod.Whole(), s.Restarts}
	peer, _ := c.known.Get(before)
	c.known.Remove(before) // a pod is claimed once
	return c.call(ctx, at(s), func(l *line) error {
		code, _, err := c.deliver(l, &peer, func() ([]byte, error) { return peer.Seal(config) }, l.post(initbox.Path))
		if err == nil && code != http.StatusNoContent {
			err = fmt.Errorf("the agent answered %d to its configuration", code)
		}
		return err
	})
}

// Configured asks the agent of a sandbox whether it is configured for that sandbox.
func (c *Caller) Configured(ctx context.Context, s core.Sandbox) (configured bool, err error) {
	err = c.call(ctx, at(s), func(l *line) error {
		hello, err := l.hello()
		configured = hello.Sandbox == initbox.SandboxDigest(s.ID)
		return err
	})
	return configured && err == nil, err
}

// Measurement is what an agent says that its sandbox uses. Sizes are in bytes. Nothing vouches for it: the
// sandbox may have replaced its agent.
type Measurement struct {
	Unix       int64   `json:"ts"`
	CPUCount   int     `json:"cpu_count"`
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   int64   `json:"mem_total"`
	MemUsed    int64   `json:"mem_used"`
	MemCache   int64   `json:"mem_cache"`
	DiskTotal  int64   `json:"disk_total"`
	DiskUsed   int64   `json:"disk_used"`
}

// maxSkew is how far the clock of an agent may be from that of the allocator.
const maxSkew = time.Hour

// plausible reports whether a sandbox can have measured this at now, or up to age before. What runs in it may have replaced
// the agent.
func (m *Measurement) plausible(now time.Time, age time.Duration) bool {
	const maxCPUs, maxPct = 1 << 16, 1e4
	at := time.Unix(m.Unix, 0)
	return at.After(now.Add(-age-maxSkew)) && at.Before(now.Add(maxSkew)) &&
		m.CPUCount >= 1 && m.CPUCount <= maxCPUs && m.CPUUsedPct >= 0 && m.CPUUsedPct <= maxPct &&
		min(m.MemTotal, m.MemUsed, m.MemCache, m.DiskTotal, m.DiskUsed) >= 0
}

// Measure asks the agent of a sandbox what the sandbox uses.
func (c *Caller) Measure(ctx context.Context, s core.Sandbox) (m Measurement, err error) {
	err = c.call(ctx, at(s), func(l *line) error {
		code, body, err := l.exchange(http.MethodGet, "/metrics", c.o.Key.Secret(s.ID).AgentToken(s.ID), nil)
		switch {
		case err != nil:
			return err
		case code != http.StatusOK:
			return fmt.Errorf("the agent answered %d when it was asked what its sandbox uses", code)
		case json.Unmarshal(body, &m) != nil:
			return errors.New("the agent's measurement cannot be read")
		case !m.plausible(time.Now(), 0):
			return errors.New("the agent's measurement is impossible")
		}
		return nil
	})
	return m, err
}

// seriesAge is the time for which agents keep measurements.
const seriesAge = time.Hour

// MeasureOver asks the agent of a sandbox what the sandbox has used in the last hour, the oldest measurement first. An agent of
// an earlier version says what it uses now.
func (c *Caller) MeasureOver(ctx context.Context, s core.Sandbox) (all []Measurement, err error) {
	err = c.call(ctx, at(s), func(l *line) error {
		l.most = maxSeries
		code, body, err := l.exchange(http.MethodGet, "/metrics/history", c.o.Key.Secret(s.ID).AgentToken(s.ID), nil)
		if err == nil && code == http.StatusNotFound {
			code, body, err = l.exchange(http.MethodGet, "/metrics", c.o.Key.Secret(s.ID).AgentToken(s.ID), nil)
		}
		var series struct {
			Measurement
			// Points are Unix time, percent of CPU, and bytes of memory, cache and disk.
			Points [][5]float64 `json:"points"`
		}
		switch {
		case err != nil:
			return err
		case code != http.StatusOK:
			return fmt.Errorf("the agent answered %d when it was asked what its sandbox has used", code)
		case json.Unmarshal(body, &series) != nil:
			return errors.New("the agent's measurements cannot be read")
		}
		now := series.Measurement
		for _, p := range series.Points {
			m := now
			m.Unix, m.CPUUsedPct, m.MemUsed, m.MemCache, m.DiskUsed = int64(p[0]), p[1], int64(p[2]), int64(p[3]), int64(p[4])
			all = append(all, m)
		}
		all = append(all, now)
		slices.SortStableFunc(all, func(a, b Measurement) int { return cmp.Compare(a.Unix, b.Unix) })
		for i := range all {
			if !all[i].plausible(time.Now(), seriesAge) || len(all) > maxPoints {
				return errors.New("the agent's measurements are impossible")
			}
		}
		return nil
	})
	return all, err
}

// maxPoints bounds a series.
const maxPoints = 241

// at is the address of the agent of a sandbox.
func at(s core.Sandbox) netip.AddrPort { return netip.AddrPortFrom(s.IP, s.Agent.Port) }

// call connects to an agent and has f speak with it.
func (c *Caller) call(ctx context.Context, agent netip.AddrPort, f func(*line) error) error {
	if !c.o.Leads() {
		return ErrDeposed
	}
	address := agent.String()
	conn, err := c.o.Dial(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("%w at %s: %w", ErrUnreachable, address, err)
	}
	defer conn.Close() //nolint:errcheck // the answers were read, or the attempt failed
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	if !c.o.Leads() { // the process was paused in between
		return ErrDeposed
	}
	err = f(&line{conn: conn, from: bufio.NewReader(moving{conn}), host: address})
	switch {
	case !c.o.Leads():
		return ErrDeposed
	case err != nil && ctx.Err() != nil: // the end of ctx closed the connection
		return fmt.Errorf("the agent at %s did not answer in time: %w", address, ctx.Err())
	}
	return err
}

// line is one connection to an agent. It carries one call after the other.
type line struct {
	conn net.Conn
	from *bufio.Reader
	host string
	most int64 // bytes of an answer; 0: maxAnswer
}

// stillness is how long an agent may send nothing.
const stillness = 30 * time.Second

// moving reads from a connection for as long as it is not still.
type moving struct{ net.Conn }

func (m moving) Read(p []byte) (int, error) {
	_ = m.SetReadDeadline(time.Now().Add(stillness)) // it is closed
	return m.Conn.Read(p)
}

// meet asks an agent for its key.
func (c *Caller) meet(l *line) (*initbox.Peer, error) {
	hello, err := l.hello()
	switch {
	case err != nil:
		return nil, err
	case hello.Version != initbox.Version:
		return nil, fmt.Errorf("the agent speaks version %d of the configuration, this allocator %d", hello.Version, initbox.Version)
	}
	return c.sealer.For(hello.PublicKey), nil
}

// deliver has send send a box that seal has made for a peer. It asks the agent for its key if the peer is nil or does
// not fit any more.
func (c *Caller) deliver(
	l *line, peer **initbox.Peer, seal func() ([]byte, error), send func(box []byte) (int, []byte, error),
) (code int, answer []byte, err error) {
	known := *peer != nil
	for {
		if !known {
			if *peer, err = c.meet(l); err != nil {
				return 0, nil, err
			}
		}
		sealed, err := seal()
		if err != nil {
			return 0, nil, err
		}
		code, answer, err = send(sealed)
		if !known || err != nil || code != http.StatusUnauthorized {
			return code, answer, err
		}
		known = false // the agent has started again meanwhile
	}
}

// post sends a box for deliver.
func (l *line) post(path string) func(box []byte) (int, []byte, error) {
	return func(box []byte) (int, []byte, error) { return l.exchange(http.MethodPost, path, "", box) }
}

func (l *line) hello() (h initbox.Hello, err error) {
	code, body, err := l.exchange(http.MethodGet, initbox.Path, "", nil)
	switch {
	case err != nil:
		return h, err
	case code != http.StatusOK:
		return h, fmt.Errorf("the agent answered %d when it was asked for its key", code)
	}
	if json.Unmarshal(body, &h) != nil {
		return h, errors.New("the agent's key cannot be read")
	}
	return h, nil
}

// errUnreadable takes the place of errors of package http, because those can quote the answer.
var errUnreadable = errors.New("the agent's answer cannot be read")

// exchange makes one call and reads its answer. An empty token is none.
func (l *line) exchange(method, path, token string, body []byte) (code int, answer []byte, err error) {
	r, err := l.request(method, path, token, body)
	if err != nil {
		return 0, nil, err
	}
	limited := &io.LimitedReader{R: l.from, N: cmp.Or(l.most, maxAnswer)}
	response, err := http.ReadResponse(bufio.NewReader(limited), r)
	if err != nil {
		return 0, nil, errUnreadable
	}
	return whole(response)
}

// whole reads the rest of an answer.
func whole(response *http.Response) (code int, answer []byte, err error) {
	defer response.Body.Close()
	answer, err = io.ReadAll(response.Body)
	if err != nil {
		return 0, nil, errUnreadable
	}
	return response.StatusCode, answer, nil
}

// request sends a request.
func (l *line) request(method, path, token string, body []byte) (*http.Request, error) {
	r, err := http.NewRequest(method, "http://"+l.host+path, bytes.NewReader(body)) //nolint:noctx // the end of the context closes the connection
	if err != nil {
		return nil, fmt.Errorf("request to the agent: %w", err)
	}
	r.Header.Set("User-Agent", "berth-allocator")
	if token != "" {
		r.Header.Set(sandboxaccess.AgentHeader, token)
	}
	if body != nil {
		r.Header.Set("Content-Type", "application/octet-stream")
	}
	if err := r.Write(l.conn); err != nil {
		return nil, fmt.Errorf("write to the agent: %w", err)
	}
	return r, nil
}
