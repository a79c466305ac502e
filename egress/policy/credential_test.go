package policy_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/egress/policy"
)

func TestCredentialIsForOneExactHost(t *testing.T) {
	for text, want := range map[string]policy.Dest{
		"api.example.com": {Host: "api.example.com", Port: 8443}, "API.Example.com.": {Host: "api.example.com", Port: 8443},
		"bücher.example":      {Host: "xn--bcher-kva.example", Port: 8443},
		"api.example.com:443": {Host: "api.example.com", Port: 443},
	} {
		dest, err := policy.CredentialDest(text, 8443)
		require.NoError(t, err, text)
		require.Equal(t, want, dest)
	}
	_, err := policy.CredentialDest("api.example.com", 80)
	require.ErrorContains(t, err, "port 80")
	for _, text := range []string{
		"*.example.com", "*", "", "localhost", "192.0.2.1", "[::1]", "example.com:", "example.com:0", "example.com:080",
		"example.com:80", "example.com:1:2", "https://example.com", "api.example.com/v1",
		"kubernetes.default.svc.cluster.local", "0x7f.1", strings.Repeat("a.", 200) + "com",
	} {
		_, err := policy.CredentialDest(text, 443)
		require.ErrorContains(t, err, "host ", text)
	}
}

func TestHeadersThatProxiesReadAreNotSet(t *testing.T) {
	for text, want := range map[string]string{
		"Authorization": "authorization", "x-api-key": "x-api-key", "X_Api.Key": "x_api.key",
	} {
		name, err := policy.CredentialHeader(text)
		require.NoError(t, err, text)
		require.Equal(t, want, name)
	}
	for _, text := range []string{
		"", ":authority", "Host", "Connection", "Content-Length", "Transfer-Encoding", "TE", "Upgrade", "Expect", "Trailer",
		"Keep-Alive", "Proxy-Authorization", "proxy-connection", "X-Berth-Peer", "x-envoy-original-dst-host",
		"X-Forwarded-For",
		"proxy_key", "Proxy.auth", "x_forwarded_user", "x-forwarded", "x.berth", "X_Envoy_A",
		"a b", "a:b", "a\r\nb", "é",
		strings.Repeat("a", 129),
	} {
		_, err := policy.CredentialHeader(text)
		require.ErrorContains(t, err, "header ", text)
	}
}

func TestValuesOfHeadersBeginNoOtherHeader(t *testing.T) {
	for _, value := range []string{"Bearer sk-1", "a\tb", "~", strings.Repeat("a", 4096)} {
		require.NoError(t, policy.CheckHeaderValue(value), value)
	}
	for _, value := range []string{
		"", "a\nb", "a\r\nHost: b", "a\x00", "\x7f", "é", " a", "a\t", "secret\n", strings.Repeat("a", 4097),
	} {
		err := policy.CheckHeaderValue(value)
		require.Error(t, err, value)
		require.NotContains(t, err.Error(), "secret")
	}
}
