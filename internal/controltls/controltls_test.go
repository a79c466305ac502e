package controltls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/security/advancedtls"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func authority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority(time.Now())
	require.NoError(t, err)
	return a
}

// dir writes a certificate of the authority for the name.
func dir(t *testing.T, a *Authority, name string) string {
	t.Helper()
	d := t.TempDir()
	write(t, d, a, name)
	return d
}

func write(t *testing.T, d string, a *Authority, name string) {
	t.Helper()
	f, err := a.Issue(name, time.Now())
	require.NoError(t, err)
	for file, content := range map[string][]byte{CertFile: f.Cert, KeyFile: f.Key, CAFile: f.CA} {
		// Replaced in one step, as a Secret's volume does it.
		temporary := filepath.Join(d, "."+file)
		require.NoError(t, os.WriteFile(temporary, content, 0o600))
		require.NoError(t, os.Rename(temporary, filepath.Join(d, file)))
	}
}

// serve runs a gRPC server with the credentials of a directory.
func serve(t *testing.T, d string) string { return serveAs(t, d, AllocatorName) }

func serveAs(t *testing.T, d, name string, more ...grpc.ServerOption) string {
	t.Helper()
	c, stop, err := open(d, 10*time.Millisecond, name, []string{RouterName, EgressName}, advancedtls.NewServerCreds)
	require.NoError(t, err)
	s := grpc.NewServer(append(more, grpc.Creds(c))...)
	healthv1.RegisterHealthServer(s, health.NewServer())
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	served := make(chan error, 1)
	go func() { served <- s.Serve(l) }()
	t.Cleanup(func() {
		s.Stop()
		require.NoError(t, <-served)
		stop()
	})
	return l.Addr().String()
}

// ask makes a call over a new connection.
func ask(t *testing.T, address string, c credentials.TransportCredentials) error {
	t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(c))
	require.NoError(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	_, err = healthv1.NewHealthClient(conn).Check(ctx, &healthv1.HealthCheckRequest{})
	return err
}

func router(t *testing.T, d string) credentials.TransportCredentials {
	t.Helper()
	c, stop, err := open(d, 10*time.Millisecond, RouterName, []string{AllocatorName}, advancedtls.NewClientCreds)
	require.NoError(t, err)
	t.Cleanup(stop)
	return c
}

// Invariant: P6
func TestOnlyTheTwoRolesOfOneAuthorityConnect(t *testing.T) {
	ours, others := authority(t), authority(t)
	address := serve(t, dir(t, ours, AllocatorName))
	require.NoError(t, ask(t, address, router(t, dir(t, ours, RouterName))))

	require.Error(t, ask(t, address, insecure.NewCredentials()), "without TLS")
	require.Error(t, ask(t, address, credentials.NewTLS(nil)), "without a certificate")
	require.Error(t, ask(t, address, router(t, dir(t, others, RouterName))), "a router of another authority")
	mixed := dir(t, others, RouterName) // trusts the allocator, and is not trusted by it
	f, err := ours.Files()
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(mixed, CAFile), f.CA, 0o600))
	require.Error(t, ask(t, address, router(t, mixed)), "a certificate of another authority")

	// The certificate of one role is refused for the other role.
	d := dir(t, ours, AllocatorName)
	c, stop, err := open(d, time.Hour, AllocatorName, []string{AllocatorName}, advancedtls.NewClientCreds)
	require.NoError(t, err)
	t.Cleanup(stop)
	require.Error(t, ask(t, address, c), "an allocator as a client")
	require.ErrorContains(t, ask(t, serveAs(t, dir(t, ours, RouterName), RouterName), router(t, dir(t, ours, RouterName))), "certificate", "a router as a server")
}

// otherInfo is that of a connection with other security.
type otherInfo struct{}

func (otherInfo) AuthType() string { return "other" }

