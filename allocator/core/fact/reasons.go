package fact

// Because returns a Cause without details.
func Because(reason string) Cause { return Cause{Reason: reason} }

// Reasons for which a sandbox is released. The first one that is observed counts.
const (
	ReasonKilled              = "Killed"
	ReasonCanceled            = "Canceled"
	ReasonIdleTimeout         = "IdleTimeout"
	ReasonEndTime             = "EndTime"
	ReasonMaxLifetime         = "MaxLifetime"
	ReasonStartupTimeout      = "StartupTimeout"
	ReasonStartFailed         = "StartFailed"
	ReasonConfigurationFailed = "ConfigurationFailed"
	ReasonBatchIncomplete     = "BatchIncomplete"
	ReasonWakeFailed          = "WakeFailed"
	ReasonUnexpectedRestart   = "UnexpectedRestart"
	ReasonOOMKilled           = "OOMKilled"
	ReasonFailed              = "Failed"
	ReasonCompleted           = "Completed"
	ReasonEvicted             = "Evicted"
	ReasonNodeLost            = "NodeLost"
	ReasonPodDeleted          = "PodDeleted"
	ReasonPoolDeleted         = "PoolDeleted"
	ReasonObjectDeleted       = "ObjectDeleted"
	ReasonPodMoved            = "PodMoved"
	ReasonAddressShared       = "AddressShared"
	ReasonDuplicate           = "Duplicate"
)

// LogReasons are those of sandboxes that ended by themselves or failed, while their nodes could be asked for a
// log.
var LogReasons = []string{
	ReasonStartupTimeout, ReasonStartFailed, ReasonConfigurationFailed, ReasonUnexpectedRestart, ReasonOOMKilled, ReasonFailed, ReasonCompleted, ReasonEvicted,
}

// Reasons explains all reasons, for docs/reference/reasons.md.
var Reasons = []struct{ Reason, When, Next string }{
	{ReasonKilled, "a call released it: `DELETE /sandboxes/{id}`, an SDK's `kill()`, `berth kill`", "-"},
	{ReasonCanceled, "the caller of the claim had gone before the claim was answered", "give the caller more time, or send an `Idempotency-Key` and repeat the claim"},
	{ReasonIdleTimeout, "it was not used for its idle timeout", "claim with a longer `idleTimeout`, or call keepalive: [lifetimes](../lifetimes.md)"},
	{ReasonEndTime, "the end came that the claim or a later call had set", "move the end in time: `POST /sandboxes/{id}/timeout`"},
	{ReasonMaxLifetime, "it reached `maxLifetimeSeconds` of its pool", "raise the bound of the pool"},
	{ReasonStartupTimeout, "the `postStart` hook did not succeed within `startupTimeoutSeconds` of its pool", "read the log of the pod's hook; raise the bound"},
	{ReasonStartFailed, "the `postStart` hook failed", "the message has the hook's status or the error"},
	{ReasonConfigurationFailed, "the agent in its pod was not configured, so the claim got another pod or was refused", "the message has the agent's status or the error; look at the agent's log"},
	{ReasonBatchIncomplete, "too few sandboxes of its batch started", "claim fewer, or allow fewer with `atLeast`"},
	{ReasonWakeFailed, "it was asleep, and its agent did not continue its processes", "the message has the agent's status or the error; look at the agent's log"},
	{ReasonUnexpectedRestart, "a container of its pod ended and was started again, which loses the sandbox's state", "the message names the container and its exit code. `onRestart: Keep` keeps such sandboxes, unless the pool has an agent"},
	{ReasonOOMKilled, "the kernel killed a container of its pod for using more memory than its limit", "raise the memory limit of the pool's template"},
	{ReasonFailed, "its pod failed: a container ended with another exit code than 0 and is not started again, or the kubelet gave the pod up", "the exit code and the message say how"},
	{ReasonCompleted, "all containers of its pod ended with exit code 0", "the containers of a pool must not end by themselves"},
	{ReasonEvicted, "Kubernetes removed its pod: a drain or another call of the eviction API, preemption, a node short of memory or disk, the shutdown of a node, a NoExecute taint", "the message names which. A PodDisruptionBudget limits drains"},
	{ReasonNodeLost, "Kubernetes removed its pod because the node did not answer, was not ready, or does not exist any more", "look at the node"},
	{ReasonPodDeleted, "its pod was deleted, and not by Berth", "look at the audit log of the API server; release sandboxes with `berth kill`"},
	{ReasonPoolDeleted, "its pool was deleted", "-"},
	{ReasonObjectDeleted, "its `Sandbox` object was deleted", "-"},
	{ReasonPodMoved, "its pod got another address", "look at the node and the network plugin"},
	{ReasonAddressShared, "another pod was seen at its address. With a message: requests of an earlier sandbox could still reach its address when it was claimed, so the claim got another pod", "without a message: look at the node and the network plugin"},
	{ReasonDuplicate, "the journal and its `Sandbox` object named different pods", "something other than Berth wrote to one of them: [recovery](../design/recovery.md)"},
}
