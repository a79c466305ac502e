package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator"
	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/allocator/pools"
	controlv1 "github.com/berth-sandbox/berth/api/control/v1"
	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// asProgram in the environment makes the test binary the program itself.
const asProgram = "BERTH_TEST_ALLOCATOR_AS_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestFinalErrorIsALogLine(t *testing.T) {
	program, err := os.Executable()
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	command := exec.CommandContext(ctx, program, "--public-url=ftp://x")
	command.Env = append(os.Environ(), asProgram+"=1")
	var stderr bytes.Buffer
	command.Stderr = &stderr
	var exit *exec.ExitError
	require.ErrorAs(t, command.Run(), &exit)
	require.Equal(t, 1, exit.ExitCode())
	var line struct{ Level, Error string }
	require.NoError(t, json.Unmarshal(stderr.Bytes(), &line), stderr.String())
	require.Equal(t, "error", line.Level)
	require.Contains(t, line.Error, `--public-url "ftp://x"`)
}

// Invariant: P11
func TestProcessEndsDespiteHangingParts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		lost := errors.New("the lease was lost")
		stopping, stop := context.WithCancelCause(t.Context())
		release := make(chan struct{})
		defer close(release)
		began := time.Now()
		ended := make(chan error, 1)
		go func() { ended <- await(stopping, time.Minute, func() error { <-release; return nil }) }()
		time.Sleep(time.Hour) // as long as nothing has failed it goes on
		require.Empty(t, ended)
		stop(lost)
		require.ErrorIs(t, <-ended, lost)
		require.Equal(t, time.Hour+time.Minute, time.Since(began))
		require.ErrorIs(t, await(stopping, time.Minute, func() error { return io.EOF }), io.EOF, "what has ended in time says why")
	})
}

