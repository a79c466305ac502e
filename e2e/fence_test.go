package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// berth runs the program of that name against the HTTP API.
func (e *env) berth(args ...string) (string, error) {
	transport := &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return e.site.api(ctx) }}
	api := httptest.NewServer(&httputil.ReverseProxy{Transport: transport, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: "api"})
	}})
	defer api.Close()
	return berthLocal(e, append(args, "--api-url="+api.URL)...)
}

// berthLocal runs the program of that name.
func berthLocal(e *env, args ...string) (string, error) {
	argv := []string{filepath.Join(binDir, "berth")}
	if shared != nil {
		argv = []string{"go", "run", filepath.Join("..", "cmd", "berth")}
	}
	cmd := exec.CommandContext(e.t.Context(), argv[0], append(argv[1:], args...)...)
	cmd.Env = append(os.Environ(), "BERTH_API_KEY="+e.site.key())
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%w: %s", err, out)
	}
	return string(out), err
}

// waitsFor are the routers that the fence of a sandbox waits for.
func (e *env) waitsFor(s openapi.Sandbox) ([]openapi.AwaitedSession, error) {
	out := e.api(http.MethodGet, "/v1/fences", "").body
	var all openapi.Fences
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, err
	}
	for _, f := range all.Fences {
		if f.SandboxID == s.SandboxID {
			return f.WaitsFor, nil
		}
	}
	return nil, fmt.Errorf("no fence of %s in %s", s.SandboxID, out)
}

// A fence waits for a paused router until an operator declares it dead. That is wrong here, and
// the router goes on, but it serves no sandbox that was released.
//
// It takes more than 20 s because the router must be away for 10 s before it can be declared dead.
// Invariant: P9
func TestOperatorEndsTheWaitForAPausedRouter(t *testing.T) {
	e := startDamaging(t, owners, 1, stack.Options{Gateways: 2}) // max-stale is 15 minutes
	client := e.client()
	s := e.claim()
	e.reaches(client, s)
	router := e.stack.Gateways[0].Router
	require.NoError(t, router.Pause())
	e.release(s.SandboxID)

	var silent openapi.AwaitedSession
	e.eventually(func() error {
		waitsFor, err := e.waitsFor(s)
		switch {
		case err != nil:
			return err
		case len(waitsFor) != 1: // the other router has to acknowledge
			return fmt.Errorf("waits for %+v", waitsFor)
		}
		silent = waitsFor[0]
		return nil
	})
	require.NotNil(t, silent.Address)
	require.Equal(t, "127.0.0.1", *silent.Address)
	declare := func() error {
		_, err := e.berth("fence", "declare-dead", silent.SessionID, "--gone", "--reason=the test says so")
		return err
	}
	require.ErrorContains(t, declare(), "session_alive")
	pod := func() error {
		_, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Get(t.Context(), s.PodName, metav1.GetOptions{})
		return err
	}
	e.eventually(func() error { // the connection is found broken, and the router stays away
		waitsFor, err := e.waitsFor(s)
		require.NoError(t, err)
		require.NoError(t, pod(), "its fence is not complete")
		if a := waitsFor[0]; a.Connected || *a.LastHeardSeconds < 10 {
			return fmt.Errorf("waits for %+v", a)
		}
		return nil
	})
	out, err := e.berth("fence", "ls")
	require.NoError(t, err)
	require.Contains(t, out, silent.SessionID+"  not connected, heard")
	require.NoError(t, declare())
	e.eventually(func() error {
		if err := pod(); !apierrors.IsNotFound(err) {
			return fmt.Errorf("the pod of the released sandbox is there, or it is not known: %w", err)
		}
		return nil
	})
	require.Equal(t, 1.0, e.metric(e.stack.Allocators[0].Admin, "berth_allocator_sessions_declared_dead_total"))

	require.NoError(t, router.Resume())
	e.eventually(func() error {
		if router.Running() {
			return errors.New("a router that was declared dead goes on")
		}
		return nil
	})
	require.NoError(t, router.Start(t.Context()))
	another := e.claim()
	e.reaches(client, another)
	e.gone(client, s)
	out, err = e.berth("fence", "sessions")
	require.NoError(t, err)
	require.NotContains(t, out, silent.SessionID)
}

// The max-stale of the allocators was lowered, and the gateways still have the longer one, as during an
// upgrade. Their acknowledgements and the Goodbye of one that ends count, so no pod waits for the 15
// minutes after which their routes are stale.
//
// It takes more than 20 s because an allocator begins anew and three sandboxes are fenced.
func TestGatewaysOfALongerMaxStaleDelayNothing(t *testing.T) {
	var lowered atomic.Bool
	e := startDamaging(t, owners, 2, stack.Options{Gateways: 2, AllocatorLaunchArgs: func(int) []string {
		if lowered.Load() {
			return []string{"--max-stale=20s"}
		}
		return nil
	}})
	client := e.client()
	before := e.claim()
	e.reaches(client, before)

	lowered.Store(true)
	allocator := e.stack.Allocators[0]
	require.NoError(t, allocator.Stop(t.Context(), 10*time.Second))
	require.NoError(t, allocator.Start(t.Context()))
	_, err := e.stack.Leader(t.Context())
	require.NoError(t, err)
	released := func(s openapi.Sandbox) {
		t.Helper()
		e.release(s.SandboxID)
		e.eventually(func() error {
			_, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).Get(t.Context(), s.PodName, metav1.GetOptions{})
			if !apierrors.IsNotFound(err) {
				waitsFor, _ := e.waitsFor(s)
				return errors.Join(err, fmt.Errorf("its pod is not known to be gone; its fence waits for %+v", waitsFor))
			}
			return nil
		})
		e.gone(client, s)
	}
	s := e.claim()
	e.reaches(client, s)
	released(s)

	require.NoError(t, e.stack.Gateways[1].Router.Stop(t.Context(), 10*time.Second))
	released(before)
	after := e.claim()
	e.reaches(client, after)
	released(after)
	var all openapi.Fences
	require.NoError(t, json.Unmarshal([]byte(e.api(http.MethodGet, "/v1/fences", "").body), &all))
	require.Empty(t, all.Fences)
}
