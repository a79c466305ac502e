package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/bench/hop/table"
	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
)

// The kinds of scenarios.
const (
	kindDirect = iota
	kindEnvoy
	kindStock
	kindProxy
	kindBerth
)

// scenario is one way from the client to the sandboxes, with processes of its own.
type scenario struct {
	name, about string
	kind        int
	one         bool // the router names one address for all sandboxes
	// change takes a part away from Berth's Envoy configuration, or adds one to the stock configuration.
	change func(config node) error
	// crossed: Berth's router with the stock configuration, or the reverse.
	crossed bool
	// once: sandboxes close each connection after one answer.
	once bool
	// env and args are added to those of the router.
	env, args []string
	// traces is the percentage of requests that Envoy and the router trace.
	traces float64
	// concurrency of Envoy; 0: the default of the chart.
	concurrency int

	target                 target
	envoy, router, backend *proc.Process
	adminSocket            string
	metrics                string // URL of the router's metrics
}

const (
	// concurrency is the default of the chart.
	concurrency = 2
	startLimit  = time.Minute
)

// The names of scenarios that others are compared with.
const (
	nameReference = "stock"
	nameControl   = "stock-again"
	nameBerth     = "berth"
)

func scenarios() []*scenario {
	return []*scenario{
		{name: "direct", about: "no hop: the client connects to the sandbox", kind: kindDirect},
		{name: "envoy", about: "Envoy without ext_proc: the client names the address in a header", kind: kindEnvoy},
		{name: "stock-one", about: "Envoy and the stock do-nothing server, one address in all", kind: kindStock, one: true},
		{name: nameReference, about: "Envoy and the stock do-nothing server, an address for each sandbox", kind: kindStock},
		{name: nameControl, about: "the same in other processes: the control", kind: kindStock},
		{name: "proxy", about: "httputil.ReverseProxy with a table, no Envoy", kind: kindProxy},
		{name: nameBerth, about: "Berth's bootstrap and router", kind: kindBerth},
		{name: "berth-grpc-go", about: "the same with grpc-go on the router's socket", kind: kindBerth,
			args: []string{"--grpc-go"}},
	}
}

// site is where the processes of all scenarios run.
type site struct {
	ctx      context.Context
	sup      *proc.Supervisor
	dir, bin string // for files, and of the programs
	envoyBin string
	sandbox  int // how many there are
	leader   *leader
}

// start starts the processes of a scenario and waits until they answer.
func (s *site) start(c *scenario) error {
	listener, port, err := listen("0.0.0.0:0")
	if err != nil {
		return err
	}
	once := fmt.Sprintf("-once=%t", c.once)
	if c.backend, err = s.run(c, "backend", nil, listener, filepath.Join(s.bin, "backend"), once); err != nil {
		return err
	}
	c.target = target{port: port, byHeader: c.kind == kindEnvoy}
	c.target.addr = table.Dst(0, port)
	file := filepath.Join(s.dir, c.name+".table")
	if c.kind != kindDirect && c.kind != kindBerth {
		if err := table.Write(file, s.sandbox, port); err != nil {
			return err
		}
	}
	admin := ""
	if c.kind != kindDirect && c.kind != kindEnvoy {
		if admin, err = freeAddr(); err != nil {
			return err
		}
		c.metrics = "http://" + admin + "/metrics"
	}
	in := sockets{filepath.Join(s.dir, c.name, "router.sock"), filepath.Join(s.dir, c.name, "envoy.sock")}
	err = errors.Join(os.RemoveAll(filepath.Dir(in.router)), os.Mkdir(filepath.Dir(in.router), 0o700))
	if err != nil {
		return err
	}
	var config node
	switch c.kind {
	case kindDirect:
		return nil
	case kindProxy:
		listener, port, err := listen("127.0.0.1:0")
		if err != nil {
			return err
		}
		c.target.addr = fmt.Sprintf("127.0.0.1:%d", port)
		c.router, err = s.run(c, "router", c.env, listener, filepath.Join(s.bin, "proxy"), "-table="+file, "-admin="+admin)
		if err != nil {
			return err
		}
		return s.await(c, func() error { return s.get(http.DefaultClient, c.metrics, nil) })
	case kindEnvoy:
		config, err = plainConfig(in, "")
	case kindStock:
		args := append([]string{
			"-table=" + file, "-admin=" + admin, "-socket=" + in.router,
			fmt.Sprintf("-one=%t", c.one), "-namespace=" + namespaceOf(c),
		}, c.args...)
		if c.router, err = s.run(c, "router", c.env, nil, filepath.Join(s.bin, "stock"), args...); err == nil {
			config, err = s.config(c, in)
		}
	case kindBerth:
		args := append([]string{
			"--domain=" + table.Domain, "--allocator=" + s.leader.addr, "--pod-cidrs=127.64.0.0/10",
			"--socket=" + in.router, "--envoy-admin=" + in.admin, "--admin-listen=" + admin, "--log-level=warn",
		}, c.args...)
		if c.traces > 0 {
			args = append(args, "--traces-to=http://"+s.leader.addr)
		}
		if c.router, err = s.run(c, "router", c.env, nil, filepath.Join(s.bin, "extproc"), args...); err == nil {
			config, err = s.config(c, in)
		}
	}
	if err != nil {
		return err
	}
	if c.change != nil {
		if err := c.change(config); err != nil {
			return fmt.Errorf("scenario %s: %w", c.name, err)
		}
	}
	return s.startEnvoy(c, in.admin, config)
}

