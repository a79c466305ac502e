package rest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
)

// Bounds of calls in progress. They stop a client from blocking others by waiting, sending slowly
// or reading slowly.
const (
	// claimsInFlight and inFlight bound the concurrent claims and the other concurrent calls. A
	// call is in progress from the end of its request until its answer is ready.
	claimsInFlight = 4_000
	inFlight       = 1_000
	// readsInFlight bounds the calls that ask a kubelet or the API server and may take seconds.
	readsInFlight = 100
	// teamShare is how much of a budget a team can use for each unit that is left. So a team alone can
	// use four fifths of it, and each of n teams 4/(4n+1).
	teamShare = 4

	// bodyWait bounds the time for sending a body, sendWait that for reading the answer.
	bodyWait = 5 * time.Second
	sendWait = 10 * time.Second
	// linger is how long the rest of a refused request is read. Closing at once would make the
	// kernel drop the answer.
	linger = 500 * time.Millisecond

	// bodyBytes bounds the memory of the request bodies of each class, and answerBytes that of all
	// answers. The first smallBody and smallAnswer bytes of each are not counted; the bound on
	// connections limits those.
	bodyBytes   = 16 << 20
	answerBytes = 32 << 20
	smallBody   = 4 << 10
	// smallAnswer is the size of the largest answer with one sandbox. JSON escapes a byte to at
	// most six, so 2 KiB of metadata take 15 KiB in hundreds of short pairs, and a user takes
	// 1.5 KiB.
	smallAnswer = 19 << 10
)

// claimSlots is how many claims can be in progress, if so many of them may wait for a pod of one pool.
// One team has enough slots for these.
func claimSlots(queue int) int { return max(claimsInFlight, queue+(queue+teamShare-1)/teamShare) }

// MaxConns is the number of connections that a listener needs for all calls, with Options.ClaimQueue, and
// for connections that are idle, sending or reading.
func MaxConns(queue int) int {
	const others, sleeps, wakes = inFlight, inFlight, inFlight
	return claimSlots(queue) + others + sleeps + wakes + snapshotsInFlight + readsInFlight + maxStreams + 1_000
}

// class is a kind of calls. Classes share no slot, so waiting claims block no other call.
type class struct {
	slots, bodies *budget
	// wait bounds the duration of a call.
	wait time.Duration
}

func newClass(slots int, wait time.Duration) *class {
	return &class{slots: newBudget(slots), bodies: newBudget(bodyBytes), wait: wait}
}

// budget is a number of slots or bytes that may be in use at one time. The calls of one team never use all
// of it, so they block no call of another team. It may be used concurrently.
type budget struct {
	size int
	most int // what one team can use; 0: what teamShare leaves it
	mu   sync.Mutex
	left int            // below 0: it is overdrawn
	used map[string]int // by team, what is not 0
}

func newBudget(n int) *budget { return &budget{size: n, left: n, used: map[string]int{}} }

// inUse is what all teams use.
func (b *budget) inUse() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.size - b.left
}

// take reports whether a team gets n. It gets them if it uses at most teamShare then for each one that is left
// then. The team must give them back.
func (b *budget) take(team string, n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	ok := b.used[team]+n <= teamShare*(b.left-n) && (b.most == 0 || b.used[team]+n <= b.most)
	if ok {
		b.add(team, n)
	}
	return ok
}

// atMost reports whether a team uses the most that one team can.
func (b *budget) atMost(team string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most > 0 && b.used[team] >= b.most
}

// overdraw takes n even if the team does not get them.
func (b *budget) overdraw(team string, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.add(team, n)
}

func (b *budget) giveBack(team string, n int) { b.overdraw(team, -n) }

// overdrawn reports whether a team uses more than it gets.
func (b *budget) overdrawn(team string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left < 0 || b.used[team] > teamShare*b.left
}

func (b *budget) add(team string, n int) {
	b.left -= n
	if b.used[team] += n; b.used[team] == 0 {
		delete(b.used, team)
	}
}

// held is a buffer whose bytes count against a budget.
type held struct {
	buf    bytes.Buffer
	budget *budget
	team   string
	free   int // bytes that are not counted
	taken  int
	owed   bool // its bytes may overdraw the budget
}

// reserve makes room for n bytes in total.
func (h *held) reserve(n int) bool {
	if n -= h.free + h.taken; n <= 0 {
		return true
	}
	if h.owed {
		h.budget.overdraw(h.team, n)
	} else if !h.budget.take(h.team, n) {
		return false
	}
	h.taken += n
	return true
}

// settle returns the reservation beyond n bytes.
func (h *held) settle(n int) {
	if spare := h.taken - max(0, n-h.free); spare > 0 {
		h.budget.giveBack(h.team, spare)
		h.taken -= spare
	}
}

func tooManyBytes() *apierror.Error {
	return apierror.New(apierror.Overloaded, "too many large requests and answers are in progress; try again")
}

