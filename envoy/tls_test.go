package envoy_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/envoy"
)

// secret is a directory as the kubelet makes it of a Secret: what is seen in it
// are links into a directory that is replaced as a whole.
type secret struct {
	t   *testing.T
	dir string
}

func newSecret(t *testing.T) *secret {
	s := &secret{t, t.TempDir()}
	for _, name := range []string{"tls.crt", "tls.key"} {
		require.NoError(t, os.Symlink(filepath.Join("..data", name), filepath.Join(s.dir, name)))
	}
	return s
}

// put replaces the certificate by one with a common name.
func (s *secret) put(name string) {
	s.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(s.t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), DNSNames: []string{"*." + sandboxDomain}}
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	require.NoError(s.t, err)
	private, err := x509.MarshalPKCS8PrivateKey(key)
	require.NoError(s.t, err)
	version, err := os.MkdirTemp(s.dir, "..version-")
	require.NoError(s.t, err)
	require.NoError(s.t, os.WriteFile(filepath.Join(version, "tls.crt"), pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: raw}), 0o600))
	require.NoError(s.t, os.WriteFile(filepath.Join(version, "tls.key"), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}), 0o600))
	link := filepath.Join(s.dir, "..data_new")
	require.NoError(s.t, os.Symlink(filepath.Base(version), link))
	require.NoError(s.t, os.Rename(link, filepath.Join(s.dir, "..data")))
}

func TestTLSUsesTheNewestCertificate(t *testing.T) {
	certificate := newSecret(t)
	certificate.put("first")
	g := startGatewayWith(t, config{settings: func(s *envoy.Settings) {
		s.TLS = &envoy.TLS{CertFile: filepath.Join(certificate.dir, "tls.crt"), KeyFile: filepath.Join(certificate.dir, "tls.key"), SecretFile: filepath.Join(certificate.dir, "envoy-tls.yaml")}
		raw, err := envoy.TLSSecret(*s)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(s.TLS.SecretFile, raw, 0o600))
	}})
	g.router.set(admit(g.admitted("abc")))
	ask := func(h2 bool) (*tls.ConnectionState, http.Header) {
		t.Helper()
		var p http.Protocols
		p.SetHTTP1(!h2)
		p.SetHTTP2(h2)
		transport := &http.Transport{Protocols: &p, TLSClientConfig: &tls.Config{ServerName: host, InsecureSkipVerify: true}} //nolint:gosec // it is looked at below
		defer transport.CloseIdleConnections()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+g.addr+"/", http.NoBody)
		require.NoError(t, err)
		r.Host = host
		response, err := (&http.Client{Transport: transport}).Do(r)
		require.NoError(t, err)
		defer response.Body.Close()
		require.Equal(t, http.StatusOK, response.StatusCode)
		var seen http.Header
		require.NoError(t, json.NewDecoder(response.Body).Decode(&seen))
		return response.TLS, seen
	}
	for h2, protocol := range map[bool]string{false: "", true: "h2"} /* the first asks for none */ {
		state, seen := ask(h2)
		require.Equal(t, "first", state.PeerCertificates[0].Subject.CommonName)
		require.Equal(t, protocol, state.NegotiatedProtocol)
		require.Equal(t, "https", seen.Get("X-Forwarded-Proto"))
	}
	_, err := tls.Dial("tcp", g.addr, &tls.Config{ServerName: host, InsecureSkipVerify: true, MinVersion: tls.VersionTLS10, MaxVersion: tls.VersionTLS11}) //nolint:gosec // that is what is tested
	require.ErrorContains(t, err, "protocol version")

	certificate.put("second")
	require.Eventually(t, func() bool {
		state, _ := ask(true)
		return state.PeerCertificates[0].Subject.CommonName == "second"
	}, time.Minute, 50*time.Millisecond, "the certificate is not read again")
}
