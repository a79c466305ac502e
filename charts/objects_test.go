package charts

import (
	"fmt"
	"maps"
	"net"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	podsecurity "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/internal/controltls"
)

// forEachValues runs a check on what each file of values renders.
func forEachValues(t *testing.T, check func(t *testing.T, all []object)) {
	t.Helper()
	for _, values := range valueFiles() {
		t.Run(values, func(t *testing.T) { check(t, render(t, values)) })
	}
}

func TestPodsAskForNothingSpecial(t *testing.T) {
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	require.NoError(t, err)
	restricted := podsecurity.LevelVersion{Level: podsecurity.LevelRestricted, Version: podsecurity.LatestVersion()}
	forEachValues(t, func(t *testing.T, all []object) {
		for _, w := range workloads(all) {
			result := policy.AggregateCheckResults(evaluator.EvaluatePod(restricted, &w.pod.ObjectMeta, &w.pod.Spec))
			require.True(t, result.Allowed, "%s: %s", w.name, result.ForbiddenDetail())
			for _, c := range w.containers() {
				require.NotNil(t, c.SecurityContext.ReadOnlyRootFilesystem, "%s/%s", w.name, c.Name)
				require.True(t, *c.SecurityContext.ReadOnlyRootFilesystem, "%s/%s", w.name, c.Name)
				require.Empty(t, c.SecurityContext.Capabilities.Add, "%s/%s", w.name, c.Name)
				require.Contains(t, c.Resources.Requests, corev1.ResourceCPU, "%s/%s", w.name, c.Name)
				require.Contains(t, c.Resources.Requests, corev1.ResourceMemory, "%s/%s", w.name, c.Name)
				require.Contains(t, c.Resources.Limits, corev1.ResourceMemory, "%s/%s", w.name, c.Name)
				for _, mount := range c.VolumeMounts {
					require.Empty(t, mount.SubPath, "%s/%s %s: a changed Secret would not arrive", w.name, c.Name, mount.Name)
				}
			}
			for _, v := range w.pod.Spec.Volumes {
				if v.EmptyDir != nil {
					require.NotNil(t, v.EmptyDir.SizeLimit, "%s %s", w.name, v.Name)
				}
			}
		}
	})
}

func TestOnlyTheAllocatorAndTheCertificatesJobHaveTokens(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		for _, w := range workloads(all) {
			token := w.pod.Spec.AutomountServiceAccountToken
			require.NotNil(t, token, w.name)
			require.Equal(t, w.name == "berth-allocator" || w.name == "berth-control-tls", *token, w.name)
		}
		for _, a := range objectsOf[*corev1.ServiceAccount](all) {
			require.NotNil(t, a.AutomountServiceAccountToken, a.Name)
			require.False(t, *a.AutomountServiceAccountToken, a.Name)
		}
	})
}

func TestAccountsOfPodsExist(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		var accounts []string
		for _, a := range objectsOf[*corev1.ServiceAccount](all) {
			accounts = append(accounts, a.Namespace+"/"+a.Name)
		}
		for _, w := range workloads(all) {
			require.Contains(t, accounts, namespace+"/"+w.pod.Spec.ServiceAccountName, w.name)
		}
	})
}

// A selector cannot be changed, so that what may change with an upgrade has no
// place in it.
func TestSelectorsSelectTheirOwnPodsAndStayTheSame(t *testing.T) {
	components := map[string]string{}
	forEachValues(t, func(t *testing.T, all []object) {
		selects := func(selector map[string]string) (names []string) {
			for _, w := range workloads(all) {
				if labels.SelectorFromSet(selector).Matches(labels.Set(w.pod.Labels)) {
					names = append(names, w.name)
				}
			}
			return names
		}
		for _, w := range workloads(all) {
			if w.selector == nil {
				continue
			}
			require.Empty(t, w.selector.MatchExpressions, w.name)
			require.Equal(t, []string{w.name}, selects(w.selector.MatchLabels))
			require.Len(t, w.selector.MatchLabels, 3, w.name)
			component := w.selector.MatchLabels["app.kubernetes.io/component"]
			if before, ok := components[w.name]; ok {
				require.Equal(t, before, component)
			}
			components[w.name] = component
			// Zones by a constraint and nodes by affinity: the scheduler counts no constraint for nodes where they have no zone.
			require.Len(t, w.pod.Spec.TopologySpreadConstraints, 1, w.name)
			spread := w.pod.Spec.TopologySpreadConstraints[0]
			require.Equal(t, corev1.LabelTopologyZone, spread.TopologyKey, w.name)
			require.Equal(t, corev1.ScheduleAnyway, spread.WhenUnsatisfiable, w.name)
			require.Equal(t, w.selector.MatchLabels, spread.LabelSelector.MatchLabels, w.name)
			apart := w.pod.Spec.Affinity.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution
			require.Len(t, apart, 1, w.name)
			require.Equal(t, corev1.LabelHostname, apart[0].PodAffinityTerm.TopologyKey, w.name)
			require.Equal(t, w.selector.MatchLabels, apart[0].PodAffinityTerm.LabelSelector.MatchLabels, w.name)
			require.True(t, slices.ContainsFunc(objectsOf[*policyv1.PodDisruptionBudget](all), func(b *policyv1.PodDisruptionBudget) bool {
				return b.Name == w.name
			}), w.name)
		}
		for _, b := range objectsOf[*policyv1.PodDisruptionBudget](all) {
			require.Equal(t, []string{b.Name}, selects(b.Spec.Selector.MatchLabels))
		}
		for service, want := range map[string]string{
			"berth-gateway": "berth-gateway", "berth-allocator-api": "berth-allocator", "berth-allocator-control": "berth-allocator",
		} {
			require.Equal(t, []string{want}, selects(findService(t, all, service).Spec.Selector), service)
		}
	})
}

