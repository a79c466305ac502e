package main

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/wait"
)

// identity is what every path without a meaning of its own answers with.
type identity struct {
	Pod     string      `json:"pod"`
	PodUID  string      `json:"podUID"`
	IP      string      `json:"ip"`
	Port    int         `json:"port"`
	Method  string      `json:"method"`
	Path    string      `json:"path"`
	Host    string      `json:"host"`
	Headers http.Header `json:"headers"`
	// Start names this process. Hosts are all hosts of the requests that it has answered, this one included.
	Start string   `json:"start"`
	Hosts []string `json:"hosts"`
}

// sandbox is what all listeners share.
type sandbox struct {
	f         *flags
	unready   atomic.Bool
	busyUntil atomic.Int64 // bootclock
	exits     chan int     // capacity 1; exit codes asked for, the first counts
	record    *os.File     // nil: nothing is written down
	start     string
	mu        sync.Mutex
	hosts     map[string]struct{}
}

// saw notes the host of a request, and returns all.
func (s *sandbox) saw(host string) []string {
	const most = 100
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.hosts) < most {
		s.hosts[host] = struct{}{}
	}
	return slices.Sorted(maps.Keys(s.hosts))
}

func newSandbox(f *flags) (*sandbox, error) {
	s := &sandbox{f: f, exits: make(chan int, 1), start: rand.Text(), hosts: map[string]struct{}{}}
	if f.Record == "" {
		return s, nil
	}
	var err error
	// O_APPEND: lines of several goroutines, and of several starts, do not mix.
	if s.record, err = os.OpenFile(filepath.Join(f.Record, f.PodUID+".jsonl"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return s, nil
}

func (s *sandbox) close() {
	if s.record != nil {
		_ = s.record.Close() // nothing is held back
	}
}

// received is a line of the record.
type received struct {
	// At is in nanoseconds since boot, suspended time included.
	At      int64  `json:"at"`
	Pod     string `json:"pod"`
	PodUID  string `json:"podUID"`
	Host    string `json:"host"`
	Method  string `json:"method"`
	Path    string `json:"path"`
	Request string `json:"request"` // the header X-Soak-Request
}

// note writes a request down. One that cannot be is not answered as if it had been.
func (s *sandbox) note(w http.ResponseWriter, r *http.Request) bool {
	if s.record == nil {
		return true
	}
	line, err := json.Marshal(received{
		At: int64(bootclock.Now()), Pod: s.f.Pod, PodUID: s.f.PodUID,
		Host: r.Host, Method: r.Method, Path: r.URL.Path, Request: r.Header.Get("X-Soak-Request"),
	})
	if err == nil {
		_, err = s.record.Write(append(line, '\n'))
	}
	if err != nil {
		http.Error(w, "not recorded: "+err.Error(), http.StatusInternalServerError)
	}
	return err == nil
}

// handler answers on one port. Hits are counted per port and without health
// checks, so that a test can prove that no request reached it.
func (s *sandbox) handler(port int) http.Handler {
	var hits atomic.Int64
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { status(w, true) })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) { status(w, !s.unready.Load()) })
	mux.HandleFunc("POST /ready", s.setReady)
	mux.HandleFunc("GET /busy", s.busy)
	mux.HandleFunc("POST /busy", s.setBusy)
	mux.HandleFunc("/hits", func(w http.ResponseWriter, _ *http.Request) { reply(w, map[string]int64{"hits": hits.Load()}) })
	counted := func(pattern string, h http.HandlerFunc) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			hits.Add(1)
			s.saw(r.Host)
			if s.note(w, r) {
				h(w, r)
			}
		})
	}
	counted("/ws", echo)
	counted("/sse", events)
	counted("/sleep", sleep)
	counted("/download", download)
	counted("/exit", s.exit)
	counted("/upload", upload)
	counted("/", remote(func(w http.ResponseWriter, r *http.Request) { s.identify(w, r, port) }))
	return mux
}

func (s *sandbox) identify(w http.ResponseWriter, r *http.Request, port int) {
	reply(w, identity{
		Pod: s.f.Pod, PodUID: s.f.PodUID, IP: s.f.IP, Port: port,
		Method: r.Method, Path: r.URL.RequestURI(), Host: r.Host, Headers: r.Header, Start: s.start, Hosts: s.saw(r.Host),
	})
}

