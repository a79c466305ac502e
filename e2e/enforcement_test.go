package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/harness"
)

// envKubeRouter is the program kube-router, for the test of what leaves sandboxes of a kind cluster.
const envKubeRouter = "BERTH_E2E_KUBE_ROUTER"

// listener answers each datagram and takes each connection at its ports. It prints the address of its pod on the link.
const listener = `
import ipaddress, socket, sys, threading
def serve(kind, port):
    s = socket.socket(socket.AF_INET6, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    s.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
    s.bind(("::", int(port)))
    if kind == "tcp":
        s.listen(64)
        while True:
            s.accept()[0].close()
    while True:
        data, peer = s.recvfrom(2048)
        s.sendto(data, peer)
for fields in map(str.split, open("/proc/net/if_inet6")):
    if fields[3] == "20":
        print(ipaddress.ip_address(int(fields[0], 16)))
for one in sys.argv[1:]:
    threading.Thread(target=serve, args=one.split(":")).start()
`

// prober tries each target three times, and prints the names of those that answer. It ends with an error if it may not
// send pings.
const prober = `
import json, os, socket, struct, sys, time
from concurrent.futures import ThreadPoolExecutor
query = bytes([0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 1])
def echo(n):
    body = struct.pack("!HH", os.getpid() & 0xffff, n)
    total = 0x0800 + sum(struct.unpack("!HH", body))
    total = (total & 0xffff) + (total >> 16)
    total = (total & 0xffff) + (total >> 16)
    return struct.pack("!BBH", 8, 0, ~total & 0xffff) + body
def answers(s, kind, host):
    end, own = time.monotonic() + 1, struct.pack("!H", os.getpid() & 0xffff)
    while time.monotonic() < end:
        s.settimeout(max(end - time.monotonic(), 0.01))
        data, peer = s.recvfrom(2048)
        if kind == "udp" or peer[0] == host and data[20] == 0 and data[24:26] == own:
            return True
    return False
def attempt(n, kind, host, port):
    if kind == "tcp":
        socket.create_connection((host, int(port)), timeout=1).close()
        return True
    udp = kind == "udp"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM if udp else socket.SOCK_RAW, 0 if udp else 1) as s:
        s.sendto(query if udp else echo(n), (host, int(port or 0)))
        return answers(s, kind, host)
def reached(target):
    for n in range(3):
        try:
            if attempt(n, *target[1:]):
                return True
        except OSError:
            pass
        time.sleep(0.5)
    return False
socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close() # it may ping
targets = json.loads(sys.argv[1])
with ThreadPoolExecutor(len(targets)) as pool:
    print(json.dumps([t[0] for t, yes in zip(targets, pool.map(reached, targets)) if yes]))
`

// target is what the prober tries: its name, tcp, udp or icmp, the host and the port.
type target [4]string

func targetNames(all []target) (found []string) {
	for _, one := range all {
		found = append(found, one[0])
	}
	return found
}

// What the sandbox must not reach answers an ordinary pod. At the end nothing is enforced any more, and it answers the
// sandbox, too.
//
// Invariant: P37
func TestEnforcedNetworkLeavesASandboxItsGatewayOnly(t *testing.T) {
	if os.Getenv(envKubeRouter) == "" {
		t.Skipf("needs a kind cluster whose network enforces nothing, and kube-router (%s): make kind-egress", envKubeRouter)
	}
	e := startDisturbing(t, 0)
	node := e.kindNode()
	g, origin, nameServer := node.startGateway()
	g.pool = e.pool + "-egress"
	pool := e.newPool(g.pool, 2)
	agentPool(&pool.Spec)
	c := &pool.Spec.Template.Spec.Containers[0]
	*c = corev1.Container{Name: c.Name, Image: pythonImage, Command: listening("tcp:8080")}
	pool.Spec.Egress = &v1alpha1.PoolEgress{Mode: v1alpha1.EgressGateway, Ports: []int32{int32(origin.Port())}}
	e.createPool(pool)
	e.eventually(func() error {
		status := e.readPool(g.pool).Status
		require.Zero(t, status.Warm, "the network enforces NetworkPolicies by itself")
		c := meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		if c == nil || c.Reason != v1alpha1.PoolEgressNotEnforced {
			return fmt.Errorf("Degraded: %+v", c)
		}
		t.Log(c.Message)
		return nil
	})

	lift := node.enforce()
	e.waitFull(g.pool, 2)
	s, ip := g.claimed(`{"allowOut":["ok.example.com"],"denyOut":["0.0.0.0/0"]}`)
	g.allows(s, ip, "ok.example.com")
	g.refuses(s, ip, "other.example.com")
	_, neighbour := g.claimed(`{}`)
	targets, link := node.targets(origin, nameServer)
	everything := slices.Concat(targets, []target{
		{"another sandbox, TCP", "tcp", neighbour, "8080"}, {"another sandbox, ping", "icmp", neighbour, ""},
		{"pod, IPv6 of the link", "tcp", link + "%eth0", "8000"},
	})
	require.Equal(t, targetNames(targets), e.probed(everything), "an ordinary pod, which reaches no sandbox")
	require.Empty(t, e.probedIn(s, everything), "the sandbox")
	g.allows(s, ip, "ok.example.com")

	lift()
	require.Equal(t, targetNames(everything), e.probedIn(s, everything), "the sandbox, while nothing is enforced")
}

