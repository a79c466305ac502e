package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"

	"github.com/berth-sandbox/berth/envoy"
	"github.com/berth-sandbox/berth/internal/controltls"
)

// defaultListen is the default of --listen.
const defaultListen = "0.0.0.0:8080"

type envoyConfigCommand struct {
	otherGatewayFlags
	Listen         string   `default:"0.0.0.0:8080" help:"Where clients connect, ip:port."`
	HealthListen   string   `help:"Where probes and Prometheus find /ready and /stats/prometheus, ip:port. Empty: nowhere."`
	TLSDir         string   `name:"tls-dir" help:"Directory with tls.crt and tls.key to serve with, read again when they change. Needs --output: a second file is written beside it. Empty: plain HTTP."`
	TrustedHops    uint32   `placeholder:"PROXIES" help:"How many proxies in front of Envoy set X-Forwarded-For. 0: clients connect to Envoy itself, and what they say in X-Forwarded-* is removed."`
	ProxyProtocol  bool     `help:"Expect the PROXY protocol, and take the client's address from it. Only a load balancer may be able to connect then."`
	Domain         string   `help:"Domain of the sandboxes. Needed with --api, and with --for=istio and --gateway-tls."`
	API            []string `name:"api" placeholder:"HOST:PORT" help:"Addresses of the allocators' HTTP API, or of its Service, comma-separated: it is served at api.<domain>. Empty: not at all."`
	APICA          string   `name:"api-ca" help:"Connect to --api with TLS, and verify it with the authority in this file: the control stream's ca.crt. Needs --output: another file is written beside it. Empty: plain HTTP."`
	MCP            []string `name:"mcp" placeholder:"HOST:PORT" help:"Addresses of servers that \"berth mcp --http\" runs, or of their Service, comma-separated: api.<domain>/mcp is theirs. They are called in plain HTTP. Needs --api."`
	E2BStatuses    bool     `name:"e2b-statuses" help:"Answer every client as E2B does if nothing listens on a sandbox's port. The router needs its own --e2b-statuses."`
	Paths          bool     `help:"Let the path name the sandbox. The router needs its own --paths."`
	MaxHeap        uint64   `placeholder:"BYTES" help:"Bytes of memory near which Envoy refuses requests, at least 67108864; less than the container's limit. 0: no bound."`
	TracesTo       string   `name:"traces-to" placeholder:"URL" help:"OTLP receiver (gRPC) of the spans of requests, http://host:port. What clients say of traces of their own is removed then. Empty: no traces."`
	TracePercent   float64  `default:"1" placeholder:"PERCENT" help:"Share of the requests that are traced, 0 to 100. Clients do not decide."`
	RouterSocket   string   `default:"/run/berth/router.sock" help:"The router's unix socket."`
	AdminSocket    string   `default:"/run/berth/envoy-admin.sock" help:"Envoy's own admin socket: what the router's --envoy-admin names. With --for: a socket that shows the page that the router reads, and no other."`
	MaxConnections uint32   `default:"100000" placeholder:"CONNECTIONS" help:"Bound on clients' connections and on requests in progress, at least 1."`
	MaxStreams     uint32   `default:"128" placeholder:"REQUESTS" help:"Bound on the requests in progress on one HTTP/2 connection of a client, 1 to 1024."`
	MaxHeaderKiB   uint32   `name:"max-header-kib" default:"40" placeholder:"KIB" help:"Bound on the headers of a request with its path, in KiB, 8 to 64."`
	Output         string   `short:"o" help:"File to write. Empty: standard output."`
}