// body reads a request's body, which must arrive within bodyWait. The caller settles the buffer.
func (c *class) body(r *http.Request) (*held, error) {
	h := &held{budget: c.bodies, team: access.From(r.Context()).Team, free: smallBody}
	if r.ContentLength > maxBody {
		return h, tooLarge()
	}
	chunk := make([]byte, 1<<10) // small, because many clients may be here and send nothing
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

// whole is a body that was read to its end.
type whole struct {
	*bytes.Reader
	raw []byte
}

func (whole) Close() error { return nil }

// bodyOf returns the body of a call.
func bodyOf(r *http.Request) []byte { return r.Body.(whole).raw }

func tooLarge() error {
	return apierror.New(apierror.BodyTooLarge, "body: at most %d bytes", maxBody)
}

// reply collects an answer while its call has a slot. It is sent after the call returned the slot,
// so a slow reader holds nothing but its answer.
type reply struct {
	held   held
	header http.Header
	code   int    // 0: no answer, because the client has gone
	full   bool   // the budget was used up
	object string // for the audit, if it is not in the path
}

func (p *reply) Header() http.Header { return p.header }

func (p *reply) WriteHeader(code int) {
	if p.code == 0 && code >= 200 { // a proxy forwards 1xx too
		p.code = code
	}
}

// reset drops an answer that is not sent.
func (p *reply) reset() {
	p.header, p.code, p.full = http.Header{}, 0, false
	p.held.buf.Reset()
}

// Write never fails: send reports a full reply.
func (p *reply) Write(b []byte) (int, error) {
	p.WriteHeader(http.StatusOK)
	if p.full = p.full || !p.held.reserve(p.held.buf.Len()+len(b)); !p.full {
		p.held.buf.Write(b)
	}
	return len(b), nil
}

// rows reserves room for a list of n entries before it is built.
func (p *reply) rows(n int) error {
	const rowBytes = 1 << 10
	if !p.held.reserve(n * rowBytes) {
		return tooManyBytes()
	}
	return nil
}

// send sends the answer, which the client must read within sendWait.
func (p *reply) send(w http.ResponseWriter, r *http.Request) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(sendWait)) // fails only without a connection, in tests
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
	_, _ = w.Write(p.held.buf.Bytes()) // the client may have gone
}

// abort ends a call without an answer, because its client has gone, and closes the connection. A
// client that closed only its sending side counts as gone although it still reads: a handler that
// simply returned would send it an empty 200.
func abort() { panic(http.ErrAbortHandler) }

// bounded sets the deadlines of each call. A replica that shuts down closes each connection after an answer, so that
// clients do not send the next call to its end.
func (a *api) bounded(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if a.Allocator.Serving().Err() != nil {
			w.Header().Set("Connection", "close")
		}
		connection := http.NewResponseController(w) // fails only without a connection, in tests
		_ = connection.SetReadDeadline(time.Now().Add(bodyWait))
		_ = connection.SetWriteDeadline(time.Now().Add(bodyWait + sendWait))
		next.ServeHTTP(w, r)
	})
}

// refuse answers a call whose body was not read to its end. It closes the connection, because the
// rest of the body would follow on it.
func refuse(w http.ResponseWriter, r *http.Request, e *apierror.Error) {
	if r.ContentLength != 0 {
		w.Header().Set("Connection", "close")
		_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(linger))
	}
	answer(w, r, e)
}

// handle returns the handler of an operation. A follower forwards the call to the leader.
func (a *api) handle(c action, o *openapi.Operation) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, err := c.class.body(r)
		defer body.settle(0)
		if err != nil {
			e := a.toError(o, r, err)
			if e == nil {
				abort()
			}
			refuse(w, r, e)
			return
		}
		// From here on the call's context bounds it until its answer is sent; a read deadline would
		// end it early.
		connection := http.NewResponseController(w)
		_ = connection.SetReadDeadline(time.Time{})
		_ = connection.SetWriteDeadline(time.Time{})
		call := r.WithContext(r.Context())
		read := whole{bytes.NewReader(body.buf.Bytes()), body.buf.Bytes()}
		call.Body, call.ContentLength, call.TransferEncoding = read, int64(len(read.raw)), nil
		// The answer of a claim is owed, because its sandboxes live on: an error would lose their IDs.
		p := &reply{
			held:   held{budget: a.answers, team: body.team, free: smallAnswer, owed: c.class == a.claims},
			header: http.Header{},
		}
		defer p.held.settle(0)
		ctx, span := a.trace(r, o)
		a.carryOut(c, o, p, call.WithContext(ctx), body.buf.Bytes())
		endTrace(span, p)
		p.send(w, r)
	}
}

