package charts

import (
	"encoding/json"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"
)

// Invariant: P7
func TestBadValuesAreRefusedWithTheirNames(t *testing.T) {
	good := []string{"--set", "publicURL=https://sandbox.example.com", "--set", "podCIDRs={10.244.0.0/16}"}
	for name, c := range map[string]struct {
		args []string
		want []string
	}{
		"nothing said":                  {nil, []string{"publicURL: required", "podCIDRs: required"}},
		"no public URL":                 {[]string{"--set", "podCIDRs={10.244.0.0/16}"}, []string{"publicURL: required", "--set publicURL="}},
		"no pod CIDRs":                  {[]string{"--set", "publicURL=https://sandbox.example.com"}, []string{"podCIDRs: required", "--set 'podCIDRs={"}},
		"public URL with a path":        {append(good, "--set", "publicURL=https://sandbox.example.com/x"), []string{"publicURL: https://sandbox.example.com/x must be", "for example"}},
		"public URL without a scheme":   {append(good, "--set", "publicURL=sandbox.example.com"), []string{"publicURL: sandbox.example.com must be http:// or https://"}},
		"public URL in capitals":        {append(good, "--set", "publicURL=https://Sandbox.example.com"), []string{"publicURL: https://Sandbox.example.com must be", "lower case"}},
		"no CIDR":                       {append(good, "--set", "podCIDRs={10.244.0.0}"), []string{"podCIDRs: 10.244.0.0 must be a range"}},
		"all addresses":                 {append(good, "--set", "podCIDRs={0.0.0.0/0}"), []string{"podCIDRs: 0.0.0.0/0 must be", "not all"}},
		"one CIDR twice":                {append(good, "--set", "podCIDRs={10.0.0.0/8,10.0.0.0/8}"), []string{"podCIDRs"}},
		"unknown value":                 {append(good, "--set", "publicUrl=x"), []string{"publicUrl"}},
		"unknown value further down":    {append(good, "--set", "gateway.service.ports=1"), []string{"ports"}},
		"no replicas":                   {append(good, "--set", "allocator.replicas=0"), []string{"allocator", "replicas", "minimum"}},
		"unknown pod security":          {append(good, "--set", "allocator.podSecurity=restricted"), []string{"podSecurity"}},
		"unknown log level":             {append(good, "--set", "router.logLevel=verbose"), []string{"logLevel"}},
		"a flag without dashes":         {append(good, "--set", "router.extraArgs={cache-size=5}"), []string{"extraArgs", "pattern"}},
		"duration without a unit":       {append(good, "--set-string", "maxStale=15"), []string{"maxStale: 15 must be a duration", "15m"}},
		"a number as a duration":        {append(good, "--set", "maxStale=15"), []string{"maxStale: 15 must be a duration", "15m"}},
		"a public URL that is none":     {append(good, "--set", "publicURL=http://a b%zz"), []string{"publicURL: http://a b%zz must be"}},
		"keys beside the pods":          {append(good, "--set", "api.keysNamespace=sandboxes"), []string{"api.keysNamespace: sandboxes is the namespace of the sandboxes"}},
		"a value that does not exist":   {append(good, "--set", "accessLogFlush=5s"), []string{"accessLogFlush"}},
		"dry run that is neither":       {append(good, "--set", "allocator.reapDryRun=some"), []string{"reapDryRun"}},
		"duration that is too short":    {append(good, "--set", "maxStale=500ms"), []string{"maxStale: 500ms must be a duration of 1 s or more"}},
		"registry with a slash":         {append(good, "--set", "image.registry=registry.example.com/"), []string{"registry", "pattern"}},
		"node port without its type":    {append(good, "--set", "gateway.service.nodePort=30080"), []string{"gateway.service.nodePort", "ClusterIP", "NodePort"}},
		"node port of the API, too":     {append(good, "--set", "api.service.nodePort=30080"), []string{"api.service.nodePort"}},
		"traffic policy with no use":    {append(good, "--set", "gateway.service.externalTrafficPolicy=Local"), []string{"gateway.service.externalTrafficPolicy"}},
		"gateway host that is none":     {append(good, "--set", "gateway.hosts={*.example.com}"), []string{"hosts", "pattern"}},
		"negative hops":                 {append(good, "--set", "gateway.trustedHops=-1"), []string{"trustedHops", "minimum"}},
		"too little memory for Envoy":   {append(good, "--set", "envoy.maxHeapBytes=1000"), []string{"maxHeapBytes"}},
		"unknown TLS mode":              {append(good, "--set", "controlTLS.mode=none"), []string{"controlTLS", "mode"}},
		"own Secrets without names":     {append(good, "--set", "controlTLS.mode=secret"), []string{"controlTLS.secret.allocator: required", "controlTLS.secret.router: required"}},
		"names of Secrets not used":     {append(good, "--set", "controlTLS.secret.router=mine"), []string{"controlTLS.secret", "bootstrap"}},
		"namespace that is none":        {append(good, "--set", "sandboxes.namespace=My_Sandboxes"), []string{"namespace", "pattern"}},
		"no namespace for sandboxes":    {append(good, "--set", "sandboxes.namespace="), []string{"sandboxes.namespace: required", "--set sandboxes.namespace=sandboxes"}},
		"sandboxes beside the keys":     {append(good, "--namespace", "one", "--set", "sandboxes.namespace=one"), []string{"sandboxes.namespace: one is the release's namespace", "keys of the control stream", "--set sandboxes.namespace=one-sandboxes"}},
		"keys beside the sandboxes":     {append(good, "--namespace", "sandboxes"), []string{"sandboxes.namespace: sandboxes is the release's namespace", "--namespace berth-system"}},
		"resources without limits":      {append(good, "--set", "envoy.resources.limits=null"), []string{"resources", "limits"}},
		"exception that is no CIDR":     {append(good, "--set", "networkPolicy.sandboxes.extraExcept={example.com}"), []string{"extraExcept", "pattern"}},
		"MCP without the API":           {append(good, "--set", "mcp.enabled=true", "--set", "gateway.api=false"), []string{"mcp.enabled: it is served at api.<domain>/mcp", "gateway.api=true"}},
		"MCP beside an API with TLS":    {append(good, "--set", "mcp.enabled=true", "--set", "api.tlsSecret=x"), []string{"mcp.enabled: the gateway would send it API keys in plain HTTP"}},
		"MCP and the PROXY protocol":    {append(good, "--set", "mcp.enabled=true", "--set", "gateway.proxyProtocol=true"), []string{"mcp.enabled", "gateway.proxyProtocol"}},
		"release name that is too long": {append(good, "--name-template", strings.Repeat("x", 41)), []string{"release name", "at most 40"}},
		"release name with a dot":       {append(good, "--name-template", "berth.eu"), []string{"release name", "dots"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			args := []string{"template", "berth", "--kube-version", kubeVersion}
			if !strings.Contains(strings.Join(c.args, " "), "--name-template") {
				args = append(args, "--name-template", release)
			}
			_, err := tryHelm(t, append(args, c.args...)...)
			require.Error(t, err)
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
		})
	}
}