func findService(t *testing.T, all []object, name string) *corev1.Service {
	t.Helper()
	for _, s := range objectsOf[*corev1.Service](all) {
		if s.Name == name {
			return s
		}
	}
	require.Failf(t, "no such Service", "%s", name)
	return nil
}

func TestPortsLeadToListeners(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		// Every address that a program listens on must be a port of its container,
		// unless only the pod itself can connect.
		listens := func(w workload, c corev1.Container, in corev1.Container) {
			for name, address := range flagsOf(c) {
				if !strings.HasSuffix(name, "listen") {
					continue
				}
				host, port, err := net.SplitHostPort(address)
				require.NoError(t, err, name)
				if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() {
					continue
				}
				require.True(t, slices.ContainsFunc(in.Ports, func(p corev1.ContainerPort) bool {
					return strconv.Itoa(int(p.ContainerPort)) == port
				}), "%s: --%s=%s is no port of container %s", w.name, name, address, in.Name)
			}
		}
		gateway, allocator := findWorkload(t, all, "berth-gateway"), findWorkload(t, all, "berth-allocator")
		listens(gateway, gateway.container(t, "config"), gateway.container(t, "envoy"))
		listens(gateway, gateway.container(t, "router"), gateway.container(t, "router"))
		listens(allocator, allocator.container(t, "allocator"), allocator.container(t, "allocator"))

		ports := map[string]bool{}
		for _, w := range workloads(all) {
			for _, c := range w.containers() {
				own := map[string]bool{}
				for _, p := range c.Ports {
					own[p.Name], ports[w.name+"/"+p.Name] = true, true
				}
				for _, probe := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
					if probe != nil {
						require.True(t, own[probe.HTTPGet.Port.StrVal], "%s/%s: %v", w.name, c.Name, probe.HTTPGet.Port)
					}
				}
			}
		}
		for service, want := range map[string]string{
			"berth-gateway": "berth-gateway/http", "berth-allocator-api": "berth-allocator/api", "berth-allocator-control": "berth-allocator/control",
		} {
			require.True(t, ports[want], want)
			s := findService(t, all, service)
			require.Len(t, s.Spec.Ports, 1, service)
			require.Equal(t, path.Base(want), s.Spec.Ports[0].TargetPort.StrVal, service)
		}
		control := findService(t, all, "berth-allocator-control")
		require.Equal(t, control.Name+"."+control.Namespace+".svc:9090", flagsOf(gateway.container(t, "router"))["allocator"])
		require.EqualValues(t, 9090, control.Spec.Ports[0].Port)
	})
}

