package main

import (
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/berth-sandbox/berth/envoy"
)

type envoyConfigCommand struct {
	Listen         string        `default:"0.0.0.0:8080" help:"Where clients connect, ip:port."`
	HealthListen   string        `help:"Where probes and Prometheus find /ready and /stats/prometheus, ip:port. Empty: nowhere."`
	RouterSocket   string        `default:"/run/berth/router.sock" help:"The router's unix socket."`
	AdminSocket    string        `default:"/run/berth/envoy-admin.sock" help:"Envoy's own admin socket."`
	AccessLogFlush time.Duration `default:"5s" help:"How often an open request is reported to the router, at least 1s."`
	MaxConnections uint32        `default:"100000" help:"Bound on connections and requests of each cluster, at least 1."`
	Output         string        `short:"o" help:"File to write. Empty: standard output."`
}

// Run implements the command.
func (c *envoyConfigCommand) Run(o *output) error {
	listen, err := netip.ParseAddrPort(c.Listen)
	if err != nil {
		return fmt.Errorf("--listen %q: must be ip:port", c.Listen)
	}
	var health netip.AddrPort
	if c.HealthListen != "" {
		if health, err = netip.ParseAddrPort(c.HealthListen); err != nil {
			return fmt.Errorf("--health-listen %q: must be ip:port", c.HealthListen)
		}
	}
	raw, err := envoy.YAML(envoy.Settings{
		Listen: listen, HealthListen: health, RouterSocket: c.RouterSocket, AdminSocket: c.AdminSocket,
		AccessLogFlush: c.AccessLogFlush, MaxConnections: c.MaxConnections,
	})
	if err != nil {
		return err
	}
	if c.Output == "" {
		_, err = o.out.Write(raw)
		return err
	}
	return writeFile(c.Output, raw)
}

// writeFile puts a whole file in place or none: a container that is started
// again may find its last run's.
func writeFile(path string, raw []byte) error {
	temporary := path + ".new"
	err := os.WriteFile(temporary, raw, 0o644)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		os.Remove(temporary)
		return fmt.Errorf("--output: %w", err)
	}
	return nil
}
