// Package poststart calls a pool's postStart hook in a pod that has become a
// sandbox.
package poststart

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

const (
	// dialWait bounds one attempt to connect; pauses lie between attempts.
	dialWait   = time.Second
	pauseFirst = 50 * time.Millisecond
	pauseMost  = time.Second
	// answerMost is how much of an answer is read: it says nothing that matters.
	answerMost = 4 << 10
)

// Caller calls hooks. Its methods may be called concurrently.
type Caller struct{ client *http.Client }

// errDeposed: another process may lead.
var errDeposed = errors.New("this process may not lead any more")

// New returns a Caller. dial connects to a pod's address; nil is the machine's
// own network. leads reports whether this process certainly leads. Only then is the
// pod that is to be called certainly at its address: no other leader has released it,
// and waited for the window, which is longer than an attempt to connect.
func New(dial func(ctx context.Context, network, address string) (net.Conn, error), leads func() bool) *Caller {
	if dial == nil {
		dial = (&net.Dialer{}).DialContext
	}
	connect := func(ctx context.Context, network, address string) (net.Conn, error) {
		if !leads() {
			return nil, errDeposed
		}
		attempt, cancel := context.WithTimeout(ctx, dialWait)
		defer cancel()
		conn, err := dial(attempt, network, address)
		switch {
		case err == nil && !leads(): // it stood still in between
			return nil, errors.Join(errDeposed, conn.Close())
		case err != nil && attempt.Err() != nil && ctx.Err() == nil: // whatever dial says then
			return nil, &net.OpError{Op: "dial", Net: network, Err: err}
		}
		return conn, err
	}
	return &Caller{client: &http.Client{
		// What runs in the pod must not choose where the allocator connects to.
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			// No proxy of the environment, and no connection is kept: a pod gets one
			// call in its life.
			DialContext: connect, DisableKeepAlives: true, MaxResponseHeaderBytes: answerMost,
		},
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
// be connected to, and returns nil when it has answered 2xx within its time.
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
		var op *net.OpError
		if err == nil || !errors.As(err, &op) || op.Op != "dial" || ctx.Err() != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(pause):
		}
	}
}

func (c *Caller) once(ctx context.Context, url string, raw []byte) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(raw))
	if err != nil {
		return fmt.Errorf("postStart: %w", err)
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("User-Agent", "berth-allocator")
	answer, err := c.client.Do(r)
	if err != nil {
		return fmt.Errorf("postStart: %w", err)
	}
	defer answer.Body.Close()
	_, _ = io.CopyN(io.Discard, answer.Body, answerMost) // so that the pod can finish what it says
	if answer.StatusCode/100 != 2 {
		return fmt.Errorf("postStart: the sandbox answered %s", strconv.Itoa(answer.StatusCode))
	}
	return nil
}