// Invariant: P23
func TestGatewayPodHoldsTogether(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		gateway := findWorkload(t, all, "berth-gateway")
		var order []string
		for _, c := range gateway.containers() {
			order = append(order, c.Name)
		}
		require.Equal(t, []string{"config", "router", "envoy"}, order)
		config, router, envoy := gateway.container(t, "config"), gateway.container(t, "router"), gateway.container(t, "envoy")
		require.Equal(t, router.Image, config.Image, "bootstrap and router must be of one version")
		require.NotNil(t, router.RestartPolicy, "a sidecar ends after Envoy")
		require.Equal(t, corev1.ContainerRestartPolicyAlways, *router.RestartPolicy)
		require.Equal(t, flagsOf(router)["socket"], flagsOf(config)["router-socket"])
		require.Equal(t, flagsOf(router)["envoy-admin"], flagsOf(config)["admin-socket"])
		require.Equal(t, path.Dir(flagsOf(router)["socket"]), path.Dir(flagsOf(router)["envoy-admin"]))
		// The socket is open to its group (mode 0660): the router must be in that group.
		require.NotNil(t, gateway.pod.Spec.SecurityContext.RunAsGroup)
		require.Contains(t, envoy.Args, flagsOf(config)["output"])
		for _, c := range []corev1.Container{config, router, envoy} {
			require.Nil(t, c.SecurityContext.RunAsUser, c.Name)
			require.Nil(t, c.SecurityContext.RunAsGroup, c.Name)
			require.True(t, slices.ContainsFunc(c.VolumeMounts, func(m corev1.VolumeMount) bool {
				return m.MountPath == path.Dir(flagsOf(router)["socket"]) && !m.ReadOnly
			}), c.Name)
		}
		require.NotContains(t, router.LivenessProbe.HTTPGet.Path, "ready", "an allocator that is away must not restart routers")
		require.NotNil(t, router.LivenessProbe.TerminationGracePeriodSeconds, "a router that hangs must not get the time of a drain")
		// The router's container begins the drain, during which Envoy's sleeps.
		require.Equal(t, []string{"/usr/local/bin/berth", "envoy-drain", "--admin-socket=" + flagsOf(config)["admin-socket"]},
			router.Lifecycle.PreStop.Exec.Command)
		sleep := envoy.Lifecycle.PreStop.Sleep.Seconds
		require.Greater(t, *gateway.pod.Spec.TerminationGracePeriodSeconds, sleep+20, "Envoy and the router have to end too")
		// Both ends must agree on it.
		require.Equal(t, flagsOf(router)["max-stale"], flagsOf(findWorkload(t, all, "berth-allocator").container(t, "allocator"))["max-stale"])
	})
}

func TestAddressesAreOfThePodsMainFamily(t *testing.T) {
	for values, want := range map[string]struct{ any, pod string }{
		"minimal": {"0.0.0.0", "$(POD_IP)"},
		"ipv6":    {"[::]", "[$(POD_IP)]"},
	} {
		all := render(t, values)
		config := flagsOf(findWorkload(t, all, "berth-gateway").container(t, "config"))
		require.Equal(t, want.any+":8080", config["listen"])
		require.Equal(t, want.any+":8082", config["health-listen"])
		allocator := flagsOf(findWorkload(t, all, "berth-allocator").container(t, "allocator"))
		require.Equal(t, want.pod+":9090", allocator["control-advertise"])
		require.Equal(t, want.pod+":8081", allocator["api-advertise"])
	}
}

func TestDomainIsThatOfThePublicURL(t *testing.T) {
	for values, want := range map[string]string{"minimal": "sandbox.example.com", "full": "sandbox.example.com", "kind": "sandbox.example.test"} {
		require.Equal(t, want, flagsOf(findWorkload(t, render(t, values), "berth-gateway").container(t, "router"))["domain"], values)
	}
}

// The gateway sends what is for MCP to its Service, and MCP reaches sandboxes through the gateway's.
func TestServerOfMCPAndGatewayFindEachOther(t *testing.T) {
	for name, c := range map[string]struct {
		args  []string
		plain bool
	}{
		"TLS in front of the gateway": {nil, true},
		"TLS at the gateway":          {[]string{"--set", "gateway.tlsSecret=wildcard"}, false},
		"no TLS":                      {[]string{"--set", "publicURL=http://sandbox.example.com"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			all := render(t, "ipv6", c.args...)
			mcp := findWorkload(t, all, "berth-mcp")
			container := mcp.container(t, "mcp")
			flags := flagsOf(container)
			service := findService(t, all, "berth-mcp")
			require.Equal(t, []string{"berth-mcp." + namespace + ".svc:8090"},
				[]string{flagsOf(findWorkload(t, all, "berth-gateway").container(t, "config"))["mcp"]})
			require.EqualValues(t, 8090, service.Spec.Ports[0].Port)
			require.Equal(t, container.Ports[0].Name, service.Spec.Ports[0].TargetPort.StrVal)
			require.Equal(t, "[::]:8090", flags["http"])
			require.EqualValues(t, 8090, container.Ports[0].ContainerPort)
			require.Equal(t, "http://berth-allocator-api."+namespace+".svc:80", flags["api-url"])
			require.Equal(t, "berth-gateway."+namespace+".svc:80", flags["gateway"])
			require.Equal(t, c.plain, slices.Contains(container.Args, "--plain-gateway"))
			if len(mcp.pod.Spec.Volumes) > 0 {
				require.Equal(t, []corev1.KeyToPath{{Key: "tls.crt", Path: "tls.crt"}}, mcp.pod.Spec.Volumes[0].Secret.Items, "the key stays at the gateway")
				require.Equal(t, container.VolumeMounts[0].MountPath+"/tls.crt", flags["ca-file"])
			}
			require.Equal(t, name == "TLS at the gateway", flags["ca-file"] != "")
		})
	}
}

