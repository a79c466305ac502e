// Package sandboxes keeps the life of every sandbox, from the claim that is durable to the record that is forgotten. It
// is the only owner of that. It does no I/O and starts no goroutine. One goroutine uses it.
//
// # States
//
//	bound      its claim is durable and not granted yet; no caller knows its ID
//	starting   granted; the pool's postStart hook has not answered yet
//	running    routers may send requests to it. From Close on they do not, and it is about to fall asleep
//	falling    durable before its processes are stopped: they run, or are stopped
//	archiving  falling, and its processes are stopped while its files are archived
//	asleep     its processes are stopped
//	waking     durable before its processes are continued: they are stopped, or run
//	stopped    its files are archived, and no pod serves it. Its former pod is deleted
//	ending     its release is on its way into the journal
//	released   no new request may be admitted; its fence is under way, or its pod still exists
//	ended      its pod is gone, and no router can send a request to its address
//
//	        Grant            hook              End        durable            TryEnd           Forget
//	bound --------> starting -----> running -------> ending --------> released -------> ended -------> gone
//	     \--------------------------^  \ a pool without hook
//
//	running --Close, FallAsleep--> falling --Frozen--> asleep --Wake--> waking --Thawed--> running
//	       <--------Open--------           --------it could not--------^
//	                                       --Frozen--> archiving --ArchiveWritten--> waking
//
//	asleep --Stop, ArchiveWritten--> stopped --Rebind, Revive--> starting --hook--> running
//	                                         <-Unrevive, or the start fails-/
//
// A sandbox that is stopped and is to run again is bound to its next pod by a claim: see package claims. Each pod after a
// stop has a higher incarnation of the sandbox. stop.go has the reasons.
//
// A sandbox is archiving only if it was closed for that ([ForArchive]). One that is asleep stays so while its files are
// archived, and its wake ends that.
//
// End ends a sandbox in each of these states. docs/design/sleep.md has the reasons for them.
//
// [Table.End] is the only way to end a sandbox. Its first call counts. A sandbox that is bound ends when its claim is
// decided, because those of one claim must end in one Write, and how it ends is decided then.
//
// # How a sandbox ends
//
// A [How] says what holds from End until the release is durable:
//
//	Serving    routers keep its route; requests reach it
//	Idle       a verdict has found it idle; no router gets its route any more, and requests wait for the release
//	Lost       its pod cannot serve it any more; no router gets its route any more
//	Rejected   as Lost, and its claim does not get it: the key of the claim does not stand for it
//
// A later call of End can only take the route away. What the caller of its claim hears follows from its phase, its reason
// and whether it ran, and for a batch from how many are left: answer and answerBatch of package claims.
//
// # Guarantees
//
//   - A sandbox has no route from Close until its agent has obeyed the order to continue its processes. The order has
//     the revision of the fact that it follows from. An answer to another order changes nothing.
//   - A sandbox is stopped only when its archive is written, and while no router has its route. It keeps the name of the
//     archive until the next stop is durable. A start after a stop that does not succeed ends no sandbox: it is stopped
//     again. No router has ever had the route to the pod.
//   - One that is asleep and may be stopped, or is about to be, is stopped when its pod is being deleted. It does not wake
//     there, and ends with the pod if it is not stopped before.
//   - A call to sleep, to stop, to wake or to archive is answered once, when that is durable and done, or is given up.
//   - An archive alone moves no end: a sandbox wakes from it with the end that it had.
//   - Of the sandboxes of a pool that are asleep beyond its bound those of the team with the most are stopped, the one
//     that has slept for longest first. A stop that fails has no other one stopped before it is tried again.
//   - Of the places to wake for requests one team has half at most, and a team that has none finds one while any is free.
//   - A sandbox that End was called for never starts or runs again. Its release is a fact, which is committed once.
//   - SandboxCreated, SandboxReady and SandboxReleased come at most once for a sandbox.
//   - The object of a sandbox is written only when its claim was granted, or with its release. It shows the latest
//     revision, or a write of that is under way.
//   - The record stays until the sandbox has ended, its object shows that, and its key holds no longer.
//   - A step of the wall clock ends no sandbox, and keeps none: end times are on the boot clock within a term.
//   - The sandboxes of a batch are known by the batch as long as one of them is on record.
//
// What concerns routers and the callers of claims it lists, and the caller takes it from [step.Notices] before the step
// ends.
//
// # What breaks them
//
// FallAsleep of a sandbox that is still reached. TryEnd of a sandbox whose fence is not complete in the ledger of fences. A fact that is not of the outbox.
package sandboxes