// Run implements the command.
func (c *envoyConfigCommand) Run(o *output) error {
	listen, err := netip.ParseAddrPort(c.Listen)
	if err != nil {
		return fmt.Errorf("--listen %q: must be ip:port", c.Listen)
	}
	var health netip.AddrPort
	if c.HealthListen != "" {
		if health, err = netip.ParseAddrPort(c.HealthListen); err != nil {
			return fmt.Errorf("--health-listen %q: must be ip:port", c.HealthListen)
		}
	}
	settings := envoy.Settings{
		Listen: listen, HealthListen: health, RouterSocket: c.RouterSocket, AdminSocket: c.AdminSocket,
		TrustedHops: c.TrustedHops, ProxyProtocol: c.ProxyProtocol, Paths: c.Paths, MaxHeap: c.MaxHeap,
		MaxConnections: c.MaxConnections, MaxStreams: c.MaxStreams, MaxHeaderKiB: c.MaxHeaderKiB, E2BStatuses: c.E2BStatuses,
	}
	if c.For != nil {
		raw, err := c.print(c, settings)
		if err != nil {
			return err
		}
		return c.write(o, raw)
	}
	if !reflect.ValueOf(c.otherGatewayFlags).IsZero() {
		return errors.New("--for: needed with the flags of another gateway")
	}
	if len(c.API) > 0 {
		settings.API = &envoy.API{Domain: c.Domain}
		if settings.API.Endpoints, err = endpoints("--api", c.API); err != nil {
			return err
		}
		if settings.API.MCP, err = endpoints("--mcp", c.MCP); err != nil {
			return err
		}
	} else if len(c.MCP) > 0 {
		return errors.New("--mcp: needs --api")
	}
	if c.TracesTo != "" {
		address, plain := strings.CutPrefix(c.TracesTo, "http://")
		to, err := envoy.ParseEndpoint(address)
		if !plain || err != nil {
			return fmt.Errorf("--traces-to %q: must be http://host:port", c.TracesTo)
		}
		settings.Traces = &envoy.Traces{To: to, Percent: c.TracePercent}
	}
	for name, value := range map[string]string{"--tls-dir": c.TLSDir, "--api-ca": c.APICA} {
		if value != "" && c.Output == "" {
			return fmt.Errorf("%s: needs --output, because another file is written beside it", name)
		}
	}
	output, err := filepath.Abs(c.Output)
	if err != nil {
		return fmt.Errorf("--output: %w", err)
	}
	if c.APICA != "" {
		if err := c.verifyAPI(&settings, output); err != nil {
			return err
		}
	}
	if c.TLSDir != "" {
		dir, err := filepath.Abs(c.TLSDir)
		if err != nil {
			return fmt.Errorf("--tls-dir: %w", err)
		}
		extension := filepath.Ext(output)
		settings.TLS = &envoy.TLS{
			CertFile: filepath.Join(dir, "tls.crt"), KeyFile: filepath.Join(dir, "tls.key"),
			SecretFile: strings.TrimSuffix(output, extension) + "-tls" + extension,
		}
		secret, err := envoy.TLSSecret(settings)
		if err != nil {
			return err
		}
		if err := writeFile(settings.TLS.SecretFile, secret); err != nil {
			return err
		}
	}
	raw, err := envoy.YAML(settings)
	if err != nil {
		return err
	}
	return c.write(o, raw)
}

func (c *envoyConfigCommand) write(o *output, raw []byte) error {
	if c.Output == "" {
		_, err := o.out.Write(raw)
		return err
	}
	return writeFile(c.Output, raw)
}

func endpoints(flag string, addresses []string) (all []envoy.Endpoint, err error) {
	for _, address := range addresses {
		endpoint, err := envoy.ParseEndpoint(address)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", flag, err)
		}
		all = append(all, endpoint)
	}
	return all, nil
}

// verifyAPI has Envoy verify the API by the role of an allocator.
func (c *envoyConfigCommand) verifyAPI(settings *envoy.Settings, output string) error {
	if settings.API == nil {
		return errors.New("--api-ca: needs --api")
	}
	ca, err := filepath.Abs(c.APICA)
	if err != nil {
		return fmt.Errorf("--api-ca: %w", err)
	}
	extension := filepath.Ext(output)
	settings.API.TLS = &envoy.APITLS{
		CAFile: ca, ServerName: controltls.AllocatorName, SecretFile: strings.TrimSuffix(output, extension) + "-api" + extension,
	}
	secret, err := envoy.APISecret(*settings)
	if err != nil {
		return err
	}
	return writeFile(settings.API.TLS.SecretFile, secret)
}

// writeFile puts a whole file in place or none. A container that starts again may find the file of
// its last run.
func writeFile(path string, raw []byte) error {
	temporary := path + ".new"
	err := os.WriteFile(temporary, raw, 0o644)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}
