// Package conformance is one table of what a kubelet does with pods, as far as
// Berth relies on it. It runs unchanged on the process node and on a real
// kubelet: what holds on the one must hold on the other, or tests on the process
// node prove nothing.
//
// A behaviour is judged by the versions of the pod object that a watch showed,
// in their order, and where Options.Dial is given by what answers at the pod's
// address. Times are only ever bounds that a slow machine cannot break: not
// before, or long before. A version is asked for only if it holds for seconds, or
// if what follows it takes a runtime longer than a write takes the API server:
// a kubelet looks once a second and writes the latest only, so on a busy machine
// what did not last is never seen.
//
// Run needs a way to pods, RunInCluster makes one through the API server.
//
// Pods run the demo-sandbox binary by its bare name: found on the node's path on
// the process node, in Options.Image on a real one, which needs nothing else in
// it.
package conformance