// Invariant: P35
func TestRoleOfARouterIsThatOfItsCertificate(t *testing.T) {
	a := authority(t)
	roles := map[string][]string{
		RouterName: {RouterName}, EgressName: {EgressName}, "both": {RouterName, EgressName}, "*.berth.sh": nil,
	}
	for name, has := range roles {
		template := certificate(name, time.Now())
		template.DNSNames = []string{name}
		if name == "both" {
			template.DNSNames = has
		}
		f, err := a.sign(template)
		require.NoError(t, err)
		pair, err := tls.X509KeyPair(f.Cert, f.Key)
		require.NoError(t, err)
		ctx := peer.NewContext(t.Context(), &peer.Peer{
			AuthInfo: credentials.TLSInfo{State: tls.ConnectionState{PeerCertificates: []*x509.Certificate{pair.Leaf}}},
		})
		for _, role := range []string{RouterName, EgressName} {
			require.Equal(t, slices.Contains(has, role), CheckRole(ctx, role) == nil, "%s as %s", name, role)
		}
	}
	require.Error(t, CheckRole(t.Context(), RouterName))
	require.Error(t, CheckRole(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: credentials.TLSInfo{}}), RouterName))
	require.NoError(t, CheckRole(peer.NewContext(t.Context(), &peer.Peer{}), RouterName), "without TLS there are no roles")
	require.ErrorContains(t, CheckRole(peer.NewContext(t.Context(), &peer.Peer{AuthInfo: otherInfo{}}), RouterName), "secured by other")
	// The TLS layer lets both kinds in, and shows which one came.
	var is []string
	address := serveAs(t, dir(t, a, AllocatorName), AllocatorName, grpc.UnaryInterceptor(
		func(ctx context.Context, request any, _ *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
			for _, role := range []string{RouterName, EgressName} {
				if CheckRole(ctx, role) == nil {
					is = append(is, role)
				}
			}
			return handle(ctx, request)
		}))
	for _, role := range []string{EgressName, RouterName} {
		is = nil
		c, stop, err := Client(dir(t, a, role), role)
		require.NoError(t, err)
		t.Cleanup(stop)
		require.NoError(t, ask(t, address, c))
		require.Equal(t, []string{role}, is)
	}
	_, _, err := Client(dir(t, a, RouterName), EgressName)
	require.ErrorContains(t, err, EgressName)
	_, _, err = Client(dir(t, a, EgressName), RouterName)
	require.ErrorContains(t, err, RouterName)
}

func TestOlderVersionsOfTLSAreRefused(t *testing.T) {
	a := authority(t)
	f, err := a.Issue(RouterName, time.Now())
	require.NoError(t, err)
	pair, err := tls.X509KeyPair(f.Cert, f.Key)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(f.CA))
	address := serve(t, dir(t, a, AllocatorName))
	config := &tls.Config{Certificates: []tls.Certificate{pair}, RootCAs: roots, ServerName: AllocatorName}
	require.NoError(t, ask(t, address, credentials.NewTLS(config)))
	config.MaxVersion = tls.VersionTLS12
	require.ErrorContains(t, ask(t, address, credentials.NewTLS(config)), "protocol version")
}

// The same authority may serve other workloads, with certificates for both uses.
func TestCertificateForAnotherNameIsRefused(t *testing.T) {
	a := authority(t)
	template := certificate("other.berth.sh", time.Now())
	template.DNSNames = []string{"other.berth.sh"}
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}
	f, err := a.sign(template)
	require.NoError(t, err)
	d := t.TempDir()
	for file, content := range map[string][]byte{CertFile: f.Cert, KeyFile: f.Key, CAFile: f.CA} {
		require.NoError(t, os.WriteFile(filepath.Join(d, file), content, 0o600))
	}
	c, stop, err := open(d, time.Hour, "other.berth.sh", []string{AllocatorName}, advancedtls.NewClientCreds)
	require.NoError(t, err)
	t.Cleanup(stop)
	require.Error(t, ask(t, serve(t, dir(t, a, AllocatorName)), c), "another role as a router")
	require.ErrorContains(t, ask(t, serveAs(t, d, "other.berth.sh"), router(t, dir(t, a, RouterName))), "other.berth.sh", "another role as an allocator")
	_, _, err = Client(d, RouterName)
	require.ErrorContains(t, err, RouterName)
	_, _, err = Server(d)
	require.ErrorContains(t, err, AllocatorName)
}