func reply(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the reader is gone
}

func status(w http.ResponseWriter, ok bool) {
	if !ok {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprintln(w, ok)
}

func (s *sandbox) setReady(w http.ResponseWriter, r *http.Request) {
	value, err := strconv.ParseBool(r.URL.Query().Get("value"))
	if err != nil {
		http.Error(w, "value must be true or false", http.StatusBadRequest)
		return
	}
	s.unready.Store(!value)
	fmt.Fprintln(w, value)
}

// busy answers a busy probe: 200 while it computes, else 204.
func (s *sandbox) busy(w http.ResponseWriter, _ *http.Request) {
	if int64(bootclock.Now()) >= s.busyUntil.Load() {
		w.WriteHeader(http.StatusNoContent)
	}
}

// setBusy has it compute for so long, though nothing is sent meanwhile.
func (s *sandbox) setBusy(w http.ResponseWriter, r *http.Request) {
	d, err := time.ParseDuration(r.URL.Query().Get("for"))
	if err != nil || d < 0 {
		http.Error(w, "for must be a duration such as 100ms", http.StatusBadRequest)
		return
	}
	s.busyUntil.Store(int64(bootclock.Now() + d))
	fmt.Fprintln(w, "busy for", d)
}

// download sends zeros until the reader goes.
func download(w http.ResponseWriter, _ *http.Request) {
	zeros := make([]byte, 64<<10)
	for {
		if _, err := w.Write(zeros); err != nil {
			return
		}
	}
}

func (s *sandbox) exit(w http.ResponseWriter, r *http.Request) {
	code, err := strconv.Atoi(r.URL.Query().Get("code"))
	if err != nil || code < 0 || code > 255 {
		http.Error(w, "code must be 0 to 255", http.StatusBadRequest)
		return
	}
	fmt.Fprintln(w, "exit", code)
	select {
	case s.exits <- code:
	default:
	}
}

func sleep(w http.ResponseWriter, r *http.Request) {
	ms, err := strconv.Atoi(r.URL.Query().Get("ms"))
	if err != nil || ms < 0 {
		http.Error(w, "ms must be a number of milliseconds", http.StatusBadRequest)
		return
	}
	wait.Sleep(r.Context(), time.Duration(ms)*time.Millisecond)
	fmt.Fprintln(w, "slept", ms, "ms")
}

// events sends numbered server-sent events: count of them (0: without end), one
// per interval.
func events(w http.ResponseWriter, r *http.Request) {
	interval, count := time.Second, 0
	var err error
	if q := r.URL.Query().Get("interval"); q != "" {
		if interval, err = time.ParseDuration(q); err != nil || interval <= 0 {
			http.Error(w, "interval must be a duration such as 100ms", http.StatusBadRequest)
			return
		}
	}
	if q := r.URL.Query().Get("count"); q != "" {
		if count, err = strconv.Atoi(q); err != nil {
			http.Error(w, "count must be a number", http.StatusBadRequest)
			return
		}
	}
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	out := http.NewResponseController(w)
	for n := 1; count == 0 || n <= count; n++ {
		if _, err := fmt.Fprintf(w, "id: %d\ndata: %d\n\n", n, n); err != nil || out.Flush() != nil {
			return
		}
		if n != count && !wait.Sleep(r.Context(), interval) {
			return
		}
	}
}

// echo sends each WebSocket message back as it came, until either side closes.
func echo(w http.ResponseWriter, r *http.Request) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true}) // any Origin may talk to a demo
	if err != nil {
		return // Accept has answered
	}
	defer func() { _ = c.CloseNow() }() // it has been closed in good order by then, or cannot be
	c.SetReadLimit(16 << 20)
	for {
		kind, message, err := c.Read(r.Context())
		if err != nil {
			return
		}
		if err := c.Write(r.Context(), kind, message); err != nil {
			return
		}
	}
}

func upload(w http.ResponseWriter, r *http.Request) {
	n, err := io.Copy(io.Discard, r.Body)
	if err != nil {
		http.Error(w, fmt.Sprintf("after %d bytes: %v", n, err), http.StatusBadRequest)
		return
	}
	reply(w, map[string]int64{"bytes": n})
}
