package h2

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"

	"golang.org/x/net/http2"
	"google.golang.org/grpc/codes"
)

// stream is a call.
type stream struct {
	id uint32

	// Those of the reading goroutine alone.
	handler Handler
	message []byte // what has arrived of a message that came in several frames
	room    int    // what the peer may still send
	length  int64  // what is missing of its content-length, -1: it has none
	asked   bool   // the message is complete and the last one that is read, or the call has failed
	trace   string // traceparent

	// Those under the lock of the connection.
	halfClosed bool // by the peer. Only the reading goroutine sets it.
	window     int64
	begun      bool   // its header block was sent
	pending    []byte // DATA that waits for a window
	trailers   []byte // header block that follows pending and ends the stream
	waits      bool   // it is in output.waiting
	open       Open
	ending     bool               // Ending.End was called. Its trailers follow pending.
	cancel     context.CancelFunc // ends Later
	gone       bool
}

// end tells those that work for the stream that it is over. It must be called once, without the lock,
// by the one who has removed the stream.
func (s *stream) end(byPeer bool) {
	if s.cancel != nil {
		s.cancel()
	}
	if s.open != nil {
		s.open.Ended(byPeer)
	}
}

// remove forgets a stream.
func (c *conn) remove(s *stream) {
	s.gone = true
	delete(c.streams, s.id)
	c.closeIfDone()
}

// newStream returns a stream in the state opened.
func (c *conn) newStream(b *block) *stream {
	var s *stream
	if n := len(c.free); n > 0 {
		s, c.free = c.free[n-1], c.free[:n-1]
	} else {
		s = new(stream)
	}
	*s = stream{id: b.stream, halfClosed: b.ends, window: c.out.firstWindow, room: maxMessage, length: b.length, trace: b.trace}
	return s
}

// prefixLength is the length of what stands before each message: whether it is compressed, and its length.
const prefixLength = 5

// open begins a stream.
func (c *conn) open(s *stream, b *block) {
	switch s.handler = c.server.methods[b.path]; {
	case !b.grpc || !b.post:
		s.asked = true
		c.finish(s, notGRPC)
	case s.handler == nil:
		c.fail(s, codes.Unimplemented, "unknown method "+b.path)
	case b.ends:
		c.halfClose(s)
	}
}

// take reads a part of the stream's messages.
func (c *conn) take(s *stream, data []byte) error {
	for !s.asked && len(data) > 0 {
		if len(s.message) > 0 {
			s.message = append(s.message, data...)
			c.partial += len(data)
			data = s.message
		}
		if len(data) >= prefixLength {
			length := uint64(binary.BigEndian.Uint32(data[1:prefixLength]))
			switch {
			case data[0] != 0:
				c.fail(s, codes.Unimplemented, "compressed messages are not supported")
				return nil
			case length > maxMessage-prefixLength:
				c.fail(s, codes.ResourceExhausted, "the message is longer than 256 KiB")
				return nil
			case uint64(len(data)) >= prefixLength+length:
				c.complete(s)
				c.ask(s, data[prefixLength:prefixLength+length])
				data = data[prefixLength+length:]
				continue
			}
		}
		if len(s.message) == 0 {
			s.message = bytes.Clone(data)
			c.partial += len(data)
		}
		break
	}
	if c.partial > maxPartial {
		return http2.ConnectionError(http2.ErrCodeEnhanceYourCalm)
	}
	return nil
}

// complete forgets what was read of a message.
func (c *conn) complete(s *stream) {
	c.partial -= len(s.message)
	s.asked, s.message = true, nil
}

// ask has a complete message answered.
func (c *conn) ask(s *stream, message []byte) {
	reply, later := s.handler.Now(message, s.trace)
	if later == nil {
		if reply.Next {
			c.next(s)
		} else {
			c.reply(s, reply)
		}
		return
	}
	ctx, cancel := context.WithCancel(c.server.ctx)
	c.mu.Lock()
	s.cancel = cancel
	c.later++
	c.mu.Unlock()
	c.server.running.Go(func() {
		reply := later(ctx, func(m []byte) error { return c.sendMore(s, m) })
		cancel()
		c.reply(s, reply)
		c.mu.Lock()
		defer c.mu.Unlock()
		c.later--
		c.out.flush()
	})
}

// next lets the peer send another message.
func (c *conn) next(s *stream) {
	s.asked = false
	if s.room == maxMessage { // the message before shared a frame with this one
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.out.addWindowUpdate(s.id, uint32(maxMessage-s.room))
	s.room = maxMessage
}

// reply sends a reply. The caller flushes.
func (c *conn) reply(s *stream, r Reply) {
	c.mu.Lock()
	if s.gone {
		c.mu.Unlock()
		if r.Open != nil {
			r.Open.Ended(!c.server.isForced())
		}
		return
	}
	if r.Open != nil && s.halfClosed {
		// The peer has left before it could know of the answer, so it does not get one.
		c.endWith(s, statusBlock(s.begun, codes.Canceled, "the call was half-closed before it was answered"))
		c.mu.Unlock()
		r.Open.Ended(true)
		return
	}
	if r.Open != nil && r.Ending != nil {
		if block := r.Ending.begin(c, s.id); block != nil {
			c.endWith(s, block)
			c.mu.Unlock()
			r.Open.Ended(true)
			return
		}
	}
	defer c.mu.Unlock()
	if r.Message != nil {
		c.send(s, r.Message)
	}
	if s.open = r.Open; r.Open == nil {
		c.endWith(s, statusBlock(s.begun, r.Status, r.Text))
	}
}

var errStreamEnded = errors.New("the peer has ended the stream")

// sendMore sends a message that is not the last one.
func (c *conn) sendMore(s *stream, message []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if s.gone {
		return errStreamEnded
	}
	c.send(s, message)
	c.out.flush()
	return nil
}

// fail ends a stream with an error, before its message was answered.
func (c *conn) fail(s *stream, code codes.Code, text string) {
	c.complete(s)
	c.finish(s, statusBlock(false, code, text))
}

// finish ends a stream with a header block.
func (c *conn) finish(s *stream, block []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !s.gone {
		c.endWith(s, block)
	}
}

// halfClose acts on the end of what the peer sends for a stream. It is no sign that the peer has read an
// answer, because both may cross on the socket, so it ends no stream that is kept.
func (c *conn) halfClose(s *stream) {
	c.mu.Lock()
	s.halfClosed = true
	over := c.overWith(s)
	if !s.gone && !s.asked { // the peer has left before it asked
		c.complete(s)
		c.endWith(s, statusBlock(false, codes.OK, ""))
	}
	c.mu.Unlock()
	if over {
		s.end(true)
	}
}
