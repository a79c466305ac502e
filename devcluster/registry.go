package devcluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// Each named cluster lives in a background process, its owner. The owner answers HTTP
// requests on a socket in the abstract namespace, whose name follows from the cluster's
// directory in the cache, dev/<name>. The kernel lets one process at a time have the socket,
// and frees it when that process dies. Any process of this machine can reach the socket, as
// it can reach the cluster's etcd.

var clusterName = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$`)

const (
	// stateLimit bounds the wait for the state of a cluster.
	stateLimit = 10 * time.Second
	stopPoll   = 50 * time.Millisecond
)

// State describes a named cluster. The registry sets Name, PID, Started and Ready.
type State struct {
	Name    string    `json:"name"`
	PID     int       `json:"pid"`
	Started time.Time `json:"started"`
	// Ready is true from Serve on.
	Ready      bool              `json:"ready"`
	Kubeconfig string            `json:"kubeconfig,omitempty"`
	URLs       map[string]string `json:"urls,omitempty"`
	// Environment has the variables with which programs find the cluster.
	Environment map[string]string `json:"environment,omitempty"`
	Parts       []Part            `json:"parts,omitempty"`
}

// Part is a process that belongs to a named cluster.
type Part struct {
	Name string `json:"name"`
	// PID is that of the process started last. Running is false if that has ended.
	PID     int  `json:"pid"`
	Running bool `json:"running"`
	// Restarts is how often the owner has started the part again.
	Restarts int `json:"restarts"`
}

// Registration is the ownership of a name. It ends with Close or with the
// process.
type Registration struct {
	dir    string
	state  atomic.Pointer[func() State]
	server http.Server
	served chan struct{} // closed when the server has ended
}

// Acquire makes this process the owner of a name. The error is ErrRunning when the name
// has one. RequestStop calls stop.
func Acquire(name string, stop func()) (*Registration, error) {
	dir, socket, err := registered(name)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("unix", socket)
	if errors.Is(err, unix.EADDRINUSE) {
		return nil, fmt.Errorf("cluster %s: %w; stop it first or choose another name", name, ErrRunning)
	}
	if err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, err)
	}
	r := &Registration{dir: dir, served: make(chan struct{})}
	if err := errors.Join(os.MkdirAll(dir, 0o700), os.RemoveAll(r.Dir())); err != nil {
		return nil, fmt.Errorf("cluster %s: %w", name, errors.Join(err, listener.Close()))
	}
	started := time.Now().Round(0)
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) {
		var s State
		if state := r.state.Load(); state != nil {
			s = (*state)()
			s.Ready = true
		}
		s.Name, s.PID, s.Started = name, os.Getpid(), started
		_ = json.NewEncoder(w).Encode(s) // fails if the client has gone
	})
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusNoContent)
		_ = http.NewResponseController(w).Flush() // before the process can end; it fails only if the caller has gone
		stop()
	})
	r.server = http.Server{Handler: mux, ReadHeaderTimeout: stateLimit}
	go func() {
		defer close(r.served)
		_ = r.server.Serve(listener) // until Close
	}()
	return r, nil
}

// Dir is the directory for the cluster's own files; it does not exist yet.
func (r *Registration) Dir() string { return filepath.Join(r.dir, "cluster") }

// Serve has Lookup return what state returns then. It may be called concurrently.
func (r *Registration) Serve(state func() State) { r.state.Store(&state) }

// Close gives the name up. Calls of RequestStop that wait for it then return.
func (r *Registration) Close() error {
	err := r.server.Close()
	<-r.served
	return err
}

// Lookup returns the state of a running cluster, or ErrNotRunning.
func Lookup(name string) (s State, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), stateLimit)
	defer cancel()
	return s, ask(ctx, name, http.MethodGet, "/", &s)
}

// ask sends a request to the owner of a name and decodes the answer, if into is not nil.
func ask(ctx context.Context, name, method, path string, into any) error {
	_, socket, err := registered(name)
	if err != nil {
		return err
	}
	request, err := http.NewRequestWithContext(ctx, method, "http://owner"+path, http.NoBody)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", socket)
		}}}
	answer, err := client.Do(request)
	if errors.Is(err, unix.ECONNREFUSED) {
		return fmt.Errorf("cluster %s: %w", name, ErrNotRunning)
	}
	if err != nil {
		return fmt.Errorf("cluster %s: %w", name, err)
	}
	defer answer.Body.Close()
	if into == nil {
		return nil
	}
	if err := json.NewDecoder(answer.Body).Decode(into); err != nil {
		return fmt.Errorf("cluster %s: read its state: %w", name, err)
	}
	return nil
}

// List returns the states of all running clusters, by name.
func List() ([]State, error) {
	cache, err := CacheDir()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(filepath.Join(cache, "dev"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list the clusters: %w", err)
	}
	var states []State
	for _, e := range entries {
		s, err := Lookup(e.Name())
		if errors.Is(err, ErrNotRunning) {
			continue
		}
		if err != nil {
			return nil, err
		}
		states = append(states, s)
	}
	return states, nil
}

// RequestStop asks the owner of a name to end and waits until the name is free.
func RequestStop(ctx context.Context, name string) error {
	if err := ask(ctx, name, http.MethodPost, "/stop", nil); err != nil {
		return err
	}
	err := wait.PollUntilContextCancel(ctx, stopPoll, true, func(context.Context) (bool, error) {
		_, err := Lookup(name)
		return errors.Is(err, ErrNotRunning), nil
	})
	if err != nil {
		dir, _, _ := registered(name)
		return fmt.Errorf("stop cluster %s: %w; its logs are in %s", name, err, dir)
	}
	return nil
}

// registered returns the directory and the socket of a name.
func registered(name string) (dir, socket string, err error) {
	if !clusterName.MatchString(name) {
		return "", "", fmt.Errorf("cluster name %q: up to 40 of a-z, 0-9 and -, not - at the ends", name)
	}
	cache, err := CacheDir()
	if err != nil {
		return "", "", err
	}
	dir = filepath.Join(cache, "dev", name)
	sum := sha256.Sum256([]byte(dir))
	return dir, "@berth-dev-" + hex.EncodeToString(sum[:16]), nil
}
