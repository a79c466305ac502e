// Package podnet reaches pods from outside a cluster through the API server alone, so
// that the same tests run on any kubeconfig.
//
// Dial connects to a port of a pod, named by namespace and name, through the
// portforward subresource. It also reaches ports on the pod's loopback. Relay
// connects to any address inside the cluster, through a pod that it starts.
//
// Every connection is also a connection to the API server. That suits tests and
// inspection. It is slow under load.
package podnet
