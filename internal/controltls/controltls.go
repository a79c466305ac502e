// Package controltls secures the control stream between routers and allocators
// with mutual TLS 1.3.
//
// Both ends have a directory with tls.crt, tls.key and ca.crt, the files of a
// mounted Secret of type kubernetes.io/tls. The files are read again every 30 s:
// what has changed is used from the next connection on, and connections that are
// open stay open. Files that cannot be used are logged by gRPC and change
// nothing.
//
// A certificate is believed when ca.crt's authority has signed it for the right
// use, client or server, and it carries the DNS name of the other end's role.
// The name stands for the role and not for an address, because routers follow
// the leader from address to address.
package controltls

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/tls/certprovider"
	"google.golang.org/grpc/credentials/tls/certprovider/pemfile"
	"google.golang.org/grpc/security/advancedtls"
)

// The DNS names that certificates must carry.
const (
	AllocatorName = "allocator.berth.sh"
	RouterName    = "router.berth.sh"
)

// The files of a directory.
const (
	CertFile = "tls.crt"
	KeyFile  = "tls.key"
	CAFile   = "ca.crt"
)

// refresh is how often the files are read again.
const refresh = 30 * time.Second

// Server returns the allocator's credentials from a directory. The caller calls
// stop when it has stopped the server.
func Server(dir string) (c credentials.TransportCredentials, stop func(), err error) {
	return open(dir, refresh, AllocatorName, server)
}

// Client returns a router's credentials from a directory. The caller calls stop
// when it has closed the connections.
func Client(dir string) (c credentials.TransportCredentials, stop func(), err error) {
	return open(dir, refresh, RouterName, client)
}

func open(dir string, refresh time.Duration, name string, of func(certprovider.Provider) (credentials.TransportCredentials, error)) (credentials.TransportCredentials, func(), error) {
	// The provider would wait for good files for ever; a mistake is told at once.
	if err := check(dir, name); err != nil {
		return nil, nil, err
	}
	provider, err := pemfile.NewProvider(pemfile.Options{
		CertFile: filepath.Join(dir, CertFile), KeyFile: filepath.Join(dir, KeyFile), RootFile: filepath.Join(dir, CAFile),
		RefreshDuration: refresh,
	})
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %w", dir, err)
	}
	c, err := of(provider)
	if err != nil {
		provider.Close()
		return nil, nil, fmt.Errorf("%s: %w", dir, err)
	}
	return c, provider.Close, nil
}

func server(provider certprovider.Provider) (credentials.TransportCredentials, error) {
	return advancedtls.NewServerCreds(&advancedtls.Options{
		IdentityOptions:   advancedtls.IdentityCertificateOptions{IdentityProvider: provider},
		RootOptions:       advancedtls.RootCertificateOptions{RootProvider: provider},
		RequireClientCert: true, VerificationType: advancedtls.CertVerification,
		AdditionalPeerVerification: called(RouterName),
		MinTLSVersion:              tls.VersionTLS13, MaxTLSVersion: tls.VersionTLS13,
	})
}

func client(provider certprovider.Provider) (credentials.TransportCredentials, error) {
	return advancedtls.NewClientCreds(&advancedtls.Options{
		IdentityOptions:            advancedtls.IdentityCertificateOptions{IdentityProvider: provider},
		RootOptions:                advancedtls.RootCertificateOptions{RootProvider: provider},
		VerificationType:           advancedtls.CertVerification,
		AdditionalPeerVerification: called(AllocatorName),
		MinTLSVersion:              tls.VersionTLS13, MaxTLSVersion: tls.VersionTLS13,
	})
}

// called refuses a peer whose certificate is not for the name. It runs after
// the chain has been verified.
func called(name string) advancedtls.PostHandshakeVerificationFunc {
	return func(p *advancedtls.HandshakeVerificationInfo) (*advancedtls.PostHandshakeVerificationResults, error) {
		if p.Leaf == nil {
			return nil, errors.New("the peer shows no certificate")
		}
		if err := p.Leaf.VerifyHostname(name); err != nil {
			return nil, fmt.Errorf("the peer's certificate: %w", err)
		}
		return &advancedtls.PostHandshakeVerificationResults{}, nil
	}
}

// check reads the files once, and says which of them cannot be used and why.
func check(dir, name string) error {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, CertFile), filepath.Join(dir, KeyFile))
	if err != nil {
		return fmt.Errorf("%s and %s in %s: %w", CertFile, KeyFile, dir, err)
	}
	if err := pair.Leaf.VerifyHostname(name); err != nil {
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
