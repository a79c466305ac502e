package charts

import (
	"maps"
	"net/netip"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// end is one end of a connection: a pod, or an address outside the cluster.
type end struct {
	namespace string
	labels    map[string]string
	address   netip.Addr
}

// network says what NetworkPolicies let through, by the rules of
// https://kubernetes.io/docs/concepts/services-networking/network-policies/, as
// far as the chart needs them. The test cluster's network plugin may enforce
// none.
type network struct {
	t        *testing.T
	policies []*networkingv1.NetworkPolicy
}

// allows reports whether a connection passes both its ends' policies.
func (n network) allows(from, to end, protocol corev1.Protocol, port int32) bool {
	in, out := true, true
	for _, p := range n.policies {
		for _, kind := range p.Spec.PolicyTypes {
			if kind == networkingv1.PolicyTypeIngress && n.applies(p, to) {
				in = false
			}
			if kind == networkingv1.PolicyTypeEgress && n.applies(p, from) {
				out = false
			}
		}
	}
	for _, p := range n.policies {
		if n.applies(p, to) {
			for _, rule := range p.Spec.Ingress {
				in = in || n.port(rule.Ports, protocol, port) && n.peer(p, rule.From, from)
			}
		}
		if n.applies(p, from) {
			for _, rule := range p.Spec.Egress {
				out = out || n.port(rule.Ports, protocol, port) && n.peer(p, rule.To, to)
			}
		}
	}
	return in && out
}

func (n network) applies(p *networkingv1.NetworkPolicy, e end) bool {
	return e.namespace == p.Namespace && n.matches(&p.Spec.PodSelector, e.labels)
}

func (n network) matches(s *metav1.LabelSelector, of map[string]string) bool {
	selector, err := metav1.LabelSelectorAsSelector(s)
	require.NoError(n.t, err)
	return selector.Matches(labels.Set(of))
}

func (n network) port(ports []networkingv1.NetworkPolicyPort, protocol corev1.Protocol, port int32) bool {
	for _, p := range ports {
		want := corev1.ProtocolTCP
		if p.Protocol != nil {
			want = *p.Protocol
		}
		require.Zero(n.t, p.Port.StrVal, "a port by name, which not every network plugin finds in a sidecar")
		if want == protocol && p.Port.IntVal == port {
			return true
		}
	}
	return len(ports) == 0
}

func (n network) peer(p *networkingv1.NetworkPolicy, peers []networkingv1.NetworkPolicyPeer, e end) bool {
	for _, peer := range peers {
		if block := peer.IPBlock; block != nil {
			inside := netip.MustParsePrefix(block.CIDR).Contains(e.address)
			for _, except := range block.Except {
				inside = inside && !netip.MustParsePrefix(except).Contains(e.address)
			}
			if inside {
				return true
			}
			continue
		}
		if e.namespace == "" {
			continue // not a pod
		}
		there := e.namespace == p.Namespace
		if peer.NamespaceSelector != nil {
			there = n.matches(peer.NamespaceSelector, map[string]string{corev1.LabelMetadataName: e.namespace})
		}
		if there && (peer.PodSelector == nil || n.matches(peer.PodSelector, e.labels)) {
			return true
		}
	}
	return len(peers) == 0
}

// Invariant: P37
func TestWhoMayConnectToWhom(t *testing.T) {
	outside := func(address string) end { return end{address: netip.MustParseAddr(address)} }
	for _, values := range []struct {
		file, sandboxes string
		podIP           string
	}{{"minimal", "sandboxes", "10.244.3.4"}, {"ipv6", "agents", "fd00:10:244::7"}, {"kind", "sandboxes", "10.244.3.4"}, {"full", "sandboxes", "198.18.0.9"}, {"egress", "sandboxes", "fd00:10:244::7"}} {
		t.Run(values.file, func(t *testing.T) {
			all := render(t, values.file)
			n := network{t: t, policies: objectsOf[*networkingv1.NetworkPolicy](all)}
			mcp := end{namespace, map[string]string{"app.kubernetes.io/name": "berth", "app.kubernetes.io/instance": "berth", "app.kubernetes.io/component": "mcp"}, netip.MustParseAddr(values.podIP)}
			test := end{namespace, maps.Clone(mcp.labels), mcp.address}
			test.labels["app.kubernetes.io/component"] = "test"
			served := values.file == "ipv6"
			require.Equal(t, served, slices.ContainsFunc(n.policies, func(p *networkingv1.NetworkPolicy) bool { return p.Name == "berth-mcp" }))
			ip := netip.MustParseAddr(values.podIP)
			gateway := end{namespace, findWorkload(t, all, "berth-gateway").pod.Labels, ip}
			allocator := end{namespace, findWorkload(t, all, "berth-allocator").pod.Labels, ip}
			sandbox := end{values.sandboxes, map[string]string{"berth.sh/pool": "python", "berth.sh/phase": "warm"}, ip}
			behind := end{values.sandboxes, maps.Clone(sandbox.labels), ip}
			behind.labels["berth.sh/egress"] = "gateway"
			egress := end{namespace, maps.Clone(mcp.labels), ip}
			egress.labels["app.kubernetes.io/component"] = "egress"
			neighbour := end{values.sandboxes, map[string]string{"app": "other"}, ip}
			stranger := end{"apps", map[string]string{"app.kubernetes.io/name": "berth", "app.kubernetes.io/instance": "berth", "app.kubernetes.io/component": "gateway"}, ip}
			prometheus := end{"monitoring", map[string]string{"app": "prometheus"}, ip}
			ingress := end{"ingress", map[string]string{"app": "nginx"}, ip}
			dns := end{"kube-system", map[string]string{"k8s-app": "kube-dns"}, ip}
			// Where the values say so.
			open, internet := values.file != "full", values.file != "kind"
			through := values.file == "full" || values.file == "egress" // there is an egress gateway

			for _, c := range []struct {
				name     string
				from, to end
				port     int32
				want     bool
			}{
				{"gateway to sandbox", gateway, sandbox, 8080, true},
				{"gateway to sandbox, any port", gateway, sandbox, 49983, true},
				{"sandbox to sandbox", sandbox, sandbox, 8080, false},
				{"allocator to sandbox, for a postStart hook", allocator, sandbox, 8080, true},
				{"pod in the same namespace to sandbox", neighbour, sandbox, 8080, false},
				{"pod elsewhere with the gateway's labels to sandbox", stranger, sandbox, 8080, false},
				{"internet to sandbox", outside("198.51.100.1"), sandbox, 8080, false},

				{"gateway to MCP", gateway, mcp, 8090, true},
				{"sandbox to MCP", sandbox, mcp, 8090, false},
				{"pod elsewhere to MCP", stranger, mcp, 8090, !served},
				{"MCP to gateway", mcp, gateway, 8080, open},
				{"MCP to sandbox", mcp, sandbox, 49983, false},

				{"sandbox to DNS", sandbox, dns, 53, true},
				{"sandbox to another port of DNS", sandbox, dns, 9153, false},
				{"sandbox to internet", sandbox, outside("198.51.100.1"), 443, internet},
				{"sandbox to internet, IPv6", sandbox, outside("2606:4700::1"), 443, internet},
				{"sandbox to metadata", sandbox, outside("169.254.169.254"), 80, false},
				{"sandbox to metadata, IPv6", sandbox, outside("fd00:ec2::254"), 80, false},
				{"sandbox to the API server's Service", sandbox, outside("10.96.0.1"), 443, false},
				{"sandbox to a public API server that the values name", sandbox, outside("203.0.113.7"), 6443, !slices.Contains([]string{"kind", "full"}, values.file)},
				{"sandbox to what the values allow", sandbox, outside("10.9.0.1"), 443, values.file == "full"},
				{"sandbox to a node", sandbox, outside("10.0.0.7"), 10250, false},
				{"sandbox to the API", sandbox, allocator, 8081, false},
				{"sandbox to the console", sandbox, allocator, 8082, false},
				{"ingress controller to the console", ingress, allocator, 8082, values.file == "full"},
				{"pod elsewhere to the console", stranger, allocator, 8082, false},
				{"sandbox to the control stream", sandbox, allocator, 9090, false},
				{"sandbox to another pod", sandbox, stranger, 80, false},

				{"gateway to sandbox behind a gateway", gateway, behind, 49983, true},
				{"allocator to sandbox behind a gateway", allocator, behind, 49983, true},
				{"sandbox to sandbox behind a gateway", sandbox, behind, 8080, false},
				{"sandbox behind a gateway to the egress gateway", behind, egress, 3128, true},
				{"sandbox behind a gateway to another port of it", behind, egress, 8082, false},
				{"sandbox behind a gateway to DNS", behind, dns, 53, false},
				{"sandbox behind a gateway to internet", behind, outside("198.51.100.1"), 443, false},
				{"sandbox behind a gateway to internet, IPv6", behind, outside("2606:4700::1"), 443, false},
				{"sandbox behind a gateway to the API server's Service", behind, outside("10.96.0.1"), 443, false},
				{"sandbox behind a gateway to what the values allow", behind, outside("10.9.0.1"), 443, false},
				{"sandbox behind a gateway to metadata", behind, outside("169.254.169.254"), 80, false},
				{"sandbox behind a gateway to sandbox", behind, sandbox, 8080, false},
				{"sandbox behind a gateway to the gateway", behind, gateway, 8080, false},
				{"sandbox behind a gateway to the control stream", behind, allocator, 9090, false},
				{"another sandbox to the egress gateway", sandbox, egress, 3128, false},
				{"pod in the same namespace to the egress gateway", neighbour, egress, 3128, !through},
				{"prometheus to the egress gateway", prometheus, egress, 9903, true},
				{"egress gateway to the control stream", egress, allocator, 9090, through},
				{"egress gateway to the API", egress, allocator, 8081, !through},
				{"egress gateway to DNS", egress, dns, 53, true},
				{"egress gateway to internet", egress, outside("198.51.100.1"), 22, true},
				{"egress gateway to sandbox", egress, sandbox, 8080, false},
				{"egress gateway to metadata", egress, outside("169.254.169.254"), 80, !through},
				{"egress gateway to the API server's Service", egress, outside("10.96.0.1"), 443, !through},
				{"egress gateway to a public API server", egress, outside("203.0.113.7"), 6443, values.file != "full"},
				{"egress gateway to internet, IPv6", egress, outside("2606:4700::1"), 443, true},
				{"egress gateway to a private address, IPv6", egress, outside("fd00::1"), 443, !through},
				{"egress gateway to a range outside", egress, outside("10.8.0.1"), 443, values.file != "egress"},
				{"egress gateway to a range outside around pods", egress, outside("10.245.0.1"), 443, values.file != "egress"},
				{"egress gateway to a pod in a range outside", egress, outside("10.244.0.1"), 443, !through},
				{"egress gateway to what the values allow it", egress, outside("10.96.0.10"), 53, !through},

				{"gateway to the control stream", gateway, allocator, 9090, true},
				{"pod elsewhere with the gateway's labels to the control stream", stranger, allocator, 9090, false},
				{"pod elsewhere to the API", stranger, allocator, 8081, true},
				{"internet to the API", outside("198.51.100.1"), allocator, 8081, open},
				{"follower to leader", allocator, allocator, 8081, true},
				{"prometheus to the allocator", prometheus, allocator, 9902, true},
				{"pod elsewhere to the allocator's metrics", stranger, allocator, 9902, open},

				{"internet to gateway", outside("198.51.100.1"), gateway, 8080, open},
				{"load balancer to gateway", outside("192.0.2.9"), gateway, 8080, true},
				{"helm test to gateway", test, gateway, 8080, true},
				{"prometheus to Envoy", prometheus, gateway, 8082, true},
				{"prometheus to router", prometheus, gateway, 9903, true},
				{"internet to the router's metrics", outside("198.51.100.1"), gateway, 9903, open},
				{"gateway to the router's admin port of another pod", gateway, gateway, 9901, false},
			} {
				require.Equal(t, c.want, n.allows(c.from, c.to, corev1.ProtocolTCP, c.port), c.name)
			}
			require.True(t, n.allows(sandbox, dns, corev1.ProtocolUDP, 53))
			require.False(t, n.allows(sandbox, outside("198.51.100.1"), corev1.ProtocolUDP, 53) && !internet)
			require.False(t, n.allows(behind, dns, corev1.ProtocolUDP, 53))
		})
	}
}