// Invariant: P11
func TestReplicaThatLostTheLeaseIsUnhealthy(t *testing.T) {
	var f flags
	var held []byte
	_, err := cli.Parse(&f, "allocator", "", "BERTH_ALLOCATOR", []string{"--public-url=http://a", leases(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method == http.MethodGet && held == nil:
			http.NotFound(w, r)
			return
		case r.Method == http.MethodPut: // it is not renewed
			http.Error(w, "", http.StatusConflict)
			return
		case r.Method == http.MethodPost:
			held, _ = io.ReadAll(r.Body)
		}
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		_, _ = w.Write(held)
	})}, io.Discard, io.Discard)
	require.NoError(t, err)
	config, err := kube.Config(f.Kubeconfig)
	require.NoError(t, err)
	config.Transport = &http.Transport{DisableKeepAlives: true}
	clients, err := kube.NewClients(config, 0, 0)
	require.NoError(t, err)
	policy, err := pools.NewPolicy(pools.PolicyBaseline)
	require.NoError(t, err)
	registry := metric.NewRegistry(metric.Allocator)
	a, err := allocator.New(allocator.Options{
		Clients: clients, Namespace: "default", ControlAddress: "127.0.0.1:1", APIAddress: "127.0.0.1:2", MaxStale: time.Minute, ConnectWindow: time.Second,
		LeaseDuration: time.Second, RenewDeadline: 200 * time.Millisecond, RetryPeriod: 20 * time.Millisecond,
		Policy: policy, PublicScheme: "http", PublicHost: "a", Metrics: registry, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	require.Empty(t, registry.Missing(), "every metric of the table is registered")
	health := func() int {
		w := httptest.NewRecorder()
		(&service{allocator: a, metrics: registry}).adminHandler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/healthz", http.NoBody))
		return w.Code
	}
	require.Equal(t, 200, health())
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	require.ErrorIs(t, a.Run(ctx), allocator.ErrLeaseLost)
	require.Equal(t, 503, health())
}

// A client that only connects must not keep a leader from giving its lease back.
// Invariant: P11
func TestSilentConnectionsDoNotDelayTheEnd(t *testing.T) {
	for name, args := range map[string][]string{
		"TLS":    {"--control-tls-dir=" + tlsDir(t, authority(t), controltls.AllocatorName), "--shutdown-after=1s"},
		"no TLS": {"--shutdown-after=1s"},
	} {
		t.Run(name, func(t *testing.T) {
			at, stop, ended := runs(t, args...)
			for _, address := range []string{at.Control, at.API, at.Admin} {
				for _, says := range []string{"", "PRI * HTTP/2.0\r\n", "\x16\x03\x01\x02", "GET /sandboxes HTTP/1.1\r\n"} {
					conn, err := net.Dial("tcp", address)
					require.NoError(t, err)
					defer conn.Close()
					_, err = io.WriteString(conn, says)
					require.NoError(t, err)
				}
			}
			stop()
			select {
			case err := <-ended:
				require.NoError(t, err)
			case <-time.After(time.Minute): // the library's own limit is two
				t.Fatal("a peer that says nothing keeps the process from ending")
			}
		})
	}
}

const key = "e2b_0123456789abcdef0123456789abcdef01234567"

// addresses are where a replica listens.
type addresses struct{ API, Control, Admin, Console string }

// running runs a replica until the test ends.
func running(t *testing.T, args ...string) (listening addresses) {
	t.Helper()
	listening, stop, ended := runs(t, args...)
	t.Cleanup(func() {
		http.DefaultClient.CloseIdleConnections()
		stop()
		require.NoError(t, <-ended)
	})
	return listening
}

// runs runs a replica until stop, or until it ends by itself.
func runs(t *testing.T, args ...string) (listening addresses, stop func(), _ <-chan error) {
	t.Helper()
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	logs, stderr := io.Pipe()
	args = enough(t, args...)
	ended := make(chan error, 1)
	go func() {
		ended <- run(ctx, args, io.Discard, stderr)
		stderr.Close()
	}()
	lines := bufio.NewScanner(logs)
	var line struct{ Msg string }
	for line.Msg != "listening" {
		require.True(t, lines.Scan(), "it ended")
		require.NoError(t, json.Unmarshal(lines.Bytes(), &line))
	}
	require.NoError(t, json.Unmarshal(lines.Bytes(), &listening))
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
		}
	}()
	t.Cleanup(func() { <-drained })
	return listening, stop, ended
}

func get(t *testing.T, address, path string, header http.Header) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address+path, http.NoBody)
	require.NoError(t, err)
	r.Header = header
	response, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	require.NoError(t, err)
	return response.StatusCode, string(body)
}

func TestReplicaWithoutAPIServerIsHealthyButNotReady(t *testing.T) {
	at := running(t)
	for path, code := range map[string]int{"/healthz": 200, "/readyz": 503, "/leaderz": 503, "/metrics": 200, "/": 404, "/debug/pprof/": 200} {
		got, body := get(t, at.Admin, path, nil)
		require.Equal(t, code, got, "%s: %s", path, body)
	}
	code, body := get(t, at.API, "/health", nil)
	require.Equal(t, 503, code, "without a leader")
	require.Contains(t, body, "not_leader")
}

func TestAPIAcceptsOnlyKeysOfItsNamespace(t *testing.T) {
	key := access.NewKey()
	at := running(t, "--api-keys-namespace=keys", apiServer(t, nil, key))
	with := http.Header{"X-Api-Key": {key}}
	require.Eventually(t, func() bool {
		_, body := get(t, at.API, "/nothing", with)
		return strings.Contains(body, "not_found") // let through
	}, time.Minute, time.Millisecond)
	for _, header := range []http.Header{nil, {"X-Api-Key": {access.NewKey()}}} {
		code, body := get(t, at.API, "/sandboxes", header)
		require.Equal(t, 401, code, body)
	}
	code, _ := get(t, at.Admin, "/healthz", nil)
	require.Equal(t, 200, code, "probes have no key")
}

