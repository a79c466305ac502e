// Package devcluster runs a real kube-apiserver and etcd on loopback, for tests and
// the demo. Its process nodes run pods as local processes. Package hollow adds nodes
// for thousands of pods without processes. Package stack runs Berth on the cluster.
//
// # Guarantees
//
//   - No server, pod or temporary directory outlives the process that has started a
//     cluster, however that process ends (package proc).
//   - Clusters run side by side on one machine. Each has an address block of its own
//     in 127.64.0.0/10 for its servers and its pods, so no two clusters want the
//     same port.
//   - A program in the cache is complete. It is built once, however many processes
//     want it at the same time.
//   - Every wait ends: when its component dies, when the context ends, or at a
//     limit. The error holds the end of the component's log.
//
// # Limits
//
// A devcluster has no controller manager. Owner references do not cause garbage
// collection, Services get no endpoints, namespaces no service account, and the
// deletion of a namespace does not finish.
//
// Linux only.
//
// # Why not envtest
//
// controller-runtime's envtest starts etcd and kube-apiserver too, and could replace
// the files that do so here. It lacks what Berth's tests need beside that:
//
//   - It cannot kill, pause and restart the API server on the same address and data.
//     The tests of leader changes and of lost connections do that.
//   - It ends its servers only when the test calls Stop. They outlive a test that is
//     killed.
//   - It picks free ports on 127.0.0.1. Berth needs an address per pod, and the
//     address blocks of clusters that run side by side must not overlap.
//   - It downloads the servers. devcluster builds them from Go modules that are
//     pinned by hash, so a Go module proxy is the only source it needs.
//
// # Why not kube-scheduler
//
// It would add about a minute to the first build, and one process to each of the many
// clusters that a test run starts. Package nodes has a scheduler that does what Berth
// needs. The tests on a kind cluster run with the real kube-scheduler.
//
// # Programs
//
// etcd, kube-apiserver and Envoy come from KUBEBUILDER_ASSETS and ENVOY_BIN if these are
// set. Else they are built or downloaded into the cache (BERTH_CACHE) on first use.
package devcluster
