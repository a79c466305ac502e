package metric

const poolsSummed = "Pools after the first 100 are summed as _other."

// Claims and releases.
var (
	Claims = counter(Row{
		Program: Allocator, Name: "berth_allocator_claims_total", Unit: "claims", Labels: []string{Outcome},
		Help:  "Claims answered, by outcome: claimed, canceled (by the caller), or the reason of the error (docs/reference/errors.md).",
		Moves: "The outcome says what refuses claims; errors.md has what each one means.",
	})
	ClaimSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_claim_seconds", Unit: "seconds",
		Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120, 300},
		Help:    "Time from the call to the answer of successful claims, including the wait for a warm pod.",
		Moves:   "Compare it with berth_allocator_pool_claim_wait_seconds: the rest are postStart hooks and a change of leaders.",
	})
	BatchClaims = counter(Row{
		Program: Allocator, Name: "berth_allocator_batch_claims_total", Unit: "claims", Labels: []string{Outcome},
		Help:  "Batch claims (POST /v1/claims) answered, by outcome, like berth_allocator_claims_total.",
		Moves: "As berth_allocator_claims_total.",
	})
	PoolClaims = counter(Row{
		Program: Allocator, Name: "berth_allocator_pool_claims_total", Unit: "claims", Labels: []string{Pool, Result},
		Help:  "Claims by pool and result: warm (all pods that it got were warm when it came), waited (for a pod), refused (the pool had no pod in time, or too many claims waited) or canceled (by the caller before it was granted). Other refusals do not count. A claim of several sandboxes is one. " + poolsSummed,
		Moves: "waited and refused: raise warm, maxWarm or maxPods of the pool, or see why it does not fill.",
	})
	PoolClaimWaitSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_pool_claim_wait_seconds", Unit: "seconds", Labels: []string{Pool, Result},
		Buckets: []float64{.001, .002, .005, .01, .02, ClaimBound, .1, .2, .5, 1, 2, 5, 10, 30, 60, 120},
		Help:    "Time from when the leader accepts a claim until the claim is granted, by result (warm or waited): it has its pods, the journal has it, and the agents in the pods are configured. A postStart hook follows. " + poolsSummed,
		Moves:   "warm: the journal (berth_allocator_journal_commit_seconds) or the agents are slow. waited: pods start slowly, or too few are warm.",
	})
	Releases = counter(Row{
		Program: Allocator, Name: "berth_allocator_releases_total", Unit: "sandboxes", Labels: []string{Reason},
		Help:  "Sandboxes released, by reason.",
		Moves: "reasons.md has what each reason means.",
	})
	ReleaseAcknowledgedSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_release_acknowledged_seconds", Unit: "seconds",
		Buckets: []float64{.001, .002, .003, .004, .005, .006, .008, .01, .015, .02, .03, .05, .1, .2, .5, ReleaseBound, 2, 5, 15, 60, 300, 900, 1200},
		Help:    "Time from when the release of a sandbox was in the journal until every router that could know its route had acknowledged it, ended or expired. The pod is deleted the connect window (--connect-window) later. Releases without any router do not count.",
		Moves:   "A router is slow or has vanished: berth fence ls.",
	})
	ReapLateSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_reap_late_seconds", Unit: "seconds", Labels: []string{Reason},
		Buckets: []float64{.1, .25, .5, 1, 2, ReapBound, 10, 30, 60, 300, 1800},
		Help:    "Time from when a sandbox was due until its release was in the journal, by reason: EndTime, IdleTimeout, MaxLifetime or StartupTimeout. The time while no allocator led counts, except for IdleTimeout.",
		Moves:   "IdleTimeout: a router cannot tell what is open (berth_router_look_error), or does not answer. Others: no allocator led, or the journal is slow.",
	})
	WouldReap = counter(Row{
		Program: Allocator, Name: "berth_allocator_would_reap_total", Unit: "times",
		Help:  "Times an idle sandbox would have been released without --reap-dry-run.",
		Moves: "Nothing: it says what idle timeouts would do.",
	})
	SandboxesLive = gauge(Row{
		Program: Allocator, Name: "berth_allocator_sandboxes_live", Unit: "sandboxes",
		Help:  "Sandboxes that are starting or running, or are asleep or stopped.",
		Moves: "Compare it with what the nodes can hold.",
	})
	SandboxesAsleep = gauge(Row{
		Program: Allocator, Name: "berth_allocator_sandboxes_asleep", Unit: "sandboxes",
		Help:  "Sandboxes that are asleep or stopped, or fall asleep or wake.",
		Moves: "They use memory and no CPU, and neither once they are stopped.",
	})
	ResizesDeferred = gauge(Row{
		Program: Allocator, Name: "berth_allocator_resizes_deferred", Unit: "sandboxes",
		Help:  "Sandboxes that are awake, and whose node has no room for the CPU request that their pod had before it slept.",
		Moves: "They run with less CPU when the node is busy. Add nodes, or let fewer sandboxes sleep on a node.",
	})
	Snapshots = counter(Row{
		Program: Allocator, Name: "berth_allocator_snapshots_total", Unit: "snapshots", Labels: []string{Outcome},
		Help:  "Snapshots of sandboxes, by outcome: done, or failed.",
		Moves: "failed: the log of the leader says why; the object store does not answer, or a sandbox has more files than spec.snapshot of its pool allows.",
	})
	Restores = counter(Row{
		Program: Allocator, Name: "berth_allocator_restores_total", Unit: "pods", Labels: []string{Outcome},
		Help:  "Pods into which a snapshot was restored for a claim, or the files of a stopped sandbox, by outcome: done, or failed. A claim tries three pods.",
		Moves: "failed: the log of the leader says why; those pods are deleted.",
	})
	StopArchives = counter(Row{
		Program: Allocator, Name: "berth_allocator_stop_archives_total", Unit: "archives", Labels: []string{Outcome, Cause},
		Help:  "Archives of sandboxes that were to be stopped, by outcome: done, busy, or failed; and by cause: call, stopAfter, maxAsleep (more sandboxes of the pool were asleep than may be), cordon (of the node), or podDeleted (as by an eviction).",
		Moves: "busy: other archives were being written for 30 s; the sandbox stays asleep, and a stop that no call has asked for is tried again. failed: it stays asleep too, and the log of the leader says why; the object store does not answer, or the sandbox has more files than spec.snapshot of its pool allows.",
	})
	Sleeps = counter(Row{
		Program: Allocator, Name: "berth_allocator_sleeps_total", Unit: "times",
		Help:  "Times a sandbox fell asleep.",
		Moves: "Compare it with the wakes: sandboxes that wake soon gain nothing from sleep.",
	})
	WakeSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_wake_seconds", Unit: "seconds",
		Buckets: []float64{.002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
		Help:    "Time from when a sandbox that is asleep was to wake, by a call or a request, until routers were sent its route.",
		Moves:   "The journal (berth_allocator_journal_commit_seconds) is slow, or the nodes have no CPU for the agents.",
	})
	TeamSandboxes = gauge(Row{
		Program: Allocator, Name: "berth_allocator_team_sandboxes", Unit: "sandboxes", Labels: []string{Team},
		Help:  "Sandboxes that are live or being claimed, by team, for teams with limits of their own in --team-limits: the first 100 by name.",
		Moves: "Near the limit of the team, claims are answered 429 quota_exceeded.",
	})
	TeamClaimsWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_team_claims_waiting", Unit: "claims", Labels: []string{Team},
		Help:  "Claims that wait for a pod, by team, for the same teams.",
		Moves: "As berth_allocator_pool_claims_waiting.",
	})
)

