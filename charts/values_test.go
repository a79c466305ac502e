package charts

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/envoy"
)

// Invariant: P7
func TestBadValuesAreRefusedWithTheirNames(t *testing.T) {
	// Each case is values of --set, and what the message has to say. helm says all that is wrong at once, but what the schema
	// refuses before the rest: so all cases that change different values have one call together.
	type refused struct{ set, says string }
	const heap = 768 << 20 // envoy.maxHeapBytes
	schema := []refused{
		{"publicUrl=x", "publicUrl"},
		{"gateway.service.ports=1", "ports"},
		{"accessLogFlush=5s", "accessLogFlush"},
		{"allocator.replicas=0", "/allocator/replicas': minimum: got 0, want 1"},
		{"allocator.podSecurity=restricted", "/allocator/podSecurity': value must be one of 'baseline', 'privileged'"},
		{"router.logLevel=verbose", "/router/logLevel': value must be one of"},
		{"allocator.reapDryRun=some", "/allocator/reapDryRun': got string, want boolean"},
		{"gateway.trustedHops=-1", "/gateway/trustedHops': minimum"},
		{"gateway.maxReplicas=1001", "/gateway/maxReplicas': maximum"},
		{"egress.maxConnections=499", "/egress/maxConnections': minimum"},
		{"snapshots.perTeam=0", "/snapshots/perTeam': minimum"},
		{"tracing.percent=101", "/tracing/percent': maximum"},
		{"controlTLS.mode=none", "/controlTLS/mode': value must be one of"},
		{"envoy.resources.limits=null", "/envoy/resources': missing property 'limits'"},
		{"podCIDRs={10.0.0.0/8,10.0.0.0/8}", "/podCIDRs': items at 0 and 1 are equal"},
	}
	rest := []refused{
		{"publicURL=https://sandbox.example.com/x", "publicURL: https://sandbox.example.com/x must be"},
		{"publicURL=sandbox.example.com", "publicURL: sandbox.example.com must be http:// or https://"},
		{"publicURL=https://Sandbox.example.com", "publicURL: https://Sandbox.example.com must be"},
		{"publicURL=http://a b%zz", "publicURL: http://a b%zz must be"},
		{"podCIDRs={10.244.0.0}", "podCIDRs: 10.244.0.0 must be a range"},
		{"podCIDRs={0.0.0.0/0}", "podCIDRs: 0.0.0.0/0 must be a range of addresses, and not all"},
		{"maxStale=15", "maxStale: 15 must be a duration of 1 s or more with its unit, for example 15m"},
		{"maxStale=1.5", "maxStale: 1.5 must be a duration"},
		{"maxStale=500ms", "maxStale: 500ms must be a duration of 1 s or more"},
		{"api.keysNamespace=sandboxes sandboxes.namespace=sandboxes", "api.keysNamespace: sandboxes is the namespace of the sandboxes"},
		{"api.keysNamespace=my.keys", "api.keysNamespace: my.keys is no name of a namespace"},
		{"sandboxes.namespace=My_Sandboxes", "sandboxes.namespace: My_Sandboxes is no name of a namespace"},
		{"sandboxes.namespace=", "sandboxes.namespace: required: an existing namespace other than the release's"},
		{"sandboxes.namespace=" + namespace, "sandboxes.namespace: " + namespace + " is the release's namespace, which holds the keys of the control stream"},
		{"image.registry=registry.example.com/", "image.registry: registry.example.com/ must be a host"},
		{"image.registry=https://registry.example.com", "image.registry: https://registry.example.com must be a host"},
		{"image.pullSecrets={A}", `image.pullSecrets: "A" is no name of a Secret`},
		{"image.tag=1.2.3@sha256:12", "image.tag: 1.2.3@sha256:12 must be a tag, and may have a digest"},
		{"router.image.tag=a b", "router.image.tag: a b must be a tag"},
		{"agent.image.repository=", `agent.image.repository: "" must be the name of an image`},
		{"envoy.image.repository=envoy@sha256:12", `envoy.image.repository: "envoy@sha256:12" must be the name of an image without its tag`},
		{"envoy.image.tag=", "envoy.image.tag: required"},
		{"tracing.to=https://collector:4317", "tracing.to: https://collector:4317 must be http://host:port"},
		{"snapshots.store=file:///x", "snapshots.store: file:///x must be s3://BUCKET"},
		{"snapshots.keep=30d", `snapshots.keep: "30d" must be a time such as 720h`},
		{"envoy.maxHeapBytes=1000", "envoy.maxHeapBytes: 1000 is too little for Envoy: 67108864"},
		{"router.extraArgs={cache-size=5}", "router.extraArgs: cache-size=5 must be a flag"},
		{"envoy.configArgs={paths}", "envoy.configArgs: paths must be a flag"},
		{"gateway.hosts={*.example.com}", "gateway.hosts: *.example.com must be a DNS name in lower case, without *"},
		{"gateway.tlsSecret=My_Secret", "gateway.tlsSecret: My_Secret is no name of an object"},
		{"gateway.priorityClassName=-x", "gateway.priorityClassName: -x is no name of an object"},
		{"gateway.ingress.className=Nginx", "gateway.ingress.className: Nginx is no name of an object"},
		{"gateway.maxReplicas=1", "gateway.maxReplicas: 1 is less than gateway.replicas, 2"},
		{"gateway.service.nodePort=30080", "gateway.service.nodePort: 30080 has no meaning with gateway.service.type ClusterIP: set the type to NodePort"},
		{"gateway.service.externalTrafficPolicy=Local", "gateway.service.externalTrafficPolicy: Local has no meaning"},
		{"gateway.service.loadBalancerClass=x", "gateway.service.loadBalancerClass: has no meaning with gateway.service.type ClusterIP"},
		{"gateway.service.loadBalancerSourceRanges={192.0.2.0/24}", "gateway.service.loadBalancerSourceRanges: has no meaning"},
		{"gateway.service.loadBalancerSourceRanges={192.0.2.7}", "gateway.service.loadBalancerSourceRanges: 192.0.2.7 must be a range"},
		{"api.service.nodePort=30080", "api.service.nodePort: 30080 has no meaning"},
		{"console.service.nodePort=30080", "console.service.nodePort: 30080 has no meaning"},
		{"console.url=https://console.example.com", "console.url: needs console.enabled"},
		{"console.ingress.enabled=true", "console.ingress: needs console.enabled, and the host in console.url"},
		{"console.enabled=true console.url= console.httpRoute.parentRefs[0].name=public", "console.httpRoute: needs console.enabled, and the host in console.url"},
		{"console.ingress.tlsSecret=My_Secret", "console.ingress.tlsSecret: My_Secret is no name of an object"},
		{"console.enabled=true console.url=http://console.example.com", "console.url: http://console.example.com must be https://"},
		{"console.enabled=true console.url=https://console.example.com/x", "console.url: https://console.example.com/x must be https://"},
		{"publicURL=https://sandbox.example.com console.enabled=true console.url=https://sandbox.example.com", "console.url: its host must not be sandbox.example.com or below it"},
		{"publicURL=https://sandbox.example.com console.enabled=true console.url=https://console.sandbox.example.com:8443", "console.url: its host must not be sandbox.example.com or below it"},
		{"controlTLS.mode=secret", "controlTLS.secret.allocator: required"},
		{"controlTLS.mode=secret controlTLS.secret.allocator=a controlTLS.secret.router=b egress.enabled=true", "controlTLS.secret.egress: required"},
		{"controlTLS.mode=secret controlTLS.secret.allocator=a controlTLS.secret.router=b controlTLS.secret.egress=b egress.enabled=true",
			"controlTLS.secret.egress: b is the Secret of the gateways"},
		{"egress.enabled=true maxStale=29.9s", "maxStale: 29.9s is less than the 30 s for which egress gateways use rules"},
		{"egress.enabled=true maxStale=0.4m5s", "maxStale: 0.4m5s is less than the 30 s"},
		{"controlTLS.mode=bootstrap controlTLS.secret.egress=mine", "controlTLS.secret: not used with controlTLS.mode bootstrap"},
		{"controlTLS.mode=bootstrap controlTLS.secret.router=mine", "controlTLS.secret: not used with controlTLS.mode bootstrap"},
		{"networkPolicy.sandboxes.extraExcept={example.com}", "networkPolicy.sandboxes.extraExcept: example.com must be a range"},
		{"egress.enabled=true networkPolicy.enabled=false", "egress.enabled: without NetworkPolicies the pods of pools with egress.mode Gateway reach everything"},
		{"egress.enabled=true egress.caFile=ca.crt", `egress.caFile: "ca.crt" must be an absolute path`},
		{"egress.enabled=true egress.maxConnections=6000", fmt.Sprintf(
			"6000 connections of %d KiB need more than nine tenths of envoy.maxHeapBytes, %d: set at most %d",
			envoy.EgressConnectionMemory>>10, heap, heap*9/10/envoy.EgressConnectionMemory)},
		{"egress.outsideCIDRs={10.0.0.0}", "egress.outsideCIDRs: 10.0.0.0 must be a range"},
		{"egress.enabled=true egress.outsideCIDRs={10.244.128.0/17}", "egress.outsideCIDRs: 10.244.128.0/17 lies in 10.244.0.0/16, which podCIDRs"},
		{"egress.extraArgs={max-stale=20s}", "egress.extraArgs: max-stale=20s must be a flag"},
		{"egress.priorityClassName=-x", "egress.priorityClassName: -x is no name of an object"},
		{"mcp.enabled=true gateway.api=false", "mcp.enabled: it is served at api.<domain>/mcp, beside the API: set gateway.api=true"},
		{"mcp.enabled=true api.tlsSecret=x", "mcp.enabled: the gateway would send it API keys in plain HTTP"},
		{"mcp.enabled=true gateway.proxyProtocol=true", "mcp.enabled: it connects to the gateway without the PROXY protocol"},
	}
	call := func(together []refused, args ...string) {
		t.Helper()
		args = append([]string{"template", "berth", "--kube-version", kubeVersion}, args...)
		for _, c := range together {
			for _, value := range settings(c.set) {
				args = append(args, "--set", value)
			}
		}
		_, err := tryHelm(t, args...)
		require.Error(t, err)
		for _, c := range together {
			require.ErrorContains(t, err, c.says, c.set)
		}
	}
	for _, all := range [][]refused{schema, rest} {
		for len(all) > 0 {
			now, later := []refused{{set: "publicURL=https://sandbox.example.com podCIDRs={10.244.0.0/16}"}}, []refused(nil)
			changed := map[string]bool{}
			for _, c := range all {
				if slices.ContainsFunc(settings(c.set), func(v string) bool { return changed[nameOf(v)] }) {
					later = append(later, c)
					continue
				}
				for _, v := range settings(c.set) {
					changed[nameOf(v)] = true
				}
				now = append(now, c)
			}
			call(now, "--name-template", release, "--namespace", namespace)
			all = later
		}
	}
	call([]refused{
		{"", "publicURL: required: where clients reach the gateway, for example --set publicURL="},
		{"", "podCIDRs: required: the ranges of the cluster's pod addresses, for example --set 'podCIDRs={"},
		{"", "at most 40 characters"}, {"", "no dots"},
		{"", "sandboxes.namespace: sandboxes is the release's namespace"}, {"", "--namespace berth-system"},
	}, "--name-template", strings.Repeat("x", 39)+".x", "--namespace", sandboxes)
}

