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

// forwardedHeader is on calls that a replica has passed on, so that two which
// take each other for the leader do not pass them on for ever.
const forwardedHeader = "Berth-Forwarded"

// How a replica reaches the leader's API.
const (
	leaderDialWait = time.Second
	leaderIdle     = 256 // connections that are kept
	// leaderSlack is for how much longer a call is waited for than the leader may carry it
	// out: it says so itself when it cannot.
	leaderSlack = 2 * time.Second
)

type leaderKey struct{}

// newForwarder returns a proxy to the leader that the request's context names.
// A call is sent once: whether one that failed has taken place is not known.
//
// There is no bound on connections, which claims that wait would share with everything
// else: the slots of each class bound what is passed on. Two calls share no connection
// either, since without TLS it is HTTP/1.
func newForwarder(log *zap.Logger) *httputil.ReverseProxy {
	return &httputil.ReverseProxy{
		Rewrite: func(p *httputil.ProxyRequest) {
			leader, _ := p.In.Context().Value(leaderKey{}).(string)
			p.SetURL(&url.URL{Scheme: "http", Host: leader})
			p.Out.Host = p.In.Host // what a browser's Origin is compared with
			p.Out.Header.Set(forwardedHeader, "1")
		},
		Transport: &http.Transport{
			DialContext:         (&net.Dialer{Timeout: leaderDialWait}).DialContext,
			MaxIdleConnsPerHost: leaderIdle, IdleConnTimeout: time.Minute,
			// The client's own wishes go through as they are.
			DisableCompression: true,
		},
		ErrorLog: zap.NewStdLog(log),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if errors.Is(err, context.Canceled) {
				return // the client has gone
			}
			answer(w, r, apierror.New(apierror.NotLeader,
				"this replica does not lead, and the leader did not answer it: %v; whether the call has taken place is not known: a claim with an Idempotency-Key is found again by it, one without ends at its timeout", err))
		},
	}
}

// forward passes a call on to the leader.
func (a *api) forward(c *class, w *reply, r *http.Request, leader string) {
	refuse := func(message string) {
		answer(w, r, apierror.New(apierror.NotLeader, "%s", message))
	}
	switch {
	case leader == "":
		refuse("this replica does not lead, and no leader is known yet; try again")
		return
	case r.Header.Get(forwardedHeader) != "":
		refuse("the replica that this call was passed on to does not lead any more; try again")
		return
	}
	ctx, cancel := context.WithTimeout(context.WithValue(r.Context(), leaderKey{}, leader), c.wait+leaderSlack)
	defer cancel()
	a.forwarder.ServeHTTP(w, r.WithContext(ctx))
}
