package h2

import (
	"sync"

	"google.golang.org/grpc/codes"
)

// Ending ends a stream that is kept. The zero value is ready. It is for one Reply.
type Ending struct {
	mu   sync.Mutex
	conn *conn // once the stream is kept
	id   uint32
	// block ends the stream. It is nil until End is called.
	block []byte
}

// End ends the stream with a status, which should be an error: Envoy goes on with a request whose stream ends well.
// An answer that was not sent yet is never sent. Open.Ended is called when the peer has ended the stream, too, at once
// if the peer has no answer. All calls but the first do nothing. It may be called at any time, and it does not block:
// while the peer reads nothing, a goroutine of the server waits for it.
func (e *Ending) End(code codes.Code, text string) {
	e.mu.Lock()
	if e.block != nil {
		e.mu.Unlock()
		return
	}
	e.block = statusBlock(true, code, text)
	c := e.conn
	if c == nil { // begin ends it
		e.block = statusBlock(false, code, text)
	}
	block := e.block
	e.mu.Unlock()
	if c != nil {
		c.server.endKept(c, e.id, block)
	}
}

// begin notes which stream is kept. If End was called it returns what ends the stream instead.
func (e *Ending) begin(c *conn, id uint32) []byte {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.conn, e.id = c, id
	return e.block
}

// endKept ends a stream that is kept. A connection that has ended has none.
func (s *Server) endKept(c *conn, id uint32, block []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, open := s.conns[c]; open { // so its serve counts
		s.running.Go(func() { c.endKept(id, block) })
	}
}

// endKept sends the end of a stream. The number of a stream is never used again, so this ends no other one.
func (c *conn) endKept(id uint32, block []byte) {
	c.mu.Lock()
	s := c.streams[id]
	if s == nil || s.ending {
		c.mu.Unlock()
		return
	}
	s.ending = true
	c.endWith(s, block)
	c.out.flush()
	over := c.overWith(s)
	c.mu.Unlock()
	if over {
		s.end(true)
	}
}

// overWith forgets an ending stream that both sides have ended. The caller ends it when it has given the lock back.
func (c *conn) overWith(s *stream) bool {
	if s.gone || !s.ending || !s.halfClosed || len(s.pending) > 0 {
		return false
	}
	c.remove(s)
	return true
}