func TestReplicasForwardCallsOverTLS(t *testing.T) {
	ours := authority(t)
	control := tlsDir(t, ours, controltls.AllocatorName)
	clients := tlsDir(t, ours, controltls.RouterName) // stands for a certificate for clients, which has another name
	args := []string{
		"--api-tls-cert=" + filepath.Join(clients, controltls.CertFile), "--api-tls-key=" + filepath.Join(clients, controltls.KeyFile),
		"--control-tls-dir=" + control, "--api-keys-namespace=keys",
	}
	secured, err := controltls.NewAPI(filepath.Join(clients, controltls.CertFile), filepath.Join(clients, controltls.KeyFile), control)
	require.NoError(t, err)
	t.Cleanup(secured.Close)
	leader := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "the leader saw ", r.Header.Get("X-Api-Key"))
	}))
	leader.Listener = tls.NewListener(leader.Listener, secured.Config())
	leader.Start()
	t.Cleanup(leader.Close)
	at := running(t, append(args, apiServer(t, heldBy(leader.Listener.Addr().String()), key))...)

	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true, VerifyConnection: func(s tls.ConnectionState) error {
		return s.PeerCertificates[0].VerifyHostname(controltls.RouterName)
	}}}
	t.Cleanup(transport.CloseIdleConnections)
	ask := func() (code int, body string, err error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+at.API+"/sandboxes", http.NoBody)
		require.NoError(t, err)
		r.Header.Set("X-API-Key", key)
		w, err := transport.RoundTrip(r)
		if err != nil {
			return 0, "", err
		}
		defer w.Body.Close()
		read, err := io.ReadAll(w.Body)
		return w.StatusCode, string(read), err
	}
	require.Eventually(t, func() bool {
		code, body, err := ask()
		return err == nil && code == 200 && body == "the leader saw "+key
	}, time.Minute, 10*time.Millisecond)
	code, _ := get(t, at.API, "/sandboxes", http.Header{"X-Api-Key": {key}})
	require.Equal(t, 400, code, "plain HTTP")
	code, _ = get(t, at.Admin, "/healthz", nil)
	require.Equal(t, 200, code, "probes speak plain HTTP")
}

func TestReplicaIsNotReadyBeforeItHasKeys(t *testing.T) {
	at := running(t, "--api-keys-namespace=keys") // there is no API server
	code, body := get(t, at.API, "/sandboxes", http.Header{"X-Api-Key": {access.NewKey()}})
	require.Equal(t, 503, code, body)
	code, body = get(t, at.Admin, "/readyz", nil)
	require.Equal(t, 503, code)
	require.Contains(t, body, access.ErrNotLoaded.Error())
}

func TestControlServerAcceptsOnlyItsAuthoritysRouters(t *testing.T) {
	ours := authority(t)
	at := running(t, "--control-tls-dir="+tlsDir(t, ours, controltls.AllocatorName))
	open := func(c credentials.TransportCredentials) (*controlv1.AllocatorMessage, error) {
		conn, err := grpc.NewClient("passthrough:///"+at.Control, grpc.WithTransportCredentials(c))
		require.NoError(t, err)
		defer conn.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		stream, err := controlv1.NewControlClient(conn).Session(ctx)
		if err != nil {
			return nil, err
		}
		return stream.Recv()
	}
	router := func(a *controltls.Authority) credentials.TransportCredentials {
		c, stop, err := controltls.Client(tlsDir(t, a, controltls.RouterName), controltls.RouterName)
		require.NoError(t, err)
		t.Cleanup(stop)
		return c
	}
	m, err := open(router(ours))
	require.NoError(t, err)
	require.NotNil(t, m.GetNotLeader())
	for name, c := range map[string]credentials.TransportCredentials{
		"without TLS": insecure.NewCredentials(), "without a certificate": credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}), "of another authority": router(authority(t)),
	} {
		_, err := open(c)
		require.Error(t, err, name)
	}
}

// leases is an API server that has nothing but the lease.
func leases(t *testing.T, h http.HandlerFunc) (flag string) { return apiServer(t, h) }

