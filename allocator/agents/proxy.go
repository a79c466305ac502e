package agents

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// lookupWait bounds one look-up of the egress gateway. The next one begins lookupPause after one that has failed, and
	// lookupEvery after one that has not: the address of a Service changes only with the Service.
	lookupWait  = 2 * time.Second
	lookupPause = time.Second
	lookupEvery = 30 * time.Second
)

// CheckProxy returns nil, or an error that says what is wrong with the address of the egress gateway.
func CheckProxy(address string) error {
	_, _, err := proxyAddress(address)
	return err
}

func proxyAddress(address string) (host string, port uint16, err error) {
	u, err := url.Parse(address)
	if err != nil || u.Hostname() == "" || *u != (url.URL{Scheme: "http", Host: u.Host}) {
		return "", 0, fmt.Errorf("%q: must be http://<host>:<port>", address)
	}
	number, err := strconv.ParseUint(u.Port(), 10, 16)
	if err != nil || number == 0 {
		return "", 0, fmt.Errorf("%q: must be http://<host>:<port>, with a port of 1 to 65535", address)
	}
	return u.Hostname(), uint16(number), nil
}

// proxy is the egress gateway. The pods that reach it reach no DNS, so they get its address and not its name.
type proxy struct {
	host   string
	port   uint16
	lookup func(ctx context.Context, host string) ([]netip.Addr, error)
	// known is closed when the first look-up has succeeded.
	known chan struct{}

	mu    sync.Mutex
	addrs []netip.Addr // of the latest look-up that has succeeded
	err   error        // of the latest one
}

func newProxy(address string, lookup func(ctx context.Context, host string) ([]netip.Addr, error)) (*proxy, error) {
	if address == "" {
		return nil, nil //nolint:nilnil // there is none
	}
	host, port, err := proxyAddress(address)
	if err != nil {
		return nil, fmt.Errorf("egress proxy %w", err)
	}
	if lookup == nil {
		lookup = func(ctx context.Context, host string) ([]netip.Addr, error) {
			return net.DefaultResolver.LookupNetIP(ctx, "ip", host)
		}
	}
	return &proxy{host: host, port: port, lookup: lookup, known: make(chan struct{})}, nil
}

// keep looks the host up again and again until ctx ends.
func (p *proxy) keep(ctx context.Context) {
	for pause := time.Duration(0); wait.Sleep(ctx, pause); {
		call, cancel := context.WithTimeout(ctx, lookupWait)
		addrs, err := p.lookup(call, p.host)
		cancel()
		if err == nil && len(addrs) == 0 {
			err = errors.New("it has no address")
		}
		pause = lookupPause
		p.mu.Lock()
		p.err = err
		if err == nil {
			pause = lookupEvery
			if p.addrs == nil {
				close(p.known)
			}
			p.addrs = addrs
		}
		p.mu.Unlock()
	}
}

// url returns the URL of the proxy for a pod with this address, with a credential. The sandbox is known by the address
// of its pod, so the pod must connect with that one: the address of the proxy is of the same family.
func (p *proxy) url(ctx context.Context, pod netip.Addr, credential *url.Userinfo) (string, error) {
	select {
	case <-p.known:
	case <-ctx.Done():
		p.mu.Lock()
		defer p.mu.Unlock()
		return "", fmt.Errorf("look up %s, the host of the egress gateway: %w", p.host, errors.Join(p.err, ctx.Err()))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	at := slices.IndexFunc(p.addrs, func(a netip.Addr) bool { return a.Unmap().Is4() == pod.Unmap().Is4() })
	if at < 0 {
		return "", fmt.Errorf("%s, the host of the egress gateway, has no address of the family of the pod's, %s",
			p.host, pod)
	}
	u := url.URL{Scheme: "http", User: credential, Host: netip.AddrPortFrom(p.addrs[at].Unmap(), p.port).String()}
	return u.String(), nil
}

// EgressGateway returns the addresses of the egress gateway, host:port and comma-separated; empty: they are not known.
func (c *Caller) EgressGateway() string {
	if c == nil || c.proxy == nil {
		return ""
	}
	c.proxy.mu.Lock()
	defer c.proxy.mu.Unlock()
	var all []string
	for _, a := range c.proxy.addrs {
		all = append(all, netip.AddrPortFrom(a.Unmap(), c.proxy.port).String())
	}
	return strings.Join(all, ",")
}

// errNoProxy is the error for a sandbox behind an egress gateway.
var errNoProxy = errors.New("the pod reaches only an egress gateway, and this allocator has no address of one: set --egress-proxy")

// proxyOf returns the URL of the proxy for a sandbox, with its credential; empty: it needs none.
func (c *Caller) proxyOf(ctx context.Context, s core.Sandbox) (string, error) {
	switch {
	case !s.Agent.Egress:
		return "", nil
	case c.proxy == nil:
		return "", errNoProxy
	}
	return c.proxy.url(ctx, s.IP, url.UserPassword(s.ID, c.o.Key.EgressToken(s.ID, s.Incarnation)))
}