// carryOut executes a call in a slot of its class.
func (a *api) carryOut(c action, o *openapi.Operation, p *reply, r *http.Request, body []byte) {
	team := access.From(r.Context()).Team
	if !c.class.slots.take(team, 1) {
		e := apierror.New(apierror.Overloaded, "too many requests are being served; try again")
		if l := a.Allocator.Leader(); !l.Here && l.Address == "" {
			e = apierror.New(apierror.NotLeader, "this replica does not lead, no leader is known yet, and as many requests wait for one as may; try again")
		}
		answer(p, r, e)
		return
	}
	defer c.class.slots.giveBack(team, 1)
	if c.large && a.answers.overdrawn(team) { // bounds the memory of answers that clients read slowly
		answer(p, r, tooManyBytes())
		return
	}
	// Checked before forwarding, because the proxy drops malformed parts of a query.
	query, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		answer(p, r, invalid("query: %v", err))
		return
	}
	h := a.newHold(r, c.class == a.claims)
	if key := r.Header.Get(keyHeader); h.claim && strings.HasPrefix(key, fact.InternalKeys) && !h.passedOn() {
		answer(p, r, invalid("%s: must not begin with %q, which replicas use", keyHeader, fact.InternalKeys))
		return
	}
	for uncertain := false; ; {
		if err := h.next(); err != nil {
			if e := a.toError(o, r, err); e != nil {
				answer(p, r, e)
			}
			return
		}
		var e *apierror.Error
		call := r.WithContext(context.WithValue(r.Context(), waitedKey{}, h.waited()))
		call.Body = whole{bytes.NewReader(body), body}
		repeatable := c.again || r.Method == http.MethodGet
		if h.leader.Here {
			e = a.here(c, o, p, call, query, body)
			repeatable = repeatable || h.claim && r.Header.Get(keyHeader) != ""
		} else {
			h.makeKey()
			e = h.forward(p, call, c.class.wait+leaderSlack-h.waited())
			repeatable = repeatable || h.claim // under its key
		}
		ended := uncertain && e == nil && p.code >= http.StatusBadRequest && reasonOf(p.held.buf.Bytes()) == apierror.SandboxGone
		switch {
		case ended && h.key != "": // that sandbox was released, and the caller has not heard of it
			h.key, h.failed, uncertain = "", nil, false
			p.reset()
			continue
		case ended && o.ID == killOperation: // by an earlier attempt
			p.reset()
			p.WriteHeader(http.StatusNoContent)
			return
		case e == nil:
			return
		case !h.hasFailed(e, repeatable):
			answer(p, r, e)
			return
		}
		uncertain = uncertain || e.OutcomeUnknown
	}
}

// killOperation is the operation whose repetition finds the sandbox gone.
const killOperation = "killSandbox"

// here executes a call at this replica. It returns an error, and answers nothing, if this replica has not led until the
// end of the call.
func (a *api) here(c action, o *openapi.Operation, p *reply, r *http.Request, query url.Values, body []byte) *apierror.Error {
	ctx, cancel := context.WithTimeout(r.Context(), c.class.wait)
	defer cancel()
	began := time.Now()
	err := check(o, query, body)
	if err == nil {
		err = c.f(p, r.WithContext(ctx))
	}
	e := a.toError(o, r, err)
	over := e != nil && e.Reason == apierror.NotLeader
	if over && !e.OutcomeUnknown {
		return e
	}
	if e != nil {
		answer(p, r, e)
	} else if err == nil {
		p.WriteHeader(http.StatusOK) // like net/http: an empty text list writes nothing
	}
	if o.Method != http.MethodGet {
		a.audit.call(o, r, p, began)
	}
	if over {
		p.reset()
		return e
	}
	return nil
}

// check checks a request against the OpenAPI document.
func check(o *openapi.Operation, query url.Values, body []byte) error {
	if err := o.CheckQuery(query); err != nil {
		return err
	}
	body = bytes.TrimSpace(body)
	switch {
	case o.Body == nil: // RFC 9110, section 9.3: a body of GET or DELETE has no meaning
		return nil
	case !utf8.Valid(body): // the decoder would replace invalid bytes
		return invalid("body: must be UTF-8")
	case len(body) > 0:
		return o.Body.Check(body)
	case o.BodyRequired:
		return invalid("body: must be a JSON object")
	}
	return nil
}

// toError returns the answer to an error: nil for no error, and for a caller that has gone.
func (a *api) toError(o *openapi.Operation, r *http.Request, err error) *apierror.Error {
	if err == nil {
		return nil
	}
	var e *apierror.Error
	var problem *openapi.Problem
	switch {
	case errors.As(err, &e):
		return e
	case errors.As(err, &problem) && problem.Refused:
		return notImplemented("%v", problem)
	case problem != nil:
		return invalid("%v", problem)
	case errors.Is(err, context.Canceled):
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return unknownOutcome(apierror.Timeout, "the API server did not confirm in time, or the sandbox did not wake in time; an unanswered claim is released unless it had an Idempotency-Key; a release goes on, and so does a wake")
	}
	a.Log.Error("request failed", zap.String("operation", o.ID), zap.String("object", objectOf(o, r)), zap.Error(err))
	return apierror.New(apierror.Internal, "the allocator failed; see its log")
}
