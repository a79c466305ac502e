// Package podnet reaches pods from outside a cluster with nothing but its API
// server, so that the same tests run on any kubeconfig.
//
// Dial connects to a port of one pod that is known by name, through the
// portforward subresource: also to what listens only on the pod's loopback.
// Relay connects to any address inside the cluster, by way of a pod of its own.
//
// Every connection is a connection to the API server too. That is right for
// tests and for looking; it is slow for load.
package podnet
