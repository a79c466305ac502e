package main

import (
	"net"
	"net/http"
	"net/http/httputil"
	"time"
)

// relayDialTimeout bounds the wait for a target to accept. A pod network does not refuse
// connections to an address without a pod, it drops them.
const relayDialTimeout = 3 * time.Second

// relay is an HTTP proxy. It passes requests in absolute form on to the address that they
// name, and the others to next. It is only for tests that cannot reach pods themselves:
// a client that reaches the port can reach any address that this pod can.
func relay(next http.Handler) http.Handler {
	proxy := &httputil.ReverseProxy{
		Rewrite: func(*httputil.ProxyRequest) {}, // the URL of the request names the target
		Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext:       (&net.Dialer{Timeout: relayDialTimeout}).DialContext,
		},
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.IsAbs() {
			proxy.ServeHTTP(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}
