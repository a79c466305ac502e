// Package busy asks a sandbox whether it works although no request for it is open.
//
// The program in the sandbox is not trusted. One attempt costs one connection of its own,
// 200 ms and a few KB at most, whatever the program answers: only the status counts, no
// body is read, and no redirect is followed.
package busy

import (
	"context"
	"net/http"
	"net/netip"
	"time"
)

const (
	// wait bounds one attempt, the connection included.
	wait = 200 * time.Millisecond
	// attempts that fail one after the other, each with a pause after it, mean "not busy".
	attempts = 3
	pause    = time.Second
	// headMost is how many bytes of an answer are read.
	headMost = 4 << 10
)

var transport = &http.Transport{DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: headMost, ReadBufferSize: headMost}

// Ask sends GET http://addr/path and reports whether the answer was 200. 204 means that
// the sandbox is not busy; anything else is a failure.
func Ask(ctx context.Context, addr netip.AddrPort, path string) bool {
	for range attempts {
		switch status(ctx, addr, path) {
		case http.StatusOK:
			return true
		case http.StatusNoContent:
			return false
		}
		select {
		case <-ctx.Done():
			return false
		case <-time.After(pause):
		}
	}
	return false
}

// status is that of the answer; 0: there was none.
func status(ctx context.Context, addr netip.AddrPort, path string) int {
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr.String()+path, http.NoBody)
	if err != nil || request.URL.Host != addr.String() {
		return 0
	}
	request.Header.Set("User-Agent", "berth")
	response, err := transport.RoundTrip(request)
	if err != nil {
		return 0
	}
	_ = response.Body.Close()
	return response.StatusCode
}
