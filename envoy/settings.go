package envoy

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"strconv"
	"time"
)

// Names that the router and the bootstrap share.
const (
	// MetadataNamespace is the dynamic metadata namespace of the router's answers.
	MetadataNamespace = "berth"
	// MetadataDst is the key of the destination, in the form of Destination.
	MetadataDst = "dst"
	// MetadataID is the key of the sandbox ID.
	MetadataID = "id"
	// MetadataTLS is the key that makes Envoy speak TLS to the pod. Any text does.
	MetadataTLS = "tls"
	// MetadataReply is the key that marks the router's own answers, so that they pass the
	// local reply mapping unchanged.
	MetadataReply = "reply"
	// CookieHeader has the value of each cookie of the name sandboxaccess.CookieName. LinkHeader has
	// path and query of a request whose path begins with sandboxaccess.LinkPath. KeyHeader has each
	// value of sandboxaccess.KeyHeader that contains sandboxaccess.KeyPrefix. Envoy makes them for the
	// router, and the pod does not see them. No client can send them, because they begin with x-berth.
	CookieHeader = "x-berth-cookie"
	LinkHeader   = "x-berth-link"
	KeyHeader    = "x-berth-key"
	// ReasonHeader names, in one word, why Berth answered instead of a sandbox.
	ReasonHeader = "x-berth-reason"
)

// These bound how long an admitted request may open connections.
const (
	// ConnectTimeout bounds one attempt to connect to a pod.
	ConnectTimeout = time.Second
	// Retries is how often Envoy retries to connect to the same pod.
	Retries = 1
	// retryBackOffBase and retryBackOffMax bound the pause before a retry.
	retryBackOffBase = 25 * time.Millisecond
	retryBackOffMax  = 100 * time.Millisecond
	// StallBudget is the longest tolerated pause of router and Envoy together between the
	// router's decision and Envoy's connection attempt.
	StallBudget = 2900 * time.Millisecond
)

// MessageTimeout is how long Envoy waits for the router's answer, including Envoy's own
// retries. A router that restarts must answer within that time.
const MessageTimeout = 5 * time.Second

// MaxHold bounds how long the router may hold a request for a starting sandbox. The router
// asks for the time once. Envoy grants at most MaxHold + MessageTimeout.
const MaxHold = 30 * time.Second

// ConnectWindow is how long after its admission a request may still open a connection.
const ConnectWindow = (1+Retries)*ConnectTimeout + Retries*retryBackOffMax + StallBudget

// Version is the version of Envoy that the configuration is written for and tested with.
const Version = "1.40.0"

// Settings are the differences between installations.
type Settings struct {
	// Listen is the address for clients. Port 0 lets the kernel choose. Required.
	Listen netip.AddrPort
	// HealthListen, if set, is the address of a listener that serves /ready and
	// /stats/prometheus of Envoy's admin interface, and no other page. Port 0 lets the kernel
	// choose.
	HealthListen netip.AddrPort
	// RouterSocket is the unix socket of the router. AdminSocket is Envoy's own admin socket.
	// Envoy creates it with mode 0660, and a router of the same user or group reads /clusters
	// there. Both paths are absolute and have at most 107 bytes (sockaddr_un). Required.
	RouterSocket, AdminSocket string
	// TLS, if set, is the listener's certificate. Otherwise the listener serves plain HTTP.
	TLS *TLS
	// TrustedHops is how many proxies in front of Envoy set X-Forwarded-For, 0 to 100. The
	// client's address is that many entries from the right end. With 0, clients connect to
	// Envoy directly, and every X-Forwarded-* header is removed. Otherwise these headers are
	// kept, and the proxies must remove those that a client sends.
	TrustedHops uint32
	// ProxyProtocol expects each connection to start with a PROXY protocol header, version 1
	// or 2, and takes the client's address from it. Only the load balancer may then be able
	// to connect, because every peer can name any client address.
	ProxyProtocol bool
	// API, if set, is served at api.<domain> of this listener.
	API *API
	// E2BStatuses answers every client as E2B does if no program listens on a sandbox's port. The
	// router has the same setting for its own answers.
	E2BStatuses bool
	// Traces, if set, has Envoy send spans of requests to a collector. It then removes what clients say of their
	// own traces.
	Traces *Traces
	// Paths allows the path to name the sandbox. Envoy then sends the path to the router,
	// which may change it.
	Paths bool
	// MaxHeap bounds Envoy's memory in bytes, 64 MiB or more. Close to the limit Envoy first
	// releases memory and then refuses requests. 0: no limit.
	MaxHeap uint64
	// MaxConnections bounds the connections of clients, and separately the requests in
	// progress at sandboxes (HTTP/1.1 and gRPC each) and at the router, 1 or more. Envoy
	// refuses what exceeds it. Default 100,000.
	MaxConnections uint32
	// MaxStreams bounds the requests in progress on one HTTP/2 connection of a client, 1 to 1,024. A client
	// waits with further ones, as HTTP/2 says. Default 128.
	MaxStreams uint32
	// MaxHeaderKiB bounds the headers of a request, with its path, in KiB, 8 to 64. Default 40, which
	// leaves room for 24 KiB of cookies and a URL of 8 KiB.
	MaxHeaderKiB uint32
	// Other, if set, makes a configuration of which the Envoy of another gateway gets a part: see EnvoyPatchPolicy
	// and EnvoyFilter. That gateway has what concerns listeners and the process, and Berth's own gateway has the API:
	// HealthListen, TLS, ProxyProtocol, API, MaxHeap and Traces must be empty. AdminSocket is then a socket at which the
	// router finds /clusters only. Listen is not used.
	Other *OtherGateway
}