func TestGatewayWithFewClientsLetsTheServerOfMCPConnect(t *testing.T) {
	all := render(t, "ipv6", "--set-json", `networkPolicy.gateway.from=[{"ipBlock":{"cidr":"192.0.2.0/24"}}]`)
	n := network{t: t, policies: objectsOf[*networkingv1.NetworkPolicy](all)}
	mcp := end{namespace: namespace, labels: findWorkload(t, all, "berth-mcp").pod.Labels}
	gateway := end{namespace: namespace, labels: findWorkload(t, all, "berth-gateway").pod.Labels}
	require.True(t, n.allows(mcp, gateway, corev1.ProtocolTCP, 8080))
	require.False(t, n.allows(end{namespace: namespace}, gateway, corev1.ProtocolTCP, 8080))
}

// Every Secret that a pod mounts is one that the chart makes, that its Job or
// cert-manager makes, or that the values name.
func TestSecretsOfPodsHaveAMaker(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		makers := map[string]bool{"my-api": true, "my-allocator": true, "my-router": true, "my-egress": true, "wildcard": true, "my-access-key": true}
		for _, s := range objectsOf[*corev1.Secret](all) {
			makers[s.Name] = true
		}
		for _, w := range workloads(all) {
			if w.name == "berth-control-tls" {
				flags := flagsOf(w.container(t, "certs"))
				for _, role := range []string{"allocator", "router", "egress"} {
					makers[flags[role+"-secret"]] = true
				}
				require.Equal(t, namespace, flags["namespace"])
			}
		}
		for _, c := range certificates(t, all) {
			makers[c.Spec.SecretName] = true
		}
		mounted := map[string]string{}
		for _, w := range workloads(all) {
			for _, v := range w.pod.Spec.Volumes {
				if v.Secret != nil {
					require.True(t, makers[v.Secret.SecretName], "%s: %s", w.name, v.Secret.SecretName)
					require.Nil(t, v.Secret.Optional, "a pod waits for its Secrets")
					mounted[w.name+"/"+v.Name] = v.Secret.SecretName
				}
			}
		}
		for mount := range mounted {
			require.Contains(t, []string{
				"berth-gateway/tls", "berth-gateway/control-tls", "berth-gateway/api-ca", "berth-allocator/control-tls", "berth-allocator/api-tls",
				"berth-allocator/access-key", "berth-test/gateway-tls", "berth-egress/control-tls",
			}, mount)
		}
		require.NotEqual(t, mounted["berth-gateway/control-tls"], mounted["berth-allocator/control-tls"])
		// Invariant: P35
		require.NotEqual(t, mounted["berth-gateway/control-tls"], mounted["berth-egress/control-tls"], "it opens all sandboxes")
	})
}

// Where the API has a certificate, the gateway must speak TLS to it, and Envoy needs the authority
// and nothing else.
func TestGatewaySpeaksTLSToAnAPIWithACertificate(t *testing.T) {
	for values, secured := range map[string]bool{"minimal": false, "closed": true} {
		all := render(t, values)
		gateway := findWorkload(t, all, "berth-gateway")
		allocator := flagsOf(findWorkload(t, all, "berth-allocator").container(t, "allocator"))
		config := flagsOf(gateway.container(t, "config"))
		require.NotEmpty(t, config["api"], values)
		require.Equal(t, secured, allocator["api-tls-cert"] != "" && allocator["api-tls-key"] != "", values)
		require.Equal(t, secured, config["api-ca"] != "", values)
		for _, v := range gateway.pod.Spec.Volumes {
			if v.Name == "api-ca" {
				require.Len(t, v.Secret.Items, 1)
				require.Equal(t, "ca.crt", v.Secret.Items[0].Key)
			}
		}
	}
}

