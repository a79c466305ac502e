package envoy

import (
	"errors"
	"fmt"
	"path/filepath"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	tlsv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	discoveryv3 "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/protobuf/types/known/anypb"
)

// tlsSecret is the name of the listener's certificate in the file of TLSSecret.
const tlsSecret = "gateway"

// tlsHandshakeTimeout bounds the TLS handshake of a connection.
const tlsHandshakeTimeout = 10 * time.Second

// tls is the listener's transport socket. The certificate is in a separate file, because
// Envoy reloads only certificates from separate files.
func (b *builder) tls() *corev3.TransportSocket {
	context := &tlsv3.DownstreamTlsContext{CommonTlsContext: &tlsv3.CommonTlsContext{
		TlsParams:     &tlsv3.TlsParameters{TlsMinimumProtocolVersion: tlsv3.TlsParameters_TLSv1_2},
		AlpnProtocols: []string{"h2", "http/1.1"},
		TlsCertificateSdsSecretConfigs: []*tlsv3.SdsSecretConfig{{
			Name: tlsSecret,
			SdsConfig: &corev3.ConfigSource{
				ResourceApiVersion: corev3.ApiVersion_V3,
				ConfigSourceSpecifier: &corev3.ConfigSource_PathConfigSource{PathConfigSource: &corev3.PathConfigSource{
					Path: b.TLS.SecretFile,
				}},
			},
		}},
	}}
	return &corev3.TransportSocket{
		Name:       "envoy.transport_sockets.tls",
		ConfigType: &corev3.TransportSocket_TypedConfig{TypedConfig: b.any(context)},
	}
}

// TLSSecret renders the file for Settings.TLS.SecretFile. It names the certificate, and the
// directory whose changes make Envoy read it again.
func TLSSecret(s Settings) ([]byte, error) {
	s, err := s.withDefaults()
	if err == nil && s.TLS == nil {
		err = errors.New("TLS: not set")
	}
	if err != nil {
		return nil, fmt.Errorf("envoy settings: %w", err)
	}
	file := func(path string) *corev3.DataSource {
		return &corev3.DataSource{Specifier: &corev3.DataSource_Filename{Filename: path}}
	}
	secret, err := anypb.New(&tlsv3.Secret{Name: tlsSecret, Type: &tlsv3.Secret_TlsCertificate{TlsCertificate: &tlsv3.TlsCertificate{
		CertificateChain: file(s.TLS.CertFile), PrivateKey: file(s.TLS.KeyFile),
		WatchedDirectory: &corev3.WatchedDirectory{Path: filepath.Dir(s.TLS.CertFile)},
	}}})
	if err != nil {
		return nil, fmt.Errorf("render TLS secret: %w", err)
	}
	return render(&discoveryv3.DiscoveryResponse{Resources: []*anypb.Any{secret}})
}