// Traces says where spans go.
type Traces struct {
	// To receives OTLP over gRPC, without TLS.
	To Endpoint
	// Percent is the share of requests that are traced, 0 to 100. Clients do not decide.
	Percent float64
}

// API is where Envoy finds the allocators' HTTP API.
type API struct {
	// Domain of the sandboxes, in lower case. The API is served at Host.
	Domain string
	// Endpoints are the replicas, or a Service in front of them.
	Endpoints []Endpoint
	// TLS is how Envoy connects to them. nil: plain HTTP.
	TLS *APITLS
	// MCP are the servers of the Model Context Protocol that get the requests for /mcp, in plain HTTP. None: the
	// API gets them, too.
	MCP []Endpoint
	// LocalClients: every client of the listener is a program of this machine. The API then sees the address
	// that a client has connected from, and an API without keys answers it. Envoy by itself names a client on
	// loopback by the address of the machine. For development clusters; Listen must be on loopback.
	LocalClients bool
}

// APITLS verifies the API with an authority. The paths are absolute.
type APITLS struct {
	// CAFile is in PEM form. Envoy reads it again when a file is moved into its directory.
	CAFile string
	// ServerName is the DNS name that the certificate of the API must have, and that Envoy asks for.
	ServerName string
	// SecretFile is the path of the file that APISecret renders.
	SecretFile string
}

// Endpoint is a host name or IP address, and a port.
type Endpoint struct {
	Host string
	Port uint16
}

// ParseEndpoint reads host:port.
func ParseEndpoint(s string) (Endpoint, error) {
	host, port, err := net.SplitHostPort(s)
	if err != nil || host == "" {
		return Endpoint{}, fmt.Errorf("address %q: must be host:port", s)
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return Endpoint{}, fmt.Errorf("address %q: must be host:port", s)
	}
	return Endpoint{host, uint16(n)}, nil
}

// apiLabel is the host name of the API below the domain of the sandboxes. It is no sandbox ID.
const apiLabel = "api"

// Host is the name at which the API is served.
func (a *API) Host() string { return apiLabel + "." + a.Domain }

// mcpPath is where the servers in API.MCP are.
const mcpPath = "/mcp"

// apiCluster are servers that requests for the API's host go to.
type apiCluster struct {
	Name, Host string
	// Path is the only one that they serve, "" for all.
	Path      string
	Endpoints []Endpoint
	TLS       *APITLS
}

// apiClusters returns the servers for the API's host. The first one with the path of a request gets it.
func apiClusters(a *API) (all []apiCluster) {
	if a == nil {
		return nil
	}
	if len(a.MCP) > 0 {
		all = append(all, apiCluster{Name: "mcp", Host: a.Host(), Path: mcpPath, Endpoints: a.MCP})
	}
	return append(all, apiCluster{Name: "api", Host: a.Host(), Endpoints: a.Endpoints, TLS: a.TLS})
}

const (
	// apiRoute is the name of the routes to the API, that for mcpPath included.
	apiRoute = "api"
	// apiIdle is how long a call to the API may be silent. It is longer than the longest wait, which is that for a snapshot
	// (17 min), and than the pauses of an event stream.
	apiIdle = 18 * time.Minute
	// apiRequests bounds the calls to the API in progress at one Envoy.
	apiRequests = 2_000
)

// hostName matches a DNS name in lower case.
var hostName = regexp.MustCompile(`^[a-z0-9-]+(\.[a-z0-9-]+)*$`)