// Pools and pods.
var (
	PoolPods = gauge(Row{
		Program: Allocator, Name: "berth_allocator_pool_pods", Unit: "pods", Labels: []string{Pool, State},
		Help:  "Pods by pool and state: warm, pending, claimed or releasing. Pools after the first 100 by name are summed as _other.",
		Moves: "No warm ones and many pending ones: berth pools diagnose. Many releasing ones: berth fence ls.",
	})
	PoolClaimsWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_pool_claims_waiting", Unit: "claims", Labels: []string{Pool},
		Help:  "Claims that wait for a pod, by pool. Pools after the first 100 by name are summed as _other.",
		Moves: "Raise warm, maxWarm or maxPods of the pool, or see why it does not fill.",
	})
	PoolTargetPods = gauge(Row{
		Program: Allocator, Name: "berth_allocator_pool_target_pods", Unit: "pods", Labels: []string{Pool, Part},
		Help:  "Pods that a pool asks for, without regard to maxPods: warm (for claims to come: spec.warm, or more with spec.maxWarm), lacking (that waiting claims still need) and spare (created for claims that have gone, and not deleted yet). Pools after the first 100 by name are summed as _other.",
		Moves: "It follows the demand.",
	})
	PoolStartSeconds = gauge(Row{
		Program: Allocator, Name: "berth_allocator_pool_start_seconds", Unit: "seconds", Labels: []string{Pool},
		Help:  "Time from the creation of a pod until it was warm, that 9 of 10 of the last 32 pods of the pool did not exceed. No value: none was measured since this replica leads. Pools after the first 100 by name have none.",
		Moves: "Images are pulled, nodes are added, or a readiness probe passes late.",
	})
	PodFailures = counter(Row{
		Program: Allocator, Name: "berth_allocator_pod_failures_total", Unit: "pods", Labels: []string{Reason},
		Help:  "Idle pods that ended, were deleted by others or did not become ready in time, by reason (the reasons of a pool's condition Degraded).",
		Moves: "The condition Degraded of the pool has the words of the kubelet.",
	})
	Recycles = counter(Row{
		Program: Allocator, Name: "berth_allocator_recycles_total", Unit: "pods", Labels: []string{Outcome},
		Help:  "Pods of released sandboxes in pools with reuse Recycle, by outcome: Recycled, or why they were deleted instead (docs/recycle.md).",
		Moves: "Few are Recycled: recycle.md says what each outcome means.",
	})
	Repairs = counter(Row{
		Program: Allocator, Name: "berth_allocator_repairs_total", Unit: "repairs",
		Help:  "Repaired inconsistencies: pods in a state that no record explains, and changes that no watch reported.",
		Moves: `The log of the leader has a line "found: ..." for each. Another client changes pods, or the API server lost a watch.`,
	})
)

