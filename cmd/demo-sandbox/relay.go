package main

import (
	"context"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

// relayDialTimeout is how long a target may take to accept. In a pod network an
// address that nobody has any more does not refuse, it is silent.
const relayDialTimeout = 3 * time.Second

// relay answers CONNECT by connecting to what it names, and everything else as
// before. Only for tests that cannot reach pods themselves: who can reach the
// port can reach whatever this pod can.
func relay(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodConnect {
			connect(w, r)
			return
		}
		next.ServeHTTP(w, r)
	})
}

func connect(w http.ResponseWriter, r *http.Request) {
	d := net.Dialer{Timeout: relayDialTimeout}
	there, err := d.DialContext(r.Context(), "tcp", r.Host)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	defer func() { _ = there.Close() }()
	here, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return // the server closes the connection
	}
	defer func() { _ = here.Close() }()
	if _, err := io.WriteString(here, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	defer context.AfterFunc(r.Context(), func() {
		_ = here.Close()
		_ = there.Close()
	})()
	var carried sync.WaitGroup
	carry := func(to net.Conn, from io.Reader) {
		carried.Go(func() {
			_, _ = io.Copy(to, from) // however it ended, the other side learns of it
			_ = to.(*net.TCPConn).CloseWrite()
		})
	}
	carry(there, buffered)
	carry(here, there)
	carried.Wait()
}
