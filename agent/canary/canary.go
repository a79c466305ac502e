// Package canary tries, from inside a pod, whether the pod reaches the egress gateway and nothing else, as its network
// policy says.
//
// # Guarantees
//
//   - [Await] returns nil only after an attempt in which the gateway was reached and no target was. The gateway shows
//     that the network of the pod works, so that the targets are not missed for another reason.
//   - An attempt has one connection or one socket for each address, and ends within two seconds.
//
// # What breaks them
//
// Targets that are away themselves, such as an API server that has stopped. Without the address of a gateway only the
// targets are tried.
//
// Of the own node only name servers are targets. Kubernetes says that traffic between a pod and its node is always
// allowed, and network plugins such as kindnet let it pass, so the kubelet (10250) and other ports are no target:
// no pod would ever start there (https://kubernetes.io/docs/concepts/services-networking/network-policies/,
// https://github.com/kubernetes-sigs/kube-network-policies/issues/283).
package canary

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/internal/wait"
)

// Failed begins the message of the error of Await.
const Failed = "egress check failed: "

const (
	attemptTime  = 2 * time.Second
	attemptPause = time.Second
	// maxNameServers bounds those that are tried. The C library reads three.
	maxNameServers = 8
	// localDNS is the usual address of NodeLocal DNSCache, a name server on each node. It may listen at the address in
	// /etc/resolv.conf instead.
	localDNS = "169.254.20.10"
	// healthPort is where the pods of the egress gateway answer probes. Their Service has the port too, and the network
	// policy does not.
	healthPort = "8082"
)

// Target is what must not be reached.
type Target struct {
	// What it is, for people.
	What string
	// Network is tcp or udp. With udp the target is a name server.
	Network, Address string
}

// Pod is what is known of a pod. The lists are comma-separated, and may be empty.
type Pod struct {
	// Getenv has its variables.
	Getenv func(string) string
	// ResolvConf is its /etc/resolv.conf.
	ResolvConf []byte
	// Gateway has the addresses of the egress gateway, ip:port.
	Gateway string
	// Node has the addresses of its node.
	Node string
	// Public has addresses outside the cluster, ip:port.
	Public string
}

// Targets returns what a pod must not reach.
func (p *Pod) Targets() ([]Target, error) {
	host, port := p.Getenv("KUBERNETES_SERVICE_HOST"), p.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT: must be set, as the kubelet does; " +
			"remove them from the template")
	}
	all := []Target{{"the API server", "tcp", net.JoinHostPort(host, port)}}
	for _, metadata := range []string{"169.254.169.254", "fd00:ec2::254"} {
		all = append(all, Target{"the metadata service", "tcp", net.JoinHostPort(metadata, "80")})
	}
	for _, address := range split(p.Public) {
		all = append(all, Target{"a public address", "tcp", address})
	}
	for _, address := range split(p.Gateway) {
		// Pods of the gateway answer there, unless the policy of the own pod stops it. If the chart's
		// networkPolicy.metrics.from is set theirs does, too, and this target shows nothing.
		if host, _, err := net.SplitHostPort(address); err == nil {
			all = append(all, Target{"another port of the egress gateway's pods", "tcp", net.JoinHostPort(host, healthPort)})
		}
	}
	all = append(all, nameServer(localDNS)...)
	for _, address := range split(p.Node) {
		all = append(all, nameServer(address)...)
	}
	servers := 0
	for lines := bufio.NewScanner(bytes.NewReader(p.ResolvConf)); lines.Scan() && servers < maxNameServers; {
		fields := strings.Fields(lines.Text())
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		server, err := netip.ParseAddr(fields[1])
		if err != nil || server.IsLoopback() { // one in the pod is not outside
			continue
		}
		servers++
		all = append(all, nameServer(server.String())...)
	}
	return all, nil
}

// Reached returns the targets of which one must be reached: the addresses of the egress gateway.
func (p *Pod) Reached() (all []Target) {
	for _, address := range split(p.Gateway) {
		all = append(all, Target{"the egress gateway", "tcp", address})
	}
	return all
}

func nameServer(ip string) []Target {
	address := net.JoinHostPort(ip, "53")
	return []Target{{"a name server", "udp", address}, {"a name server", "tcp", address}}
}

func split(list string) []string {
	return slices.DeleteFunc(strings.Split(list, ","), func(s string) bool { return s == "" })
}

// Await tries all until one of gateway was reached and none of targets, for up to patience. Its error then says what is
// wrong, behind Failed. It is that of ctx if that has ended.
func Await(ctx context.Context, gateway, targets []Target, patience time.Duration) error {
	for begin := time.Now(); ; {
		err := attempt(ctx, gateway, targets)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err == nil || time.Since(begin) >= patience:
			return err
		}
		wait.Sleep(ctx, attemptPause)
	}
}

func attempt(ctx context.Context, gateway, targets []Target) error {
	ctx, cancel := context.WithTimeout(ctx, attemptTime)
	defer cancel()
	tried := slices.Concat(gateway, targets)
	var all sync.WaitGroup
	reached := make([]bool, len(tried))
	for i := range tried {
		all.Go(func() { reached[i] = reach(ctx, &tried[i]) })
	}
	all.Wait()
	if i := slices.Index(reached[len(gateway):], true); i >= 0 {
		t := &targets[i]
		return fmt.Errorf(Failed+"the pod reaches %s (%s %s), and its pool has egress.mode Gateway; use a network plugin "+
			"that enforces NetworkPolicies, and no other policy for the pod", t.What, t.Network, t.Address)
	}
	if len(gateway) > 0 && !slices.Contains(reached[:len(gateway)], true) {
		return fmt.Errorf(Failed+"the pod does not reach %s (%s)", gateway[0].What, gateway[0].Address)
	}
	return nil
}

// query asks a name server for those of the root (RFC 1035, section 4). Every answer shows that it was reached.
var query = []byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1}

func reach(ctx context.Context, t *Target) bool {
	conn, err := new(net.Dialer).DialContext(ctx, t.Network, t.Address)
	if err != nil {
		return false
	}
	defer conn.Close() //nolint:errcheck // nothing was written that matters
	if t.Network != "udp" {
		return true
	}
	for deadline, _ := ctx.Deadline(); ctx.Err() == nil; { // a datagram may be lost
		if _, err := conn.Write(query); err != nil {
			return false
		}
		next := time.Now().Add(attemptTime / 4)
		if next.After(deadline) {
			next = deadline
		}
		_ = conn.SetReadDeadline(next) // it is open
		var answer [1]byte
		_, err := conn.Read(answer[:])
		if err == nil {
			return true
		}
		if !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
			return false
		}
	}
	return false
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}
