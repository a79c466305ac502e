// Package proc starts child processes that cannot outlive the process that started
// them, however that process ends.
//
// Every child leads a process group of its own. Three events end a group:
//
//   - [Process.Stop]: SIGTERM to the group, a grace period, SIGKILL to the group.
//   - The death of the child. The other processes of its group are killed, as a
//     container's processes die with its PID 1.
//   - The death of this process, by whatever cause. The kernel kills the direct
//     children (PR_SET_PDEATHSIG). A guard, a small shell process that holds the read
//     end of a pipe of this process, kills the groups when that pipe reports end of
//     file. The guard sits in a session of its own, so neither a terminal's Ctrl-C
//     nor a kill of this process's group reaches it.
//
// Limits: a child that leaves its process group (setsid) escapes the group signals.
// A SIGKILL to the guard and then to this process leaves grandchildren behind. Linux
// only.
package proc
