package rest

import (
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
)

// forwardedHeader marks forwarded calls, so that two replicas that each take the other for the
// leader do not forward for ever.
const forwardedHeader = "Berth-Forwarded"

// Bounds of forwarded calls.
const (
	leaderDialWait = time.Second
	leaderIdle     = 256 // idle connections that are kept
	// leaderSlack is the additional time for a forwarded call: the leader itself reports a timeout
	// first.
	leaderSlack = 2 * time.Second
)

type leaderKey struct{}

type dial = func(ctx context.Context, network, address string) (net.Conn, error)

// within bounds the time of a dial.
func within(limit time.Duration, d dial) dial {
	if d == nil {
		return nil
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, limit)
		defer cancel()
		return d(ctx, network, address)
	}
}

// newForwarder returns a proxy to the leader that the request's context names. It sends a call
// once, because the outcome of a failed call is unknown.
//
// Connections have no bound of their own, because waiting claims would use it up; the slots of each
// class bound forwarded calls. The proxy uses HTTP/1, so two calls never share a connection.
func newForwarder(dialTLS dial, log *zap.Logger) *httputil.ReverseProxy {
	scheme := "http"
	if dialTLS != nil {
		scheme = "https"
	}
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			leader, _ := p.In.Context().Value(leaderKey{}).(string)
			p.SetURL(&url.URL{Scheme: scheme, Host: leader})
			p.Out.Host = p.In.Host // compared with a browser's Origin
			p.Out.Header.Set(forwardedHeader, "1")
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
			return nil
		},
		ErrorLog: zap.NewStdLog(log),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if errors.Is(err, context.Canceled) {
				return // the client has gone
			}
			answer(w, r, unknownOutcome(apierror.NotLeader,
				"this replica does not lead, and the leader did not answer: %v; the outcome of the call is unknown: repeat a claim with its Idempotency-Key; a claim without a key ends at its timeout", err))
		},
	}
}

// forward forwards a call to the leader.
func (a *api) forward(c *class, w http.ResponseWriter, r *http.Request, leader string) {
	refuse := func(message string) {
		answer(w, r, apierror.New(apierror.NotLeader, "%s", message))
	}
	switch {
	case leader == "":
		refuse("this replica does not lead, and no leader is known yet; try again")
		return
	case r.Header.Get(forwardedHeader) != "":
		refuse("the replica that this call was forwarded to no longer leads; try again")
		return
	}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), leaderKey{}, leader), c.wait+leaderSlack)
	defer cancel()
	a.forwarder.ServeHTTP(w, r.WithContext(ctx))
}
