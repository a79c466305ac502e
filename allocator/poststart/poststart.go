// Package poststart calls a pool's postStart hook in a pod that has become a
// sandbox.
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
)

const (
	// dialWait bounds one attempt to connect; pauses lie between attempts.
	dialWait   = time.Second
	pauseFirst = 50 * time.Millisecond
	pauseMost  = time.Second
	// answerMost bounds what is read of an answer, in bytes: informational answers,
	// headers and body together.
	answerMost = 8 << 10
	// bodyWait bounds the time in which the body of a final answer is read. The body
	// says nothing that matters; it is read so that the pod can finish writing it.
	bodyWait = time.Second
)

// Caller calls hooks. Its methods may be called concurrently.
type Caller struct {
	connect func(ctx context.Context, address string) (net.Conn, error)
}

// errDeposed: another process may lead, or this one has not renewed its lease in time.
var errDeposed = errors.New("this process may not lead any more")

// New returns a Caller. dial connects to a pod's address; nil is the machine's
// own network. leads reports whether this process certainly leads. Only then is the
// pod that is to be called certainly at its address: no other leader has released it,
// and waited for the window, which is longer than an attempt to connect.
func New(dial func(ctx context.Context, network, address string) (net.Conn, error), leads func() bool) *Caller {
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	return &Caller{func(ctx context.Context, address string) (net.Conn, error) {
		if !leads() {
			return nil, errDeposed
		}
		attempt, cancel := context.WithTimeout(ctx, dialWait)
		defer cancel()
		conn, err := dial(attempt, "tcp", address)
		switch {
		case err == nil && !leads(): // it stood still in between
			return nil, errors.Join(errDeposed, conn.Close())
		case err != nil && attempt.Err() != nil && ctx.Err() == nil: // whatever dial says then
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: err}
		}
		return conn, err
	}}
}

// body is what the hook is told.
type body struct {
	SandboxID string            `json:"sandboxID"`
	Pool      string            `json:"pool"`
	Metadata  map[string]string `json:"metadata,omitempty"`
	User      string            `json:"user,omitempty"`
}

// Call calls the hook of the sandbox's pool, again and again while the pod cannot
// be connected to or this process cannot tell that it leads, and returns nil when the pod
// has answered 2xx within its time. It returns
// when that time is over or ctx has ended, whatever the pod does.
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
	for pause := pauseFirst; ; pause = min(2*pause, pauseMost) {
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

// notConnected reports whether an attempt has sent the pod nothing, so that another one
// may follow. errDeposed is among that: a leader whose lease is late to be renewed may be
// sure again in a moment, and one that was deposed soon ends ctx.
func notConnected(err error) bool {
	var op *net.OpError
	return errors.Is(err, errDeposed) || errors.As(err, &op) && op.Op == "dial"
}

// once makes one attempt. It owns the connection, which is closed when ctx ends: nothing
// that the pod sends, or does not send, keeps a read or a write waiting after that. An
// http.Client would hand the connection of a 101 over, beyond the reach of ctx.
func (c *Caller) once(ctx context.Context, url string, raw []byte) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return fmt.Errorf("postStart: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("User-Agent", "berth-allocator")
	r.Close = true // a pod gets one call in its life
	conn, err := c.connect(ctx, r.URL.Host)
	if err != nil {
		return fmt.Errorf("postStart: connect to %s: %w", r.URL.Host, err)
	}
	defer conn.Close() //nolint:errcheck // there is nothing more to say to it
	stop := context.AfterFunc(ctx, func() { _ = conn.Close() })
	defer stop()
	code, err := exchange(conn, r)
	switch {
	case err != nil && ctx.Err() != nil: // the connection was closed for that
		return fmt.Errorf("postStart: no answer: %w", ctx.Err())
	case err != nil:
		return fmt.Errorf("postStart: %w", err)
	case code/100 != 2: // redirects among them: a pod must not choose where the allocator connects to
		return fmt.Errorf("postStart: the sandbox answered %d", code)
	}
	return nil
}

// exchange returns the status of the final answer. 101 is one: what comes after it is
// not HTTP.
func exchange(conn net.Conn, r *http.Request) (code int, err error) {
	if err := r.Write(conn); err != nil {
		return 0, fmt.Errorf("write request: %w", err)
	}
	limited := &io.LimitedReader{R: conn, N: answerMost}
	from := bufio.NewReader(limited)
	for {
		answer, err := http.ReadResponse(from, r) //nolint:bodyclose // closing it would read to its end; the connection is closed
		switch {
		case err != nil && limited.N <= 0:
			return 0, fmt.Errorf("the answer is longer than %d bytes", answerMost)
		case err != nil:
			return 0, fmt.Errorf("read answer: %w", err)
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
