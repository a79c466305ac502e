package main

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/berth-sandbox/berth/envoy"
)

type envoyConfigCommand struct {
	Listen         string        `default:"0.0.0.0:8080" help:"Where clients connect, ip:port."`
	RouterSocket   string        `default:"/run/berth/router.sock" help:"The router's unix socket."`
	AdminSocket    string        `default:"/run/berth/envoy-admin.sock" help:"Envoy's own admin socket."`
	AccessLogFlush time.Duration `default:"5s" help:"How often an open request is reported to the router, at least 1s."`
	MaxConnections uint32        `default:"100000" help:"Bound on connections and requests of each cluster, at least 1."`
}

// Run implements the command.
func (c *envoyConfigCommand) Run(o *output) error {
	listen, err := netip.ParseAddrPort(c.Listen)
	if err != nil {
		return fmt.Errorf("--listen %q: must be ip:port", c.Listen)
	}
	raw, err := envoy.YAML(envoy.Settings{
		Listen: listen, RouterSocket: c.RouterSocket, AdminSocket: c.AdminSocket,
		AccessLogFlush: c.AccessLogFlush, MaxConnections: c.MaxConnections,
	})
	if err != nil {
		return err
	}
	_, err = o.out.Write(raw)
	return err
}
