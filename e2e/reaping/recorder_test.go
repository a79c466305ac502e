package reaping

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-sandbox/berth/e2e/internal/chance"
	"github.com/berth-sandbox/berth/e2e/reaping/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// What requests are, in the path of each.
const (
	short     = "short"
	webSocket = "websocket"
	sse       = "sse"
	longPoll  = "long-poll"
	upload    = "upload"
)

// requestHeader names a request.
const requestHeader = "X-Reaping-Request"

// recorder answers for all pods, and writes down what was in progress at which.
type recorder struct {
	t   *testing.T
	log *log
	ctx context.Context // ends everything
	end context.CancelFunc
	all sync.WaitGroup // requests
}

func newRecorder(t *testing.T, l *log) *recorder {
	r := &recorder{t: t, log: l}
	r.ctx, r.end = context.WithCancel(context.WithoutCancel(t.Context()))
	return r
}

// close ends what is in progress.
func (rec *recorder) close() {
	rec.end()
	rec.all.Wait()
}

// sandboxOf is the sandbox that a host names.
func sandboxOf(host string) string {
	label, _, _ := strings.Cut(host, ".")
	return label
}

func (rec *recorder) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := bootclock.Now()
	rec.all.Add(1)
	defer rec.all.Done()
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(rec.ctx, cancel)()
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr) // always set, see net/http
	address, _, _ := net.SplitHostPort(local.String())
	id := sandboxOf(r.Host)
	e := history.Event{Kind: history.Received, Began: began, Sandbox: id, Address: address, What: strings.TrimPrefix(r.URL.Path, "/")}
	var err error
	if e.Request, err = strconv.ParseUint(r.Header.Get(requestHeader), 10, 64); err != nil {
		rec.t.Errorf("a pod received a request that is none of the test's: %s %s", r.Method, r.URL)
	}
	// ended is called before the last of an answer is sent.
	ended := func() {
		e.Ended = bootclock.Now()
		rec.log.add(e)
	}
	hold, _ := time.ParseDuration(r.URL.Query().Get("hold"))
	who := fmt.Sprintf("%s %s", address, id)
	switch e.What {
	case webSocket:
		c, err := websocket.Accept(w, r, nil)
		if err != nil {
			ended()
			return
		}
		defer func() { _ = c.CloseNow() }()
		// The request's own context says nothing once its connection was taken over.
		ctx, cancel := context.WithCancel(rec.ctx)
		defer cancel()
		_ = c.Write(ctx, websocket.MessageText, []byte(who)) // a client that has gone needs no answer
		chance.Pause(c.CloseRead(ctx), hold)
		ended()
		_ = c.Close(websocket.StatusNormalClosure, "")
	case sse:
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, who)
		_ = http.NewResponseController(w).Flush()
		chance.Pause(ctx, hold)
		ended()
	case upload:
		_, _ = io.Copy(io.Discard, r.Body)
		ended()
		_, _ = io.WriteString(w, who)
	default:
		chance.Pause(ctx, hold)
		ended()
		_, _ = io.WriteString(w, who)
	}
}

// log is what was written down. Its methods may be called concurrently.
type log struct {
	mu     sync.Mutex
	events []history.Event
}

func (l *log) add(e history.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// all is what was written down so far.
func (l *log) all() []history.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	return append([]history.Event(nil), l.events...)
}
