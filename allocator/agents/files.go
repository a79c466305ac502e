package agents

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/core"
)

const (
	// maxInterim bounds the answers in bytes that say that an agent still restores.
	maxInterim = 256 << 10
	// piece is how many bytes of an archive are sent or received at one time.
	piece = 64 << 10
)

// Archive says which files are archived. Package agent/archive says what the bounds bound.
type Archive struct {
	// Paths are absolute. Empty: the home of the default user.
	Paths    []string
	MaxBytes int64
	MaxFiles int
	// Stop names the archive of a sandbox that is stopped. It has the configuration too, sealed with a key that follows
	// from this name, the ID of the sandbox and the cluster's key. Empty: it has only files.
	Stop string
}

// seal returns the key that seals the configuration in an archive of a sandbox, nil if it has none.
func (c *Caller) seal(id string, a *Archive) []byte {
	if a.Stop == "" {
		return nil
	}
	key := c.o.Key.Derive("stopped configuration 1 " + id + " " + a.Stop)
	return key[:]
}

// Restore says which archive is restored, and where.
type Restore struct {
	Archive
	// SHA256, in hexadecimal digits, and Size, in bytes, are those of the stream that Caller.Archive has written.
	SHA256 string
	Size   int64
}

// Summary is what an agent says that it has archived or restored. It is in the bounds. Nothing else vouches for it.
type Summary = initbox.Summary

// Archive has the agent of a sandbox whose processes are stopped write an archive to w. The order has the revision of
// the sandbox. After an error, what was written is no archive. The error is that of w, ErrSuperseded, a *RefusedError,
// or one after which it can be tried again. The agent may have sent anything: a Restore is given the hash of what was
// written.
func (c *Caller) Archive(ctx context.Context, s core.Sandbox, a Archive, w io.Writer) (sum Summary, err error) {
	o := &initbox.FilesOrder{SandboxID: s.ID, Kind: initbox.Archive, Term: s.Revision.Term, Counter: s.Revision.Counter,
		Paths: a.Paths, MaxBytes: a.MaxBytes, MaxFiles: a.MaxFiles, Seal: c.seal(s.ID, &a)}
	now := incarnation{s.Pod.Whole(), s.Restarts}
	peer, _ := c.known.Get(now)
	err = c.call(ctx, at(s), func(l *line) error {
		known := peer
		var trailer http.Header
		code, answer, err := c.deliver(l, &peer, func() ([]byte, error) { return peer.SealFilesOrder(o) },
			func(box []byte) (code int, answer []byte, err error) {
				code, answer, trailer, err = l.receive(box, a.MaxBytes, w)
				return code, answer, err
			})
		if peer != known {
			c.known.Add(now, peer)
		}
		text := trailer.Get(initbox.SummaryTrailer)
		switch {
		case err != nil:
			return err
		case code != http.StatusOK:
			return refused(code, answer, o)
		case text == "":
			return refusal(initbox.Reason(trailer.Get(initbox.FailureTrailer)), errPart)
		case json.Unmarshal([]byte(text), &sum) != nil || sum.Check(a.MaxBytes, a.MaxFiles) != nil:
			return errors.New("the agent's summary of its archive is impossible")
		}
		return nil
	})
	if err != nil {
		return Summary{}, err
	}
	return sum, nil
}

// errPart is the error of an archive that ends without a summary and a known reason.
var errPart = errors.New("the agent has written a part of an archive")

// Restore has the agent in a pod that is going to be that of a sandbox restore the archive that from has. It is called
// once for an agent, before Configure, which the agent then accepts for this sandbox only. After an error the pod may
// have a part of the files, and its agent then refuses to be configured. The error is that of from, a *RefusedError, or
// another one.
func (c *Caller) Restore(ctx context.Context, s core.Sandbox, r Restore, from io.Reader) (sum Summary, err error) {
	o := &initbox.FilesOrder{SandboxID: s.ID, Kind: initbox.Restore, Paths: r.Paths, MaxBytes: r.MaxBytes,
		MaxFiles: r.MaxFiles, SHA256: r.SHA256, Size: r.Size, Seal: c.seal(s.ID, &r.Archive)}
	err = c.call(ctx, at(s), func(l *line) error {
		var peer *initbox.Peer // a key that is not new would cost the stream
		code, answer, err := c.deliver(l, &peer, func() ([]byte, error) { return peer.SealFilesOrder(o) },
			func(box []byte) (int, []byte, error) { return l.send(box, from, r.Size) })
		switch {
		case err != nil:
			return err
		case code != http.StatusOK:
			return refused(code, answer, o)
		case json.Unmarshal(answer, &sum) != nil || sum.Check(r.MaxBytes, r.MaxFiles) != nil:
			return errors.New("the agent's summary of what it has restored is impossible")
		}
		return nil
	})
	if err != nil {
		return Summary{}, err
	}
	return sum, nil
}

