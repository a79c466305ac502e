// Package harness is what the tests and benchmarks of a whole Berth share: the cluster and
// the processes on it (Start), calls and requests that go into a history, the faults that
// routers and allocators are subjected to, and the evidence that a failed test leaves. It
// is linked by tests only.
//
// A test begins with NewRun, which draws and prints the seed of all that is random and
// opens the history. Start then starts a cluster and Berth on it, and ends both when the
// test is over. Judge judges the history at the end.
//
// Package network holds the relays that cut connections, package history (e2e/history) the
// format of histories and their judges.
package harness
