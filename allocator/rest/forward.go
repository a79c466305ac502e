package rest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/internal/tracing"
)

const (
	// forwardedHeader marks forwarded calls, so that two replicas that each take the other for the
	// leader do not forward for ever.
	forwardedHeader = "Berth-Forwarded"
	// waitedHeader says for how many milliseconds a forwarded call has waited for a leader, and for a pod under an
	// earlier one.
	waitedHeader = "Berth-Waited-Ms"
	keyHeader    = "Idempotency-Key"
)

// Bounds of forwarded calls.
const (
	leaderDialWait = time.Second
	leaderIdle     = 256 // idle connections that are kept
	// leaderSlack is the additional time for a forwarded call: the leader itself reports a timeout
	// first.
	leaderSlack = 2 * time.Second
	// maxRefusal bounds the bytes of a leader's answer 503 that are read for its reason.
	maxRefusal = 64 << 10
)

type dial = func(ctx context.Context, network, address string) (net.Conn, error)

// errNotSent is the error of a call that has not reached the leader.
var errNotSent = errors.New("not sent")

// within bounds the time of a dial.
func within(limit time.Duration, d dial) dial {
	if d == nil {
		return nil
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		c, err := d(ctx, network, address)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errNotSent, err)
		}
		return c, nil
	}
}

// attempt is one attempt to forward a call.
type attempt struct {
	leader string
	key    string        // Idempotency-Key, if the caller gave none
	waited time.Duration // 0: not worth to be said
	failed error
}

type attemptKey struct{}

// newForwarder returns a proxy for the attempt that the request's context holds. It sends a call
// once. If it fails before the answer begins, it answers nothing, and attempt.failed says why.
//
// Connections have no bound of their own, because waiting claims would use it up; the slots of each
// class bound forwarded calls. The proxy uses HTTP/1, so two calls never share a connection.
func newForwarder(dialTLS dial, log *zap.Logger) *httputil.ReverseProxy {
	scheme := "http"
	if dialTLS != nil {
		scheme = "https"
	}
	of := func(r *http.Request) *attempt { return r.Context().Value(attemptKey{}).(*attempt) }
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			at := of(p.In)
			p.SetURL(&url.URL{Scheme: scheme, Host: at.leader})
			p.Out.Host = p.In.Host // compared with a browser's Origin
			p.Out.Header.Set(forwardedHeader, "1")
			p.Out.Header.Del(waitedHeader)
			if at.waited > 0 {
				p.Out.Header.Set(waitedHeader, strconv.FormatInt(at.waited.Milliseconds(), 10))
			}
			if at.key != "" {
				p.Out.Header.Set(keyHeader, at.key)
			}
			p.Out.Header.Del(tracing.Header) // the client's
			if span := tracing.From(p.In.Context()); span != nil {
				p.Out.Header.Set(tracing.Header, span.Header())
			}
		},
		Transport: &http.Transport{
			DialContext:         within(leaderDialWait, (&net.Dialer{}).DialContext),
			DialTLSContext:      within(leaderDialWait, dialTLS),
			MaxIdleConnsPerHost: leaderIdle, IdleConnTimeout: time.Minute,
			// Accept-Encoding passes unchanged.
			DisableCompression: true,
		},
		ModifyResponse: func(r *http.Response) error {
			for _, own := range []string{"X-Content-Type-Options", "Access-Control-Allow-Origin", "Access-Control-Expose-Headers"} {
				r.Header.Del(own) // this replica sets it
			}
			if r.StatusCode != http.StatusServiceUnavailable {
				return nil
			}
			body, err := io.ReadAll(io.LimitReader(r.Body, maxRefusal))
			if err != nil {
				return err
			}
			if reasonOf(body) == apierror.NotLeader {
				e := apierror.New(apierror.NotLeader, "the replica that this call was forwarded to no longer leads; try again")
				e.OutcomeUnknown = r.Header.Get("Should-Retry") == "false"
				return e
			}
			r.Body = io.NopCloser(bytes.NewReader(body))
			return nil
		},
		ErrorLog:     zap.NewStdLog(log),
		ErrorHandler: func(_ http.ResponseWriter, r *http.Request, err error) { of(r).failed = err },
	}
}

// reasonOf returns the reason in the body of an error.
func reasonOf(body []byte) apierror.Reason {
	var e struct{ Reason apierror.Reason }
	_ = json.Unmarshal(body, &e) // a body that is none has no reason
	return e.Reason
}

// proxy makes an attempt. If the leader breaks off within its answer, nothing of that is in w, unless w is a stream.
func (a *api) proxy(w http.ResponseWriter, r *http.Request, at *attempt) {
	defer func() {
		p, whole := w.(*reply)
		switch broken := recover(); {
		case broken == nil:
		case broken == http.ErrAbortHandler && whole: //nolint:errorlint // the proxy panics with this value
			p.reset()
			at.failed = io.ErrUnexpectedEOF
		default:
			panic(broken)
		}
	}()
	a.forwarder.ServeHTTP(w, r)
}

// forward forwards a call to the leader. It returns nil if the leader has answered w, or if the client has gone.
func (h *hold) forward(w http.ResponseWriter, r *http.Request, limit time.Duration) *apierror.Error {
	at := &attempt{leader: h.leader.Address, key: h.key, waited: h.waited()}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), attemptKey{}, at), limit)
	defer cancel()
	for _, over := range []context.Context{h.leader.Left, h.api.Allocator.Answering()} {
		if over != nil {
			defer context.AfterFunc(over, cancel)()
		}
	}
	h.api.proxy(w, r.WithContext(ctx), at)
	var e *apierror.Error
	switch {
	case at.failed == nil || r.Context().Err() != nil:
		return nil
	case errors.As(at.failed, &e):
		return e
	case errors.Is(at.failed, errNotSent):
		return apierror.New(apierror.NotLeader, "this replica does not lead, and the leader cannot be reached: %v; try again", at.failed)
	}
	return unknownOutcome(apierror.NotLeader,
		"this replica does not lead, and the leader did not answer: %v; the outcome of the call is unknown: repeat a claim with its Idempotency-Key; a claim without a key ends at its timeout", at.failed)
}
