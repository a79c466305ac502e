package busy

import (
	"context"
	"net/http"
	"net/netip"
	"time"
)

const (
	// attemptTimeout bounds one attempt, including the connection.
	attemptTimeout = 200 * time.Millisecond
	// maxAttempts failed attempts in a row, with a pause after each, count as "not busy".
	maxAttempts = 3
	pause       = time.Second
	// maxHeader bounds the bytes of an answer that are read.
	maxHeader = 4 << 10
)

var transport = &http.Transport{
	DisableKeepAlives: true, DisableCompression: true,
	MaxResponseHeaderBytes: maxHeader, ReadBufferSize: maxHeader,
}

// Ask sends GET http://addr/path and reports whether the answer was 200. 204 means that the
// sandbox is not busy. Any other result is a failed attempt.
func Ask(ctx context.Context, addr netip.AddrPort, path string) bool {
	for range maxAttempts {
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

// status returns the status of the answer, or 0 if there is none.
func status(ctx context.Context, addr netip.AddrPort, path string) int {
	ctx, cancel := context.WithTimeout(ctx, attemptTimeout)
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
