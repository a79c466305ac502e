package console

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"
)

// maxPosition bounds the header Last-Event-ID in bytes.
const maxPosition = 64

// events passes the API's stream of events on to the script. It ends with the session, and the API ends it with the
// key.
func (c *Console) events(w http.ResponseWriter, r *http.Request) {
	s, err := c.session(r)
	if err != nil {
		http.Error(w, "sign in again", http.StatusUnauthorized)
		return
	}
	if site := r.Header.Get("Sec-Fetch-Site"); site != "" && site != "same-origin" {
		http.Error(w, "only pages of this console may read this stream", http.StatusForbidden)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), s.end().Sub(c.o.Now()))
	defer cancel()
	call, err := http.NewRequestWithContext(ctx, http.MethodGet, c.o.APIURL+"/v1/events", http.NoBody)
	if err != nil {
		http.Error(w, "the stream of events cannot be read", http.StatusInternalServerError)
		return
	}
	if s.key != "" {
		call.Header.Set("X-API-Key", s.key)
	}
	if at := r.Header.Get("Last-Event-ID"); at != "" && len(at) <= maxPosition {
		call.Header.Set("Last-Event-ID", at)
	}
	answer, err := from{c.o.API, r}.RoundTrip(call)
	if err != nil {
		http.Error(w, "the stream of events cannot be read", http.StatusBadGateway)
		return
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		http.Error(w, "the API refuses the stream of events", answer.StatusCode)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("X-Accel-Buffering", "no") // for proxies that would collect the answer
	connection := http.NewResponseController(w)
	_ = connection.SetReadDeadline(time.Time{}) // these fail only without a connection, in tests
	_ = connection.SetWriteDeadline(time.Now().Add(sendWait))
	if connection.Flush() != nil {
		return
	}
	buffer := make([]byte, 4<<10)
	for {
		n, err := answer.Body.Read(buffer)
		if n > 0 {
			_ = connection.SetWriteDeadline(time.Now().Add(sendWait))
			if _, err := w.Write(buffer[:n]); err != nil || connection.Flush() != nil {
				return
			}
		}
		if err != nil {
			if errors.Is(err, io.EOF) {
				_ = connection.SetWriteDeadline(time.Now().Add(sendWait))
			}
			return
		}
	}
}
