package stack

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// apiTLS is how gateways connect to the API: as replicas connect to each other's.
func (o *Options) apiTLS(dir string) (*envoy.APITLS, error) {
	for _, arg := range o.AllocatorArgs {
		if control, ok := strings.CutPrefix(arg, "--control-tls-dir="); ok {
			return &envoy.APITLS{
				CAFile: filepath.Join(control, controltls.CAFile), ServerName: controltls.AllocatorName,
				SecretFile: filepath.Join(dir, "envoy-api.yaml"),
			}, nil
		}
	}
	return nil, errors.New("stack: APITLS needs --control-tls-dir in AllocatorArgs")
}

// newCertificate makes an authority, and a certificate of it for a domain and the names below it. It
// writes them to dir. The authority's key is not kept.
func newCertificate(dir, domain string) (_ *envoy.TLS, caFile string, err error) {
	year := func(name string) *x509.Certificate {
		return &x509.Certificate{
			Subject: pkix.Name{CommonName: name}, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().AddDate(1, 0, 0),
		}
	}
	authority := year("Berth development cluster")
	authority.IsCA, authority.BasicConstraintsValid, authority.KeyUsage = true, true, x509.KeyUsageCertSign
	authorityKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, "", err
	}
	ca, err := x509.CreateCertificate(rand.Reader, authority, authority, authorityKey.Public(), authorityKey)
	if err != nil {
		return nil, "", fmt.Errorf("sign authority: %w", err)
	}
	if authority, err = x509.ParseCertificate(ca); err != nil {
		return nil, "", err
	}
	leaf := year(domain)
	leaf.DNSNames = []string{domain, "*." + domain, "localhost"}
	leaf.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	leaf.KeyUsage, leaf.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	leafKey, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, "", err
	}
	cert, err := x509.CreateCertificate(rand.Reader, leaf, authority, leafKey.Public(), authorityKey)
	if err != nil {
		return nil, "", fmt.Errorf("sign certificate: %w", err)
	}
	key, err := x509.MarshalPKCS8PrivateKey(leafKey)
	if err != nil {
		return nil, "", err
	}
	caFile = filepath.Join(dir, "ca.crt")
	files := &envoy.TLS{
		CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"),
		SecretFile: filepath.Join(dir, "envoy-tls.yaml"),
	}
	write := func(file, kind string, raw []byte) error {
		return os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw}), 0o600)
	}
	return files, caFile, errors.Join(os.MkdirAll(dir, 0o700), write(caFile, "CERTIFICATE", ca),
		write(files.CertFile, "CERTIFICATE", cert), write(files.KeyFile, "PRIVATE KEY", key))
}
