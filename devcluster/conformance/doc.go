// Package conformance is a table of the kubelet behaviours that Berth relies on. The
// same table runs on the process node and on a real kubelet. A behaviour that only
// one of them has would make tests on the process node worthless.
//
// A behaviour is judged by the versions of the pod object that a watch shows, in
// their order. With Options.Client it is also judged by the answers at the pod's
// address. Times are bounds that a slow machine cannot break: "not before", or "long
// before". The table asks for a version only if it lasts for seconds, or if the next
// step takes a runtime longer than a write takes the API server. A kubelet writes
// the latest status once a second, so a shorter state may never be visible.
//
// The table holds readiness (httpGet), restarts and the crash back-off, the preStop
// sleep, the grace period, SIGTERM and SIGKILL, deletion, eviction through the API,
// and addresses. It leaves out the fields that a process node refuses.
//
// RunInCluster makes a way to pods through the API server.
//
// Pods run the demo-sandbox binary by its bare name. A process node finds it on its
// path; a real node finds it in Options.Image, which needs no other file.
package conformance
