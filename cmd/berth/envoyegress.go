package main

import (
	"errors"
	"fmt"
	"net/netip"

	"github.com/berth-sandbox/berth/envoy"
)

type egressEnvoyCommand struct {
	Listen         string `default:"0.0.0.0:3128" help:"Where sandboxes connect, ip:port."`
	HealthListen   string `help:"Where probes and Prometheus find /ready and /stats/prometheus, ip:port. Empty: nowhere."`
	RouterSocket   string `default:"/run/berth/router.sock" help:"The router's unix socket."`
	AdminSocket    string `default:"/run/berth/envoy-admin.sock" help:"Envoy's own admin socket: what the router's --envoy-admin names."`
	CAFile         string `name:"ca-file" default:"/etc/ssl/certs/ca-certificates.crt" help:"File with the certificates of the authorities, in PEM form, by which origins with TLS are verified. Envoy reads it when it starts."`
	MaxHeap        uint64 `placeholder:"BYTES" help:"Bytes of memory near which Envoy refuses requests, at least 67108864; less than the container's limit. 0: no bound."`
	MaxConnections uint32 `default:"100000" placeholder:"CONNECTIONS" help:"Bound on the connections of sandboxes and on requests in progress, at least 1."`
	Output         string `short:"o" help:"File to write. Empty: standard output."`
}

// Run implements the command.
func (c *egressEnvoyCommand) Run(o *output) error {
	s := envoy.EgressSettings{
		RouterSocket: c.RouterSocket, AdminSocket: c.AdminSocket, CAFile: c.CAFile, MaxHeap: c.MaxHeap, MaxConnections: c.MaxConnections,
	}
	var err error
	if s.Listen, err = netip.ParseAddrPort(c.Listen); err != nil {
		return fmt.Errorf("--listen %q: must be ip:port", c.Listen)
	}
	if c.HealthListen != "" {
		if s.HealthListen, err = netip.ParseAddrPort(c.HealthListen); err != nil {
			return fmt.Errorf("--health-listen %q: must be ip:port", c.HealthListen)
		}
	}
	if c.MaxConnections == 0 {
		return errors.New("--max-connections 0: must be at least 1")
	}
	raw, err := envoy.EgressYAML(s)
	if err != nil {
		return err
	}
	if c.Output == "" {
		_, err = o.out.Write(raw)
		return err
	}
	return writeFile(c.Output, raw)
}
