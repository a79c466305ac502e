package metric

// Requests.
var (
	Requests = counter(Row{
		Program: Router, Name: "berth_router_requests_total", Unit: "requests", Labels: []string{Outcome},
		Help:  "Requests Envoy asked about, by outcome: admitted, link (the redirection of a link), preflight (of CORS, for the port of agents), or the reason of the refusal.",
		Moves: "The reason says what refuses requests; errors.md has what each one means.",
	})
	AdmissionSeconds = histogram(Row{
		Program: Router, Name: "berth_router_admission_seconds", Unit: "seconds",
		Buckets: []float64{.00001, .00002, .00005, .0001, .0002, .0005, .001, AdmissionBound, .005, .01, .05, .1, .5, 1, 5},
		Help:    "Time from when the router has read the headers of a request until it has the answer that admits it. Requests that are held for a sandbox that starts or wakes do not count.",
		Moves:   "The router has too little CPU time, does not know the sandboxes (berth_routecache_misses_total), or waits for the leader.",
	})
	RequestsLimited = counter(Row{
		Program: Router, Name: "berth_router_requests_limited_total", Unit: "requests", Labels: []string{Pool, Reason},
		Help:  "Requests that a limit of their sandbox has refused, by pool and reason. " + poolsSummed,
		Moves: "The log of the router has the sandboxes. A client is in a loop, or the limit is too low.",
	})
	RequestsHeld = gauge(Row{
		Program: Router, Name: "berth_router_requests_held", Unit: "requests",
		Help:  "Requests waiting for a leader, or for a sandbox that is starting, waking or quiesced. Above 2,000 further ones are refused, and before that those for a sandbox that has as many as are left.",
		Moves: "No leader, slow postStart hooks, or slow wakes (berth_router_wake_wait_seconds).",
	})
	AnswersUnread = gauge(Row{
		Program: Router, Name: "berth_router_answers_unread", Unit: "answers",
		Help:  "Answers that Envoy may not have read yet. A release is acknowledged only after all earlier answers were read.",
		Moves: "If it stays high, Envoy hangs: releases wait for it.",
	})
	QuiesceHoldSeconds = histogram(Row{
		Program: Router, Name: "berth_router_quiesce_hold_seconds", Unit: "seconds",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2},
		Help:    "How long requests waited while the allocator asked whether their sandbox is idle.",
		Moves:   "A router answers the questions of the leader slowly: see berth_router_look_seconds.",
	})
	WakeWaitSeconds = histogram(Row{
		Program: Router, Name: "berth_router_wake_wait_seconds", Unit: "seconds",
		Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		Help:    "How long requests waited for a sandbox that was asleep, whatever came of it.",
		Moves:   "The leader, the journal or the agents are slow, or the nodes have no CPU time for sandboxes that wake.",
	})
)

// Session.
var (
	Connected = gauge(Row{
		Program: Router, Name: "berth_router_connected", Unit: "0 or 1",
		Help:  "1 while the router has a session with the leader.",
		Moves: "The log of the router says why it has none. It serves what it knows until --max-stale.",
	})
	PingSeconds = histogram(Row{
		Program: Router, Name: "berth_router_ping_seconds", Unit: "seconds",
		Buckets: []float64{.0005, .001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		Help:    "Time from the ping of the router to the pong of the leader, through the leader's core.",
		Moves:   "The leader, the router or the network between them is slow.",
	})
)

// Routes and activity.
var (
	CacheHits = counter(Row{
		Program: Router, Name: "berth_routecache_hits_total", Unit: "requests",
		Help:  "Requests answered from the cache, with a route or a refusal.",
		Moves: "It follows the requests.",
	})
	CacheMisses = counter(Row{
		Program: Router, Name: "berth_routecache_misses_total", Unit: "requests",
		Help:  "Requests that waited for the allocator.",
		Moves: "The cache is too small (berth_routecache_evictions_total), or clients guess IDs.",
	})
	CacheQuestions = counter(Row{
		Program: Router, Name: "berth_routecache_questions_total", Unit: "questions",
		Help:  "Resolve messages sent to the allocator, one for each sandbox ID that was not known.",
		Moves: "As berth_routecache_misses_total.",
	})
	CacheEvictions = counter(Row{
		Program: Router, Name: "berth_routecache_evictions_total", Unit: "routes",
		Help:  "Routes evicted because the cache was full.",
		Moves: "Raise --cache-size, and the memory with it.",
	})
	CacheRoutes = gauge(Row{
		Program: Router, Name: "berth_routecache_routes", Unit: "routes",
		Help:  "Routes held.",
		Moves: "It follows the live sandboxes, up to berth_routecache_capacity.",
	})
	CacheCapacity = gauge(Row{
		Program: Router, Name: "berth_routecache_capacity", Unit: "routes",
		Help:  "Routes that the cache can hold (--cache-size).",
		Moves: "Nothing: it is a flag.",
	})
	CacheQuiesced = gauge(Row{
		Program: Router, Name: "berth_routecache_quiesced", Unit: "sandboxes",
		Help:  "Sandboxes whose requests are held while the allocator asks whether they are idle.",
		Moves: "If it stays, the leader does not decide.",
	})
	CacheFresh = gauge(Row{
		Program: Router, Name: "berth_routecache_fresh", Unit: "0 or 1",
		Help:  "1 while routes may be served.",
		Moves: "0: the router had no answer of a leader for --max-stale, and serves no sandbox.",
	})
	TrackedSandboxes = gauge(Row{
		Program: Router, Name: "berth_lastactive_sandboxes", Unit: "sandboxes",
		Help:  "Sandboxes whose last activity is remembered.",
		Moves: "It follows the live sandboxes.",
	})
	LookError = gauge(Row{
		Program: Router, Name: "berth_router_look_error", Unit: "0 or 1",
		Help:  "1 while the newest look at the requests that Envoy holds open has failed, so that no sandbox is released for being idle. The page /admin/last-active of the router says why.",
		Moves: "Envoy's admin socket does not answer: --envoy-admin of the router and --admin-socket of Envoy's configuration must be the same.",
	})
	LookSeconds = histogram(Row{
		Program: Router, Name: "berth_router_look_seconds", Unit: "seconds",
		Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2},
		Help:    "How long it took to read what requests Envoy holds open. Failed looks are not counted.",
		Moves:   "Envoy has too little CPU time. Looks come less often then: 100 times as far apart.",
	})
)
