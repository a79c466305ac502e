package controltls

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/tls/certprovider/pemfile"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/security/advancedtls"
)

// The DNS names of the roles, which certificates must have. A session of an egress router needs EgressName, one of another
// router RouterName.
const (
	AllocatorName = "allocator.berth.sh"
	RouterName    = "router.berth.sh"
	EgressName    = "egress.berth.sh"
)

// The names of the files in the directory.
const (
	CertFile = "tls.crt"
	KeyFile  = "tls.key"
	CAFile   = "ca.crt"
)

// refresh is the interval at which the files are read again.
const refresh = 30 * time.Second

// Server returns the allocator's credentials from a directory. Routers of both kinds can connect: CheckRole says which one
// has. The caller must call stop after it has stopped the server.
func Server(dir string) (c credentials.TransportCredentials, stop func(), err error) {
	return open(dir, refresh, AllocatorName, []string{RouterName, EgressName}, advancedtls.NewServerCreds)
}

// Client returns the credentials of a router from a directory: name is RouterName or EgressName. The caller must call stop
// after it has closed the connections.
func Client(dir, name string) (c credentials.TransportCredentials, stop func(), err error) {
	return open(dir, refresh, name, []string{AllocatorName}, advancedtls.NewClientCreds)
}

// CheckRole returns an error if the other end of a connection has a certificate without the name. A connection without
// TLS has no roles: it comes from a loopback address.
func CheckRole(ctx context.Context, name string) error {
	p, ok := peer.FromContext(ctx)
	if !ok {
		return errors.New("the connection has no peer")
	}
	info, ok := p.AuthInfo.(credentials.TLSInfo)
	switch {
	case p.AuthInfo == nil || p.AuthInfo.AuthType() == "insecure":
		return nil
	case !ok:
		return fmt.Errorf("the connection is secured by %s, which shows no certificate", p.AuthInfo.AuthType())
	case len(info.State.PeerCertificates) == 0:
		return errors.New("the peer has sent no certificate")
	}
	return hasName(info.State.PeerCertificates[0], name)
}

// hasName returns an error for a certificate without the name. A wildcard is none, because it would be all roles.
func hasName(certificate *x509.Certificate, name string) error {
	if slices.Contains(certificate.DNSNames, name) {
		return nil
	}
	return fmt.Errorf("the certificate is for the DNS names %q, and not for %s", certificate.DNSNames, name)
}

// open makes the credentials of the role name from a directory. The other end has one of the roles
// peers.
func open(
	dir string, refresh time.Duration, name string, peers []string,
	newCreds func(*advancedtls.Options) (credentials.TransportCredentials, error),
) (credentials.TransportCredentials, func(), error) {
	// The provider waits for usable files without end, so mistakes are reported here.
	if err := check(dir, name); err != nil {
		return nil, nil, err
	}
	provider, err := pemfile.NewProvider(files(dir, refresh))
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", dir, err)
	}
	c, err := newCreds(&advancedtls.Options{
		IdentityOptions:   advancedtls.IdentityCertificateOptions{IdentityProvider: provider},
		RootOptions:       advancedtls.RootCertificateOptions{RootProvider: provider},
		RequireClientCert: true, // clients ignore it
		VerificationType:  advancedtls.CertVerification, AdditionalPeerVerification: requireName(peers),
		MinTLSVersion: tls.VersionTLS13, MaxTLSVersion: tls.VersionTLS13,
	})
	if err != nil {
		provider.Close()
		return nil, nil, fmt.Errorf("%s: %w", dir, err)
	}
	return c, provider.Close, nil
}

// requireName refuses a peer whose certificate has none of the names. gRPC calls it after it
// has verified the chain.
func requireName(names []string) advancedtls.PostHandshakeVerificationFunc {
	return func(p *advancedtls.HandshakeVerificationInfo) (*advancedtls.PostHandshakeVerificationResults, error) {
		if p.Leaf == nil {
			return nil, errors.New("the peer has sent no certificate")
		}
		var errs []error
		for _, name := range names {
			err := hasName(p.Leaf, name)
			if err == nil {
				return &advancedtls.PostHandshakeVerificationResults{}, nil
			}
			errs = append(errs, err)
		}
		return nil, fmt.Errorf("the peer's certificate: %w", errors.Join(errs...))
	}
}

// check reads the files once and returns an error for the first that cannot be used.
func check(dir, name string) error {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, CertFile), filepath.Join(dir, KeyFile))
	if err != nil {
		return fmt.Errorf("%s and %s in %s: %w", CertFile, KeyFile, dir, err)
	}
	if err := hasName(pair.Leaf, name); err != nil {
		return fmt.Errorf("%s: the other end would refuse it: %w", filepath.Join(dir, CertFile), err)
	}
	ca := filepath.Join(dir, CAFile)
	raw, err := os.ReadFile(ca)
	if err != nil {
		return err
	}
	if !x509.NewCertPool().AppendCertsFromPEM(raw) {
		return fmt.Errorf("%s: holds no certificate in PEM form", ca)
	}
	return nil
}
