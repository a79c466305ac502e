package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// outage is how long the control plane is away: a minute, or what the environment
// says. It must be shorter than max-stale.
func outage(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv(envOutage)
	if text == "" {
		return time.Minute
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err, envOutage)
	return d
}

// Invariant: I8
func TestKnownSandboxesKeepTrafficThroughAnOutage(t *testing.T) {
	e := startLasting(t, 2, stack.Options{Allocators: 2, Gateways: 2})
	length := outage(t)
	client := e.client()
	var known []rest.Sandbox
	for range 4 {
		s := e.claim()
		known = append(known, s)
		for i := range e.stack.Gateways { // each router knows it
			e.reaches(e.throughGateway(i), s)
		}
	}
	released := e.claim()
	e.reaches(client, released)
	e.release(released.SandboxID)
	e.eventually(func() error { // all that is under way is done
		if n := len(e.pods(nil)); n != len(known)+2 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	e.waitWarm(2)
	pods := func() map[string]types.UID { // those that hold a sandbox: what is idle may be replaced
		all := map[string]types.UID{}
		for _, p := range e.pods(nil) {
			if slices.ContainsFunc(known, func(s rest.Sandbox) bool { return s.PodName == p.Name }) {
				all[p.Name] = p.UID
			}
		}
		return all
	}
	before := pods()
	require.Len(t, before, len(known))
	hits := make([]int, len(known))
	for i, s := range known {
		hits[i] = e.hits(client, s)
	}
	socket, response, err := websocket.Dial(t.Context(), "ws://"+e.host(8080, known[0].SandboxID)+"/ws",
		&websocket.DialOptions{HTTPClient: client})
	require.NoError(t, err)
	defer socket.CloseNow()
	require.Equal(t, http.StatusSwitchingProtocols, response.StatusCode)

	require.NoError(t, e.cluster.KillAPIServer(t.Context()))
	for _, a := range e.stack.Allocators {
		require.NoError(t, a.Kill())
	}
	e.eventually(func() error { // the routers notice
		for i := range e.stack.Gateways {
			if a := e.get(e.throughGateway(i), e.host(8080, "bbbbbbbbbbbbbbbbbbbb"),
				"/"); a.code != http.StatusServiceUnavailable {
				return fmt.Errorf("%d %s", a.code, a.body)
			}
		}
		return nil
	})

	var served atomic.Int64
	const pause = 20 * time.Millisecond // between two requests of one client
	traffic, ctx := errgroup.WithContext(t.Context())
	end := time.Now().Add(length)
	for _, s := range known {
		for gateway := range e.stack.Gateways {
			client := e.throughGateway(gateway)
			traffic.Go(func() error {
				ticker := time.NewTicker(pause)
				defer ticker.Stop()
				for time.Now().Before(end) {
					a, err := do(ctx, client, http.MethodGet, "http://gateway/", e.host(8080, s.SandboxID), "")
					if err != nil {
						return err
					}
					var at identity
					if a.code != http.StatusOK || json.Unmarshal([]byte(a.body), &at) != nil || at.Pod != s.PodName {
						return fmt.Errorf("a request for the sandbox on pod %s: %d %s", s.PodName, a.code, a.body)
					}
					served.Add(1)
					select {
					case <-ticker.C:
					case <-ctx.Done():
						return nil
					}
				}
				return nil
			})
		}
	}
	for gateway := range e.stack.Gateways {
		client := e.throughGateway(gateway)
		traffic.Go(func() error {
			ticker := time.NewTicker(10 * pause)
			defer ticker.Stop()
			for n := 0; time.Now().Before(end); n++ {
				// What it does not know may well be there.
				err := e.answers(ctx, client, fmt.Sprintf("b%019d", n), http.StatusServiceUnavailable, "router_not_ready")
				if err := errors.Join(err,
					e.answers(ctx, client, released.SandboxID, http.StatusGone, "sandbox_gone")); err != nil {
					return err
				}
				select {
				case <-ticker.C:
				case <-ctx.Done():
					return nil
				}
			}
			return nil
		})
	}
	require.NoError(t, traffic.Wait())
	t.Logf("%d requests in %v", served.Load(), length)
	require.NoError(t, socket.Write(t.Context(), websocket.MessageText, []byte("still there")))
	_, message, err := socket.Read(t.Context())
	require.NoError(t, err)
	require.Equal(t, "still there", string(message))

	require.NoError(t, e.cluster.StartAPIServer(t.Context()))
	for _, a := range e.stack.Allocators {
		require.NoError(t, a.Start(t.Context()))
	}
	_, err = e.stack.Leader(t.Context())
	require.NoError(t, err)
	e.waitWarm(2)
	require.Equal(t, before, pods(), "no pod of a sandbox was replaced")
	var live []rest.Sandbox
	require.NoError(t, json.Unmarshal([]byte(e.api(http.MethodGet, "/sandboxes", "").body), &live))
	require.Len(t, live, len(known), "nothing was released")
	records, err := e.ended()
	require.NoError(t, err)
	require.Equal(t, []string{released.SandboxID}, records)
	for _, s := range known {
		for i := range e.stack.Gateways {
			e.reaches(e.throughGateway(i), s)
		}
	}
	total := 0
	for i, s := range known {
		total += e.hits(client, s) - hits[i]
	}
	// Those of reaches, and one of hits, came on top.
	require.GreaterOrEqual(t, total, int(served.Load()), "the pods have counted on: no container was started again")
	another := e.claim()
	e.reaches(client, another)
	for _, s := range known {
		require.NotEqual(t, s.PodName, another.PodName)
	}
	e.release(known[0].SandboxID)
	e.gone(client, known[0])
}

// throughGateway returns a client of one gateway.
func (e *env) throughGateway(i int) *http.Client {
	address := e.stack.Gateways[i].Addr.String()
	return e.clientOf(func(ctx context.Context) (net.Conn,
		error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}, 8)
}

// answers sends one request and returns an error unless it is refused like that.
func (e *env) answers(ctx context.Context, client *http.Client, id string, code int, reason string) error {
	a, err := do(ctx, client, http.MethodGet, "http://gateway/", e.host(8080, id), "")
	if err != nil {
		return err
	}
	var refusal struct{ Reason string }
	if a.code != code || json.Unmarshal([]byte(a.body), &refusal) != nil || refusal.Reason != reason {
		return fmt.Errorf("sandbox %s: %d %s, expected %d %s", id, a.code, a.body, code, reason)
	}
	return nil
}

// ended lists the sandboxes whose objects say that they do not run any more.
func (e *env) ended() (ids []string, err error) {
	var all v1alpha1.SandboxList
	err = e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxes").Do(e.t.Context()).Into(&all)
	for _, s := range all.Items {
		if s.Status.Phase != v1alpha1.SandboxRunning {
			ids = append(ids, s.Name)
		}
	}
	return ids, err
}
