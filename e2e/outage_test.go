package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/internal/wait"
)

// outage is how long the control plane is away: 15 s, which is five leases, or what the
// environment says. It must be shorter than max-stale.
func outage(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv(envOutage)
	if text == "" {
		return 15 * time.Second
	}
	d, err := time.ParseDuration(text)
	require.NoError(t, err, envOutage)
	return d
}

// It takes more than 20 s because the control plane is away for 15 s.
// Invariant: I8
func TestKnownSandboxesKeepTrafficThroughAnOutage(t *testing.T) {
	e := startLongAlone(t, 2, stack.Options{Allocators: 2, Gateways: 2})
	length := outage(t)
	client := e.client()
	known, released := e.beforeTheOutage(client)
	before := e.podsOf(known)
	require.Len(t, before, len(known))
	hits := make([]int, len(known))
	for i, s := range known {
		hits[i] = e.hits(client, s)
	}
	socket := e.open(known[0])

	require.NoError(t, e.cluster.APIServer().Kill())
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
	served := e.duringTheOutage(time.Now().Add(length), known, released)
	t.Logf("%d requests in %v", served, length)
	e.echoes(socket, "still there")

	require.NoError(t, e.cluster.APIServer().Start(t.Context()))
	for _, a := range e.stack.Allocators {
		require.NoError(t, a.Start(t.Context()))
	}
	_, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	e.waitWarm(2)
	require.Equal(t, before, e.podsOf(known), "no pod of a sandbox was replaced")
	var live []openapi.Sandbox
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
	// The requests of reaches, and one of hits, came on top.
	require.GreaterOrEqual(t, total, served, "a container was started again and has lost its count")
	another := e.claim()
	e.reaches(client, another)
	for _, s := range known {
		require.NotEqual(t, s.PodName, another.PodName)
	}
	e.release(known[0].SandboxID)
	e.gone(client, known[0])
}

// beforeTheOutage claims sandboxes that every router knows and one that is released, and waits
// until nothing is under way.
func (e *env) beforeTheOutage(client *http.Client) (known []openapi.Sandbox, released openapi.Sandbox) {
	e.t.Helper()
	for range 4 {
		s := e.claim()
		known = append(known, s)
		for i := range e.stack.Gateways {
			e.reaches(e.throughGateway(i), s)
		}
	}
	released = e.claim()
	e.reaches(client, released)
	e.release(released.SandboxID)
	e.eventually(func() error {
		if n := len(e.pods(nil)); n != len(known)+2 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	e.waitWarm(2)
	return known, released
}

// podsOf are the pods of sandboxes, by name. Warm pods may be replaced.
func (e *env) podsOf(known []openapi.Sandbox) map[string]types.UID {
	e.t.Helper()
	all := map[string]types.UID{}
	for _, p := range e.pods(nil) {
		if slices.ContainsFunc(known, func(s openapi.Sandbox) bool { return s.PodName == p.Name }) {
			all[p.Name] = p.UID
		}
	}
	return all
}

// duringTheOutage sends requests through each gateway until end, and returns how many sandboxes
// have answered. Those for known sandboxes reach their pods. Those for an unknown one are refused
// as not ready, because it may exist, and those for the released one as gone.
func (e *env) duringTheOutage(end time.Time, known []openapi.Sandbox, released openapi.Sandbox) int {
	e.t.Helper()
	var served atomic.Int64
	const pause = 20 * time.Millisecond // between two requests of one client
	traffic, ctx := errgroup.WithContext(e.t.Context())
	repeat := func(pause time.Duration, send func(n int) error) {
		traffic.Go(func() error {
			for n := 0; time.Now().Before(end) && ctx.Err() == nil; n++ {
				if err := send(n); err != nil {
					return err
				}
				wait.Sleep(ctx, pause)
			}
			return nil
		})
	}
	for gateway := range e.stack.Gateways {
		for _, s := range known {
			client := e.throughGateway(gateway)
			repeat(pause, func(int) error {
				a, err := do(ctx, client, http.MethodGet, "http://gateway/", e.host(8080, s.SandboxID), "")
				if err != nil {
					return err
				}
				var at identity
				if a.code != http.StatusOK || json.Unmarshal([]byte(a.body), &at) != nil || at.Pod != s.PodName {
					return fmt.Errorf("a request for the sandbox on pod %s: %d %s", s.PodName, a.code, a.body)
				}
				served.Add(1)
				return nil
			})
		}
		client := e.throughGateway(gateway)
		repeat(10*pause, func(n int) error {
			return errors.Join(
				e.answers(ctx, client, fmt.Sprintf("b%019d", n), http.StatusServiceUnavailable, "router_not_ready"),
				e.answers(ctx, client, released.SandboxID, http.StatusGone, "sandbox_gone"))
		})
	}
	require.NoError(e.t, traffic.Wait())
	return int(served.Load())
}

// throughGateway returns a client of one gateway.
func (e *env) throughGateway(i int) *http.Client { return e.clientOf(dialerOf(e.stack.Gateways[i]), 8) }

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

// ended lists the sandboxes of the pool whose objects say that they do not run any more.
func (e *env) ended() (ids []string, err error) {
	var all v1alpha1.SandboxList
	err = e.clients.Berth.Get().Namespace(e.site.namespace()).Resource("sandboxes").Do(e.t.Context()).Into(&all)
	for _, s := range all.Items {
		if s.Spec.Pool == e.pool && s.Status.Phase != v1alpha1.SandboxRunning {
			ids = append(ids, s.Name)
		}
	}
	return ids, err
}