// The egress gateway is one Envoy and one router, the allocator knows its Service, and both walls know the same ranges.
func TestEgressGatewayHoldsTogether(t *testing.T) {
	for _, w := range workloads(render(t, "minimal")) {
		require.NotEqual(t, "berth-egress", w.name)
	}
	all := render(t, "full")
	egress, gateway := findWorkload(t, all, "berth-egress"), findWorkload(t, all, "berth-gateway")
	config, router, envoy := egress.container(t, "config"), egress.container(t, "router"), egress.container(t, "envoy")
	require.Equal(t, router.Image, config.Image, "bootstrap and router must be of one version")
	require.Equal(t, corev1.ContainerRestartPolicyAlways, *router.RestartPolicy, "a sidecar ends after Envoy")
	require.Equal(t, flagsOf(router)["socket"], flagsOf(config)["router-socket"])
	require.Equal(t, flagsOf(router)["envoy-admin"], flagsOf(config)["admin-socket"])
	require.Contains(t, envoy.Args, flagsOf(config)["output"])
	require.Equal(t, "4000", flagsOf(config)["max-connections"])
	require.Equal(t, "4000", flagsOf(router)["max-connections"], "the shares are those of Envoy's bound")
	require.Equal(t, router.Lifecycle, gateway.container(t, "router").Lifecycle)
	require.Equal(t, "Egress", flagsOf(router)["mode"])
	require.Equal(t, flagsOf(gateway.container(t, "router"))["allocator"], flagsOf(router)["allocator"])
	require.Equal(t, "10.244.0.0/16,198.18.0.0/16", flagsOf(router)["pod-cidrs"])
	require.Equal(t, "$(NODE_IPS),203.0.113.7/32,2001:db8::/32", flagsOf(router)["inside-cidrs"])
	require.Equal(t, "10.8.0.0/16,10.240.0.0/12", flagsOf(router)["outside-cidrs"])
	require.Greater(t, *egress.pod.Spec.TerminationGracePeriodSeconds, envoy.Lifecycle.PreStop.Sleep.Seconds+20)
	service := findService(t, all, "berth-egress")
	require.Equal(t, "proxy", service.Spec.Ports[0].TargetPort.StrVal)
	port := strconv.Itoa(int(service.Spec.Ports[0].Port))
	require.Equal(t, "http://"+service.Name+"."+service.Namespace+".svc:"+port,
		flagsOf(findWorkload(t, all, "berth-allocator").container(t, "allocator"))["egress-proxy"])
	require.EqualValues(t, 3128, envoy.Ports[0].ContainerPort, "the NetworkPolicies name it")
	require.True(t, strings.HasSuffix(flagsOf(config)["listen"], ":"+port))
	require.Equal(t, "proxy", envoy.Ports[0].Name)
	health := service.Spec.Ports[1]
	require.Equal(t, "health", health.TargetPort.StrVal)
	require.EqualValues(t, 8082, health.Port, "agent/canary tries it")
}

// The router and Envoy must have the same settings of the edge, and Envoy must
// find its certificate where its configuration says.
func TestRouterAndEnvoyGetTheSameSettings(t *testing.T) {
	for values, full := range map[string]bool{"minimal": false, "full": true} {
		all := render(t, values)
		gateway := findWorkload(t, all, "berth-gateway")
		router, config := flagsOf(gateway.container(t, "router")), flagsOf(gateway.container(t, "config"))
		for _, flags := range []map[string]string{router, config} {
			_, paths := flags["paths"]
			require.Equal(t, full, paths)
		}
		_, proxy := config["proxy-protocol"]
		require.Equal(t, full, proxy)
		require.Equal(t, map[bool]string{true: "gateway.example.com,api.example.com"}[full], router["gateway-hosts"])
		require.Equal(t, map[bool]string{true: "1"}[full], config["trusted-hops"])
		require.Equal(t, map[bool]string{true: "6442450944", false: "805306368"}[full], config["max-heap"])
		at := ""
		for _, m := range gateway.container(t, "envoy").VolumeMounts {
			if m.Name == "tls" {
				at = m.MountPath
				require.Empty(t, m.SubPath, "a changed Secret would never arrive")
			}
		}
		require.Equal(t, at, config["tls-dir"])
		require.Equal(t, full, at != "")
	}
}

// The hook's account and rights are there before its Job, and gone after it.
func TestHooksRunInTheRightOrderAndLeaveNoRightsBehind(t *testing.T) {
	weights := map[string]string{}
	for _, o := range render(t, "minimal") {
		if !o.hook() {
			continue
		}
		require.Equal(t, "pre-install,pre-upgrade", o.GetAnnotations()["helm.sh/hook"], o)
		require.Equal(t, "before-hook-creation,hook-succeeded", o.GetAnnotations()["helm.sh/hook-delete-policy"], o)
		weights[o.GetKind()] = o.GetAnnotations()["helm.sh/hook-weight"]
	}
	require.Equal(t, map[string]string{"ServiceAccount": "-10", "Role": "-10", "RoleBinding": "-9", "Job": "0"}, weights)
	for _, values := range []string{"full", "closed"} {
		for _, o := range render(t, values) {
			require.False(t, o.hook(), "%s: %s", values, o)
		}
	}
}