// refused returns the error for an answer of an agent to a FilesOrder.
func refused(code int, answer []byte, o *initbox.FilesOrder) error {
	err := fmt.Errorf("the agent answered %d to the order %s", code, o.Kind)
	switch code {
	case http.StatusBadRequest:
		if len(o.Seal) > 0 { // it does not know the field
			return &RefusedError{Why: "the agent has a version that cannot stop a sandbox or wake one that was stopped: those " +
				"that are installed from now on can"}
		}
	case http.StatusConflict, http.StatusUnprocessableEntity:
		var r initbox.FilesRefusal
		_ = json.Unmarshal(answer, &r) // no reason is an unknown one
		return refusal(r.Reason, err)
	case http.StatusNotFound:
		return &RefusedError{Why: "the agent of this sandbox has a version that knows no archives: sandboxes that are " +
			"claimed from now on have one that does"}
	}
	return err
}

// refusal returns the error for a reason that an agent has named: other if it is not known.
func refusal(reason initbox.Reason, other error) error {
	known := &initbox.FilesRefusal{Reason: reason}
	switch {
	case reason == initbox.Superseded:
		return ErrSuperseded
	case !known.Known():
		return other
	}
	return &RefusedError{Reason: reason, Why: known.Error()}
}

// receive sends the box of an order to archive, and writes the stream that answers it to w. It returns what is behind
// the stream. Another answer is returned as exchange does.
func (l *line) receive(box []byte, maxBytes int64, w io.Writer) (
	code int, answer []byte, trailer http.Header, err error,
) {
	r, err := l.request(http.MethodPost, initbox.ArchivePath, "", box)
	if err != nil {
		return 0, nil, nil, err
	}
	limited := &io.LimitedReader{R: l.from, N: maxAnswer}
	// Package http reads a trailer only if it fits the buffer.
	response, err := http.ReadResponse(bufio.NewReaderSize(limited, initbox.MaxSummary+piece), r)
	if err != nil {
		return 0, nil, nil, errUnreadable
	}
	if response.StatusCode != http.StatusOK {
		code, answer, err = whole(response)
		return code, answer, nil, err
	}
	defer response.Body.Close()
	// More than what a configuration has, what maxBytes are compressed to, and what divides the stream.
	limited.N = initbox.MaxSealed + min(maxBytes, math.MaxInt64/2) + maxBytes/32 + 2<<20
	sink := &sink{Writer: w}
	_, err = io.CopyBuffer(sink, response.Body, make([]byte, piece))
	switch {
	case sink.err != nil:
		return 0, nil, nil, fmt.Errorf("write the archive: %w", sink.err)
	case err != nil:
		return 0, nil, nil, errors.New("the archive of the agent is cut off, stands still, or is longer than maxBytes")
	}
	return response.StatusCode, nil, response.Trailer, nil
}

// sink keeps the error of a writer apart from those of what is read.
type sink struct {
	io.Writer
	err error
}

func (s *sink) Write(p []byte) (n int, err error) {
	n, s.err = s.Writer.Write(p)
	return n, s.err
}

// send sends the box of an order to restore, and the archive, and returns the answer to it.
func (l *line) send(box []byte, from io.Reader, size int64) (code int, answer []byte, err error) {
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		code, answer, err = l.final()
		_ = l.conn.Close() // an agent that refuses the archive does not read it
	}()
	// The box does not wait for the first piece of the archive, as it would in a request of package http.
	head := fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: %s\r\nUser-Agent: berth-allocator\r\n"+
		"Content-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n",
		initbox.RestorePath, l.host, int64(4+len(box))+size)
	head = append(binary.BigEndian.AppendUint32(head, uint32(len(box))), box...)
	source := &source{Reader: from}
	if _, failed := l.conn.Write(head); failed == nil {
		sent, _ := io.CopyN(l.conn, source, size)
		if sent < size && source.err != nil {
			_ = l.conn.Close()
			<-answered
			if errors.Is(source.err, io.EOF) {
				source.err = io.ErrUnexpectedEOF
			}
			return 0, nil, fmt.Errorf("read the archive: %w after %d of %d bytes", source.err, sent, size)
		}
	}
	<-answered
	return code, answer, err
}

// source keeps the error of a reader apart from those of what is written.
type source struct {
	io.Reader
	err error
}

func (s *source) Read(p []byte) (n int, err error) {
	n, s.err = s.Reader.Read(p)
	return n, s.err
}

// final returns the answer to a request behind those that say that the agent still works.
func (l *line) final() (code int, answer []byte, err error) {
	from := bufio.NewReader(&io.LimitedReader{R: l.from, N: maxInterim})
	for {
		response, err := http.ReadResponse(from, &http.Request{Method: http.MethodPost})
		if err != nil {
			return 0, nil, errUnreadable
		}
		if response.StatusCode >= http.StatusOK {
			return whole(response)
		}
		_ = response.Body.Close() // it has none
	}
}
