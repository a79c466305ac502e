package controltls

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"time"
)

// Validity is the lifetime of all certificates of an Authority, including its own. An
// installation that needs shorter lifetimes uses an issuer that renews certificates.
const Validity = 10 * 365 * 24 * time.Hour

// Files are the contents of the directory, or of the Secret, in PEM form.
type Files struct{ Cert, Key, CA []byte }

// Authority signs certificates for the roles, in installations without another authority.
type Authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority returns an authority with a new key.
func NewAuthority(now time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("make key: %w", err)
	}
	template := certificate("berth control authority", now)
	template.IsCA, template.BasicConstraintsValid, template.MaxPathLenZero = true, true, true
	template.KeyUsage = x509.KeyUsageCertSign
	raw, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, fmt.Errorf("sign authority: %w", err)
	}
	cert, err := x509.ParseCertificate(raw)
	if err != nil {
		return nil, fmt.Errorf("parse authority: %w", err)
	}
	return &Authority{cert: cert, key: key}, nil
}

// ParseAuthority reads an authority from the result of Authority.Files.
func ParseAuthority(cert, key []byte) (*Authority, error) {
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	signer, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok || !pair.Leaf.IsCA {
		return nil, errors.New("not an authority made by Berth")
	}
	return &Authority{cert: pair.Leaf, key: signer}, nil
}

// Files returns the authority in the form that ParseAuthority reads.
func (a *Authority) Files() (Files, error) {
	return encode(a.cert.Raw, a.key, a.cert.Raw)
}

// Issue returns a new certificate and key for a role: AllocatorName, RouterName or EgressName.
func (a *Authority) Issue(name string, now time.Time) (Files, error) {
	template := certificate(name, now)
	template.DNSNames = []string{name}
	switch name {
	case AllocatorName:
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	case RouterName, EgressName:
		template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	default:
		return Files{}, fmt.Errorf("role %q: unknown", name)
	}
	return a.sign(template)
}

// sign makes a key and signs a certificate for it.
func (a *Authority) sign(template *x509.Certificate) (Files, error) {
	template.KeyUsage = x509.KeyUsageDigitalSignature
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Files{}, fmt.Errorf("make key: %w", err)
	}
	raw, err := x509.CreateCertificate(rand.Reader, template, a.cert, key.Public(), a.key)
	if err != nil {
		return Files{}, fmt.Errorf("sign %s: %w", template.Subject.CommonName, err)
	}
	return encode(raw, key, a.cert.Raw)
}

// Good reports whether the files have a certificate of this authority for the name, with its
// key, that remains valid for more than half of Validity.
func (a *Authority) Good(f Files, name string, now time.Time) bool {
	pair, err := tls.X509KeyPair(f.Cert, f.Key)
	if err != nil || !bytes.Equal(f.CA, pemBlock("CERTIFICATE", a.cert.Raw)) {
		return false
	}
	return pair.Leaf.CheckSignatureFrom(a.cert) == nil && hasName(pair.Leaf, name) == nil &&
		fresh(pair.Leaf, now)
}

// Fresh reports whether the authority itself remains valid for more than half of Validity.
func (a *Authority) Fresh(now time.Time) bool { return fresh(a.cert, now) }

func fresh(c *x509.Certificate, now time.Time) bool {
	return now.After(c.NotBefore) && c.NotAfter.Sub(now) > Validity/2
}

// certificate returns a template without a serial number, which crypto/x509 chooses at random.
func certificate(name string, now time.Time) *x509.Certificate {
	return &x509.Certificate{
		Subject:   pkix.Name{CommonName: name},
		NotBefore: now.Add(-time.Hour), // for peers whose clocks are slightly behind
		NotAfter:  now.Add(Validity),
	}
}

func encode(cert []byte, key *ecdsa.PrivateKey, ca []byte) (Files, error) {
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Files{}, fmt.Errorf("encode key: %w", err)
	}
	return Files{
		Cert: pemBlock("CERTIFICATE", cert), Key: pemBlock("PRIVATE KEY", raw), CA: pemBlock("CERTIFICATE", ca),
	}, nil
}

func pemBlock(kind string, raw []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: raw})
}
