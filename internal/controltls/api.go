package controltls

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"google.golang.org/grpc/credentials/tls/certprovider"
	"google.golang.org/grpc/credentials/tls/certprovider/pemfile"
)

// API is TLS for the HTTP API of an allocator. Its clients get a certificate of their own. A
// client that asks for the name AllocatorName, as replicas do, gets the certificate of the control
// stream. So replicas and gateways can verify a replica by its role, at any address and whatever the
// certificate for clients is.
type API struct {
	clients  certprovider.Provider // cert and key
	replicas certprovider.Provider // cert, key and roots of the control stream
}

// NewAPI reads the certificate for clients from two files in PEM form, and the other one from the
// directory of the control stream. The files are read again when they change. The caller must call
// Close after it has stopped the server and its connections to other replicas.
func NewAPI(certFile, keyFile, dir string) (*API, error) {
	return newAPI(certFile, keyFile, dir, refresh)
}

func newAPI(certFile, keyFile, dir string, refresh time.Duration) (*API, error) {
	if _, err := tls.LoadX509KeyPair(certFile, keyFile); err != nil {
		return nil, fmt.Errorf("%s and %s: %w", certFile, keyFile, err)
	}
	if err := check(dir, AllocatorName); err != nil {
		return nil, err
	}
	clients, err1 := pemfile.NewProvider(pemfile.Options{CertFile: certFile, KeyFile: keyFile, RefreshDuration: refresh})
	replicas, err2 := pemfile.NewProvider(files(dir, refresh))
	a := &API{clients, replicas}
	if err := errors.Join(err1, err2); err != nil {
		a.Close()
		return nil, err
	}
	return a, nil
}

// files are the options of a provider of the files in a directory.
func files(dir string, refresh time.Duration) pemfile.Options {
	return pemfile.Options{
		CertFile: filepath.Join(dir, CertFile), KeyFile: filepath.Join(dir, KeyFile), RootFile: filepath.Join(dir, CAFile),
		RefreshDuration: refresh,
	}
}

// Config is that of the listener. It offers HTTP/1.1 only: the API's bounds are for connections
// with one call at a time.
func (a *API) Config() *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			provider := a.clients
			if hello.ServerName == AllocatorName {
				provider = a.replicas
			}
			m, err := provider.KeyMaterial(hello.Context())
			if err != nil {
				return nil, err
			}
			return &m.Certs[0], nil
		},
	}
}

// DialReplica connects to the API of another replica.
func (a *API) DialReplica(ctx context.Context, network, address string) (net.Conn, error) {
	m, err := a.replicas.KeyMaterial(ctx)
	if err != nil {
		return nil, err
	}
	d := tls.Dialer{Config: &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: m.Roots, ServerName: AllocatorName}}
	return d.DialContext(ctx, network, address)
}

// Close stops reading the files.
func (a *API) Close() {
	for _, p := range []certprovider.Provider{a.clients, a.replicas} {
		if p != nil {
			p.Close()
		}
	}
}
