// Package tools holds modules that pin what Berth builds but does not import.
package tools

import _ "embed"

// KubeMod and KubeSum are the go.mod and go.sum of a module from which
// `go build -mod=readonly` builds k8s.io/kubernetes/cmd/kube-apiserver and
// go.etcd.io/etcd/server/v3, to the version and hash of every dependency.
var (
	//go:embed kube.mod
	KubeMod []byte
	//go:embed kube.sum
	KubeSum []byte
)
