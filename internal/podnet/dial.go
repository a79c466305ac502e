package podnet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"
)

// closeLimit bounds the wait for the connection's own goroutines to end.
const closeLimit = 5 * time.Second

// Dial connects to a port of a pod. ctx bounds the connection set-up only. The
// pod's runtime connects to the port on the pod's loopback after Dial has returned,
// so a port without a listener fails the first Read.
//
// The connection supports deadlines. Close returns when its goroutines have ended.
func Dial(ctx context.Context, config *rest.Config, namespace, pod string, port int) (net.Conn, error) {
	wire, err := upgrade(ctx, config, namespace, pod)
	if err != nil {
		return nil, fmt.Errorf("forward to port %d of pod %s/%s: %w", port, namespace, pod, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = wire.Close() }) // a call that waits for an answer then fails
	c, err := newConn(wire, addr{fmt.Sprintf("%s/%s:%d", namespace, pod, port)}, port)
	if err == nil && !stop() {
		err = errors.Join(context.Cause(ctx), c.Close())
	}
	if err != nil {
		stop()
		closeWire(wire)
		return nil, fmt.Errorf("forward to port %d of pod %s/%s: %w", port, namespace, pod, err)
	}
	return c, nil
}

// upgrade turns a request to the API server into a connection that carries streams.
// It uses a WebSocket, and SPDY if an older API server or a proxy refuses that.
func upgrade(ctx context.Context, config *rest.Config, namespace, pod string) (httpstream.Connection, error) {
	config = rest.CopyConfig(config)
	config.GroupVersion, config.APIPath = &corev1.SchemeGroupVersion, "/api"
	config.NegotiatedSerializer = scheme.Codecs.WithoutConversion()
	client, err := rest.RESTClientFor(config)
	if err != nil {
		return nil, err
	}
	url := client.Post().Resource("pods").Namespace(namespace).Name(pod).SubResource("portforward").URL()
	// The dialers take no context, but their requests can be given one.
	config.Wrap(func(next http.RoundTripper) http.RoundTripper { return inContext{ctx, next} })
	overWebSocket, err := portforward.NewSPDYOverWebsocketDialerForStreaming(url, config)
	if err != nil {
		return nil, err
	}
	transport, upgrader, err := spdy.RoundTripperFor(config)
	if err != nil {
		return nil, err
	}
	plain := spdy.NewDialerForStreaming(upgrader, &http.Client{Transport: transport}, http.MethodPost, url)
	wire, protocol, err := portforward.NewFallbackDialerForStreaming(overWebSocket, plain, func(err error) bool {
		return httpstream.IsUpgradeFailure(err) || httpstream.IsHTTPSProxyError(err)
	}).Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		return nil, err
	}
	if protocol != portforward.PortForwardProtocolV1Name {
		closeWire(wire)
		return nil, fmt.Errorf("the API server speaks %q instead of %q", protocol, portforward.PortForwardProtocolV1Name)
	}
	return wire, nil
}

type inContext struct {
	ctx  context.Context
	next http.RoundTripper
}

func (i inContext) RoundTrip(r *http.Request) (*http.Response, error) {
	return i.next.RoundTrip(r.WithContext(i.ctx))
}

// closeWire closes the connection and waits for the goroutines that serve it.
func closeWire(wire httpstream.Connection) {
	_ = wire.Close() // it may be broken already
	timer := time.NewTimer(closeLimit)
	defer timer.Stop()
	select {
	case <-wire.CloseChan():
	case <-timer.C:
	}
}

// conn is the near end of a pipe. Two goroutines copy between the far end and the
// stream. The pipe adds deadlines, which a stream does not have.
type conn struct {
	net.Conn
	wire    httpstream.Connection
	remote  addr
	carried sync.WaitGroup
	once    sync.Once

	mu   sync.Mutex
	fail error // reported by the pod's side
}

func newConn(wire httpstream.Connection, remote addr, port int) (*conn, error) {
	headers := http.Header{}
	headers.Set(corev1.PortHeader, strconv.Itoa(port))
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	failures, err := wire.CreateStream(headers)
	if err != nil {
		return nil, fmt.Errorf("open the stream for errors: %w", err)
	}
	_ = failures.Close() // this side sends nothing on it
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := wire.CreateStream(headers)
	if err != nil {
		return nil, fmt.Errorf("open the stream for data: %w", err)
	}
	near, far := net.Pipe()
	c := &conn{Conn: near, wire: wire, remote: remote}
	c.carried.Go(func() { // towards us
		_, err := io.Copy(far, data)
		said, _ := io.ReadAll(failures) // ends when the pod's side has ended
		if len(said) > 0 {
			err = errors.New(string(said))
		}
		c.mu.Lock()
		c.fail = err
		c.mu.Unlock()
		_ = far.Close()
	})
	c.carried.Go(func() { // towards the pod
		_, _ = io.Copy(data, far) // a broken stream shows when reading
		_ = data.Close()
	})
	return c, nil
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if errors.Is(err, io.EOF) {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.fail != nil {
			err = fmt.Errorf("forward to %s: %w", c.remote, c.fail)
		}
	}
	return n, err
}

func (c *conn) Close() error {
	c.once.Do(func() {
		_ = c.Conn.Close()
		closeWire(c.wire)
		c.carried.Wait()
	})
	return nil
}

func (c *conn) LocalAddr() net.Addr  { return addr{"portforward"} }
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// addr names an end of a connection that has no address of its own.
type addr struct{ name string }

func (addr) Network() string  { return "portforward" }
func (a addr) String() string { return a.name }