func nameOf(setting string) string {
	name, _, _ := strings.Cut(setting, "=")
	return name
}

// settings splits what a case sets. A blank separates values only where a name follows it.
func settings(set string) []string {
	var all []string
	for field := range strings.SplitSeq(set, " ") {
		if n := len(all); n > 0 && !strings.Contains(field, "=") {
			all[n-1] += " " + field
		} else if field != "" {
			all = append(all, field)
		}
	}
	return all
}

// What helm says about these is a regular expression, or nothing about the cause.
func TestSchemaLeavesToTheTemplatesWhatItCannotSay(t *testing.T) {
	raw, err := os.ReadFile("berth/values.schema.json")
	require.NoError(t, err)
	for _, word := range []string{"pattern", "not", "anyOf", "oneOf", "allOf"} {
		require.NotContains(t, string(raw), `"`+word+`":`)
	}
}

func TestLintFailsWithoutTheRequiredValues(t *testing.T) {
	_, err := tryHelm(t, "lint", "berth", "--kube-version", kubeVersion)
	require.ErrorContains(t, err, "publicURL: required")
	require.ErrorContains(t, err, "podCIDRs: required")
}

// The files in testdata/values together change every value, and each must matter. A chart that has this one many times, once
// for each value with its default, is rendered by one call of helm.
func TestEveryValueChangesWhatIsRendered(t *testing.T) {
	defaults := readValues(t, filepath.Join("berth", "values.yaml"))
	changedBy := map[string]string{} // path of a value -> a file that changes it
	instances := map[string]any{}    // values by the name of an instance
	for _, file := range valueFiles() {
		own := readValues(t, valueFile(file))
		for path, value := range leaves("", own) {
			if other, ok := lookup(defaults, path); !ok || !reflect.DeepEqual(value, other) {
				changedBy[path] = file
				for at := path; strings.Contains(at, "\x00"); changedBy[at] = file { // also the maps that it is in
					at = at[:strings.LastIndex(at, "\x00")]
				}
			}
		}
		instances["instance"+file] = withoutCRDs(own)
	}
	fileOf := map[string]string{}
	paths := map[string]string{} // by instance
	for path := range leaves("", defaults) {
		file, ok := changedBy[path]
		require.True(t, ok, "no file in testdata/values changes %q", path)
		own := readValues(t, valueFile(file))
		if path != "crds\x00install" {
			own = withoutCRDs(own)
		}
		remove(own, path)
		name := fmt.Sprintf("instance%03d", len(paths))
		instances[name], paths[name], fileOf[name] = own, path, "instance"+file
	}
	rendered := renderTogether(t, instances)
	for name, path := range paths {
		require.NotEmpty(t, rendered[name])
		if rendered[fileOf[name]] == rendered[name] {
			t.Errorf("nothing changes with %q", path)
		}
	}
	require.Greater(t, len(paths), 90)
}

