package rest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"sync/atomic"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/api/apierror"
)

// Bounds of what is in progress at one time, so that no caller can hold what others need:
// not by waiting, not by sending slowly, not by reading slowly.
const (
	// claimsInFlight and inFlight bound the claims, and the other calls, that are carried
	// out at one time. A call is carried out when its request has been read, and until its
	// answer is ready.
	claimsInFlight = 4_000
	inFlight       = 1_000
	// MaxConns is how many connections a listener needs for that, and for those that are
	// idle, send or read.
	MaxConns = claimsInFlight + inFlight + 1_000

	// bodyWait is how long a client may take to send a body, sendWait how long it may
	// take to read its answer.
	bodyWait = 5 * time.Second
	sendWait = 10 * time.Second
	// linger is how long the rest of a request is read that was answered before it had
	// been read: closing at once would make the kernel drop the answer.
	linger = 500 * time.Millisecond

	// bodyBytes and answerBytes bound the memory of the bodies of each class, and of all
	// answers. smallBody and smallAnswer are free for each: the bound on connections is
	// enough for those.
	bodyBytes   = 16 << 20
	answerBytes = 32 << 20
	smallBody   = 4 << 10
	// smallAnswer is the largest answer that shows one sandbox: a claim that was made must
	// not be refused for want of room. JSON escapes a byte to six at most, so 2 KiB of
	// metadata take 18 KiB in a thousand short pairs, and a user takes 1.5 KiB.
	smallAnswer = 22 << 10
)

// class is a kind of calls. Two classes share no limit: claims wait, and must not keep
// anything else waiting.
type class struct {
	slots  chan struct{}
	bodies *budget
	// wait is for how long a call may be carried out.
	wait time.Duration
}

func newClass(slots int, wait time.Duration) *class {
	return &class{slots: make(chan struct{}, slots), bodies: newBudget(bodyBytes), wait: wait}
}

// budget is a number of bytes that may be in use at one time.
type budget struct{ left atomic.Int64 }

func newBudget(bytes int64) *budget {
	b := &budget{}
	b.left.Store(bytes)
	return b
}

func (b *budget) take(n int) bool {
	if b.left.Add(int64(-n)) >= 0 {
		return true
	}
	b.left.Add(int64(n))
	return false
}

// held is a buffer whose bytes count against a budget.
type held struct {
	buf    bytes.Buffer
	budget *budget
	free   int // bytes that do not count
	taken  int
}

// reserve makes room for n bytes in all.
func (h *held) reserve(n int) bool {
	if n -= h.free + h.taken; n <= 0 {
		return true
	}
	if !h.budget.take(n) {
		return false
	}
	h.taken += n
	return true
}

// settle gives back what is reserved for more than n bytes.
func (h *held) settle(n int) {
	if spare := h.taken - max(0, n-h.free); spare > 0 {
		h.budget.left.Add(int64(spare))
		h.taken -= spare
	}
}

func tooManyBytes() *apierror.Error {
	return apierror.New(apierror.Overloaded, "too many large requests and answers are in progress; try again")
}

// body reads a request's body, which must come within bodyWait. The caller settles it.
func (c *class) body(r *http.Request) (*held, error) {
	h := &held{budget: c.bodies, free: smallBody}
	if r.ContentLength > maxBody {
		return h, tooLarge()
	}
	chunk := make([]byte, 1<<10) // many may be here at one time, and send nothing
	for {
		n, err := r.Body.Read(chunk)
		switch {
		case h.buf.Len()+n > maxBody:
			return h, tooLarge()
		case !h.reserve(h.buf.Len() + n):
			return h, tooManyBytes()
		}
		h.buf.Write(chunk[:n])
		switch {
		case errors.Is(err, io.EOF):
			return h, nil
		case errors.Is(err, os.ErrDeadlineExceeded):
			return h, apierror.New(apierror.RequestTimeout, "body: it did not arrive within %v", bodyWait)
		case err != nil:
			return h, invalid("body: %v", err)
		}
	}
}

func tooLarge() error {
	return apierror.New(apierror.BodyTooLarge, "body: at most %d bytes", maxBody)
}

// reply is an answer that is put together while its call has a slot, and is sent when the
// call has given that back: a client that does not read holds nothing but its answer.
type reply struct {
	held   held
	header http.Header
	code   int  // 0: none was given, because the client has gone
	full   bool // there was no room for it
}

func (p *reply) Header() http.Header { return p.header }

func (p *reply) WriteHeader(code int) {
	if p.code == 0 && code >= 200 { // a proxy passes on 1xx, too
		p.code = code
	}
}