// The files in testdata/values together change every value; each must matter.
func TestEveryValueChangesWhatIsRendered(t *testing.T) {
	defaults := readValues(t, filepath.Join("berth", "values.yaml"))
	changedBy := map[string]string{} // path of a value -> a file that changes it
	before := map[string]string{}
	for _, file := range valueFiles() {
		before[file] = template(t, file)
		for path, value := range leaves("", readValues(t, valueFile(file))) {
			if other, ok := lookup(defaults, path); !ok || !reflect.DeepEqual(value, other) {
				changedBy[path] = file
			}
		}
	}
	for path, value := range leaves("", defaults) {
		t.Run(path, func(t *testing.T) {
			t.Parallel()
			change := value
			file, ok := changedBy[path]
			if inner, isMap := value.(map[string]any); isMap && len(inner) == 0 {
				// An empty map of the values changes nothing; each of its keys is unset.
				unset := map[string]any{}
				for other, by := range changedBy {
					if key, below := strings.CutPrefix(other, path+"\x00"); below {
						file, ok, unset[key] = by, true, nil
					}
				}
				change = unset
			}
			require.True(t, ok, "no file in testdata/values changes this value")
			names := strings.Split(path, "\x00")
			for i := len(names) - 1; i >= 0; i-- {
				change = map[string]any{names[i]: change}
			}
			raw, err := json.Marshal(change)
			require.NoError(t, err)
			back := filepath.Join(t.TempDir(), "back.json")
			require.NoError(t, os.WriteFile(back, raw, 0o600))
			got, err := tryHelm(t, "template", release, "berth", "--namespace", namespace, "--kube-version", kubeVersion,
				"--values", valueFile(file), "--values", back)
			require.True(t, err != nil || withoutKey(got) != withoutKey(before[file]), "nothing changes with it")
		})
	}
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