// certificate is the part of a cert-manager Certificate that the chart uses.
type certificate struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		SecretName string   `json:"secretName"`
		CommonName string   `json:"commonName"`
		DNSNames   []string `json:"dnsNames"`
		IsCA       bool     `json:"isCA"`
		Duration   string   `json:"duration"`
		PrivateKey struct {
			Algorithm, RotationPolicy string
			Size                      int
		} `json:"privateKey"`
		Usages    []string `json:"usages"`
		IssuerRef struct{ Name, Kind, Group string }
	} `json:"spec"`
}

// issuer is the part of a cert-manager Issuer that the chart uses.
type issuer struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		SelfSigned *struct{} `json:"selfSigned"`
		CA         *struct {
			SecretName string `json:"secretName"`
		} `json:"ca"`
	} `json:"spec"`
}

func decodeAs[T any](t *testing.T, all []object, kind string) []T {
	t.Helper()
	var found []T
	for _, o := range all {
		if o.GetAPIVersion() != "cert-manager.io/v1" || o.GetKind() != kind {
			continue
		}
		raw, err := o.MarshalJSON()
		require.NoError(t, err)
		var decoded T
		require.NoError(t, yaml.UnmarshalStrict(raw, &decoded))
		found = append(found, decoded)
	}
	return found
}

func certificates(t *testing.T, all []object) []certificate {
	t.Helper()
	return decodeAs[certificate](t, all, "Certificate")
}

// No API server of these tests knows cert-manager's kinds, so that they are only
// looked at here: fields that are known, and references that lead somewhere.
func TestCertManagerMakesWhatTheProgramsBelieve(t *testing.T) {
	all := render(t, "full")
	issuers := map[string]issuer{}
	for _, i := range decodeAs[issuer](t, all, "Issuer") {
		issuers[i.Name] = i
	}
	require.Len(t, issuers, 2)
	found := map[string]certificate{}
	for _, c := range certificates(t, all) {
		require.Equal(t, "Issuer", c.Spec.IssuerRef.Kind, c.Name)
		require.Equal(t, "cert-manager.io", c.Spec.IssuerRef.Group, c.Name)
		require.Contains(t, issuers, c.Spec.IssuerRef.Name, c.Name)
		found[c.Spec.SecretName] = c
	}
	require.Len(t, found, 4)
	secret := func(name string) string {
		for _, v := range findWorkload(t, all, name).pod.Spec.Volumes {
			if v.Name == "control-tls" {
				return v.Secret.SecretName
			}
		}
		return ""
	}
	for pod, want := range map[string]struct{ dns, usage string }{
		"berth-allocator": {controltls.AllocatorName, "server auth"},
		"berth-gateway":   {controltls.RouterName, "client auth"},
		"berth-egress":    {controltls.EgressName, "client auth"},
	} {
		c, ok := found[secret(pod)]
		require.True(t, ok, pod)
		require.Equal(t, []string{want.dns}, c.Spec.DNSNames)
		require.Equal(t, []string{"digital signature", want.usage}, c.Spec.Usages)
		require.False(t, c.Spec.IsCA)
		ca := issuers[c.Spec.IssuerRef.Name].Spec.CA
		require.NotNil(t, ca)
		authority, ok := found[ca.SecretName]
		require.True(t, ok)
		require.True(t, authority.Spec.IsCA)
		require.Equal(t, "Never", authority.Spec.PrivateKey.RotationPolicy, "what it signed must stay good under its next certificate")
		require.NotNil(t, issuers[authority.Spec.IssuerRef.Name].Spec.SelfSigned)
	}
}

