package apierror

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"

	"github.com/berth-sandbox/berth/internal/printable"
)

// Reason is a stable word that programs can compare.
type Reason string

// The reasons. Kinds says of each what it means.
const (
	BadRequest         Reason = "bad_request"
	BadHost            Reason = "bad_host"
	BadPort            Reason = "bad_port"
	BadTarget          Reason = "bad_target"
	BadPath            Reason = "bad_path"
	BodyTooLarge       Reason = "body_too_large"
	HeadersTooLarge    Reason = "headers_too_large"
	HTTPVersion        Reason = "http_version"
	RequestTimeout     Reason = "request_timeout"
	HostRefused        Reason = "host_refused"
	Unauthorized       Reason = "unauthorized"
	CrossOrigin        Reason = "cross_origin"
	Forbidden          Reason = "forbidden"
	AccessDenied       Reason = "access_denied"
	AgentToken         Reason = "agent_token"
	PortPrivate        Reason = "port_private"
	MethodRefused      Reason = "method_refused"
	NotFound           Reason = "not_found"
	PoolNotFound       Reason = "pool_not_found"
	PoolChanged        Reason = "pool_changed"
	SandboxNotFound    Reason = "sandbox_not_found"
	SandboxGone        Reason = "sandbox_gone"
	SandboxState       Reason = "sandbox_state"
	SandboxBusy        Reason = "sandbox_busy"
	SleepFailed        Reason = "sleep_failed"
	SnapshotNotFound   Reason = "snapshot_not_found"
	SnapshotFailed     Reason = "snapshot_failed"
	SnapshotTooLarge   Reason = "snapshot_too_large"
	StoreUnavailable   Reason = "store_unavailable"
	SessionNotFound    Reason = "session_not_found"
	SessionAlive       Reason = "session_alive"
	PoolEmpty          Reason = "pool_empty"
	PoolNotAccepted    Reason = "pool_not_accepted"
	QuotaExceeded      Reason = "quota_exceeded"
	RateLimited        Reason = "rate_limited"
	TooManyPorts       Reason = "too_many_ports"
	TooManyOpen        Reason = "too_many_open"
	KeyReused          Reason = "idempotency_key_reused"
	StartFailed        Reason = "start_failed"
	NotImplemented     Reason = "not_implemented"
	SandboxUnreachable Reason = "sandbox_unreachable"
	SandboxReset       Reason = "sandbox_reset"
	SandboxStarting    Reason = "sandbox_starting"
	SandboxQuiesced    Reason = "sandbox_quiesced"
	SandboxAsleep      Reason = "sandbox_asleep"
	EgressRefused      Reason = "egress_refused"
	EgressCredential   Reason = "egress_credential"
	EgressNoCredential Reason = "egress_no_credential"
	EgressUnreachable  Reason = "egress_unreachable"
	EgressReset        Reason = "egress_reset"
	EgressMissing      Reason = "egress_missing"
	EgressPending      Reason = "egress_pending"
	APIUnreachable     Reason = "api_unreachable"
	APIReset           Reason = "api_reset"
	RouterNotReady     Reason = "router_not_ready"
	RouterUnavailable  Reason = "router_unavailable"
	NoRoute            Reason = "no_route"
	NotLeader          Reason = "not_leader"
	APINotReady        Reason = "api_not_ready"
	Timeout            Reason = "timeout"
	Overloaded         Reason = "overloaded"
	Internal           Reason = "internal"
)

// E2BNotFound and E2BPortClosed are the messages that the E2B SDKs look for, under
// status 502.
const (
	E2BNotFound   = "The sandbox was not found"
	E2BPortClosed = "The sandbox is running but port is not open"
)

// Sender is a part of Berth that answers.
type Sender string

// The senders. Envoy and the router answer under the hosts of sandboxes, the API
// under its own address, an admin listener on its own.
const (
	Envoy  Sender = "Envoy"
	Router Sender = "router"
	API    Sender = "API"
	Admin  Sender = "admin listener"
)

// Kind is what is fixed for a reason.
type Kind struct {
	Reason Reason
	// Code is the HTTP status.
	Code int
	// GRPC is the status that a gRPC client gets. Where Envoy answers by itself
	// this is Envoy's own translation of Code.
	GRPC codes.Code
	// RetryAfter is in seconds, 0 if a retry does not help. If it is set, the page for a browser
	// reloads itself.
	RetryAfter int
	// By is who sends it.
	By []Sender
	// When says what happened, and Do what the caller can do.
	When, Do string
}