// Leader, routers and fences.
var (
	Leading = gauge(Row{
		Program: Allocator, Name: "berth_allocator_leading", Unit: "0 or 1",
		Help:  "1 while this replica leads.",
		Moves: "At no replica: the logs of the allocators say why none is elected.",
	})
	RoutersConnected = gauge(Row{
		Program: Allocator, Name: "berth_allocator_routers_connected", Unit: "routers",
		Help:  "Routers whose control stream is open.",
		Moves: "Fewer than gateways: the log of the router without a session says why.",
	})
	PongAgeSeconds = gauge(Row{
		Program: Allocator, Name: "berth_allocator_pong_age_seconds", Unit: "seconds",
		Help:  "Longest time since the last pong, or the join, of a connected router. Routers without pongs serve cached routes until --max-stale.",
		Moves: "The leader is not sure of its lease, or a router does not read.",
	})
	ControlMessages = counter(Row{
		Program: Allocator, Name: "berth_allocator_control_messages_total", Unit: "messages", Labels: []string{Direction, Kind},
		Help:  "Messages of control streams, by direction (in: from routers, out: to them) and kind, in the words of the protocol.",
		Moves: "Many Resolve: routers do not know what they are asked for, or clients guess IDs.",
	})
	ControlStreamsEnded = counter(Row{
		Program: Allocator, Name: "berth_allocator_control_streams_ended_total", Unit: "streams", Labels: []string{Code},
		Help:  "Control streams that ended after their Join, by gRPC code. OK: the router said Goodbye, or closed the stream.",
		Moves: "The log of the leader has each end with its error. ResourceExhausted: the router is too slow.",
	})
	DeclaredDead = counter(Row{
		Program: Allocator, Name: "berth_allocator_sessions_declared_dead_total", Unit: "routers",
		Help:  "Routers that an operator declared dead, so that no fence waits for them.",
		Moves: "The log has who did it and why.",
	})
	Fences = gauge(Row{
		Program: Allocator, Name: "berth_allocator_fences", Unit: "sandboxes",
		Help:  "Released sandboxes whose fence is not complete: a router may have the route, or the connect window has not passed.",
		Moves: "It follows the releases of the last 5 s. If it grows without them: berth fence ls.",
	})
	FenceOldestSeconds = gauge(Row{
		Program: Allocator, Name: "berth_allocator_fence_oldest_seconds", Unit: "seconds",
		Help:  "Time since the oldest fence that is not complete began. 0: there is none.",
		Moves: "Beyond a minute a router has vanished: berth fence ls says which, and what ends the wait.",
	})
	Quarantine = gauge(Row{
		Program: Allocator, Name: "berth_allocator_quarantine_seconds", Unit: "seconds",
		Help:  "Time until pods are handed out, because the journal was begun anew and routers of the earlier journal may send requests to any address. 0: pods are handed out.",
		Moves: "backup.md says what ends it earlier.",
	})
	ViolatedTerms = gauge(Row{
		Program: Allocator, Name: "berth_allocator_violated_terms", Unit: "terms",
		Help:  "Terms that ended because of a violated assertion in the 10 minutes before this leader's term. From 3 on this leader withholds what violates an assertion instead.",
		Moves: "A defect of Berth: report the line of the log with the dump.",
	})
	Withheld = gauge(Row{
		Program: Allocator, Name: "berth_allocator_withheld", Unit: "subjects", Labels: []string{Assertion},
		Help:  "Pods, sandboxes and sessions for which this leader withholds something that would violate an assertion, by assertion (docs/operations.md).",
		Moves: "A defect of Berth: operations.md says what to do for each assertion.",
	})
)