func TestReplacedCertificateIsUsedForNewConnections(t *testing.T) {
	before, after := authority(t), authority(t)
	allocator, routers := dir(t, before, AllocatorName), dir(t, before, RouterName)
	address := serve(t, allocator)
	c := router(t, routers)
	require.NoError(t, ask(t, address, c))
	write(t, allocator, after, AllocatorName)
	require.Eventually(t, func() bool { return ask(t, address, c) != nil }, 10*time.Second, time.Millisecond, "the allocator goes on with the old certificate")
	write(t, routers, after, RouterName)
	require.Eventually(t, func() bool { return ask(t, address, c) == nil }, 10*time.Second, time.Millisecond, "the router goes on with the old certificate")

	// Files that cannot be used change nothing.
	require.NoError(t, os.WriteFile(filepath.Join(allocator, CertFile), []byte("no certificate"), 0o600))
	for range 30 { // for longer than the refresh
		require.NoError(t, ask(t, address, c))
	}
}

func TestUnusableFilesAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		spoil func(d string) error
		want  string
	}{
		"no directory":       {os.RemoveAll, CertFile},
		"no key":             {func(d string) error { return os.Remove(filepath.Join(d, KeyFile)) }, KeyFile},
		"no authority":       {func(d string) error { return os.Remove(filepath.Join(d, CAFile)) }, CAFile},
		"an empty authority": {func(d string) error { return os.WriteFile(filepath.Join(d, CAFile), nil, 0o600) }, CAFile},
		"another name's":     {func(d string) error { write(t, d, authority(t), AllocatorName); return nil }, RouterName},
		"a key of another": {func(d string) error {
			return os.Rename(filepath.Join(dir(t, authority(t), RouterName), KeyFile), filepath.Join(d, KeyFile))
		}, KeyFile},
		"not a PEM file":      {func(d string) error { return os.WriteFile(filepath.Join(d, CertFile), []byte("x"), 0o600) }, CertFile},
		"an unreadable chain": {func(d string) error { return os.WriteFile(filepath.Join(d, KeyFile), []byte("x"), 0o600) }, KeyFile},
	} {
		t.Run(name, func(t *testing.T) {
			d := dir(t, authority(t), RouterName)
			require.NoError(t, c.spoil(d))
			_, _, err := Client(d, RouterName)
			require.ErrorContains(t, err, c.want)
		})
	}
}

func TestCertificatesAreKeptForHalfTheirValidity(t *testing.T) {
	now := time.Now()
	a, err := NewAuthority(now)
	require.NoError(t, err)
	own, err := a.Files()
	require.NoError(t, err)
	again, err := ParseAuthority(own.Cert, own.Key)
	require.NoError(t, err)
	f, err := again.Issue(RouterName, now)
	require.NoError(t, err)

	require.True(t, a.Good(f, RouterName, now))
	require.True(t, a.Good(f, RouterName, now.Add(Validity/2-time.Hour)))
	require.False(t, a.Good(f, RouterName, now.Add(Validity/2+time.Hour)))
	require.True(t, a.Fresh(now.Add(Validity/2-time.Hour)))
	require.False(t, a.Fresh(now.Add(Validity/2+time.Hour)))
	require.False(t, a.Good(f, AllocatorName, now))
	require.False(t, authority(t).Good(f, RouterName, now), "of another authority")
	require.False(t, a.Good(Files{}, RouterName, now))
	_, err = ParseAuthority(f.Cert, f.Key)
	require.Error(t, err, "a router's certificate is no authority")
	_, err = a.Issue("other", now)
	require.ErrorContains(t, err, "other")
}