// kinds is never changed.
var kinds = []Kind{
	{Reason: BadRequest, Code: http.StatusBadRequest, GRPC: codes.Internal, By: []Sender{Envoy, API, Admin},
		When: "the request is not valid HTTP, or a body or parameter is wrong; the message names it", Do: "mend the request"},
	{Reason: BadHost, Code: http.StatusBadRequest, GRPC: codes.InvalidArgument, By: []Sender{Router},
		When: "the host is neither a sandbox's nor one that takes sandboxes by header or path", Do: "use `<port>-<sandbox id>.<domain>`"},
	{Reason: BadPort, Code: http.StatusBadRequest, GRPC: codes.InvalidArgument, By: []Sender{Router},
		When: "the port is not 1 to 65535 in digits without leading zeros", Do: "mend the port"},
	{Reason: BadTarget, Code: http.StatusBadRequest, GRPC: codes.InvalidArgument, By: []Sender{Router},
		When: "the headers that name a sandbox are missing, repeated, contradict each other or hold no sandbox ID", Do: "send one sandbox ID and at most one port"},
	{Reason: BadPath, Code: http.StatusBadRequest, GRPC: codes.InvalidArgument, By: []Sender{Router},
		When: "the path is not `/sandboxes/<id>/<port>/...`, or has dot segments", Do: "mend the path"},
	{Reason: Unauthorized, Code: http.StatusUnauthorized, GRPC: codes.Unauthenticated, By: []Sender{API},
		When: "the key is missing or not known", Do: "send it as `X-API-Key` or as a bearer token"},
	{Reason: AgentToken, Code: http.StatusUnauthorized, GRPC: codes.Unauthenticated, By: []Sender{Router},
		When: "the request is for the agent of a sandbox, and has no token of the agent, or a wrong one", Do: "send `envdAccessToken` of the claim's answer in `X-Access-Token`; for `/files`, a signature will do"},
	{Reason: CrossOrigin, Code: http.StatusForbidden, GRPC: codes.PermissionDenied, By: []Sender{API},
		When: "a web page of another origin calls an API without keys from a browser", Do: "give the API keys, or call it from a program"},
	{Reason: Forbidden, Code: http.StatusForbidden, GRPC: codes.PermissionDenied, By: []Sender{Envoy, API},
		When: "the role of the key may not make this call; from Envoy: an upgrade other than to WebSocket, or a URL scheme that the listener does not speak", Do: "use a key with the role that the message names; from Envoy: use HTTP or WebSocket, under the listener's scheme"},
	{Reason: AccessDenied, Code: http.StatusForbidden, GRPC: codes.PermissionDenied, By: []Sender{Router},
		When: "the sandbox is not public, and the request has no credential, a wrong one, or one that has expired", Do: "send the sandbox's token in `e2b-traffic-access-token` or, for the access `team`, an API key of its team in `X-API-Key`, or ask its owner for a link"},
	{Reason: EgressRefused, Code: http.StatusForbidden, GRPC: codes.PermissionDenied, By: []Sender{Router},
		When: "at the egress gateway: the rules of the sandbox do not allow the host, its port or an address of it, or the request is not one for a proxy; or the client's address is not that of the one sandbox whose credential was sent; the message says which", Do: "allow the host in the pool or at the claim; use the proxy's address and credential as the sandbox has got them"},
	{Reason: EgressCredential, Code: http.StatusProxyAuthRequired, GRPC: codes.Unauthenticated, By: []Sender{Router},
		When: "at the egress gateway: the request has no credential of a sandbox in `Proxy-Authorization`", Do: "use the proxy's URL as it stands in `HTTP_PROXY` of the sandbox"},
	{Reason: EgressNoCredential, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Router},
		When: "at the egress gateway: the request needs a header whose value the gateway does not know; it does not go out without it", Do: "operators: is the Secret there that `spec.egress.credentials` of the pool names? callers: set the rules of the sandbox again"},
	{Reason: PortPrivate, Code: http.StatusForbidden, GRPC: codes.PermissionDenied, By: []Sender{Router},
		When: "the sandbox's pool does not open this port", Do: "use a port that the message names, or add it to the pool's `spec.ports`"},
	{Reason: NotFound, Code: http.StatusNotFound, GRPC: codes.Unimplemented, By: []Sender{Router, API, Admin},
		When: "there is no such page; from the router: the host is the domain itself or `api.<domain>`, and serves nothing here", Do: "see the message"},
	{Reason: PoolNotFound, Code: http.StatusNotFound, GRPC: codes.NotFound, By: []Sender{API},
		When: "there is no pool of the name in `templateID`", Do: "create the pool or mend the name"},
	{Reason: SandboxNotFound, Code: http.StatusNotFound, GRPC: codes.NotFound, By: []Sender{Router, API},
		When: "there is no such sandbox", Do: "check the ID; claim a sandbox"},
	{Reason: SnapshotNotFound, Code: http.StatusNotFound, GRPC: codes.NotFound, By: []Sender{API},
		When: "the team has no such snapshot, or it has expired", Do: "list the snapshots"},
	{Reason: SessionNotFound, Code: http.StatusNotFound, GRPC: codes.NotFound, By: []Sender{API},
		When: "there is no such session of a router, or no more", Do: "nothing waits for it; `berth fence sessions` lists those that there are"},
	{Reason: MethodRefused, Code: http.StatusMethodNotAllowed, GRPC: codes.InvalidArgument, By: []Sender{Router, API},
		When: "the method is CONNECT; from the API: the path has no such method", Do: "connect to the sandbox's host directly; from the API: the header `Allow` lists the methods"},
	{Reason: RequestTimeout, Code: http.StatusRequestTimeout, GRPC: codes.Unknown, By: []Sender{Envoy, API},
		When: "the request's headers did not arrive in time; from the API: its body did not", Do: "send them faster"},
	{Reason: KeyReused, Code: http.StatusConflict, GRPC: codes.AlreadyExists, By: []Sender{API},
		When: "the `Idempotency-Key` was used for a claim with another body", Do: "use a new key for a new claim"},
	{Reason: PoolChanged, Code: http.StatusConflict, GRPC: codes.Aborted, By: []Sender{API},
		When: "a pool is to be scaled whose spec has changed since the caller read it", Do: "read the pool again"},
	{Reason: SessionAlive, Code: http.StatusConflict, GRPC: codes.FailedPrecondition, By: []Sender{API},
		When: "a router is to be declared dead that is connected, or was a moment ago", Do: "stop it instead; if it has ended, try again when the message says so"},
	{Reason: PoolNotAccepted, Code: http.StatusConflict, GRPC: codes.FailedPrecondition, By: []Sender{API},
		When: "the pool has no warm pod, and its template is refused: its condition `Accepted` is false", Do: "mend the pod template of the pool; the message says what is wrong"},
	{Reason: SandboxGone, Code: http.StatusGone, GRPC: codes.NotFound, By: []Sender{Router, API},
		When: "the sandbox has been released; the message says when and [why](../lifetimes.md), from the router only if the sandbox was public; the API says so with status 404, but for one that was claimed with the same `Idempotency-Key`", Do: "claim another one"},
	{Reason: SandboxState, Code: http.StatusConflict, GRPC: codes.FailedPrecondition, By: []Sender{API},
		When: "the sandbox is asleep or stopped, or falls asleep or wakes", Do: "wake it with `POST /sandboxes/{id}/connect`"},
	{Reason: EgressMissing, Code: http.StatusConflict, GRPC: codes.FailedPrecondition, By: []Sender{API},
		When: "the sandbox is to get rules of what it may reach, and what leaves its pod does not go through an egress gateway, so nothing would enforce them", Do: "set `spec.egress.mode` of the pool to `Gateway`, and claim another sandbox"},
	{Reason: SleepFailed, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{API},
		When: "the agent in the sandbox could not stop all of its processes; they run on, and the message says which it was", Do: "see [sleep](../sleep.md) for what cannot be stopped"},
	{Reason: SnapshotTooLarge, Code: http.StatusRequestEntityTooLarge, GRPC: codes.ResourceExhausted, By: []Sender{API},
		When: "the sandbox has more files or bytes in the paths of a snapshot than its pool allows", Do: "keep fewer files, or raise `spec.snapshot` of the pool"},
	{Reason: SnapshotFailed, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{API},
		When: "the files of the sandbox were not archived, or have not moved for too long, or an archive cannot be restored; the message says why", Do: "see [snapshots](../snapshots.md), and [stop](../sleep.md#stop)"},
	{Reason: StoreUnavailable, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 10, By: []Sender{API},
		When: "the object store did not take the files of the sandbox, or does not answer", Do: "try again; operators: the log of the leader has what the store has said"},
	{Reason: BodyTooLarge, Code: http.StatusRequestEntityTooLarge, GRPC: codes.ResourceExhausted, By: []Sender{API},
		When: "the body is larger than the message says", Do: "send a smaller one"},
	{Reason: HostRefused, Code: http.StatusMisdirectedRequest, GRPC: codes.PermissionDenied, By: []Sender{API, Admin},
		When: "the listener does not accept this host: an API without keys accepts `localhost`, loopback addresses, the public host and `api.` before it, and through a proxy only clients of its own machine; a router's admin listener accepts the first two", Do: "use one of these hosts, or give the API keys"},
	{Reason: HTTPVersion, Code: http.StatusUpgradeRequired, GRPC: codes.Unknown, By: []Sender{Envoy},
		When: "the request is HTTP/1.0, or of a version that does not exist", Do: "use HTTP/1.1 or HTTP/2"},
	{Reason: PoolEmpty, Code: http.StatusTooManyRequests, GRPC: codes.ResourceExhausted, RetryAfter: 1, By: []Sender{API},
		When: "the pool had no warm pod for as long as the claim waited for one, or too many claims wait; the message says what is missing", Do: "try again, or raise the pool's `spec.warm` or `spec.maxPods`"},
	{Reason: QuotaExceeded, Code: http.StatusTooManyRequests, GRPC: codes.ResourceExhausted, RetryAfter: 1, By: []Sender{API},
		When: "the team has as many sandboxes, calls that wait for a pod, or streams of events as its limits allow; the message names the limit", Do: "release sandboxes, or wait for claims; operators: raise the limit"},
	{Reason: RateLimited, Code: http.StatusTooManyRequests, GRPC: codes.ResourceExhausted, RetryAfter: 1, By: []Sender{Router, API},
		When: "the sandbox gets more requests per second than its gateway lets pass for one sandbox; from the API: the key makes more calls per second, or the team claims more sandboxes per second, than the limits allow", Do: "try again after `Retry-After`"},
	{Reason: TooManyPorts, Code: http.StatusTooManyRequests, GRPC: codes.ResourceExhausted, RetryAfter: 1, By: []Sender{Router},
		When: "Envoy lists too many ports of the sandbox, or of all sandboxes, or too many were asked for at the same time", Do: "try again, with fewer ports at one time"},
	{Reason: TooManyOpen, Code: http.StatusTooManyRequests, GRPC: codes.ResourceExhausted, RetryAfter: 1, By: []Sender{Router},
		When: "the sandbox has as many requests open as one sandbox may have at this gateway, by a count that is up to some seconds old; at the egress gateway, by an exact count, or it looks up too many names", Do: "end some, or try again"},
	{Reason: HeadersTooLarge, Code: http.StatusRequestHeaderFieldsTooLarge, GRPC: codes.Unknown, By: []Sender{Envoy},
		When: "the request's headers, with its path, are larger than `--max-header-kib` of `berth envoy-config` (40 KiB) or more than 200", Do: "send fewer"},
	{Reason: Internal, Code: http.StatusInternalServerError, GRPC: codes.Unknown, By: []Sender{Envoy, API},
		When: "Berth failed", Do: "read its log; report it"},
	{Reason: NotImplemented, Code: http.StatusNotImplemented, GRPC: codes.Unknown, By: []Sender{Envoy, API},
		When: "this version does not do what was asked for; from Envoy: an unknown transfer encoding", Do: "leave it out"},
	{Reason: SandboxUnreachable, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{Envoy, API},
		When: "the sandbox refused the connection, or did not take it in time; from the API: its agent refused it", Do: "see whether the program in it listens on that port, on all addresses"},
	{Reason: StartFailed, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{API},
		When: "the pool's `postStart` hook failed, or the sandbox ended before it ran; or a sandbox that is [stopped](../sleep.md#stop) could not be woken, and the message says why", Do: "look at the program in the sandbox that answers the hook; wake one that is stopped again"},
	{Reason: SandboxReset, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{Envoy},
		When: "the sandbox broke the connection before it answered, or answered something that is not HTTP", Do: "look at the program in the sandbox"},
	{Reason: EgressUnreachable, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{Envoy, Router},
		When: "at the egress gateway: the name of the host has no address outside the cluster, the host did not accept the connection in time, or its certificate is not valid for it", Do: "check the host; try again"},
	{Reason: EgressReset, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{Envoy},
		When: "at the egress gateway: the host broke the connection before it answered, or answered something that is not HTTP; the request may have taken effect", Do: "look at the host"},
	{Reason: APIReset, Code: http.StatusBadGateway, GRPC: codes.Unavailable, By: []Sender{Envoy},
		When: "at `api.<domain>`: the API broke the connection before it answered, or did not answer; the call may have taken effect", Do: "see whether it did; repeat a claim with its `Idempotency-Key`"},
	{Reason: APIUnreachable, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Envoy},
		When: "at `api.<domain>`: no replica of the API accepted the connection, or too many calls are in progress", Do: "try again; operators: does an allocator run?"},
	{Reason: SandboxStarting, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Router},
		When: "the sandbox was claimed, and its pool's `postStart` hook was not answered for as long as requests wait (`holdSeconds`), or too many of them wait", Do: "try again"},
	{Reason: SandboxBusy, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 5, By: []Sender{API},
		When: "the sandbox cannot fall asleep at the moment: it starts, or a router that may send it requests is not connected, or does not acknowledge; the message says which", Do: "try again"},
	{Reason: EgressPending, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 5, By: []Sender{API},
		When: "the sandbox has new rules of what it may reach, and not every egress gateway has acknowledged them within 10 s: one of those that the message counts may still use the rules of before", Do: "make the same call again, which waits again; operators: is an egress gateway cut off?"},
	{Reason: SandboxQuiesced, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Router},
		When: "the sandbox seemed idle, and for 2 s the allocator has not decided whether it is released, or too many requests wait for that", Do: "try again"},
	{Reason: SandboxAsleep, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, By: []Sender{Router},
		When: "the sandbox is asleep, and the request does not wake it, because only calls do, or because it only asks for the agent's health; with `Retry-After`: it did not wake for 30 s, or too many others are waking, or too many requests wait", Do: "resume it with a call, as `POST /sandboxes/<id>/connect`; with `Retry-After`: try again"},
	{Reason: RouterNotReady, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Router},
		When: "the router could not tell for 4 s where the sandbox is, because it has just started or the allocator is away, or too many requests wait for that; or the allocator has not read the API keys, of which the request has one; at the egress gateway: it does not know the rules of the sandboxes", Do: "try again"},
	{Reason: RouterUnavailable, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Envoy},
		When: "the router did not answer Envoy", Do: "try again; operators: is the router running?"},
	{Reason: NoRoute, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Envoy, Router},
		When: "a limit on requests in progress is reached, the sandbox's default port is not known, or its address may not be used", Do: "try again; operators: see the message"},
	{Reason: NotLeader, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{API},
		When: "no replica of the allocator leads at the moment, or the leader ended during the call: a claim without an `Idempotency-Key` may then have taken place, and ends at its `timeout`", Do: "try again"},
	{Reason: APINotReady, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{API},
		When: "the replica has just started and has not read the API keys yet", Do: "try again; operators: may the allocators list Secrets in the namespace of the keys?"},
	{Reason: Timeout, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{API},
		When: "the Kubernetes API server did not confirm in time, or a sandbox did not wake in time; a claim that was not answered is given back, unless it had an `Idempotency-Key`, a release and a wake go on", Do: "try again"},
	{Reason: Overloaded, Code: http.StatusServiceUnavailable, GRPC: codes.Unavailable, RetryAfter: 1, By: []Sender{Envoy, Router, API},
		When: "too many requests at one time, or look-ups of names at the egress gateway, too many large bodies or answers that are not read, too little memory, the allocator does not keep up with what it has to record, or a quarantine", Do: "try again, more slowly"},
}