// Journal.
var (
	CommitSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_journal_commit_seconds", Unit: "seconds",
		Buckets: []float64{.001, .002, .003, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5},
		Help:    "Duration of writes to the journal. One is under way at a time, so the rate of the sum is the part of the time that is used.",
		Moves:   "The API server or etcd is slow.",
	})
	HeldBackSeconds = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_held_back_seconds_total", Unit: "seconds",
		Help:  "Time for which writes to the journal were held back by the bound on their bytes (--journal-bytes-per-second).",
		Moves: "Raise the bound if etcd has room, or have claims bring less.",
	})
	JournalWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_journal_waiting", Unit: "facts",
		Help:  "Facts that wait for the write to the journal that is under way.",
		Moves: "It grows while the journal is slower than claims and releases come.",
	})
	JournalBatches = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_batches_total", Unit: "batches",
		Help:  "Batches written to the journal.",
		Moves: "It follows claims and releases.",
	})
	JournalRecords = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_records_total", Unit: "records",
		Help:  "New records written to the journal.",
		Moves: "It follows claims and releases.",
	})
	JournalCarried = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_carried_total", Unit: "records",
		Help:  "Records carried into another batch because no Sandbox object showed them yet.",
		Moves: "Many: Sandbox objects are written slowly, see berth_allocator_projection_lag_seconds.",
	})
	JournalBytes = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_bytes_total", Unit: "bytes",
		Help:  "Compressed bytes of batches.",
		Moves: "etcd keeps each version until its compaction.",
	})
	JournalUnknown = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_unknown_total", Unit: "writes",
		Help:  "Writes whose outcome had to be read.",
		Moves: "Connections to the API server break, or it answers too late.",
	})
	JournalUnsettled = gauge(Row{
		Program: Allocator, Name: "berth_allocator_journal_unsettled_bytes", Unit: "bytes",
		Help:  "Bytes of records that no Sandbox object shows yet and that the journal must carry. New claims are refused above 32 MiB.",
		Moves: "As berth_allocator_projection_lag_seconds.",
	})
	SlotsRepaired = counter(Row{
		Program: Allocator, Name: "berth_allocator_journal_slots_repaired_total", Unit: "slots",
		Help:  "JournalSlot objects that another client deleted or wrote to, and that the leader restored.",
		Moves: "The audit log of the API server has the client. Take its rights away.",
	})
	JournalDamaged = gauge(Row{
		Program: Allocator, Name: "berth_allocator_journal_damaged", Unit: "0 or 1",
		Help:  "1 while JournalSlot objects are damaged and the leader cannot restore them: no other leader could open the journal.",
		Moves: "Keep the leader running, and see backup.md.",
	})
)

