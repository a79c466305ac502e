package main

import (
	"encoding/pem"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// gatewayOf answers like a gateway for *.example.com: with a reason for sandboxes, and with a status for the API.
func gatewayOf(reason string, health int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Host == "api.example.com" && r.URL.Path == "/health":
			w.WriteHeader(health)
		case r.Host == noSandbox+".example.com" && reason != "":
			w.Header().Set(reasonHeader, reason)
			w.WriteHeader(http.StatusNotFound)
		}
	}
}

func TestCheckFindsWhatIsWrongWithAnInstallation(t *testing.T) {
	isolate(t)
	good := gatewayOf("sandbox_not_found", http.StatusOK)
	for name, c := range map[string]struct {
		gateway http.Handler
		args    []string
		says    string // of the error; "" if there is none
	}{
		"all is well":              {good, nil, ""},
		"TLS ends in front":        {good, []string{"--plain-gateway", "https://example.com"}, ""},
		"the router is not ready":  {gatewayOf("router_not_ready", http.StatusOK), nil, "what router_not_ready means"},
		"another server":           {gatewayOf("", http.StatusOK), nil, "the answer is not Berth's"},
		"no API":                   {gatewayOf("sandbox_not_found", http.StatusNotFound), nil, "the API does not answer"},
		"no API, as it should be":  {gatewayOf("sandbox_not_found", http.StatusNotFound), []string{"--no-api", "http://example.com"}, ""},
		"TLS where there is none":  {good, []string{"https://example.com"}, "http: server gave HTTP response"},
		"a gateway that redirects": {http.RedirectHandler("http://other.example", http.StatusFound), nil, "the answer is not Berth's"},
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(c.gateway)
			defer server.Close()
			args := c.args
			if args == nil {
				args = []string{"http://example.com"}
			}
			_, err := berth(t, append([]string{"check", "--gateway", host(server.URL)}, args...)...)
			if c.says == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorContains(t, err, c.says)
			require.Equal(t, exitUnreachable, cli.ExitCode(err), "%v", err)
		})
	}
}

func TestCheckSaysWhichCertificateAndWhichNames(t *testing.T) {
	isolate(t)
	server := httptest.NewUnstartedServer(gatewayOf("sandbox_not_found", http.StatusOK))
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS() // its certificate is for *.example.com
	defer server.Close()
	gateway := "--gateway=" + strings.TrimPrefix(server.URL, "https://")
	_, err := berth(t, "check", gateway, "https://example.com")
	require.ErrorContains(t, err, "a wildcard")
	file := filepath.Join(t.TempDir(), "ca.crt")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw}), 0o600))
	out, err := berth(t, "check", gateway, "--ca-file="+file, "https://example.com")
	require.NoError(t, err)
	require.Equal(t, "https://"+noSandbox+".example.com/: sandbox_not_found\nhttps://api.example.com/health: 200 OK\n", out)
	_, err = berth(t, "check", gateway, "--ca-file="+file, "https://example.org")
	require.ErrorContains(t, err, "must be for all names")

	require.Contains(t, hint(&url.Error{Err: &net.DNSError{}}), "must resolve to the gateway")
	for _, args := range [][]string{{"example.com"}, {"http://example.com/x"}, {"--gateway=x", "http://example.com"}, {"--plain-gateway", "http://example.com"}} {
		_, err := berth(t, append([]string{"check"}, args...)...)
		require.Equal(t, cli.ExitUsage, cli.ExitCode(err), "%v: %v", args, err)
	}
}
