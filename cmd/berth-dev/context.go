package main

import (
	"errors"

	"github.com/berth-sandbox/berth/cmd/internal/contexts"
)

// publish lets the command berth find the environment under a name until withdraw is called.
func (e *environment) publish(name string) (withdraw func() error, err error) {
	if len(e.stack.Allocators) == 0 || len(e.stack.Gateways) == 0 {
		return nil, errors.New("the environment has no allocator or no gateway")
	}
	return contexts.Publish(name, contexts.Context{
		APIURL: e.stack.Allocators[0].API, Gateway: e.stack.Gateways[0].Addr.String(),
		Kubeconfig: e.cluster.Kubeconfig(), Namespace: namespace, CAFile: e.stack.CAFile,
	})
}
