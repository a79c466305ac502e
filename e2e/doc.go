// Package e2e tests Berth from the outside: real etcd, kube-apiserver and
// Envoy, Berth's own programs as processes, pods that are local processes.
//
// Tests that send many requests write down what they sent and what came back
// (history), and judge it afterwards (check).
package e2e
