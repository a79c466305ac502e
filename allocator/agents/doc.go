// Package agents configures the agents in pods that have become sandboxes, has them stop and continue the processes of
// sandboxes that sleep, and has them archive and restore files. The format and the trust between allocator and agent are those of package initbox.
//
// A Caller asks an agent for its key when the pod can be claimed ([Caller.Expect]), so that the claim need not. The
// key is a hint. An agent that has started again does not open a box for its earlier key, and is asked anew.
//
// # Guarantees
//
//   - An agent is configured only while this process holds the lease. Success is reported only if it
//     held the lease when the agent had answered: the next leader asks the agent later than that, so it
//     finds it configured.
//   - An order ([Caller.Freeze], [Caller.Thaw]) is sent only while this process holds the lease. It can arrive later: the
//     agent refuses it then, if it has obeyed one of a later leader.
//   - The methods of [Caller] return when their context ends, whatever the pod sends or does not send.
//     They read at most 8 KiB of an answer and follow no redirect. An agent that sends nothing for 30 s ends them.
//   - Of an archive they read little more than MaxBytes. [Caller.Archive] and [Caller.Restore] succeed only if the agent
//     says that all was archived or restored.
//   - The archive of a stopped sandbox has the values of its claim only sealed. Every replica with the cluster's key can
//     have another agent open them, for that sandbox and from that archive only. Nothing of it is remembered.
//   - No error has a value of a claim in it, nor what a pod has answered: a pod could send back what it
//     was given. Two numbers of a refusal to freeze are the exception.
//     A [Summary] has texts that the sandbox can choose, of a bounded length.
//
// # What breaks them
//
// A dial function that ignores its context, and a reader or writer of an archive that does.
package agents
