// Package freeze stops and continues the processes of a sandbox, all but the agent.
//
// # States
//
//	awake   the processes run
//	frozen  they are stopped. The agent continues them by itself after [Options.Hold], because the leader that has
//	        ordered the freeze may have died
//	kept    they are stopped until an order or a signal to the agent
//
// [Freezer.Obey] carries out the orders of the allocator:
//
//	freeze  awake, frozen or kept -> frozen. All processes are looked at again
//	keep    frozen -> kept. Awake: they are stopped first, because the agent has continued them meanwhile
//	thaw    frozen or kept -> awake
//
// [Freezer.Hold] has them stay stopped while their files are archived. The time of Options.Hold begins anew when that
// ends.
//
// [Freezer.Wake] and [Freezer.End] are for signals that the agent gets. After End nothing is stopped any more, so that
// the sandbox can use its grace period. The agent calls neither when it is told to end while the sandbox is being
// stopped, and its files are archived.
//
// # Which processes
//
// The descendants of the agent, which is the parent of orphans (package children). Where the agent is process 1, as
// in a container, also those whose parent is outside of its PID namespace, such as those of kubectl exec.
//
// # Guarantees
//
//   - Frozen or kept means that two passes over /proc have found the same processes, and that no thread of them ran:
//     each is stopped (T), traced (t), or waits in vfork(2) for a child that is stopped, with SIGSTOP pending. The
//     agent reaps no process meanwhile, so one that starts another one and ends is seen. In a container no process was
//     missed either that others reap.
//   - Processes are stopped by levels. All of one level are stopped before their children get the signal, and
//     children are continued before their parents. So no shell sees that its job was stopped.
//   - A process that was stopped before the freeze stays stopped after the thaw.
//   - After an error all processes run as before. The error names the process. A freeze takes [Options.Bound] at most.
//     A process that waits in the kernel for longer, such as for a disk, makes it fail.
//   - An order that is older than the newest one that was taken is refused with [ErrSuperseded]. The same order again
//     is answered as before if what it asks for still holds, and is else carried out again.
//   - The context of a [Freezer.Hold] ends before a process runs. Nothing that continues the processes waits for its
//     release.
//   - The agent starts no process from the beginning of a freeze to the end of the thaw. [Freezer.AfterFunc] does not
//     count that time.
//
// # What breaks them
//
// A process that kubectl exec starts later runs, and can continue others. So does the kernel: when it kills a process
// for want of memory, it continues the jobs that have thereby lost their shell. A number of a process that is used
// again between two reads of /proc is noticed, but not between a read and its signal. A /proc that is mounted with
// hidepid hides processes of others from an agent that is not root.
//
// A process that waits in the kernel in the middle of fork(2) is taken for one that waits in vfork(2) if its newest
// child has exactly as much memory. The child that it then starts runs until the thaw.
package freeze