// TLS is the certificate of the listener. Envoy reads it again when it changes.
type TLS struct {
	// CertFile and KeyFile are in PEM form, in one directory, for example a mounted Secret of
	// type kubernetes.io/tls. Envoy reads them again when a file is moved into the directory,
	// which is how the kubelet updates a Secret.
	CertFile, KeyFile string
	// SecretFile is the path of the file that TLSSecret renders.
	SecretFile string
}

// withDefaults returns the settings with defaults, or all errors in them.
func (s Settings) withDefaults() (Settings, error) {
	s.MaxConnections, s.MaxStreams = cmp.Or(s.MaxConnections, 100_000), cmp.Or(s.MaxStreams, 128)
	s.MaxHeaderKiB = cmp.Or(s.MaxHeaderKiB, 40)
	var errs []error
	if !s.Listen.IsValid() {
		errs = append(errs, errors.New("listen address: required, as ip:port"))
	}
	if s.HealthListen.IsValid() && s.HealthListen.Port() != 0 && s.HealthListen == s.Listen {
		errs = append(errs, fmt.Errorf("health listen address %v: must differ from the listen address", s.HealthListen))
	}
	for _, socket := range []struct{ name, path string }{
		{"router socket", s.RouterSocket}, {"admin socket", s.AdminSocket},
	} {
		if !filepath.IsAbs(socket.path) || len(socket.path) > 107 {
			errs = append(errs, fmt.Errorf("%s %q: must be an absolute path of at most 107 bytes", socket.name, socket.path))
		}
	}
	if t := s.TLS; t != nil {
		for _, file := range []struct{ name, path string }{
			{"certificate file", t.CertFile}, {"key file", t.KeyFile}, {"TLS secret file", t.SecretFile},
		} {
			if !filepath.IsAbs(file.path) {
				errs = append(errs, fmt.Errorf("%s %q: must be an absolute path", file.name, file.path))
			}
		}
		if filepath.Dir(t.CertFile) != filepath.Dir(t.KeyFile) {
			errs = append(errs, fmt.Errorf("certificate file %q and key file %q: must be in one directory",
				t.CertFile, t.KeyFile))
		}
	}
	if a := s.API; a != nil {
		if !hostName.MatchString(a.Domain) {
			errs = append(errs, fmt.Errorf("domain %q: must be a DNS name in lower case", a.Domain))
		}
		if a.LocalClients && !s.Listen.Addr().IsLoopback() {
			errs = append(errs, fmt.Errorf("API: with local clients the listen address %v must be on loopback", s.Listen))
		}
		if len(a.Endpoints) == 0 {
			errs = append(errs, errors.New("API: at least one address is required"))
		}
		if t := a.TLS; t != nil && (!filepath.IsAbs(t.CAFile) || !filepath.IsAbs(t.SecretFile) || !hostName.MatchString(t.ServerName)) {
			errs = append(errs, fmt.Errorf("API: authority %q, secret file %q, name %q: must be absolute paths and a DNS name",
				t.CAFile, t.SecretFile, t.ServerName))
		}
	}
	if o := s.Other; o != nil {
		if s.HealthListen.IsValid() || s.TLS != nil || s.ProxyProtocol || s.API != nil || s.MaxHeap != 0 || s.Traces != nil {
			errs = append(errs, errors.New("another gateway: has its own health check, TLS, PROXY protocol, API, bound on memory and traces"))
		}
		if !o.Admin.Addr().IsLoopback() {
			errs = append(errs, fmt.Errorf("admin interface %v of another gateway: must be an address on loopback", o.Admin))
		}
	}
	if t := s.Traces; t != nil && (t.To.Host == "" || t.To.Port == 0 || !(t.Percent >= 0 && t.Percent <= 100)) {
		errs = append(errs, fmt.Errorf("traces: receiver %s:%d, %v percent: must be host:port and 0 to 100", t.To.Host, t.To.Port, t.Percent))
	}
	if s.TrustedHops > 100 {
		errs = append(errs, fmt.Errorf("trusted hops %d: must be 0 to 100", s.TrustedHops))
	}
	if s.MaxStreams > 1024 {
		errs = append(errs, fmt.Errorf("max streams %d: must be 1 to 1024", s.MaxStreams))
	}
	if s.MaxHeaderKiB < 8 || s.MaxHeaderKiB > 64 {
		errs = append(errs, fmt.Errorf("max header size %d KiB: must be 8 to 64", s.MaxHeaderKiB))
	}
	if s.MaxHeap != 0 && s.MaxHeap < 64<<20 {
		errs = append(errs, fmt.Errorf("max heap %d: must be at least 64 MiB (%d), or 0 for no limit", s.MaxHeap, 64<<20))
	}
	return s, errors.Join(errs...)
}