// Write fails never: whether there was room is found out by send.
func (p *reply) Write(b []byte) (int, error) {
	p.WriteHeader(http.StatusOK)
	if p.full = p.full || !p.held.reserve(p.held.buf.Len()+len(b)); !p.full {
		p.held.buf.Write(b)
	}
	return len(b), nil
}

// rows makes room for a list of so many before it is made.
func (p *reply) rows(n int) error {
	const rowBytes = 1 << 10
	if !p.held.reserve(n * rowBytes) {
		return tooManyBytes()
	}
	return nil
}

// send sends the answer, for which the client has sendWait.
func (p *reply) send(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendWait)) // errors where there is no connection
	switch {
	case p.full:
		answer(w, r, tooManyBytes())
		return
	case p.code == 0:
		abort()
	}
	p.held.settle(p.held.buf.Len())
	for name, values := range p.header {
		w.Header()[name] = values
	}
	w.WriteHeader(p.code)
	_, _ = w.Write(p.held.buf.Bytes()) // the client may have gone; there is nobody else to tell
}

// abort ends a call that is not answered, because its client has gone, and closes its
// connection. A client that has closed only its own side counts as gone, and still reads:
// from a handler that returned it would get an empty 200.
func abort() { panic(http.ErrAbortHandler) }

// bounded gives each call its deadlines: nothing may take long that a client does.
func bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		connection := http.NewResponseController(w) // its errors: there is no connection
		_ = connection.SetReadDeadline(time.Now().Add(bodyWait))
		_ = connection.SetWriteDeadline(time.Now().Add(bodyWait + sendWait))
		next.ServeHTTP(w, r)
	})
}

// refuse answers a call whose body was not read, or not to its end. The connection is
// closed after that: what comes next on it would be the rest of the body.
func refuse(w http.ResponseWriter, r *http.Request, e *apierror.Error) {
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(linger))
	}
	answer(w, r, e)
}

// handle turns a function that may fail into a handler. Where this replica does
// not lead, the leader answers. parameters are those that the call may have in its
// query.
func (a *api) handle(c *class, f func(*reply, *http.Request) error, parameters ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := c.body(r)
		defer body.settle(0)
		if err != nil {
			e := a.told(r, err)
			if e == nil {
				abort()
			}
			refuse(w, r, e)
			return
		}
		// From here on the call's own context bounds it, until its answer is sent: a
		// deadline for reading would end it.
		connection := http.NewResponseController(w)
		_ = connection.SetReadDeadline(time.Time{})
		_ = connection.SetWriteDeadline(time.Time{})
		call := r.WithContext(r.Context())
		call.Body, call.ContentLength, call.TransferEncoding = io.NopCloser(&body.buf), int64(body.buf.Len()), nil
		p := &reply{held: held{budget: a.answers, free: smallAnswer}, header: http.Header{}}
		defer p.held.settle(0)
		a.carryOut(c, p, call, f, parameters)
		p.send(w, r)
	}
}

// carryOut carries a call out, in a slot of its class.
func (a *api) carryOut(c *class, p *reply, r *http.Request, f func(*reply, *http.Request) error, parameters []string) {
	select {
	case c.slots <- struct{}{}:
		defer func() { <-c.slots }()
	default:
		answer(p, r, apierror.New(apierror.Overloaded, "too many requests are being served; try again"))
		return
	}
	// Before it is passed on: the proxy takes out of a query what is not well-formed.
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		answer(p, r, invalid("query: %v", err))
		return
	}
	if ok, leader := a.Allocator.Leading(); !ok {
		a.forward(c, p, r, leader)
		return
	}
	if err = noParametersBut(query, parameters); err == nil {
		err = f(p, r)
	}
	if e := a.told(r, err); e != nil {
		answer(p, r, e)
	} else if err == nil {
		p.WriteHeader(http.StatusOK) // as net/http does it: an empty list in text writes nothing
	}
}

// told is what a caller is told of an error: nil if there is none, or no caller any more.
func (a *api) told(r *http.Request, err error) *apierror.Error {
	var e *apierror.Error
	switch {
	case err == nil:
		return nil
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.Canceled):
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return apierror.New(apierror.Timeout, "the API server did not confirm in time; a claim that was not answered is given back, unless it had an Idempotency-Key; a release goes on")
	}
	a.Log.Error("request failed", zap.String("path", r.URL.Path), zap.Error(err))
	return apierror.New(apierror.Internal, "the allocator failed; its log says more")
}
