package hollow

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"sync"
)

// echo answers every HTTP request, including HTTP/2 without TLS, for the pod at the
// address of the connection.
type echo struct {
	port   uint16
	server http.Server
	runs   sync.WaitGroup // Serve
	conns  sync.WaitGroup // one per connection; grows only while Serve runs
	err    error          // of Serve; read after runs
}

func startEcho(cidr netip.Prefix, handler http.Handler) (*echo, error) {
	listener, err := net.ListenTCP("tcp4", nil)
	if err != nil {
		return nil, fmt.Errorf("listen for the pods: %w", err)
	}
	e := &echo{port: addrOf(listener.Addr()).Port()}
	e.server.Handler = handler
	e.server.Protocols = new(http.Protocols)
	e.server.Protocols.SetHTTP1(true)
	e.server.Protocols.SetUnencryptedHTTP2(true)
	e.server.ConnState = func(_ net.Conn, s http.ConnState) {
		switch s {
		case http.StateNew:
			e.conns.Add(1)
		case http.StateClosed, http.StateHijacked:
			e.conns.Done()
		}
	}
	e.runs.Go(func() {
		if err := e.server.Serve(within{listener, cidr}); !errors.Is(err, http.ErrServerClosed) {
			e.err = fmt.Errorf("serve for the pods: %w", err)
		}
	})
	return e, nil
}

func answer(w http.ResponseWriter, r *http.Request) {
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr) // always set, see net/http
	w.Header().Set("Content-Type", "text/plain")
	_, _ = io.WriteString(w, addrOf(local).Addr().String()) // a client that has gone needs no answer
}

// close ends the server at once and returns when all connections have ended.
func (e *echo) close() error {
	err := e.server.Close()
	e.runs.Wait()
	e.conns.Wait()
	return errors.Join(err, e.err)
}

// within accepts only connections to an address inside cidr.
type within struct {
	*net.TCPListener
	cidr netip.Prefix
}

func (l within) Accept() (net.Conn, error) {
	for {
		conn, err := l.AcceptTCP()
		if err != nil {
			return nil, err
		}
		if l.cidr.Contains(addrOf(conn.LocalAddr()).Addr()) {
			return conn, nil
		}
		_ = conn.SetLinger(0) // a reset, as from a machine on which nothing listens
		_ = conn.Close()
	}
}

func addrOf(a net.Addr) netip.AddrPort {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.AddrPort{}
	}
	return netip.AddrPortFrom(tcp.AddrPort().Addr().Unmap(), tcp.AddrPort().Port())
}