// startGateway turns the egress gateway of the release on. Every name is that of the origin, a server on this machine.
func (n *kindNode) startGateway() (g *egressEnv, origin, nameServer netip.AddrPort) {
	t := n.t
	t.Helper()
	l, err := net.Listen("tcp", netip.AddrPortFrom(n.outside, 0).String())
	require.NoError(t, err)
	server := httptest.NewUnstartedServer(http.HandlerFunc(answerForHost))
	require.NoError(t, server.Listener.Close())
	server.Listener = l
	server.Start()
	t.Cleanup(server.Close)
	origin = netip.MustParseAddrPort(l.Addr().String())
	nameServer = netip.MustParseAddrPort(harness.NameServer(t, n.outside, nil))
	only := n.outside.String() + "/32"
	raw, err := json.Marshal(map[string]any{"maxStale": "30s", "egress": map[string]any{ // what egress needs at least
		"enabled": true, "outsideCIDRs": []string{only}, "extraArgs": []string{"--name-server=" + nameServer.String()},
		"extraEgress": []any{map[string]any{
			"to":    []any{map[string]any{"ipBlock": map[string]any{"cidr": only}}},
			"ports": []any{map[string]any{"protocol": "UDP", "port": nameServer.Port()}},
		}},
	}})
	require.NoError(t, err)
	values := filepath.Join(t.TempDir(), "values.json")
	require.NoError(t, os.WriteFile(values, raw, 0o600))
	require.NoError(t, shared.helm(t.Context(), "upgrade", releaseName, filepath.Join("..", "charts", "berth"),
		"--namespace", releaseNamespace, "--reuse-values", "--values", values, "--wait", "--timeout", "5m"))
	require.NoError(t, shared.waitComplete(t.Context()))
	return &egressEnv{env: n.env, port: strconv.Itoa(int(origin.Port()))}, origin, nameServer
}

