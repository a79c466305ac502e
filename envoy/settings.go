// Package envoy writes the configuration of the Envoy that stands in front of
// the sandboxes. It is one static bootstrap: nothing in it changes while Envoy
// runs, because every request asks the router where to go.
//
// What must stay true of it:
//
//   - The destination comes from dynamic metadata that only the router can set.
//     No header, no listener filter and no default chooses an upstream: a guard
//     behind ext_proc refuses a request without a valid destination and ID,
//     because a cleanly closed ext_proc stream is not an error to Envoy.
//   - Everything fails closed.
//   - An upstream request is sent again only while none of it has been sent
//     (never on "reset"), and only within Settings.Window: after that time an
//     admitted request can open no connection any more. The fence before a pod
//     is deleted uses the same number.
//   - Connections to pods are pooled per sandbox ID, not only per address.
//   - What a client sends is a client's word. Headers by which Envoy, the router or
//     proxies talk to one another are removed before anything reads them, and
//     nobody is an internal client.
//   - A sandbox cannot answer in Berth's name, nor give orders to a proxy in front:
//     the headers for that are removed from its answers. Its cookies are for its own
//     host.
//   - A request waits for a router that restarts: Envoy asks again for as long as the
//     router has not begun to answer.
package envoy

import (
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"time"
)

// Names that the router and the bootstrap share.
const (
	// MetadataNamespace is the dynamic metadata namespace the router answers in.
	MetadataNamespace = "berth"
	// MetadataDst is the destination, as Destination writes it.
	MetadataDst = "dst"
	// MetadataID is the sandbox ID.
	MetadataID = "id"
	// MetadataReply is present on answers that the router gives itself, so that
	// they pass the local reply mapping unchanged.
	MetadataReply = "reply"
	// ReasonHeader says in one word why Berth, and not a sandbox, answered.
	ReasonHeader = "x-berth-reason"
)

// How long an admitted request may go on opening connections.
const (
	// ConnectTimeout bounds one attempt to connect to a pod.
	ConnectTimeout = time.Second
	// Retries is how often Envoy tries again to reach the same pod.
	Retries = 1
	// retryBackOffBase and retryBackOffMax bound the pause before a retry.
	retryBackOffBase = 25 * time.Millisecond
	retryBackOffMax  = 100 * time.Millisecond
	// StallBudget is how long router and Envoy together may be paused between
	// the router's decision and Envoy's dialling, without harm.
	StallBudget = 2900 * time.Millisecond
)

// MessageTimeout is how long Envoy waits for the router's answer, its own retries
// included: a router that restarts must be back by then.
const MessageTimeout = 5 * time.Second

// MaxHold is how long the router may keep a request waiting, for a sandbox that is
// starting. It asks for that once, and Envoy grants no more than MaxHold + MessageTimeout.
const MaxHold = 30 * time.Second

// Window is the time after which a request that was admitted before can open no
// connection any more.
const Window = (1+Retries)*ConnectTimeout + Retries*retryBackOffMax + StallBudget

// Settings are what differs between installations.
type Settings struct {
	// Listen is where clients connect. Port 0 lets the kernel choose.
	Listen netip.AddrPort
	// HealthListen, if set, is where /ready and /stats/prometheus of Envoy's
	// admin interface can be asked for, and nothing else of it. Port 0 lets the
	// kernel choose.
	HealthListen netip.AddrPort
	// RouterSocket is the unix socket of the router. AdminSocket is Envoy's own
	// admin socket, which Envoy makes with mode 0660: the router, of the same user or
	// group, reads /clusters there. Both absolute, at most 107 bytes (sockaddr_un).
	RouterSocket, AdminSocket string
	// TLS, if set, is what the listener serves with; else it speaks plain HTTP.
	TLS *TLS
	// TrustedHops is how many proxies in front of Envoy set X-Forwarded-For, 0 to
	// 100: the client is that many entries from its right end. With 0, clients
	// connect to Envoy itself and every X-Forwarded-* that one sends is removed;
	// otherwise what the proxies sent is passed on, and they must remove what a
	// client made up.
	TrustedHops uint32
	// ProxyProtocol expects each connection to begin with a PROXY protocol header,
	// version 1 or 2, and takes the client's address from it. Who can connect can
	// then name any client address: only the load balancer may.
	ProxyProtocol bool
	// Paths lets the path name the sandbox: the router is sent the path and may
	// change it.
	Paths bool
	// MaxHeap is how much memory Envoy may use, in bytes, 64 MiB or more. Near to
	// it Envoy first gives memory back, then refuses requests. 0: no limit.
	MaxHeap uint64
	// MaxConnections bounds the clients' connections, and the requests in progress
	// at the sandboxes (HTTP/1.1 and gRPC each) and at the router, 1 or more. What
	// is above is refused. Default 100,000.
	MaxConnections uint32
}

// TLS is a certificate that Envoy serves with, and reads again when it changes.
type TLS struct {
	// CertFile and KeyFile are in PEM form, in one directory: that of a mounted
	// Secret of type kubernetes.io/tls. They are read again when a file is moved
	// into that directory, which is how the kubelet updates a Secret's.
	CertFile, KeyFile string
	// SecretFile is where TLSSecret's result is found by Envoy.
	SecretFile string
}

// withDefaults fills in defaults and checks the rest.
func (s Settings) withDefaults() (Settings, error) {
	if s.MaxConnections == 0 {
		s.MaxConnections = 100_000
	}
	var errs []error
	if !s.Listen.IsValid() {
		errs = append(errs, errors.New("listen address: required, as ip:port"))
	}
	if s.HealthListen.IsValid() && s.HealthListen.Port() != 0 && s.HealthListen == s.Listen {
		errs = append(errs, fmt.Errorf("health listen address %v: must be another one than the listen address", s.HealthListen))
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
			errs = append(errs, fmt.Errorf("certificate file %q and key file %q: must be in one directory", t.CertFile, t.KeyFile))
		}
	}
	if s.TrustedHops > 100 {
		errs = append(errs, fmt.Errorf("trusted hops %d: must be 0 to 100", s.TrustedHops))
	}
	if s.MaxHeap != 0 && s.MaxHeap < 64<<20 {
		errs = append(errs, fmt.Errorf("max heap %d: must be at least 64 MiB (%d), or 0 for no limit", s.MaxHeap, 64<<20))
	}
	return s, errors.Join(errs...)
}
