package controltls

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// clientCert writes a certificate that signs itself for a name, as a client of the API knows it, and
// returns the pool that verifies it.
func clientCert(t *testing.T, dir, name string) *x509.CertPool {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(t, err)
	f, err := encode(raw, key, raw)
	require.NoError(t, err)
	for file, content := range map[string][]byte{CertFile: f.Cert, KeyFile: f.Key} {
		temporary := filepath.Join(dir, "."+file)
		require.NoError(t, os.WriteFile(temporary, content, 0o600))
		require.NoError(t, os.Rename(temporary, filepath.Join(dir, file)))
	}
	pool := x509.NewCertPool()
	require.True(t, pool.AppendCertsFromPEM(f.Cert))
	return pool
}

// serveAPI accepts connections and completes their handshakes.
func serveAPI(t *testing.T, a *API) (address string) {
	t.Helper()
	l, err := tls.Listen("tcp", "127.0.0.1:0", a.Config())
	require.NoError(t, err)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			_ = conn.(*tls.Conn).Handshake() // the client reports its failure
			_ = conn.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-ended })
	return l.Addr().String()
}

func openAPI(t *testing.T, certs, control string) *API {
	t.Helper()
	a, err := newAPI(filepath.Join(certs, CertFile), filepath.Join(certs, KeyFile), control, 10*time.Millisecond)
	require.NoError(t, err)
	t.Cleanup(a.Close)
	return a
}

// dialAs connects as a client that trusts a pool, and verifies a name.
func dialAs(t *testing.T, address, name string, pool *x509.CertPool) error {
	t.Helper()
	d := tls.Dialer{NetDialer: &net.Dialer{Timeout: 10 * time.Second}, Config: &tls.Config{RootCAs: pool, ServerName: name}}
	conn, err := d.DialContext(t.Context(), "tcp", address)
	if err == nil {
		require.Empty(t, conn.(*tls.Conn).ConnectionState().NegotiatedProtocol)
		err = conn.Close()
	}
	return err
}

func dialReplica(a *API, address string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	conn, err := a.DialReplica(ctx, "tcp", address)
	if err == nil {
		err = conn.Close()
	}
	return err
}

// Invariant: P6
func TestReplicasVerifyEachOtherByRole(t *testing.T) {
	ours := authority(t)
	certs := t.TempDir()
	pool := clientCert(t, certs, "api.example.com")
	leader, follower := openAPI(t, certs, dir(t, ours, AllocatorName)), openAPI(t, certs, dir(t, ours, AllocatorName))
	address := serveAPI(t, leader)
	require.NoError(t, dialAs(t, address, "api.example.com", pool))
	require.NoError(t, dialReplica(follower, address), "the certificate for clients has no address")

	require.Error(t, dialAs(t, address, "other.example.com", pool))
	require.Error(t, dialReplica(openAPI(t, certs, dir(t, authority(t), AllocatorName)), address), "a leader of another authority")
	require.Error(t, dialReplica(follower, serve(t, dir(t, authority(t), AllocatorName))))
	require.Error(t, dialReplica(follower, serveAs(t, dir(t, ours, RouterName), RouterName)), "a router is no replica")
}

func TestReplacedAPICertificateIsUsedForNewConnections(t *testing.T) {
	certs, control := t.TempDir(), dir(t, authority(t), AllocatorName)
	before := clientCert(t, certs, "api.example.com")
	a := openAPI(t, certs, control)
	address := serveAPI(t, a)
	require.NoError(t, dialAs(t, address, "api.example.com", before))
	require.NoError(t, os.WriteFile(filepath.Join(certs, CertFile), []byte("x"), 0o600))
	after := clientCert(t, certs, "api.example.com") // an unusable file in between changes nothing
	require.Eventually(t, func() bool { return dialAs(t, address, "api.example.com", after) == nil }, 10*time.Second, time.Millisecond)
	require.Error(t, dialAs(t, address, "api.example.com", before))

	write(t, control, authority(t), AllocatorName)
	require.Eventually(t, func() bool { return dialReplica(openAPI(t, certs, control), address) == nil }, 10*time.Second, 10*time.Millisecond)
}

func TestUnusableAPICertificateIsNamed(t *testing.T) {
	certs, control := t.TempDir(), dir(t, authority(t), AllocatorName)
	cert, key := filepath.Join(certs, CertFile), filepath.Join(certs, KeyFile)
	_, err := NewAPI(cert, key, control)
	require.ErrorContains(t, err, cert)
	clientCert(t, certs, "api.example.com")
	_, err = NewAPI(cert, key, t.TempDir())
	require.ErrorContains(t, err, CertFile)
}
