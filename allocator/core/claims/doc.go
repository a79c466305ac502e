// Package claims gives claims their pods and sandboxes, and their callers the answers. It is the only owner of that. It
// does no I/O and starts no goroutine. One goroutine uses it.
//
// # States
//
// A claim is
//
//	waiting      in the line of its pool
//	filling      the same, and it collects pods for its batch; one of a pool at a time
//	bound        it has its pods, and its facts are on their way into the journal
//	configuring  they are durable, and the agents of its pods are being configured
//	granted      it has its sandboxes; its callers wait until those run
//	refused      answered, and forgotten
//
//	waiting --> filling --> bound --> configuring --> granted
//	   ^           |          |            |
//	   +-----------+----------+------------+   a pod was lost, or an agent was not configured
//
// A claim can be called off until its facts are handed to the writer. Its pods then return to their places in the queue.
// After that it goes on, also when all of its callers have left.
//
// The parts below this package decide without the rest:
//
//	core/lines  the claims that wait, whose turn it is, and the idempotency keys
//	core/teams  whether the limits of a team allow a claim
//
// # Idempotency keys
//
// [Ledger] has the keys. A key holds for its claim until that is granted or refused, then for each sandbox of the grant
// until KeepKeys after its release. Recovered finds the latter on record. A sandbox that its claim does not get loses
// the key: [sandboxes.Rejected] takes it off the record, and unanswered off the Ledger too if the claim is of an earlier
// term. Package sandboxes keeps the record and the object of a sandbox whose key holds.
//
// # Agents
//
// A pod with an agent is handed out in three steps: the claim is durable, then the agent is configured for the sandbox,
// then the claim is granted. Between the first two the journal has the sandbox, and there is no Sandbox object. That an
// agent is configured is no fact. So the next leader asks the agents of the sandboxes that the journal has as
// SandboxFact.Ungranted and that have no object. It sends their routes to no router before.
//
// The next leader does not know whether such a claim was answered. Only one answer proves that it was not: that of an
// agent that is not configured, in a pod whose containers have not restarted. Any other end of a sandbox ends that
// sandbox alone, and its key holds as that of every sandbox that was claimed. Not covered: an agent that restarts while
// the leader changes, before the restart is observed.
//
// # Stopped sandboxes
//
// A stopped sandbox gets its next pod by a claim of its own: see revive.go. Its fact is Ungranted too. If the agent is not
// configured, or the pod cannot serve, the sandbox is stopped again, which is durable before the claim gets another pod.
// The next leader asks the agent, and does the same.
//
// # Guarantees
//
//   - Claims of a pool and a team are served in the order in which they came. Teams take turns. A claim whose pod ends
//     before the answer keeps its place, and gets another pod under an ID that was never used.
//   - A batch gets all of its sandboxes in one Write, or at least as many as it asked for, or none. Two batches of a pool
//     never wait for each other.
//   - A team never has more sandboxes than its limit at the time of the claim: those that are not released, and those
//     that its claims ask for. Both are counted from the tables.
//   - Every claim is answered once for each of its callers, unless the caller has gone. An answer with a sandbox follows
//     its durable fact, and the configuration of its agent.
//   - Claims of one team with one idempotency key are one claim while the sandbox lives and for as long after its end as
//     the caller keeps its key, also under the next leader.
//   - A claim tries the agents of MaxFailures pods.
//
// # What breaks them
//
// A token that is used twice. A pod that changes and is not given to PodChanged.
package claims