func TestDeploymentsNeverHaveLessThanTheirReplicasReadyInARollout(t *testing.T) {
	forEachValues(t, func(t *testing.T, all []object) {
		scaled := map[string]*int32{}
		for _, a := range objectsOf[*autoscalingv2.HorizontalPodAutoscaler](all) {
			scaled[a.Spec.ScaleTargetRef.Name] = a.Spec.MinReplicas
		}
		for _, d := range objectsOf[*appsv1.Deployment](all) {
			if fewest, ok := scaled[d.Name]; ok {
				require.Nil(t, d.Spec.Replicas, "%s: an upgrade would set back what the autoscaler has decided", d.Name)
				d.Spec.Replicas = fewest
			}
			require.GreaterOrEqual(t, *d.Spec.Replicas, int32(2), d.Name)
			require.Equal(t, "0", d.Spec.Strategy.RollingUpdate.MaxUnavailable.String(), d.Name)
			for _, c := range d.Spec.Template.Spec.Containers {
				require.NotNil(t, c.ReadinessProbe, "%s/%s", d.Name, c.Name)
				require.NotNil(t, c.Lifecycle.PreStop.Sleep, "%s/%s", d.Name, c.Name)
			}
		}
	})
}

func TestAutoscalerCountsTheThreadsOfEnvoy(t *testing.T) {
	all := render(t, "full")
	scalers := objectsOf[*autoscalingv2.HorizontalPodAutoscaler](all)
	require.Len(t, scalers, 1)
	spec := scalers[0].Spec
	gateway := findWorkload(t, all, spec.ScaleTargetRef.Name)
	require.EqualValues(t, 4, *spec.MinReplicas)
	require.EqualValues(t, 12, spec.MaxReplicas)
	require.Len(t, spec.Metrics, 1)
	source := spec.Metrics[0].ContainerResource
	args := gateway.container(t, source.Container).Args
	require.Equal(t, "8", args[slices.Index(args, "--concurrency")+1])
	require.Equal(t, corev1.ResourceCPU, source.Name)
	require.Equal(t, "4800m", source.Target.AverageValue.String())
	require.Empty(t, objectsOf[*autoscalingv2.HorizontalPodAutoscaler](render(t, "minimal")))
}

// Whatever is in front sends all hosts of a Service to it, on any path and for any time.
func TestRoutesLeadAllHostsToTheirService(t *testing.T) {
	all := render(t, "full")
	for name, c := range map[string]struct {
		hosts                 []string
		class, secret, parent string
		port                  int32
		annotations, ofRoute  map[string]string
	}{
		"berth-gateway": {
			hosts: []string{"*.sandbox.example.com", "sandbox.example.com", "gateway.example.com", "api.example.com"},
			class: "nginx", secret: "wildcard", parent: "{name: public, namespace: gateways}", port: 8080,
			annotations: map[string]string{"nginx.ingress.kubernetes.io/proxy-read-timeout": "3600"}, ofRoute: map[string]string{"example.com/team": "edge"},
		},
		"berth-console": {
			hosts: []string{"console.example.com"},
			class: "internal", secret: "console", parent: "{name: public, namespace: gateways, sectionName: https}", port: 8082,
			annotations: map[string]string{"example.com/allow": "192.0.2.0/24"}, ofRoute: map[string]string{"example.com/team": "console"},
		},
	} {
		service := findService(t, all, name)
		require.Equal(t, c.port, service.Spec.Ports[0].Port)
		ingresses := slices.DeleteFunc(objectsOf[*networkingv1.Ingress](all), func(o *networkingv1.Ingress) bool { return o.Name != name })
		require.Len(t, ingresses, 1)
		ingress := ingresses[0]
		require.Equal(t, []networkingv1.IngressTLS{{Hosts: c.hosts, SecretName: c.secret}}, ingress.Spec.TLS)
		require.Equal(t, c.class, *ingress.Spec.IngressClassName)
		require.Equal(t, c.annotations, ingress.Annotations)
		require.Equal(t, service.Labels, ingress.Labels)
		var served []string
		for _, rule := range ingress.Spec.Rules {
			served = append(served, rule.Host)
			prefix := networkingv1.PathTypePrefix
			require.Equal(t, []networkingv1.HTTPIngressPath{{Path: "/", PathType: &prefix, Backend: networkingv1.IngressBackend{
				Service: &networkingv1.IngressServiceBackend{Name: service.Name, Port: networkingv1.ServiceBackendPort{Name: service.Spec.Ports[0].Name}},
			}}}, rule.HTTP.Paths)
		}
		require.Equal(t, c.hosts, served)

		routes := slices.DeleteFunc(slices.Clone(all), func(o object) bool { return o.GetKind() != "HTTPRoute" || o.GetName() != name })
		require.Len(t, routes, 1)
		require.Equal(t, "gateway.networking.k8s.io/v1", routes[0].GetAPIVersion())
		require.Equal(t, c.ofRoute, routes[0].GetAnnotations())
		require.Equal(t, service.Labels, routes[0].GetLabels())
		raw, err := yaml.Marshal(routes[0].Object["spec"])
		require.NoError(t, err)
		require.YAMLEq(t, fmt.Sprintf(`
parentRefs: [%s]
hostnames: ["%s"]
rules: [{timeouts: {request: 0s}, backendRefs: [{name: %s, port: %d}]}]
`, c.parent, strings.Join(c.hosts, `", "`), name, c.port), string(raw))
	}
	for _, o := range render(t, "minimal") {
		require.NotContains(t, []string{"HTTPRoute", "Ingress"}, o.GetKind())
	}
}

