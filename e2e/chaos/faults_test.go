package chaos

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientrest "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/berth-sandbox/berth/devcluster"
)

// faults is a proxy to the API server that fails writes while it is on: some
// before the API server has seen them, some after it has carried them out. It delays what watches show.
type faults struct {
	lag    time.Duration // of watches of pods
	on     atomic.Bool
	share  float64 // of the writes
	before atomic.Int64
	after  atomic.Int64
	passed atomic.Int64
	trap   atomic.Pointer[trap]

	mu     sync.Mutex
	random *rand.Rand
	next   http.RoundTripper
}

var errFault = errors.New("the test has failed this write")

// start serves the proxy until the test is over and returns a kubeconfig for it. Clients speak
// plain HTTP without credentials. The proxy has credentials of its own.
func (f *faults) start(t *testing.T, c *devcluster.Cluster) string {
	t.Helper()
	config := c.RestConfig()
	var err error
	f.next, err = clientrest.TransportFor(config)
	require.NoError(t, err)
	target, err := url.Parse(config.Host)
	require.NoError(t, err)
	f.random = rand.New(rand.NewPCG(rand.Uint64(), 0))
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(p *httputil.ProxyRequest) { p.SetURL(target) },
		FlushInterval: -1, // watches
		Transport:     f,
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if errors.Is(err, errFault) && f.draw() < 0.5 {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			panic(http.ErrAbortHandler) // closes the connection
		},
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	server := &http.Server{Handler: proxy, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = server.Serve(listener) // until it is closed
	}()
	t.Cleanup(func() {
		server.Close()
		<-served
		if idle, ok := f.next.(interface{ CloseIdleConnections() }); ok {
			idle.CloseIdleConnections()
		}
	})
	file := filepath.Join(t.TempDir(), "kubeconfig")
	k := clientcmdapi.NewConfig()
	k.Clusters["faults"] = &clientcmdapi.Cluster{Server: "http://" + listener.Addr().String()}
	k.Contexts["faults"] = &clientcmdapi.Context{Cluster: "faults"}
	k.CurrentContext = "faults"
	require.NoError(t, clientcmd.WriteToFile(*k, file))
	require.NoError(t, os.Chmod(file, 0o600))
	return file
}

func (f *faults) draw() float64 {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.random.Float64()
}

// RoundTrip implements http.RoundTripper.
func (f *faults) RoundTrip(r *http.Request) (*http.Response, error) {
	switch r.Method {
	case http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete:
	default:
		response, err := f.next.RoundTrip(r)
		if err == nil && f.lag > 0 && r.URL.Query().Has("watch") && strings.HasSuffix(r.URL.Path, "/pods") {
			response.Body = delay(r.Context(), response.Body, f.lag)
		}
		return response, err
	}
	if t := f.trap.Load(); t != nil && r.Method == http.MethodPut && strings.Contains(r.URL.Path, "/journalslots/") &&
		f.trap.CompareAndSwap(t, nil) {
		return t.hold(f.next, r)
	}
	switch luck := f.draw(); {
	case !f.on.Load() || luck >= f.share:
		f.passed.Add(1)
		return f.next.RoundTrip(r)
	case luck < f.share/2:
		f.before.Add(1)
		return nil, errFault
	}
	if err := carryOut(f.next, r); err != nil {
		return nil, err
	}
	f.after.Add(1)
	return nil, errFault
}

// carryOut has the API server carry a write out, also when the client goes away meanwhile.
func carryOut(by http.RoundTripper, r *http.Request) error {
	response, err := by.RoundTrip(r.WithContext(context.WithoutCancel(r.Context())))
	if err != nil {
		return err
	}
	_, _ = io.Copy(io.Discard, response.Body)
	return response.Body.Close()
}

// delayed is a body whose every part is read a while after it arrived.
type delayed struct {
	io.ReadCloser
	request context.Context
	parts   chan part
	rest    []byte
	err     error
}

type part struct {
	at   time.Time
	data []byte
	err  error
}

// delay delays a body until its request ends.
func delay(request context.Context, body io.ReadCloser, by time.Duration) io.ReadCloser {
	d := &delayed{ReadCloser: body, request: request, parts: make(chan part, 1<<16)}
	go func() {
		for {
			data := make([]byte, 32<<10)
			n, err := body.Read(data)
			select {
			case d.parts <- part{time.Now().Add(by), data[:n], err}:
			case <-request.Done():
				return
			}
			if err != nil {
				return
			}
		}
	}()
	return d
}

func (d *delayed) Read(into []byte) (int, error) {
	for len(d.rest) == 0 && d.err == nil {
		select {
		case p := <-d.parts:
			d.rest, d.err = p.data, p.err
			select {
			case <-time.After(time.Until(p.at)):
			case <-d.request.Done():
			}
		case <-d.request.Done():
		}
		if err := d.request.Err(); err != nil {
			return 0, err
		}
	}
	n := copy(into, d.rest)
	if d.rest = d.rest[n:]; n > 0 {
		return n, nil
	}
	return 0, d.err
}

// trap keeps the next write to the journal from being answered, before or after the API server has carried
// it out, until the allocator that has made it ends.
type trap struct {
	after  bool
	sprung chan struct{} // closed with a write in the trap
}

func (t *trap) hold(next http.RoundTripper, r *http.Request) (*http.Response, error) {
	if t.after {
		if err := carryOut(next, r); err != nil {
			return nil, err
		}
	} else if _, err := io.Copy(io.Discard, r.Body); err != nil { // only then the server notices that a client ends
		return nil, err
	}
	close(t.sprung)
	<-r.Context().Done()
	return nil, errFault
}

func (f *faults) String() string {
	return fmt.Sprintf("writes: %d passed, %d failed before and %d after they were carried out", f.passed.Load(),
		f.before.Load(), f.after.Load())
}

// failWrites fails a part of the writes to the API server while callers claim and release.
func (g *ground) failWrites(f *faults) {
	const callers = 20
	p := g.newPool("faults", 60, nil)
	f.on.Store(true)
	random := g.Random("faults")
	for i := range times(4, 30) {
		leader := g.leader()
		b := p.burst(fmt.Sprintf("faults-%d", i), callers)
		if i%8 == 7 { // another leader reads what this one has written
			b.after(random.IntN(callers / 2))
			g.Did(leader.Name, "kill")
			require.NoError(g, leader.Kill())
		}
		b.end()
	}
	f.on.Store(false)
	g.Log(f)
	require.Positive(g, f.before.Load())
	require.Positive(g, f.after.Load())
}
