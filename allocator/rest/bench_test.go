package rest

import (
	"bytes"
	"io"
	"net/http"
	"testing"
	"time"
)

// sink is a ResponseWriter that keeps nothing.
type sink struct {
	header http.Header
	code   int
}

func (s *sink) Header() http.Header         { return s.header }
func (s *sink) WriteHeader(code int)        { s.code = code }
func (s *sink) Write(b []byte) (int, error) { return len(b), nil }

func (s *sink) SetReadDeadline(time.Time) error  { return nil }
func (s *sink) SetWriteDeadline(time.Time) error { return nil }

// BenchmarkCreate: a claim in this package alone, from the request to the answer.
func BenchmarkCreate(b *testing.B) {
	body := []byte(`{"templateID":"python","timeout":300,"metadata":{"agent":"a-1","run":"42"}}`)
	h := handler(b, &fake{})
	r := request(b.Context(), "POST", "/sandboxes", nil)
	r.ContentLength = int64(len(body))
	reader := bytes.NewReader(body)
	b.ReportAllocs()
	for b.Loop() {
		reader.Reset(body)
		r.Body = io.NopCloser(reader)
		w := &sink{header: http.Header{}}
		if h.ServeHTTP(w, r); w.code != http.StatusCreated {
			b.Fatal(w.code)
		}
	}
}
