package main

import (
	"context"

	"github.com/berth-sandbox/berth/envoy"
)

type envoyDrainCommand struct {
	AdminSocket string `default:"/run/berth/envoy-admin.sock" help:"Envoy's admin socket."`
}

// Run implements the command.
func (c *envoyDrainCommand) Run(ctx context.Context) error {
	return envoy.Drain(ctx, envoy.AdminClient(c.AdminSocket))
}