// targets are what an ordinary pod reaches and no sandbox may reach. link is the address of such a pod on its link.
func (n *kindNode) targets(origin, nameServer netip.AddrPort) (all []target, link string) {
	n.t.Helper()
	const port = "8000"
	pod := n.ordinary("listener", n.site.namespace(), false, listening("tcp:8000", "udp:8000", "tcp:3128"))
	n.run("ip", "address", "replace", "169.254.169.254/32", "dev", "lo")
	n.ordinary("listener-of-node", metav1.NamespaceDefault, true,
		listening("tcp:8000", "udp:8000", "udp:53", "tcp:53", "tcp:80"))
	service := func(namespace, name string) string {
		s, err := n.clients.Kubernetes.CoreV1().Services(namespace).Get(n.t.Context(), name, metav1.GetOptions{})
		require.NoError(n.t, err)
		return s.Spec.ClusterIP
	}
	dns := service(metav1.NamespaceSystem, "kube-dns")
	dnsPods, err := n.clients.Kubernetes.CoreV1().Pods(metav1.NamespaceSystem).List(n.t.Context(),
		metav1.ListOptions{LabelSelector: "k8s-app=kube-dns"})
	require.NoError(n.t, err)
	require.NotEmpty(n.t, dnsPods.Items)
	bridge := netip.MustParseAddr(pod).As4()
	bridge[3] = 1 // the way of pods out
	ofNode := func(what, ip string) []target {
		return []target{
			{what + ", TCP", "tcp", ip, port}, {what + ", UDP", "udp", ip, port}, {what + ", ping", "icmp", ip, ""},
			{what + ", port 53 UDP", "udp", ip, "53"}, {what + ", port 53 TCP", "tcp", ip, "53"},
			{what + ", kubelet", "tcp", ip, "10250"}, {what + ", API server", "tcp", ip, "6443"},
		}
	}
	outside := n.outside.String()
	theNode, itsBridge := ofNode("node", n.ip.String()), ofNode("bridge of the node", netip.AddrFrom4(bridge).String())
	return slices.Concat(theNode, itsBridge, []target{
		{"pod, TCP", "tcp", pod, port}, {"pod, UDP", "udp", pod, port}, {"pod, ping", "icmp", pod, ""},
		{"pod, port of the egress gateway", "tcp", pod, "3128"},
		{"NodePort of the gateway", "tcp", n.ip.String(), strconv.Itoa(nodePortGateway)},
		{"NodePort of the API", "tcp", n.ip.String(), strconv.Itoa(nodePortAPI)},
		{"another port of the egress gateway", "tcp", service(releaseNamespace, releaseName+"-egress"), "8082"},
		{"Service of the API server", "tcp", service(metav1.NamespaceDefault, "kubernetes"), "443"},
		{"Service of the gateway", "tcp", service(releaseNamespace, releaseName+"-gateway"), "80"},
		{"cluster DNS, UDP", "udp", dns, "53"}, {"cluster DNS, TCP", "tcp", dns, "53"},
		{"pod of the cluster DNS", "udp", dnsPods.Items[0].Status.PodIP, "53"},
		{"metadata service", "tcp", "169.254.169.254", "80"},
		{"outside, TCP", "tcp", outside, strconv.Itoa(int(origin.Port()))},
		{"outside, UDP", "udp", outside, strconv.Itoa(int(nameServer.Port()))},
		{"outside, ping", "icmp", outside, ""},
	}), n.logOf("listener")
}

// kindNode is the only node of a kind cluster, whose network enforces no NetworkPolicy by itself.
type kindNode struct {
	*env
	// name is that of the node and of its container. ip is its address, and outside that of this machine to it.
	name        string
	ip, outside netip.Addr
	network     string // the file of its network namespace
}

func (e *env) kindNode() *kindNode {
	e.t.Helper()
	nodes, err := e.clients.Kubernetes.CoreV1().Nodes().List(e.t.Context(), metav1.ListOptions{})
	require.NoError(e.t, err)
	require.Len(e.t, nodes.Items, 1)
	n := &kindNode{env: e, name: nodes.Items[0].Name}
	out, err := exec.CommandContext(e.t.Context(), "docker", "inspect", "--format",
		"{{.State.Pid}}{{range .NetworkSettings.Networks}} {{.IPAddress}} {{.Gateway}}{{end}}", n.name).Output()
	require.NoError(e.t, err)
	fields := strings.Fields(string(out))
	require.Len(e.t, fields, 3, "%s", out)
	n.network = filepath.Join("/proc", fields[0], "ns/net")
	n.ip, n.outside = netip.MustParseAddr(fields[1]), netip.MustParseAddr(fields[2])
	return n
}

// command is a program of this machine in the network of the node.
func (n *kindNode) command(ctx context.Context, argv ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + n.network}, argv...)...)
}

func (n *kindNode) run(argv ...string) {
	n.t.Helper()
	out, err := n.command(n.t.Context(), argv...).CombinedOutput()
	require.NoError(n.t, err, "%v: %s", argv, out)
}

