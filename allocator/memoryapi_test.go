package allocator

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// memoryAPI keeps objects as an API server does, as far as a leader without pods needs
// that: resource versions, conflicts, lists. Watches are silent.
type memoryAPI struct {
	mu      sync.Mutex
	objects map[string]map[string]any // by path
	version int
	// unserved is a resource of which no object can be made, because its CRD is not there.
	unserved string
	// written, if set, gets every accepted write before it is answered.
	written func(method, path string, object map[string]any)
}

var listKinds = map[string][2]string{
	"journalslots":  {v1alpha1.GroupVersion().String(), "JournalSlotList"},
	"eventsegments": {v1alpha1.GroupVersion().String(), "EventSegmentList"},
	"eventwebhooks": {v1alpha1.GroupVersion().String(), "EventWebhookList"},
	"sandboxes":     {v1alpha1.GroupVersion().String(), "SandboxList"},
	"sandboxpools":  {v1alpha1.GroupVersion().String(), "SandboxPoolList"},
	"pods":          {"v1", "PodList"},
	"nodes":         {"v1", "NodeList"},
}

func newMemoryAPI() *memoryAPI { return &memoryAPI{objects: map[string]map[string]any{}} }

func (m *memoryAPI) answer(r *http.Request) (int, any) {
	switch query := r.URL.Query(); {
	case query.Get("sendInitialEvents") != "":
		return 400, nil // list, then watch
	case query.Get("watch") != "":
		return 200, silence
	}
	var body map[string]any
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		var err error
		if body, err = decode(r.Body); err != nil {
			return 400, nil
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	at := r.URL.Path
	there, found := m.objects[at]
	kind, lists := listKinds[path.Base(at)]
	switch {
	case r.Method == http.MethodGet && lists:
		items := []map[string]any{}
		for _, name := range slices.Sorted(maps.Keys(m.objects)) {
			if path.Dir(name) == at {
				items = append(items, m.objects[name])
			}
		}
		return 200, map[string]any{"apiVersion": kind[0], "kind": kind[1], "metadata": map[string]any{"resourceVersion": strconv.Itoa(m.version + 1)}, "items": items}
	case r.Method == http.MethodGet && found:
		return 200, there
	case r.Method == http.MethodPost && path.Base(at) != m.unserved:
		return m.write(r.Method, path.Join(at, nameIn(body)), body, 201)
	case r.Method == http.MethodPut && found && metadata(body)["resourceVersion"] != metadata(there)["resourceVersion"]:
		return 409, nil
	case r.Method == http.MethodPut && found:
		return m.write(r.Method, at, body, 200)
	}
	return 404, nil
}

func (m *memoryAPI) write(method, at string, object map[string]any, code int) (int, any) {
	if m.written != nil {
		m.written(method, at, object)
	}
	m.version++
	metadata(object)["resourceVersion"] = strconv.Itoa(m.version)
	m.objects[at] = object
	return code, object
}

func metadata(object map[string]any) map[string]any {
	found, _ := object["metadata"].(map[string]any)
	return found
}

func nameIn(object map[string]any) string { return fmt.Sprint(metadata(object)["name"]) }

// decode reads JSON, or Kubernetes' own types in any form.
func decode(body io.Reader) (object map[string]any, err error) {
	raw, err := io.ReadAll(body)
	if err != nil {
		return nil, err
	}
	if typed, _, err := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil); err == nil {
		if raw, err = json.Marshal(typed); err != nil {
			return nil, err
		}
	}
	return object, json.Unmarshal(raw, &object)
}

// holder is who holds the lease, according to an object that was written; lease: it is
// the lease.
func holder(at string, object map[string]any) (identity string, lease bool) {
	if !strings.HasSuffix(at, "/leases/berth-allocator") {
		return "", false
	}
	spec, _ := object["spec"].(map[string]any)
	identity, _ = spec["holderIdentity"].(string)
	return identity, true
}

// newReplica is a replica at a memoryAPI.
func newReplica(t testing.TB, api *memoryAPI, options ...func(*Options)) *Allocator {
	t.Helper()
	o := Options{
		// The lease counts real time, and its renewals wait for the time of a test that may stand still.
		LeaseDuration: maxLease,
		Clients:       fakeAPI(api.answer).clients(t), Namespace: "default", ControlAddress: "127.0.0.1:1", APIAddress: "127.0.0.1:2",
		MaxStale: time.Minute, ConnectWindow: time.Second, Policy: baseline(t), Metrics: prometheus.NewRegistry(), Log: zap.NewNop(), PublicScheme: "http", PublicHost: "x",
	}
	for _, set := range options {
		set(&o)
	}
	a, err := New(o)
	require.NoError(t, err)
	return a
}

// start runs a replica until it leads.
func start(t testing.TB, a *Allocator) (tm *term, stop func(), done <-chan error) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	ended := make(chan error, 1)
	go func() { ended <- a.Run(ctx) }()
	for limit := time.After(time.Minute); ; {
		if tm, err := a.leadingTerm(); err == nil {
			return tm, stop, ended
		}
		select {
		case err := <-ended:
			t.Fatalf("it does not lead: %v", err)
		case <-limit:
			t.Fatal("it does not lead")
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// put makes an object, as another client would.
func (m *memoryAPI) put(t testing.TB, at string, object any) {
	t.Helper()
	raw, err := json.Marshal(object)
	require.NoError(t, err)
	made, err := decode(bytes.NewReader(raw))
	require.NoError(t, err)
	m.mu.Lock()
	defer m.mu.Unlock()
	m.write("", at, made, 0)
}
