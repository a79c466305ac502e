package envoy_test

import (
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
)

// pod is a server that stands for a pod. It speaks HTTP/1.1 and HTTP/2 without
// TLS.
type pod struct {
	addr netip.AddrPort
	hits atomic.Int64
}

func listen(t *testing.T, address string, h http.Handler) *pod {
	t.Helper()
	l, err := net.Listen("tcp", address)
	require.NoError(t, err)
	p := &pod{addr: netip.MustParseAddrPort(l.Addr().String())}
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetUnencryptedHTTP2(true)
	server := &http.Server{Protocols: &protocols, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		p.hits.Add(1)
		h.ServeHTTP(w, r)
	})}
	var serving sync.WaitGroup
	serving.Go(func() { _ = server.Serve(l) }) // ends with Close
	t.Cleanup(func() {
		server.Close()
		serving.Wait()
	})
	return p
}