func TestHelmTestGoesThroughTheGateway(t *testing.T) {
	for name, c := range map[string]struct {
		args        []string
		api, secure bool
	}{
		"TLS in front":                        {nil, true, false},
		"TLS at the gateway, without the API": {[]string{"--set", "gateway.tlsSecret=wildcard", "--set", "gateway.api=false"}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			all := render(t, "minimal", c.args...)
			check := findWorkload(t, all, "berth-test").container(t, "check")
			flags := flagsOf(check)
			require.Equal(t, findWorkload(t, all, "berth-gateway").container(t, "router").Image, check.Image)
			require.Equal(t, "berth-gateway."+namespace+".svc:80", flags["gateway"])
			require.Equal(t, "https://sandbox.example.com", check.Args[len(check.Args)-1])
			require.Equal(t, !c.api, slices.Contains(check.Args, "--no-api"))
			require.Equal(t, !c.secure, slices.Contains(check.Args, "--plain-gateway"))
			require.Equal(t, c.secure, flags["ca-file"] != "")
			if c.secure {
				require.Equal(t, check.VolumeMounts[0].MountPath+"/tls.crt", flags["ca-file"])
			}
		})
	}
	// It could not speak the PROXY protocol.
	require.Empty(t, objectsOf[*corev1.Pod](render(t, "full")))
}

func TestMonitoringScrapesPortsThatExist(t *testing.T) {
	var monitor struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
		Spec     struct {
			Selector            metav1.LabelSelector    `json:"selector"`
			PodMetricsEndpoints []struct{ Port string } `json:"podMetricsEndpoints"`
		} `json:"spec"`
	}
	all := render(t, "full")
	raw, err := yaml.Marshal(oneOf(t, all, "PodMonitor").Object)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal(raw, &monitor))
	require.Equal(t, "prometheus", monitor.Metadata.Labels["release"])
	var served, scraped []string
	for _, w := range workloads(all) {
		if labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels).Matches(labels.Set(w.pod.Labels)) {
			for _, c := range w.containers() {
				for _, p := range c.Ports {
					served = append(served, p.Name)
				}
			}
		}
	}
	for _, e := range monitor.Spec.PodMetricsEndpoints {
		scraped = append(scraped, e.Port)
	}
	require.Subset(t, served, scraped)
	require.Len(t, scraped, 3)
}

func TestRulesAndDashboardsAreTheGeneratedOnes(t *testing.T) {
	all := render(t, "ipv6", "--set", "monitoring.labels.release=prometheus")
	rule := oneOf(t, all, "PrometheusRule")
	require.Equal(t, "prometheus", rule.GetLabels()["release"])
	raw, err := os.ReadFile("berth/files/rules/berth.yaml")
	require.NoError(t, err)
	spec, err := yaml.Marshal(rule.Object["spec"])
	require.NoError(t, err)
	require.YAMLEq(t, string(raw), string(spec))

	files, err := filepath.Glob("berth/files/dashboards/*.json")
	require.NoError(t, err)
	boards := map[string]string{}
	for _, o := range all {
		if o.GetKind() == "ConfigMap" && o.GetLabels()["grafana_dashboard"] == "1" {
			data, _, err := unstructured.NestedStringMap(o.Object, "data")
			require.NoError(t, err)
			maps.Copy(boards, data)
		}
	}
	require.Len(t, boards, len(files))
	require.NotEmpty(t, files)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		require.JSONEq(t, string(raw), boards[filepath.Base(file)])
	}
	for _, o := range render(t, "minimal") {
		require.NotContains(t, []string{"PodMonitor", "PrometheusRule"}, o.GetKind())
		require.NotContains(t, o.GetLabels(), "grafana_dashboard")
	}
}

// oneOf returns the only object of a kind.
func oneOf(t *testing.T, all []object, kind string) object {
	t.Helper()
	found := slices.DeleteFunc(slices.Clone(all), func(o object) bool { return o.GetKind() != kind })
	require.Len(t, found, 1, kind)
	return found[0]
}
