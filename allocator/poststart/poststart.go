package poststart

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/options"
)

const (
	// dialWait bounds one attempt to connect. minPause and maxPause bound the pause after a failed
	// attempt, which doubles each time.
	dialWait = time.Second
	minPause = 50 * time.Millisecond
	maxPause = time.Second
	// maxAnswer bounds the bytes that are read of an answer: informational responses, headers and
	// body together.
	maxAnswer = 8 << 10
	// bodyWait bounds the time for reading the body of a final response. The body is discarded;
	// reading it lets the pod finish its write.
	bodyWait = time.Second
)

// Caller calls hooks. Its methods may be called concurrently.
type Caller struct {
	connect func(ctx context.Context, address string) (net.Conn, error)
}

// errDeposed is returned for an attempt while this process is not certain to hold the lease.
var errDeposed = errors.New("this process may no longer hold the lease")

// Options configure a Caller.
type Options struct {
	// Dial connects to a pod's address. Optional: the default uses the network of this machine.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// Leads reports whether this process certainly holds the lease. Only then is the pod certainly at
	// its address: another leader could have released it. Before that leader reuses the address it
	// waits for the connect window, which is longer than one attempt. Required.
	Leads func() bool
}

// New returns a Caller, or an error that names the missing options.
func New(o Options) (*Caller, error) {
	if o.Dial == nil {
		o.Dial = (&net.Dialer{}).DialContext
	}
	return &Caller{func(ctx context.Context, address string) (net.Conn, error) {
		if !o.Leads() {
			return nil, errDeposed
		}
		attempt, cancel := context.WithTimeout(ctx, dialWait)
		defer cancel()
		conn, err := o.Dial(attempt, "tcp", address)
		switch {
		case err == nil && !o.Leads(): // the process was paused in between
			return nil, errors.Join(errDeposed, conn.Close())
		case err != nil && attempt.Err() != nil && ctx.Err() == nil: // a timeout of the attempt, whatever error dial returned
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
		return conn, err
	}}, options.Require(o, "Leads")
}

// body is the JSON body of the request.
type body struct {
	SandboxID string            `json:"sandboxID"`
	Pool      string            `json:"pool"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	User      string            `json:"user,omitempty"`
}

// Call calls the hook of the sandbox's pool. It retries while the pod refuses connections or this
// process is not certain to hold the lease. It returns nil when the pod has answered 2xx within the
// hook's timeout, and an error when that time is over or ctx has ended, whatever the pod does.
// Redirects count as errors.
func (c *Caller) Call(ctx context.Context, hook v1alpha1.PostStartHook, defaultPort uint16, s core.Sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(hook.TimeoutSeconds)*time.Second)
	defer cancel()
	port := uint16(hook.Port)
	if port == 0 {
		port = defaultPort
	}
	url := "http://" + netip.AddrPortFrom(s.IP, port).String() + hook.Path
	raw, err := json.Marshal(body{SandboxID: s.ID, Pool: s.Pool.Name, Metadata: s.Metadata, User: s.User})
	if err != nil {
		return fmt.Errorf("postStart: encode body: %w", err)
	}
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		err := c.once(ctx, url, raw)
		if ctx.Err() != nil || !notConnected(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

// notConnected reports whether an attempt sent nothing to the pod, so that a retry is safe.
// errDeposed is such a case: a late renewal may succeed a moment later, and a deposed leader's ctx
// ends soon.
func notConnected(err error) bool {
	var op *net.OpError
	return errors.Is(err, errDeposed) || errors.As(err, &op) && op.Op == "dial"
}

// once makes one attempt. It owns the connection and closes it when ctx ends, so no read or write
// outlives ctx. An http.Client would hand over the connection of a 101 response, out of reach of
// ctx.
func (c *Caller) once(ctx context.Context, url string, raw []byte) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return fmt.Errorf("postStart: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("User-Agent", "berth-allocator")
	r.Close = true // one call per pod
	conn, err := c.connect(ctx, r.URL.Host)
	if err != nil {
		return fmt.Errorf("postStart: connect to %s: %w", r.URL.Host, err)
	}
	defer conn.Close() //nolint:errcheck // the answer was read, or the attempt failed
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	code, err := exchange(conn, r)
	switch {
	case err != nil && ctx.Err() != nil: // the end of ctx closed the connection
		return fmt.Errorf("postStart: no answer: %w", ctx.Err())
	case err != nil:
		return fmt.Errorf("postStart: %w", err)
	case code/100 != 2: // includes redirects: a pod must not choose an address for the allocator
		return fmt.Errorf("postStart: the sandbox answered %d", code)
	}
	return nil
}

// exchange returns the status of the final response. 101 is final too: what follows it is not HTTP.
func exchange(conn net.Conn, r *http.Request) (code int, err error) {
	if err := r.Write(conn); err != nil {
		return 0, fmt.Errorf("write request: %w", err)
	}
	limited := &io.LimitedReader{R: conn, N: maxAnswer}
	from := bufio.NewReader(limited)
	for {
		answer, err := http.ReadResponse(from, r) //nolint:bodyclose // Close would read the body to its end; the caller closes the connection
		switch {
		case err != nil && limited.N <= 0:
			return 0, fmt.Errorf("the answer is longer than %d bytes", maxAnswer)
		case err != nil && (errors.As(err, new(*net.OpError)) || errors.Is(err, io.ErrUnexpectedEOF)):
			return 0, fmt.Errorf("read answer: %w", err)
		case err != nil: // it quotes the answer, which may have a secret
			return 0, errors.New("the answer is not HTTP")
		case answer.StatusCode/100 == 1 && answer.StatusCode != http.StatusSwitchingProtocols:
			continue // informational; it has no body
		case answer.StatusCode/100 == 2:
			if conn.SetReadDeadline(time.Now().Add(bodyWait)) == nil {
				_, _ = io.Copy(io.Discard, answer.Body)
			}
		}
		return answer.StatusCode, nil
	}
}
