package metric

// Requests of sandboxes at the egress gateway.
var (
	EgressRequests = counter(Row{
		Program: Egress, Name: "berth_egress_requests_total", Unit: "requests", Labels: []string{Outcome},
		Help:  "Requests and tunnels of sandboxes that Envoy asked about, by outcome: admitted, or the reason of the refusal.",
		Moves: "egress_refused: the log of the router has each new destination; the rules refuse it, or a pod uses the gateway with a wrong credential.",
	})
	EgressOpen = gauge(Row{
		Program: Egress, Name: "berth_egress_open", Unit: "requests",
		Help:  "Requests and tunnels that were admitted and have not ended.",
		Moves: "It follows the sandboxes. Each takes two connections of Envoy.",
	})
	EgressCut = counter(Row{
		Program: Egress, Name: "berth_egress_cut_total", Unit: "requests",
		Help:  "Requests and tunnels that the router ended, because their sandbox ended or slept, its new rules refuse them, or the router was not fresh or stopped.",
		Moves: "It follows the releases. Many at once: berth_egress_fresh was 0, or the router stopped.",
	})
	EgressBytes = counter(Row{
		Program: Egress, Name: "berth_egress_bytes_total", Unit: "bytes", Labels: []string{Direction},
		Help:  "Bytes that requests and tunnels have sent to origins (out) and received from them (in), with headers and TLS. A lower bound.",
		Moves: "It follows the sandboxes. GET /v1/sandboxes/{id}/diagnostics has the bytes of one of them.",
	})
	EgressLookups = counter(Row{
		Program: Egress, Name: "berth_egress_lookups_total", Unit: "names",
		Help:  "Names that the router asked its resolver about.",
		Moves: "An answer is used for 5 s. More than the requests explain: a sandbox tries many names, which its rules allow.",
	})
	EgressConnections = counter(Row{
		Program: Egress, Name: "berth_egress_connections_total", Unit: "connections", Labels: []string{Outcome},
		Help:  "Connections to the egress gateway that Envoy asked about, by outcome: admitted, or closed because their address has too many.",
		Moves: "closed: a sandbox opens many connections or very fast. Others are not affected.",
	})
	EgressUnlogged = counter(Row{
		Program: Egress, Name: "berth_egress_unlogged_total", Unit: "lines",
		Help:  "New destinations of sandboxes that the log does not have, because there were too many.",
		Moves: "A sandbox tries many destinations. The next line of that sandbox says how many are missing.",
	})
	EgressSandboxes = gauge(Row{
		Program: Egress, Name: "berth_egress_sandboxes", Unit: "sandboxes",
		Help:  "Sandboxes whose rules the router has.",
		Moves: "It follows the live sandboxes of pools with egress.mode Gateway.",
	})
)

// Session of the egress router.
var (
	EgressFresh = gauge(Row{
		Program: Egress, Name: "berth_egress_fresh", Unit: "0 or 1",
		Help:  "1 while the rules that the router has may be used.",
		Moves: "0: the router had no answer of a leader for --max-stale. It refuses everything, and has cut what was open.",
	})
	EgressConnected = gauge(Row{
		Program: Egress, Name: "berth_egress_connected", Unit: "0 or 1",
		Help:  "1 while the router has a session with the leader.",
		Moves: "The log of the router says why it has none. It uses what it knows until --max-stale.",
	})
	EgressPingSeconds = histogram(Row{
		Program: Egress, Name: "berth_egress_ping_seconds", Unit: "seconds",
		Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		Help:    "Time from the ping of the router to the pong of the leader, through the leader's core.",
		Moves:   "The leader, the router or the network between them is slow.",
	})
)