// withoutCRDs returns values with which the chart renders none, because it takes long.
func withoutCRDs(values map[string]any) map[string]any {
	values = maps.Clone(values)
	values["crds"] = map[string]any{"install": false}
	return values
}

// renderTogether renders the chart once with each of these values, which may be refused.
func renderTogether(t *testing.T, instances map[string]any) map[string]string {
	t.Helper()
	all := t.TempDir()
	berth := filepath.Join(all, "charts", "berth")
	require.NoError(t, os.CopyFS(berth, os.DirFS("berth")))
	// What is wrong with the values of one instance must not end the others: it is rendered.
	helpers := filepath.Join(berth, "templates", "_helpers.tpl")
	text, err := os.ReadFile(helpers)
	require.NoError(t, err)
	refusal := regexp.MustCompile(`(?s)\{\{- fail \(printf [^}]*\}\}.*?\{\{- include \(join "; " \$errors\) \. \}\}`)
	require.Len(t, refusal.FindAllIndex(text, -1), 1)
	require.NoError(t, os.WriteFile(helpers, refusal.ReplaceAll(text, []byte(`refused: {{ join " " $$errors | quote }}`)), 0o600))
	type dependency struct {
		Name    string `json:"name"`
		Version string `json:"version"`
		Alias   string `json:"alias"`
	}
	chart := struct {
		APIVersion   string       `json:"apiVersion"`
		Name         string       `json:"name"`
		Version      string       `json:"version"`
		Dependencies []dependency `json:"dependencies"`
	}{"v2", "all", "0.1.0", nil}
	for name := range instances {
		chart.Dependencies = append(chart.Dependencies, dependency{"berth", ">=0.0.0-0", name})
	}
	for file, content := range map[string]any{"Chart.yaml": chart, "values.yaml": instances} {
		raw, err := yaml.Marshal(content)
		require.NoError(t, err)
		require.NoError(t, os.WriteFile(filepath.Join(all, file), raw, 0o600))
	}
	out := helm(t, "template", release, all, "--namespace", namespace, "--kube-version", kubeVersion)
	rendered := map[string]string{}
	for document := range strings.SplitSeq(out, "\n---\n") {
		source := regexp.MustCompile(`# Source: all/charts/(\w+)/`).FindStringSubmatch(document)
		require.NotNil(t, source, document)
		// An instance is called as its chart is.
		rendered[source[1]] += strings.ReplaceAll(withoutKey(document), source[1], "berth")
	}
	return rendered
}

// remove takes a value out of a tree.
func remove(node map[string]any, path string) {
	name, rest, below := strings.Cut(path, "\x00")
	if inner, isMap := node[name].(map[string]any); below && isMap {
		remove(inner, rest)
		return
	}
	delete(node, name)
}

func readValues(t *testing.T, path string) map[string]any {
	t.Helper()
	raw, err := os.ReadFile(path)
	require.NoError(t, err)
	var values map[string]any
	require.NoError(t, yaml.UnmarshalStrict(raw, &values))
	return values
}

// leaves returns what is not a map, and empty maps, by their paths: names with a
// zero byte in between, because names may have dots.
func leaves(path string, node map[string]any) map[string]any {
	all := map[string]any{}
	for name, child := range node {
		if inner, ok := child.(map[string]any); ok && len(inner) > 0 {
			maps.Copy(all, leaves(path+name+"\x00", inner))
		} else {
			all[path+name] = child
		}
	}
	return all
}

func lookup(node map[string]any, path string) (any, bool) {
	name, rest, below := strings.Cut(path, "\x00")
	child, ok := node[name]
	if inner, isMap := child.(map[string]any); below && isMap {
		return lookup(inner, rest)
	}
	return child, ok && !below
}
