package envoy

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"

	"github.com/berth-sandbox/berth/api/apierror"
)

// Names that the router of an egress gateway and the bootstrap share, beside those of ingress.
const (
	// MetadataIncarnation is the key of the incarnation, in digits.
	MetadataIncarnation = "incarnation"
	// PeerHeader has the address of the peer of the client's connection, without its port. SchemeHeader has the
	// scheme of a request in absolute form, and is missing otherwise. Envoy writes them for the router.
	PeerHeader   = "x-berth-peer"
	SchemeHeader = "x-berth-scheme"
	// PeerKey and PortKey are the keys of what the router gets of a new connection: the address of the client, and the
	// port at which the gateway listens.
	PeerKey = "peer"
	PortKey = "port"
)

const (
	// EgressIdle is how long a tunnel or a request of an egress gateway may be silent in both directions.
	EgressIdle = time.Hour
	// EgressCountsAge is how often Envoy tells the router how many bytes a request in progress has moved. Those of one
	// that has ended come egressLogFlush after its end.
	EgressCountsAge = 10 * time.Second
	egressLogFlush  = time.Second
	// egressConnectTimeout bounds one attempt to connect to an origin. There are at most two.
	egressConnectTimeout = 5 * time.Second
	// egressAccept is how long a new connection waits for the router. It may have to wait for its turn.
	egressAccept = 5 * time.Second
	// egressPing and egressPingTimeout bound how long a router may hang before its tunnels are cut.
	egressPing        = 5 * time.Second
	egressPingTimeout = 10 * time.Second
	// egressStreams is how many requests share a connection to the router. Package h2 takes as many.
	egressStreams = 16 << 10
)

// EgressRouterLoss is the time within which an egress gateway cuts the tunnels of a router that hangs.
const EgressRouterLoss = egressPing + egressPingTimeout

// EgressConnectionMemory is what the gateway needs for a connection of a sandbox, with the one to its origin, in bytes.
// The chart has the number, too.
// With 1,000 tunnels whose peers send and do not read, Envoy 1.40 allocates 123 KB for each, and 69 KB while they are idle.
const EgressConnectionMemory = 128 << 10

// EgressSettings are the differences between installations of the egress gateway.
type EgressSettings struct {
	// Listen is the address for sandboxes. HealthListen is as in Settings. Listen is required.
	Listen, HealthListen netip.AddrPort
	// RouterSocket and AdminSocket are as in Settings. Required.
	RouterSocket, AdminSocket string
	// CAFile has the certificates of the authorities, in PEM form, that origins with TLS are verified by. It is an
	// absolute path, which Envoy reads once. Required.
	CAFile string
	// MaxHeap and MaxConnections are as in Settings. MaxConnections bounds the requests in progress, too.
	MaxHeap        uint64
	MaxConnections uint32
}

// EgressBootstrap returns the configuration of the Envoy of an egress gateway.
func EgressBootstrap(s EgressSettings) (*bootstrapv3.Bootstrap, error) {
	s.MaxConnections = cmp.Or(s.MaxConnections, 100_000)
	// The rules of the fields that both kinds of settings have are those of Settings.
	_, err := Settings{
		Listen: s.Listen, HealthListen: s.HealthListen, RouterSocket: s.RouterSocket, AdminSocket: s.AdminSocket,
		MaxHeap: s.MaxHeap,
	}.withDefaults()
	if !filepath.IsAbs(s.CAFile) {
		err = errors.Join(err, fmt.Errorf("authorities file %q: must be an absolute path", s.CAFile))
	}
	if err != nil {
		return nil, fmt.Errorf("envoy egress settings: %w", err)
	}
	var config bootstrapv3.Bootstrap
	if err := execute("egress.yaml", s, &config); err != nil {
		return nil, err
	}
	if err := config.ValidateAll(); err != nil {
		return nil, fmt.Errorf("envoy egress settings: %w", err)
	}
	return &config, nil
}

// EgressYAML renders the configuration of the Envoy of an egress gateway. Equal settings give equal bytes.
func EgressYAML(s EgressSettings) ([]byte, error) {
	config, err := EgressBootstrap(s)
	if err != nil {
		return nil, err
	}
	return render(config)
}

// egressFailures lists the answers that Envoy generates in place of an origin. The other ones are as at ingress.
func egressFailures() []failure {
	return []failure{
		{
			anyOf(flags("UF"), status("EQ", 507)), apierror.EgressUnreachable,
			"the host did not accept the connection in time, or its certificate is not valid for it",
		},
		{
			flags("UC", "UR", "LR", "UPE"), apierror.EgressReset,
			"the host closed the connection before it answered, or its answer is not HTTP or has too many headers",
		},
	}
}

// egressReplies lists the answers that Envoy generates at an egress gateway. The first match counts.
func egressReplies() (all []localReply) {
	for _, f := range slices.Concat(egressFailures(), failures(), unaccepted()) {
		switch f.reason {
		case apierror.SandboxUnreachable, apierror.SandboxReset: // those of egress come first
			continue
		case apierror.NoRoute:
			f.message = "too many requests are in progress at the egress gateway; try again"
		case apierror.RouterUnavailable:
			f.message = "the egress gateway ended the request, or is not ready; try again"
		case apierror.Forbidden:
			f.message = "only CONNECT and plain HTTP in absolute form are served here, and no upgrade"
		case apierror.HTTPVersion:
			f.message = "use HTTP/1.1"
		}
		all = append(all, localReply{Filter: f.when, Kind: apierror.KindOf(f.reason), Message: f.message})
	}
	return all
}
