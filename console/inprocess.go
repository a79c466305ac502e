package console

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
)

// Handler returns what carries calls to an API in this process. A call has the address, the Host, the origin and the
// forwarded client of the request that it is made for, so an API without keys judges them as those of a call from
// outside.
func Handler(api http.Handler) http.RoundTripper { return inProcess{api} }

type inProcess struct{ api http.Handler }

type requestKey struct{}

// passed are the headers by which the API judges where a call comes from.
var passed = []string{"Origin", "Sec-Fetch-Site", "X-Forwarded-For", "X-Request-Id"}

// RoundTrip implements http.RoundTripper.
func (p inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context())
	in := r.Clone(ctx)
	in.RequestURI = r.URL.RequestURI()
	if in.Body == nil {
		in.Body = http.NoBody
	}
	if from, ok := r.Context().Value(requestKey{}).(*http.Request); ok {
		in.Host, in.RemoteAddr, in.TLS = from.Host, from.RemoteAddr, from.TLS
		for _, name := range passed {
			if values := from.Header.Values(name); len(values) > 0 {
				in.Header[name] = values
			}
		}
	}
	reader, writer := io.Pipe()
	a := &answer{header: http.Header{}, body: writer, ready: make(chan struct{})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer in.Body.Close()
		a.end(serve(p.api, a, in))
	}()
	body := &callBody{PipeReader: reader, stop: func() { cancel(); <-done }}
	select {
	case <-a.ready:
	case <-ctx.Done():
		_ = body.Close()
		return nil, context.Cause(r.Context())
	}
	if a.err != nil {
		_ = body.Close()
		return nil, a.err
	}
	return &http.Response{
		Status: fmt.Sprintf("%d %s", a.code, http.StatusText(a.code)), StatusCode: a.code,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: a.sent, Body: body, ContentLength: -1, Request: r,
	}, nil
}

// errBroken is the error of a call that ended without an answer.
var errBroken = errors.New("the API broke off")

// serve calls a handler as a server does: a panic ends the call only.
func serve(api http.Handler, w http.ResponseWriter, r *http.Request) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errBroken
		}
	}()
	api.ServeHTTP(w, r)
	return nil
}

// callBody is the answer of a call. Close ends the call and waits for it.
type callBody struct {
	*io.PipeReader
	stop func()
	once sync.Once
}

// Close implements io.Closer.
func (b *callBody) Close() error {
	b.once.Do(func() {
		_ = b.PipeReader.Close() // never fails
		b.stop()
	})
	return nil
}

// answer is written by the handler. code, sent and err are read when ready is closed.
type answer struct {
	header, sent http.Header
	body         *io.PipeWriter
	code         int
	err          error
	ready        chan struct{}
}

// Header implements http.ResponseWriter.
func (a *answer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *answer) WriteHeader(code int) {
	if a.code == 0 && code >= http.StatusOK {
		a.code, a.sent = code, a.header.Clone()
		close(a.ready)
	}
}

// Write implements http.ResponseWriter.
func (a *answer) Write(b []byte) (int, error) {
	a.WriteHeader(http.StatusOK)
	return a.body.Write(b)
}

// Flush is for http.ResponseController: what was written has been read.
func (a *answer) Flush() { a.WriteHeader(http.StatusOK) }

// end ends the answer.
func (a *answer) end(err error) {
	if a.code == 0 && err != nil {
		a.err, a.code = err, -1
		close(a.ready)
	}
	a.WriteHeader(http.StatusOK)
	_ = a.body.CloseWithError(err) // never fails
}