// namespaceOf is where the router of a scenario names the destination.
func namespaceOf(c *scenario) string {
	if (c.kind == kindBerth) != (c.kind == kindStock && c.crossed) {
		return envoy.MetadataNamespace
	}
	return "stock"
}

func (s *site) config(c *scenario, in sockets) (node, error) {
	if (c.kind == kindBerth) != c.crossed {
		var traces *envoy.Traces
		if c.traces > 0 {
			to := netip.MustParseAddrPort(s.leader.addr)
			traces = &envoy.Traces{To: envoy.Endpoint{Host: to.Addr().String(), Port: to.Port()}, Percent: c.traces}
		}
		return berthConfig(in, traces)
	}
	return plainConfig(in, namespaceOf(c))
}

func (s *site) startEnvoy(c *scenario, admin string, config node) error {
	file := filepath.Join(s.dir, c.name+".json")
	raw, err := json.MarshalIndent(config, "", " ")
	if err != nil {
		return err
	}
	if err := os.WriteFile(file, raw, 0o600); err != nil {
		return err
	}
	workers := c.concurrency
	if workers == 0 {
		workers = concurrency
	}
	c.envoy, err = s.run(c, "envoy", nil, nil, s.envoyBin, "-c", file, "--disable-hot-restart",
		"--concurrency", strconv.Itoa(workers), "--log-level", "error")
	if err != nil {
		return err
	}
	c.adminSocket = admin
	return s.await(c, func() error {
		if c.metrics != "" {
			if err := s.get(http.DefaultClient, strings.Replace(c.metrics, "/metrics", readyPage(c), 1), nil); err != nil {
				return err
			}
		}
		var all struct {
			Statuses []struct {
				Name  string
				Local struct {
					Socket struct {
						Port uint16 `json:"port_value"`
					} `json:"socket_address"`
				} `json:"local_address"`
			} `json:"listener_statuses"`
		}
		if err := s.get(envoy.AdminClient(admin), "http://envoy/listeners?format=json", &all); err != nil {
			return err
		}
		for _, l := range all.Statuses {
			if l.Name == "ingress" && l.Local.Socket.Port != 0 {
				c.target.addr = fmt.Sprintf("127.0.0.1:%d", l.Local.Socket.Port)
				return nil
			}
		}
		return errors.New("no listener of Envoy yet")
	})
}

func readyPage(c *scenario) string {
	if c.kind == kindBerth {
		return "/readyz"
	}
	return "/metrics"
}

// stop ends the processes of a scenario.
func (s *site) stop(c *scenario) {
	for _, p := range []*proc.Process{c.envoy, c.router, c.backend} {
		if p != nil {
			_ = p.Stop(s.ctx, 0)
		}
	}
}

// run starts a process. listener becomes its file descriptor 3 and is closed here.
func (s *site) run(
	c *scenario, part string, env []string, listener *os.File, program string, args ...string,
) (*proc.Process, error) {
	log, err := os.Create(filepath.Join(s.dir, c.name+"-"+part+".log"))
	if err != nil {
		return nil, err
	}
	defer log.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = append(os.Environ(), env...)
	if listener != nil {
		defer listener.Close()
		cmd.ExtraFiles = []*os.File{listener}
	}
	return s.sup.Start(cmd)
}

// await waits until check returns nil.
func (s *site) await(c *scenario, check func() error) error {
	ctx, cancel := context.WithTimeout(s.ctx, startLimit)
	defer cancel()
	for {
		err := check()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("start scenario %s: %w\n%s", c.name, err, s.logs(c))
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// logs returns the end of what the processes of a scenario have written.
func (s *site) logs(c *scenario) string {
	var all strings.Builder
	for _, part := range []string{"backend", "router", "envoy"} {
		raw, _ := os.ReadFile(filepath.Join(s.dir, c.name+"-"+part+".log"))
		fmt.Fprintf(&all, "%s: %s\n", part, raw[max(0, len(raw)-2000):])
	}
	return all.String()
}

func (s *site) get(client *http.Client, url string, into any) error {
	r, err := http.NewRequestWithContext(s.ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return err
	}
	response, err := client.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	switch {
	case response.StatusCode != http.StatusOK:
		return fmt.Errorf("%s: %s", url, response.Status)
	case into == nil:
		return nil
	}
	return json.NewDecoder(response.Body).Decode(into)
}

// listen binds an address and returns the socket for a child.
func listen(addr string) (*os.File, uint16, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, 0, err
	}
	f, err := l.(*net.TCPListener).File()
	return f, uint16(l.Addr().(*net.TCPAddr).Port), errors.Join(err, l.Close())
}

// freeAddr finds a free port at a loopback address that nothing else here uses.
func freeAddr() (string, error) {
	l, err := net.Listen("tcp", "127.33.7.1:0")
	if err != nil {
		return "", err
	}
	return l.Addr().String(), l.Close()
}
