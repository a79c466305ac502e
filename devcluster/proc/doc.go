// Package proc starts child processes that cannot outlive the process that
// started them, however that process ends.
//
// Every child leads a process group of its own. Three things end a group:
//
//   - [Process.Stop]: SIGTERM to the group, a grace period, SIGKILL to the group.
//   - The death of the child itself: what it left behind in its group is
//     killed, as a container's other processes die with its PID 1.
//   - The death of this process, by whatever cause. The kernel kills the direct
//     children (PR_SET_PDEATHSIG), and a guard, a small shell process that
//     holds the read end of a pipe of ours, kills the groups when that pipe
//     reports end of file. The guard sits in a session of its own, so a
//     terminal's Ctrl-C and a kill of our own process group do not reach it.
//
// What breaks it: a child that leaves its process group (setsid) escapes the
// group signals; someone who kills the guard and then this process, both with
// SIGKILL, leaves grandchildren behind. Linux only.
package proc