// enforce runs kube-router until the test ends or lift is called, after which nothing is enforced any more. Where nodes
// have no IPv6 it leaves to pods the IPv6 of their link, by which they reach each other over the bridge of their node.
// A rule beside it closes that, as docs/egress.md says.
func (n *kindNode) enforce() (lift func()) {
	n.t.Helper()
	// Without these, packets between pods of one node pass its bridge beside the rules.
	n.run("sysctl", "-w", "net.bridge.bridge-nf-call-iptables=1", "net.bridge.bridge-nf-call-ip6tables=1")
	n.run("ip6tables", "-A", "FORWARD", "-j", "DROP")
	log, err := os.Create(filepath.Join(n.t.TempDir(), "kube-router.log"))
	require.NoError(n.t, err)
	router := n.command(context.WithoutCancel(n.t.Context()), os.Getenv(envKubeRouter),
		"--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false",
		"--kubeconfig="+shared.kubeconfig, fmt.Sprintf("--master=https://%v:6443", n.ip), "--hostname-override="+n.name)
	router.Stdout, router.Stderr = log, log
	require.NoError(n.t, router.Start())
	stop := func() {
		if router.ProcessState != nil {
			return
		}
		require.NoError(n.t, router.Process.Kill())
		_ = router.Wait() // it was killed
	}
	n.t.Cleanup(func() {
		stop()
		if n.t.Failed() {
			raw, err := os.ReadFile(log.Name())
			n.t.Logf("kube-router (%v): %s", err, raw[max(0, len(raw)-8<<10):])
		}
		_ = log.Close() // its content has been read
	})
	return func() {
		n.t.Helper()
		stop()
		for _, chain := range []string{"INPUT", "FORWARD", "OUTPUT"} {
			n.run("iptables", "-F", "KUBE-ROUTER-"+chain)
		}
		n.run("ip6tables", "-D", "FORWARD", "-j", "DROP")
	}
}

func listening(ports ...string) []string {
	return append([]string{"python3", "-u", "-c", listener}, ports...)
}

// ordinary starts a pod without labels, which no policy selects.
func (e *env) ordinary(name, namespace string, hostNetwork bool, command []string) (ip string) {
	e.t.Helper()
	pods := e.clients.Kubernetes.CoreV1().Pods(namespace)
	zero := int64(0)
	_, err := pods.Create(e.t.Context(), &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: corev1.PodSpec{
			HostNetwork: hostNetwork, RestartPolicy: corev1.RestartPolicyNever, TerminationGracePeriodSeconds: &zero,
			Containers: []corev1.Container{{
				Name: "main", Image: pythonImage, ImagePullPolicy: corev1.PullNever, Command: command,
			}},
		},
	}, metav1.CreateOptions{})
	require.NoError(e.t, err)
	e.t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		require.NoError(e.t, pods.Delete(ctx, name, metav1.DeleteOptions{}))
	})
	e.eventually(func() error {
		p, err := pods.Get(e.t.Context(), name, metav1.GetOptions{})
		if err == nil && (p.Status.PodIP == "" || p.Status.Phase == corev1.PodPending) {
			err = fmt.Errorf("%s: %+v", name, p.Status)
		}
		if err == nil {
			ip = p.Status.PodIP
		}
		return err
	})
	return ip
}

// logOf waits for the log of a pod.
func (e *env) logOf(name string) (log string) {
	e.t.Helper()
	e.eventually(func() error {
		raw, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).GetLogs(name, &corev1.PodLogOptions{}).
			DoRaw(e.t.Context())
		log = strings.TrimSpace(string(raw))
		if err == nil && log == "" {
			err = fmt.Errorf("%s has written nothing", name)
		}
		return err
	})
	return log
}

// probed is what an ordinary pod reaches of the targets.
func (e *env) probed(targets []target) []string {
	e.t.Helper()
	e.ordinary("prober", e.site.namespace(), false, []string{"python3", "-c", prober, encoded(e.t, targets)})
	return decoded(e.t, []byte(e.logOf("prober")))
}

// probedIn is what root in a sandbox reaches of the targets.
func (e *env) probedIn(s openapi.Sandbox, targets []target) []string {
	e.t.Helper()
	r := e.command(s, "root", false, "python3", "-c", prober, encoded(e.t, targets))
	require.NoError(e.t, r.err)
	return decoded(e.t, []byte(r.out))
}

func encoded(t *testing.T, targets []target) string {
	t.Helper()
	raw, err := json.Marshal(targets)
	require.NoError(t, err)
	return string(raw)
}

func decoded(t *testing.T, out []byte) (reached []string) {
	t.Helper()
	require.NoError(t, json.Unmarshal(out, &reached), "%s", out)
	return reached
}