// Queues.
var (
	EventsWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_events_waiting", Unit: "events",
		Help:  "Events waiting for the core.",
		Moves: "The leader has too little CPU time.",
	})
	WritesWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_writes_waiting", Unit: "writes",
		Help:  "Writes that wait, or are retried, of pods and other objects.",
		Moves: "The API server is slow or refuses: the log has the errors.",
	})
	LabelsWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_labels_waiting", Unit: "pods",
		Help:  "Pods with unwritten labels.",
		Moves: "As berth_allocator_writes_waiting.",
	})
	HooksWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_hooks_waiting", Unit: "hooks",
		Help:  "postStart hooks waiting for earlier hooks of their pool.",
		Moves: "Hooks are slower than claims come.",
	})
	ProjectionWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_projection_waiting", Unit: "objects",
		Help:  "Sandbox objects waiting to be written.",
		Moves: "As berth_allocator_projection_lag_seconds.",
	})
	ProjectionRefused = gauge(Row{
		Program: Allocator, Name: "berth_allocator_projection_refused", Unit: "objects",
		Help:  "Sandbox objects whose write the API server rejects, for example because of a webhook. Up to 100 do not count for the lag.",
		Moves: "The log has the answer of the API server. Change the webhook or the policy.",
	})
	ProjectionLagSeconds = gauge(Row{
		Program: Allocator, Name: "berth_allocator_projection_lag_seconds", Unit: "seconds",
		Help:  "Age of the oldest waiting Sandbox object. New claims are refused above 30 s.",
		Moves: "The API server is slow, or rejects the objects.",
	})
)

