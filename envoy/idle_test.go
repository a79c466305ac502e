package envoy_test

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
	"github.com/berth-sandbox/berth/e2e/harness"
	"github.com/berth-sandbox/berth/e2e/history"
	"github.com/berth-sandbox/berth/envoy"
)

// Two gateways serve each sandbox, and each has a router of its own: an Envoy of Envoy Gateway with the object, and
// Berth's own Envoy. With a real Envoy Gateway, clients reach Berth's own Envoy through another listener of it, too.
// Invariant: I4
func TestOpenWebSocketAtAnyGatewayKeepsASandbox(t *testing.T) {
	if testing.Short() {
		t.Skip("needs a cluster and Envoy: run without -short")
	}
	programs := t.TempDir()
	require.NoError(t, stack.Build(t.Context(), programs, false, "allocator", "extproc", "demo-sandbox"))
	berth := harness.NewRun(t, history.Settings{}, "").Start(harness.Options{
		Cluster: devcluster.Options{Nodes: 1, NodePath: []string{programs}},
		Stack:   stack.Options{BinDir: programs, Gateways: 2},
	})
	first, other := berth.Stack.Gateways[0], berth.Stack.Gateways[1]
	require.NoError(t, other.Envoy.Stop(t.Context(), 5*time.Second)) // its router gets another Envoy
	in := inEnvoyGateway
	if *envoyGateway != "" {
		in = inRealEnvoyGateway
	}
	g := startGatewayWith(t, config{in: in, backend: first.Addr.Port(), noRouter: true, settings: func(s *envoy.Settings) {
		s.RouterSocket, s.AdminSocket = other.RouterSocket, other.AdminSocket
	}})
	gateways := map[string]string{"the object": g.addr, "Berth's own": first.Addr.String()}
	if g.plain != "" {
		gateways["plain forwarding"] = g.plain
	}
	const warm = 4
	berth.CreatePool("idle", warm, func(p *v1alpha1.SandboxPool) {
		p.Spec.Template.Spec.Containers[0].Args = []string{"--ports=8080"} // Envoy Gateway listens on 8081 of every address
	})
	harness.Eventually(t, time.Minute, func(ctx context.Context) error {
		p, err := berth.ReadPool(ctx, "idle")
		if err == nil && p.Status.Warm < warm {
			err = fmt.Errorf("%d pods are warm", p.Status.Warm)
		}
		return err
	})
	api, err := client.New(client.Options{URL: berth.Stack.Allocators[0].API})
	require.NoError(t, err)
	hostOf := func(id string) string { return "8080-" + id + "." + berth.Stack.Domain }
	// used claims a sandbox that every gateway has sent one request.
	used := func() (id string) {
		t.Helper()
		idle, wait := int64(5), int64(60)
		s, err := api.Claim(t.Context(), openapi.NewSandbox{TemplateID: "idle", IdleTimeout: &idle, WaitTimeout: &wait})
		require.NoError(t, err)
		for _, addr := range gateways {
			a, err := harness.Do(t.Context(), berth.HTTP, http.MethodGet, "http://"+addr+"/", hostOf(s.SandboxID), "")
			require.NoError(t, err)
			require.Equal(t, http.StatusOK, a.Code, string(a.Body))
		}
		return s.SandboxID
	}
	// reaped waits until a sandbox was released for being idle, and then until no gateway serves it.
	reaped := func(id string) {
		t.Helper()
		harness.Eventually(t, 2*time.Minute, func(ctx context.Context) error {
			why, err := api.Why(ctx, id)
			if err == nil && why.Sandbox.Reason != fact.ReasonIdleTimeout {
				err = fmt.Errorf("reason %q, phase %q", why.Sandbox.Reason, why.Sandbox.Phase)
			}
			return err
		})
		for name, addr := range gateways {
			harness.Eventually(t, time.Minute, func(ctx context.Context) error {
				a, err := harness.Do(ctx, berth.HTTP, http.MethodGet, "http://"+addr+"/", hostOf(id), "")
				if err == nil && a.Code != http.StatusGone {
					err = fmt.Errorf("%s: %d %s", name, a.Code, a.Body)
				}
				return err
			})
		}
	}

	sockets := map[string]*websocket.Conn{} // by sandbox
	for _, addr := range gateways {
		id := used()
		sockets[id], _, err = websocket.Dial(t.Context(), "ws://"+addr+"/ws", &websocket.DialOptions{Host: hostOf(id)})
		require.NoError(t, err)
		defer sockets[id].CloseNow()
	}
	reaped(used()) // its last use is later
	for id, socket := range sockets {
		why, err := api.Why(t.Context(), id)
		require.NoError(t, err)
		require.Empty(t, why.Sandbox.Reason)
		require.NoError(t, socket.Write(t.Context(), websocket.MessageText, []byte(id)))
		_, echo, err := socket.Read(t.Context())
		require.NoError(t, err)
		require.Equal(t, id, string(echo))
		require.NoError(t, socket.Close(websocket.StatusNormalClosure, ""))
	}
	for id := range sockets {
		reaped(id)
	}
}
