package reaping

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
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

// recorder answers for all pods, and records which request was in progress at which pod.
type recorder struct {
	run *harness.Run
	ctx context.Context // ends everything
	end context.CancelFunc
	all sync.WaitGroup // requests
}

func newRecorder(run *harness.Run) *recorder {
	r := &recorder{run: run}
	r.ctx, r.end = context.WithCancel(context.WithoutCancel(run.Context()))
	return r
}

// close ends the requests in progress.
func (rec *recorder) close() {
	rec.end()
	rec.all.Wait()
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
	id := harness.SandboxOf(r.Host)
	e := history.Event{
		Kind: history.Received, Began: began, Sandbox: id, Address: address, What: strings.TrimPrefix(r.URL.Path, "/"),
		Request: r.Header.Get(requestHeader),
	}
	if e.Request == "" {
		rec.run.Errorf("a pod received a request that is none of the test's: %s %s", r.Method, r.URL)
	}
	// ended is called before the last of an answer is sent.
	ended := func() {
		e.Ended = bootclock.Now()
		rec.run.History.Add(e)
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
		wait.Sleep(c.CloseRead(ctx), hold)
		ended()
		_ = c.Close(websocket.StatusNormalClosure, "")
	case sse:
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, who)
		_ = http.NewResponseController(w).Flush()
		wait.Sleep(ctx, hold)
		ended()
	case upload:
		_, _ = io.Copy(io.Discard, r.Body)
		ended()
		_, _ = io.WriteString(w, who)
	default:
		wait.Sleep(ctx, hold)
		ended()
		_, _ = io.WriteString(w, who)
	}
}
