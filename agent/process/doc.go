// Package process runs the commands and terminals of a sandbox, for E2B's SDKs: the service
// process.Process.
//
// # States of a process
//
//	running   it is in List, and calls can select it by its number or its tag. Of several processes with
//	          one tag, the one that was started last is selected
//	draining  it has ended, and its output is read on: until all writers have closed it, or for a second.
//	          Then what the pipe holds is read, and End is sent with its status
//	ended     calls that select it are answered with not_found. What its descendants still write is read
//	          and dropped, so that a server that was started with & neither blocks nor gets SIGPIPE
//
// A process is the leader of a session and of a process group of its own. Signals go to that group.
// SIGKILL of a process with a terminal goes to all groups of its session.
//
// # Guarantees
//
//   - A process starts with the environment of the agent, then HOME, USER, LOGNAME and PATH of its user,
//     then the variables of the sandbox's configuration, then those of the call. Later ones win.
//   - A stream that ends early changes nothing for the process. Connect-Timeout-Ms of Start does: when it
//     has passed, the process is killed with SIGKILL, whether its stream is still there or not.
//   - A stream carries start, then output in the order in which it was read, then end. A keepalive comes
//     when nothing else was sent for the time of the header Keepalive-Ping-Interval (seconds, 90).
//   - Each stream of a process gets all output from its beginning on. A stream that takes it slowly slows
//     the process: nothing is dropped, and no more than one read of 32 KiB waits for the streams.
//   - A process without a stream never waits. The newest 64 KiB that no stream has taken are kept, and the
//     next stream gets them first.
//   - Input is written in the order of the calls. A call returns when the pipe or terminal has taken all of
//     it, so that a process that does not read slows its writers.
//
// So a process costs at most 64 KiB for its output beside its goroutines, however much it writes.
//
// While the sandbox is asleep (package freeze) nothing is started, and the times above stand still.
//
// # Errors
//
//	not_found            the process has ended or was never there
//	invalid_argument     the command or its directory does not exist, or a field is wrong; the text says which
//	permission_denied    the user may not execute the command, or not enter the directory
//	unauthenticated      the user is unknown, or the agent may not act as it
//	failed_precondition  input for a closed or missing standard input, a size for a process without terminal
//	resource_exhausted   the pod has no process or descriptor left, or a message is larger than 16 MiB
//	deadline_exceeded    Connect-Timeout-Ms has passed
//	unavailable          the sandbox is asleep, or ends
//
// # What breaks them
//
// A descendant that makes a session of its own (setsid, daemons) survives signals. A stream whose client
// has vanished without closing the connection slows the process until TCP gives up.
package process