// Kinds lists every reason, by status.
func Kinds() []Kind {
	all := slices.Clone(kinds)
	slices.SortStableFunc(all, func(a, b Kind) int { return a.Code - b.Code })
	return all
}

// KindOf returns what is fixed for a reason. It returns Internal for a reason that is not in the
// list, which is a mistake in Berth.
func KindOf(r Reason) Kind {
	for _, k := range kinds {
		if k.Reason == r {
			return k
		}
	}
	return Kind{Reason: Internal, Code: http.StatusInternalServerError, GRPC: codes.Unknown}
}

// New returns an error with what is fixed for the reason. What the arguments have from a client is made printable.
func New(r Reason, format string, args ...any) *Error {
	k := KindOf(r)
	return &Error{Code: k.Code, Reason: k.Reason, RetryAfter: k.RetryAfter, Message: printable.Text(fmt.Sprintf(format, args...))}
}

// Table is Kinds as the table of the documentation, in Markdown.
func Table() string {
	var b strings.Builder
	b.WriteString("| status | `reason` | sent by | when | what to do | gRPC |\n|---|---|---|---|---|---|\n")
	for _, k := range Kinds() {
		var by []string
		for _, s := range k.By {
			by = append(by, string(s))
		}
		retry := ""
		if k.RetryAfter > 0 {
			retry = " (`Retry-After`)"
		}
		grpc := "" // at the hosts of sandboxes only
		if slices.Contains(k.By, Envoy) || slices.Contains(k.By, Router) {
			grpc = k.GRPC.String()
		}
		fmt.Fprintf(&b, "| %d%s | `%s` | %s | %s | %s | %s |\n", k.Code, retry, k.Reason, strings.Join(by, ", "), k.When, k.Do, grpc)
	}
	return b.String()
}
