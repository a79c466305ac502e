package podnet

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const guard = time.Minute

// apiServer is the portforward subresource of one pod, without WebSockets, as of
// an API server of the past: Dial must fall back to SPDY.
type apiServer struct {
	t      *testing.T
	target string // what the pod's ports lead to
}

func startAPIServer(t *testing.T, target string) *rest.Config {
	server := httptest.NewServer(&apiServer{t: t, target: target})
	t.Cleanup(server.Close)
	return &rest.Config{Host: server.URL}
}

func (a *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch {
	case r.URL.Path != "/api/v1/namespaces/ns/pods/pod/portforward":
		http.NotFound(w, r)
		return
	case r.Method != http.MethodPost:
		http.Error(w, "no WebSockets here", http.StatusBadRequest)
		return
	}
	w.Header().Set(httpstream.HeaderProtocolVersion, "portforward.k8s.io")
	streams := make(chan httpstream.Stream, 2)
	wire := spdy.NewResponseUpgrader().UpgradeResponse(w, r, func(s httpstream.Stream, _ <-chan struct{}) error {
		streams <- s
		return nil
	})
	if wire == nil {
		return
	}
	defer wire.Close()
	failures, data := <-streams, <-streams
	a.forward(failures, data)
	<-wire.CloseChan()
}

func (a *apiServer) forward(failures, data httpstream.Stream) {
	defer failures.Close()
	defer data.Close()
	conn, err := net.Dial("tcp", a.target)
	if err != nil {
		fmt.Fprintf(failures, "port %s of the pod: %v", data.Headers().Get(corev1.PortHeader), err)
		return
	}
	defer conn.Close()
	var carried sync.WaitGroup
	carried.Go(func() { _, _ = io.Copy(conn, data); _ = conn.(*net.TCPConn).CloseWrite() })
	_, _ = io.Copy(data, conn)
	_ = data.Reset()
	carried.Wait()
}

// echo sends back what it reads, in lines.
func echo(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { defer c.Close(); _, _ = io.Copy(c, c) })
		}
	})
	t.Cleanup(func() { l.Close(); serving.Wait() })
	return l.Addr().String()
}

func TestBytesGoBothWaysAndDeadlinesHold(t *testing.T) {
	config := startAPIServer(t, echo(t))
	ctx, cancel := context.WithTimeout(t.Context(), guard)
	defer cancel()
	c, err := Dial(ctx, config, "ns", "pod", 8080)
	require.NoError(t, err)
	defer c.Close()
	cancel() // bounds the making only
	_, err = io.WriteString(c, "hello\n")
	require.NoError(t, err)
	line, err := bufio.NewReader(c).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "hello\n", line)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(time.Millisecond)))
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.Close())
	require.NoError(t, c.Close())
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
}

func TestRefusedPortFailsTheFirstRead(t *testing.T) {
	config := startAPIServer(t, "127.0.0.1:1")
	c, err := Dial(t.Context(), config, "ns", "pod", 8080)
	require.NoError(t, err)
	defer c.Close()
	_, err = c.Read(make([]byte, 1))
	require.ErrorContains(t, err, "refused")
	require.ErrorContains(t, err, "ns/pod:8080")
}

func TestDialFailsWithItsContextAndWithoutAPod(t *testing.T) {
	silent, err := net.Listen("tcp", "127.0.0.1:0") // accepts by its backlog and says nothing
	require.NoError(t, err)
	defer silent.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	_, err = Dial(ctx, &rest.Config{Host: "http://" + silent.Addr().String()}, "ns", "pod", 8080)
	require.Error(t, err)
	_, err = Dial(t.Context(), startAPIServer(t, ""), "ns", "other", 8080)
	require.ErrorContains(t, err, "ns/other")
}

func TestRequestsPassTheRelay(t *testing.T) {
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, r.RequestURI)
	}))
	defer proxy.Close()
	config := startAPIServer(t, proxy.Listener.Addr().String())
	pods := relayed(func(ctx context.Context) (net.Conn, error) { return Dial(ctx, config, "ns", "pod", 8080) })
	for range 2 {
		response, err := pods.Get("http://10.1.2.3:80/path")
		require.NoError(t, err)
		raw, err := io.ReadAll(response.Body)
		require.NoError(t, err)
		require.NoError(t, response.Body.Close())
		require.Equal(t, "http://10.1.2.3:80/path", string(raw))
	}
}

func TestOnARealCluster(t *testing.T) {
	kubeconfig, image := os.Getenv("BERTH_E2E_KUBECONFIG"), os.Getenv("BERTH_E2E_SANDBOX_IMAGE")
	if kubeconfig == "" || image == "" {
		t.Skip("needs a cluster with real nodes: set BERTH_E2E_KUBECONFIG and BERTH_E2E_SANDBOX_IMAGE")
	}
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	require.NoError(t, err)
	t.Cleanup(func() {
		if transport, err := rest.TransportFor(config); err == nil {
			utilnet.CloseIdleConnectionsFor(transport)
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 2*guard)
	defer cancel()
	pods, err := StartRelay(ctx, config, "default", image)
	require.NoError(t, err)
	require.NoError(t, passes(ctx, pods))
	_, err = Dial(ctx, config, "default", "no-such-pod", 1)
	require.ErrorContains(t, err, "not found")
}