// apiServer is an API server that has the lease, if h is not nil, and the Secrets of these keys.
func apiServer(t *testing.T, h http.HandlerFunc, keys ...string) (flag string) {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case h != nil && strings.HasPrefix(r.URL.Path, "/apis/coordination.k8s.io/v1/namespaces/default/leases"):
			h(w, r)
		case r.URL.Path == "/api/v1/namespaces/keys/secrets" && r.URL.Query().Get("watch") == "":
			secrets := corev1.SecretList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "SecretList"}, ListMeta: metav1.ListMeta{ResourceVersion: "1"}}
			for i, key := range keys {
				s, err := access.NewSecret(key, access.Caller{Key: fmt.Sprint("key-", i), Team: "team", Role: access.Admin})
				if err != nil {
					t.Error(err)
					return
				}
				secrets.Items = append(secrets.Items, *s)
			}
			w.Header().Set("Content-Type", "application/json")
			_ = json.NewEncoder(w).Encode(&secrets)
		default:
			http.NotFound(w, r)
		}
	}))
	t.Cleanup(s.Close)
	return "--kubeconfig=" + kubeconfig(t, s.URL)
}

// heldBy answers that the replica with this API holds the lease.
func heldBy(api string) http.HandlerFunc {
	holder, seconds := "10.0.0.9:9090_"+api+"_x7k2", int32(60)
	return func(w http.ResponseWriter, _ *http.Request) {
		now := metav1.NowMicro()
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(&coordinationv1.Lease{
			TypeMeta:   metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
			ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "berth-allocator", ResourceVersion: "1"},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, AcquireTime: &now, RenewTime: &now},
		})
	}
}

func TestFollowerIsReadyAndForwardsToTheLeader(t *testing.T) {
	leader := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, "the leader saw ", r.Header.Get("X-Api-Key"))
	}))
	t.Cleanup(leader.Close)
	at := running(t, apiServer(t, heldBy(leader.Listener.Addr().String()), key), "--api-keys-namespace=keys")
	require.Eventually(t, func() bool {
		code, _ := get(t, at.Admin, "/readyz", nil)
		return code == 200
	}, time.Minute, 10*time.Millisecond)
	code, _ := get(t, at.Admin, "/leaderz", nil)
	require.Equal(t, 503, code)
	code, body := get(t, at.API, "/sandboxes", http.Header{"X-Api-Key": {key}})
	require.Equal(t, 200, code)
	require.Equal(t, "the leader saw "+key, body)
	code, _ = get(t, at.API, "/sandboxes", nil)
	require.Equal(t, 401, code)
}

func TestReplicaAdvertisesItsAddressesInTheLease(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want func(addresses) string
	}{
		"advertised": {
			[]string{"--api-advertise=10.0.0.1:8081", "--control-advertise=[fd00::1]:9090"},
			func(addresses) string { return "[fd00::1]:9090_10.0.0.1:8081_" },
		},
		"those it listens on": {nil, func(at addresses) string { return at.Control + "_" + at.API + "_" }},
	} {
		t.Run(name, func(t *testing.T) {
			written := make(chan string, 1)
			at := running(t, append(c.args, leases(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodPost {
					body, _ := io.ReadAll(r.Body)
					select {
					case written <- string(body):
					default:
					}
				}
				http.NotFound(w, r) // there is no lease yet
			}))...)
			select {
			case lease := <-written:
				require.Contains(t, lease, c.want(at))
			case <-time.After(time.Minute):
				t.Fatal("it does not stand for election")
			}
		})
	}
}

func TestConsoleIsServedByEveryReplica(t *testing.T) {
	key := access.NewKey()
	at := running(t, "--console-listen=127.0.0.1:0", "--api-keys-namespace=keys", apiServer(t, nil, key))
	code, body := get(t, at.Console, "/console/sign-in", nil)
	require.Equal(t, 200, code, body)
	require.Contains(t, body, "API key")
	require.Empty(t, running(t).Console)
}