// Events and webhooks.
var (
	EventLogEvents = gauge(Row{
		Program: Allocator, Name: "berth_allocator_event_log_events", Unit: "events",
		Help:  "Events in the log of events.",
		Moves: "It has 100,000 events or those of 7 days.",
	})
	EventLogBytes = gauge(Row{
		Program: Allocator, Name: "berth_allocator_event_log_bytes", Unit: "bytes",
		Help:  "Compressed bytes of the log of events, 16 MiB at most.",
		Moves: "At the bound the oldest events go earlier.",
	})
	EventLogWaiting = gauge(Row{
		Program: Allocator, Name: "berth_allocator_event_log_waiting", Unit: "states",
		Help:  "States of sandboxes that wait for the log of events. From 20,000 on the oldest are dropped.",
		Moves: "The API server is slow or refuses: the log has the errors.",
	})
	EventLogWritten = counter(Row{
		Program: Allocator, Name: "berth_allocator_event_log_written_bytes_total", Unit: "bytes",
		Help:  "Compressed bytes that were written to the log of events. A segment is written again as it fills.",
		Moves: "It follows claims and releases.",
	})
	EventLogFailures = counter(Row{
		Program: Allocator, Name: "berth_allocator_event_log_failures_total", Unit: "writes",
		Help:  "Writes and deletions of the log of events that failed and are tried again.",
		Moves: "The log has the errors.",
	})
	EventLogDropped = counter(Row{
		Program: Allocator, Name: "berth_allocator_event_log_dropped_total", Unit: "states",
		Help:  "States of sandboxes whose events were dropped, because the log of events could not be written for too long.",
		Moves: "Those events are lost. The log has why they could not be written.",
	})
	Webhooks = gauge(Row{
		Program: Allocator, Name: "berth_allocator_webhooks", Unit: "webhooks",
		Help:  "Webhooks of all teams.",
		Moves: "Teams have made or deleted some.",
	})
	WebhooksLocked = gauge(Row{
		Program: Allocator, Name: "berth_allocator_webhooks_locked", Unit: "webhooks",
		Help:  "Webhooks whose secret was sealed with another key of the cluster. They send nothing.",
		Moves: "Their teams set the secrets again.",
	})
	WebhookLag = gauge(Row{
		Program: Allocator, Name: "berth_allocator_webhook_lag_events", Unit: "events",
		Help:  "Events that the webhook that is furthest behind has not got, of all types and teams.",
		Moves: "Its receiver fails or is slow: berth webhooks. At 100,000 it loses some.",
	})
	WebhookDeliveries = counter(Row{
		Program: Allocator, Name: "berth_allocator_webhook_deliveries_total", Unit: "events",
		Help:  "Events delivered to webhooks.",
		Moves: "It follows claims and releases.",
	})
	WebhookFailures = counter(Row{
		Program: Allocator, Name: "berth_allocator_webhook_failures_total", Unit: "attempts",
		Help:  "Attempts to deliver an event to a webhook that failed.",
		Moves: "berth webhooks deliveries shows the answers of the receiver.",
	})
	WebhookGivenUp = counter(Row{
		Program: Allocator, Name: "berth_allocator_webhook_given_up_total", Unit: "events",
		Help:  "Events that a webhook has not got, because it failed for them and not for others.",
		Moves: "The receiver refuses those events.",
	})
	WebhookGaps = counter(Row{
		Program: Allocator, Name: "berth_allocator_webhook_gaps_total", Unit: "times",
		Help:  "Times a webhook fell behind the log of events.",
		Moves: "It has lost the events of the gap. GET /events/sandboxes has those of the last 7 days.",
	})
)

// HTTP API.
var (
	APICalls = counter(Row{
		Program: Allocator, Name: "berth_allocator_api_calls_total", Unit: "calls", Labels: []string{Operation, Code},
		Help:  "Calls of the HTTP API that clients made to this replica, by operation of the OpenAPI document (other: none) and class of the status code (none: the client left before the answer). Calls that other replicas forward do not count.",
		Moves: "5xx: the reason in the answer (docs/reference/errors.md) and the log of the leader. 4xx: the audit log has the keys.",
	})
	APICallSeconds = histogram(Row{
		Program: Allocator, Name: "berth_allocator_api_call_seconds", Unit: "seconds", Labels: []string{Operation},
		Buckets: []float64{.005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		Help:    "Time from the header of such a call to the end of its answer, by operation. The waits for a pod and for a leader are in it. Streams of events do not count.",
		Moves:   "Of claims: see berth_allocator_pool_claim_wait_seconds. Of reads: the leader has too little CPU time.",
	})
	APISlotsUsed = gauge(Row{
		Program: Allocator, Name: "berth_allocator_api_slots_used", Unit: "calls", Labels: []string{Class},
		Help:  "Calls in progress at this replica, by class: claims (4,000 at most, or more with --claim-queue), others (1,000), sleeps (1,000), wakes (1,000), snapshots (64), slow (100: they ask a kubelet or the API server) and streams (of events).",
		Moves: "Near the bound further calls are answered 503 overloaded.",
	})
	RateLimited = counter(Row{
		Program: Allocator, Name: "berth_allocator_calls_rate_limited_total", Unit: "calls",
		Help:  "Calls of the HTTP API that this replica refused because of --key-calls-per-second. The log names the keys.",
		Moves: "A client calls in a loop, or the limit is too low.",
	})
)
