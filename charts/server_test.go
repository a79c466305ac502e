package charts

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/pods"
	"github.com/berth-sandbox/berth/allocator/pools"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/envoy"
)

// Where the release of these tests has its sandboxes: the chart's default.
const sandboxes = "sandboxes"

// server is a real API server with a release of the chart. It has no
// controllers: objects are there, and nothing comes of them. For the same reason
// hooks are left out, whose Job would never end.
type server struct {
	kubeconfig string
	config     *rest.Config
	client     kubernetes.Interface
	dynamic    dynamic.Interface
	mapper     *restmapper.DeferredDiscoveryRESTMapper
	notes      string // of the installation
}

// TestOnAnAPIServer installs the chart once and looks at it from all sides.
func TestOnAnAPIServer(t *testing.T) {
	helm(t, "version") // it may have to be built, or this skipped
	c := devcluster.Start(t, devcluster.Options{})
	s := &server{kubeconfig: c.Kubeconfig(), config: c.RestConfig()}
	var err error
	s.client, err = kubernetes.NewForConfig(s.config)
	require.NoError(t, err)
	s.dynamic, err = dynamic.NewForConfig(s.config)
	require.NoError(t, err)
	s.mapper = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(s.client.Discovery()))
	for _, name := range []string{sandboxes, namespace, "agents", "berth-keys"} { // the last two for a dry run
		_, err := s.client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	t.Run("dry run", s.testDryRun) // first: what is there would be changed by it, and not made
	s.notes = s.helm(t, "install", release, "berth", "--values", valueFile("minimal"))
	require.Eventually(t, func() bool { // until the CRDs are served
		s.mapper.Reset()
		_, err := s.mapper.RESTMapping(v1alpha1.GroupVersion().WithKind("SandboxPool").GroupKind(), v1alpha1.GroupVersion().Version)
		return err == nil
	}, 10*time.Second, 50*time.Millisecond)

	t.Run("helm test", func(t *testing.T) {
		tests := slices.DeleteFunc(render(t, "minimal"), func(o object) bool { return !o.test() })
		require.Len(t, tests, 1)
		require.NoError(t, s.apply(t.Context(), &tests[0].Unstructured, true))
	})
	t.Run("rights", s.testRights)
	t.Run("nothing but these rights", s.testNothingElse)
	t.Run("flows", s.testFlows)
	t.Run("pools", s.testPools)
	t.Run("autoscaler", s.testAutoscaler)
	t.Run("keys of an earlier version", s.testEarlierKeys)
	t.Run("uninstall", s.testUninstall)
	t.Run("commands of the pages", s.testPages)
}

func (s *server) helm(t *testing.T, args ...string) string {
	t.Helper()
	return helm(t, append(args, "--kubeconfig", s.kubeconfig, "--namespace", namespace, "--no-hooks")...)
}

// apply is kubectl apply --server-side, by default with --validate=strict.
func (s *server) apply(ctx context.Context, o *unstructured.Unstructured, dryRun bool) error {
	gvk := o.GroupVersionKind()
	mapping, err := s.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if err != nil {
		return err
	}
	var client dynamic.ResourceInterface = s.dynamic.Resource(mapping.Resource)
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		client = s.dynamic.Resource(mapping.Resource).Namespace(o.GetNamespace())
	}
	raw, err := json.Marshal(o)
	if err != nil {
		return err
	}
	force := true
	options := metav1.PatchOptions{FieldManager: "test", Force: &force, FieldValidation: metav1.FieldValidationStrict}
	if dryRun {
		options.DryRun = []string{metav1.DryRunAll}
	}
	_, err = client.Patch(ctx, o.GetName(), types.ApplyPatchType, raw, options)
	return err
}

func (s *server) testDryRun(t *testing.T) {
	for _, values := range valueFiles() {
		for _, o := range render(t, values) {
			// The server does not know these: TestCertManagerMakesWhatTheProgramsBelieve, TestRoutesLeadAllHostsToTheGateway,
			// TestMonitoringScrapesPortsThatExist and TestRulesAndDashboardsAreTheGeneratedOnes look at them.
			if slices.Contains([]string{"cert-manager.io", "gateway.networking.k8s.io", "monitoring.coreos.com"}, o.GroupVersionKind().Group) {
				continue
			}
			if o.test() {
				continue // its account is an object of the release: see below
			}
			if o.GetNamespace() == namespace+"-keys" {
				o.SetNamespace(namespace) // it is an object of the release, and a dry run makes none
			}
			require.NoError(t, s.apply(t.Context(), &o.Unstructured, true), "%s: %s", values, o)
		}
	}
	bad := &unstructured.Unstructured{}
	require.NoError(t, yaml.Unmarshal([]byte("apiVersion: v1\nkind: Service\nmetadata: {name: x, namespace: "+namespace+"}\nspec: {prots: []}"), &bad.Object))
	require.ErrorContains(t, s.apply(t.Context(), bad, true), "prots", "else this test would show nothing")
}

// The accounts of the release.
func user(namespace, account string) string {
	return "system:serviceaccount:" + namespace + ":" + account
}

// startHookRights applies the account and the rights of the hook's Job, as helm
// does before it starts the Job.
func (s *server) startHookRights(t *testing.T) {
	t.Helper()
	for _, o := range render(t, "minimal") {
		if o.hook() && o.GetKind() != "Job" {
			require.NoError(t, s.apply(t.Context(), &o.Unstructured, false), o)
		}
	}
}

func (s *server) testRights(t *testing.T) {
	s.startHookRights(t)
	const (
		yes, no = true, false
		here    = namespace
		keys    = namespace + "-keys"
		other   = "kube-system"
		cluster = ""
	)
	var (
		allocator = user(namespace, "berth-allocator")
		gateway   = user(namespace, "berth-gateway")
		certs     = user(namespace, "berth-control-tls")
		sandbox   = user(sandboxes, "berth-sandbox")
	)
	for _, c := range []struct {
		who       string
		may       bool
		verbs     string
		resource  string // resource[.group][/subresource]
		namespace string
		name      string
	}{
		{allocator, yes, "get list watch create patch delete", "pods", sandboxes, ""},
		{allocator, no, "update deletecollection", "pods", sandboxes, ""},
		{allocator, no, "get create", "pods/exec", sandboxes, "x"},
		{allocator, no, "get create", "pods/attach", sandboxes, "x"},
		{allocator, no, "get create", "pods/portforward", sandboxes, "x"},
		{allocator, yes, "get", "pods/log", sandboxes, "x"},
		{allocator, no, "get", "pods/log", here, "x"},
		{allocator, no, "get list", "pods.metrics.k8s.io", other, ""},
		{allocator, no, "update patch", "pods/status", sandboxes, "x"},
		{allocator, no, "update patch", "pods/ephemeralcontainers", sandboxes, "x"},
		{allocator, no, "create", "pods/eviction", sandboxes, "x"},
		{allocator, no, "get list watch create delete", "pods", here, ""},
		{allocator, no, "get list watch create delete", "pods", other, ""},
		{allocator, no, "list watch", "pods", cluster, ""},
		{allocator, yes, "get list watch patch", "sandboxpools.berth.sh", sandboxes, ""},
		{allocator, no, "create update delete deletecollection", "sandboxpools.berth.sh", sandboxes, "x"},
		{allocator, yes, "patch", "sandboxpools.berth.sh/status", sandboxes, "x"},
		{allocator, yes, "update", "sandboxpools.berth.sh/finalizers", sandboxes, "x"},
		{allocator, no, "get list", "sandboxpools.berth.sh", other, ""},
		{allocator, yes, "get list watch create patch delete", "sandboxes.berth.sh", sandboxes, ""},
		{allocator, no, "update deletecollection", "sandboxes.berth.sh", sandboxes, "x"},
		{allocator, yes, "get list create update", "journalslots.berth.sh", sandboxes, ""},
		{allocator, no, "patch delete deletecollection", "journalslots.berth.sh", sandboxes, "berth-000"},
		{allocator, no, "get list", "journalslots.berth.sh", other, ""},
		{allocator, yes, "get list create update delete", "eventsegments.berth.sh", sandboxes, ""},
		{allocator, no, "watch patch deletecollection", "eventsegments.berth.sh", sandboxes, "berth-000000000000000001"},
		{allocator, no, "get list", "eventsegments.berth.sh", other, ""},
		{allocator, yes, "get list create update delete", "eventwebhooks.berth.sh", sandboxes, ""},
		{allocator, no, "watch patch deletecollection", "eventwebhooks.berth.sh", sandboxes, "x"},
		{allocator, no, "get list", "eventwebhooks.berth.sh", other, ""},
		{allocator, yes, "create", "leases.coordination.k8s.io", sandboxes, ""},
		{allocator, yes, "get update", "leases.coordination.k8s.io", sandboxes, "berth-allocator"},
		{allocator, no, "delete patch", "leases.coordination.k8s.io", sandboxes, "berth-allocator"},
		{allocator, no, "get update", "leases.coordination.k8s.io", sandboxes, "other"},
		{allocator, no, "get update", "leases.coordination.k8s.io", other, "berth-allocator"},
		{allocator, no, "get list watch create update patch delete", "secrets", sandboxes, "x"},
		{allocator, yes, "list watch", "secrets", keys, ""},
		{allocator, no, "get create update patch delete deletecollection", "secrets", keys, "first"},
		{allocator, no, "get list watch create update patch delete deletecollection", "secrets", here, "berth-control-ca"},
		{allocator, no, "get list watch", "secrets", other, ""},
		{allocator, no, "get list watch create update", "configmaps", sandboxes, "x"},
		{allocator, no, "get list watch create update", "configmaps", here, "x"},
		{allocator, yes, "create patch", "events", sandboxes, ""},
		{allocator, no, "create patch", "events.events.k8s.io", sandboxes, ""},
		{allocator, yes, "list", "pods.metrics.k8s.io", sandboxes, ""},
		{allocator, no, "get watch", "pods.metrics.k8s.io", sandboxes, "x"},
		{allocator, yes, "list", "events", sandboxes, ""},
		{allocator, no, "get watch update delete", "events", sandboxes, ""},
		{allocator, no, "create patch", "events", other, ""},
		{allocator, yes, "get list watch", "nodes", cluster, ""},
		{allocator, no, "create patch update delete", "nodes", cluster, "x"},
		{allocator, no, "update patch", "nodes/status", cluster, "x"},
		{allocator, no, "get", "nodes/proxy", cluster, "x"},
		{allocator, no, "create", "serviceaccounts/token", sandboxes, "x"},
		{allocator, no, "get impersonate", "serviceaccounts", here, "berth-gateway"},
		{allocator, no, "create update bind escalate", "roles.rbac.authorization.k8s.io", sandboxes, "x"},
		{allocator, no, "create", "rolebindings.rbac.authorization.k8s.io", sandboxes, "x"},
		{allocator, no, "update patch", "customresourcedefinitions.apiextensions.k8s.io", cluster, "sandboxpools.berth.sh"},
		{allocator, no, "get create delete", "namespaces", cluster, "x"},
		{allocator, no, "create", "deployments.apps", here, "x"},

		{certs, yes, "create", "secrets", here, ""},
		{certs, yes, "get update", "secrets", here, "berth-control-ca"},
		{certs, yes, "get update", "secrets", here, "berth-control-allocator"},
		{certs, yes, "get update", "secrets", here, "berth-control-router"},
		{certs, no, "list watch deletecollection", "secrets", here, ""},
		{certs, no, "list watch delete patch", "secrets", here, "berth-control-ca"},
		{certs, no, "get update patch delete", "secrets", here, "ci"},
		{certs, no, "get create", "secrets", sandboxes, "berth-control-ca"},
		{certs, no, "get create", "secrets", other, "berth-control-ca"},
		{certs, no, "get list create", "pods", here, ""},
		{certs, no, "get create", "configmaps", here, "x"},

		{gateway, no, "get list watch create patch delete", "pods", sandboxes, ""},
		{gateway, no, "get list watch create patch delete", "pods", here, ""},
		{gateway, no, "get list watch", "secrets", here, "berth-control-router"},
		{gateway, no, "get list", "sandboxes.berth.sh", sandboxes, ""},
		{gateway, no, "get update", "leases.coordination.k8s.io", sandboxes, "berth-allocator"},
		{gateway, no, "get list", "configmaps", here, ""},

		{sandbox, no, "get list watch create patch delete", "pods", sandboxes, ""},
		{sandbox, no, "get list watch", "secrets", sandboxes, ""},
		{sandbox, no, "get list", "configmaps", sandboxes, ""},
		{sandbox, no, "get list create patch", "sandboxes.berth.sh", sandboxes, ""},
		{sandbox, no, "get list patch", "sandboxpools.berth.sh", sandboxes, ""},
		{sandbox, no, "list", "nodes", cluster, ""},
	} {
		for verb := range strings.FieldsSeq(c.verbs) {
			s.requireAccess(t, c.who, c.may, verb, c.resource, c.namespace, c.name)
		}
	}
}

// testFlows asks as the allocator and looks at which flow the API server says it
// was: it answers with the UID of the FlowSchema that a request has matched.
func (s *server) testFlows(t *testing.T) {
	flows := s.client.FlowcontrolV1().FlowSchemas()
	uid := func(name string) string {
		f, err := flows.Get(t.Context(), name, metav1.GetOptions{})
		require.NoError(t, err)
		return string(f.UID)
	}
	allocator := user(namespace, release+"-allocator")
	ask := func(who, path string) string {
		config := rest.CopyConfig(s.config)
		config.Impersonate = rest.ImpersonationConfig{UserName: who, Groups: groups(who)}
		client, err := rest.HTTPClientFor(config)
		require.NoError(t, err)
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.config.Host+path, http.NoBody)
		require.NoError(t, err)
		answer, err := client.Do(r)
		require.NoError(t, err)
		require.NoError(t, answer.Body.Close())
		client.CloseIdleConnections()
		return answer.Header.Get(flowcontrolv1.ResponseHeaderMatchedFlowSchemaUID)
	}
	name := namespace + "-" + release + "-allocator"
	for path, flow := range map[string]string{
		"/apis/berth.sh/v1alpha1/namespaces/" + sandboxes + "/journalslots":                name + "-journal",
		"/apis/coordination.k8s.io/v1/namespaces/" + sandboxes + "/leases/berth-allocator": name + "-journal",
		"/apis/berth.sh/v1alpha1/namespaces/" + sandboxes + "/sandboxes":                   name,
		"/api/v1/namespaces/" + sandboxes + "/pods":                                        name,
		"/api/v1/nodes": name,
	} {
		// The API server learns of new flows by a watch.
		require.Eventually(t, func() bool { return ask(allocator, path) == uid(flow) }, 30*time.Second, 50*time.Millisecond, path)
		require.NotEqual(t, uid(flow), ask(user(namespace, release+"-gateway"), path), "others have no part of it")
	}
}

func (s *server) requireAccess(t *testing.T, who string, want bool, verb, resource, namespace, name string) {
	t.Helper()
	resource, subresource, _ := strings.Cut(resource, "/")
	parsed := schema.ParseGroupResource(resource)
	_, account, _ := strings.Cut(strings.TrimPrefix(who, "system:serviceaccount:"), ":")
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: who, Groups: groups(who),
		ResourceAttributes: &authorizationv1.ResourceAttributes{
			Verb: verb, Group: parsed.Group, Resource: parsed.Resource, Subresource: subresource, Namespace: namespace, Name: name,
		},
	}}
	allowed := func() bool {
		answer, err := s.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), review, metav1.CreateOptions{})
		require.NoError(t, err)
		return answer.Status.Allowed
	}
	if want { // the server learns of new rights by a watch
		require.Eventually(t, allowed, 10*time.Second, 20*time.Millisecond, "%s cannot %s %s %s/%s", account, verb, resource, namespace, name)
	} else {
		require.False(t, allowed(), "%s can %s %s/%s %s/%s", account, verb, resource, subresource, namespace, name)
	}
}

// groups are those of a service account, https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/.
func groups(user string) []string {
	namespace, _, _ := strings.Cut(strings.TrimPrefix(user, "system:serviceaccount:"), ":")
	return []string{"system:serviceaccounts", "system:serviceaccounts:" + namespace, "system:authenticated"}
}

// testNothingElse asks the server for all rights of each account, and compares
// them with those of an account without any.
func (s *server) testNothingElse(t *testing.T) {
	s.startHookRights(t)
	roles := map[string][]rbacv1.PolicyRule{}
	var everywhere []rbacv1.PolicyRule // of the allocators
	for _, o := range render(t, "minimal") {
		if role, ok := o.typed.(*rbacv1.Role); ok {
			roles[role.Namespace+"/"+role.Name] = role.Rules
		}
		if role, ok := o.typed.(*rbacv1.ClusterRole); ok {
			require.Nil(t, everywhere, "another ClusterRole: %s", role.Name)
			everywhere = role.Rules
		}
	}
	given := map[string]bool{}
	for _, account := range []struct{ namespace, name string }{
		{namespace, "berth-allocator"}, {namespace, "berth-control-tls"}, {namespace, "berth-gateway"}, {sandboxes, "berth-sandbox"},
	} {
		for _, in := range []string{namespace, namespace + "-keys", sandboxes, "default", "kube-system"} {
			want := s.rules(t, user(account.namespace, "nobody"), in)
			rules := roles[in+"/"+account.name]
			given[in+"/"+account.name] = len(rules) > 0
			if account.name == "berth-allocator" {
				rules = append(slices.Clone(rules), everywhere...)
			}
			for _, rule := range rules {
				want = append(want, authorizationv1.ResourceRule{Verbs: rule.Verbs, APIGroups: rule.APIGroups, Resources: rule.Resources, ResourceNames: rule.ResourceNames})
			}
			require.EventuallyWithT(t, func(c *assert.CollectT) {
				require.ElementsMatch(c, want, s.rules(t, user(account.namespace, account.name), in), "%s in %s", account.name, in)
			}, 10*time.Second, 50*time.Millisecond)
		}
	}
	maps.DeleteFunc(given, func(_ string, some bool) bool { return !some })
	require.Equal(t, map[string]bool{sandboxes + "/berth-allocator": true, namespace + "-keys/berth-allocator": true, namespace + "/berth-control-tls": true}, given)
}

func (s *server) rules(t *testing.T, user, namespace string) []authorizationv1.ResourceRule {
	t.Helper()
	config := rest.CopyConfig(s.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: groups(user)}
	client, err := kubernetes.NewForConfig(config)
	require.NoError(t, err)
	answer, err := client.AuthorizationV1().SelfSubjectRulesReviews().Create(t.Context(), &authorizationv1.SelfSubjectRulesReview{
		Spec: authorizationv1.SelfSubjectRulesReviewSpec{Namespace: namespace},
	}, metav1.CreateOptions{})
	require.NoError(t, err)
	require.False(t, answer.Status.Incomplete)
	return answer.Status.ResourceRules
}

// testPools offers the pools that the chart shows people to the API server, and
// to the allocator's own rules.
func (s *server) testPools(t *testing.T) {
	inNotes := regexp.MustCompile(`(?s)kubectl apply -f - <<'END'\n(.*?)\n  END\n`).FindStringSubmatch(s.notes)
	require.NotNil(t, inNotes, s.notes)
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	require.NoError(t, err)
	type shown struct {
		text  string
		level api.Level
	}
	all := map[string]shown{"notes": {inNotes[1], api.LevelBaseline}}
	files, err := filepath.Glob("berth/examples/*.yaml")
	require.NoError(t, err)
	require.Len(t, files, 3)
	for _, file := range files {
		example, err := os.ReadFile(file)
		require.NoError(t, err)
		all[filepath.Base(file)] = shown{string(example), api.LevelRestricted}
	}
	image := flagsOf(findWorkload(t, render(t, "minimal"), "berth-allocator").container(t, "allocator"))["agent-image"]
	settings := pods.Settings{ServeOn: envoy.ConnectWindow, AgentImage: image, AgentKey: "key"}
	berthPools := s.dynamic.Resource(v1alpha1.GroupVersion().WithResource("sandboxpools")).Namespace(sandboxes)
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			o := &unstructured.Unstructured{}
			require.NoError(t, yaml.Unmarshal([]byte(c.text), &o.Object), c.text)
			if o.GetNamespace() == "" {
				o.SetNamespace(sandboxes)
			}
			require.Equal(t, sandboxes, o.GetNamespace())
			if c.level == api.LevelRestricted {
				require.Equal(t, name, o.GetName()+".yaml")
			}
			made, err := berthPools.Create(t.Context(), o,
				metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}, FieldValidation: metav1.FieldValidationStrict})
			require.NoError(t, err)
			var pool v1alpha1.SandboxPool
			require.NoError(t, runtime.DefaultUnstructuredConverter.FromUnstructured(made.Object, &pool))
			require.NotNil(t, pool.Spec.AgentEnabled())
			require.NoError(t, pods.CheckAgent(&pool, settings))
			rules, err := pools.NewPolicy(pools.PolicyBaseline)
			require.NoError(t, err)
			require.NoError(t, rules.Check(&pool))
			pod := pods.Build(&pool, "x", settings)
			result := policy.AggregateCheckResults(evaluator.EvaluatePod(api.LevelVersion{Level: c.level, Version: api.LatestVersion()}, &pod.ObjectMeta, &pod.Spec))
			require.True(t, result.Allowed, result.ForbiddenDetail())
			require.Equal(t, "berth-sandbox", pod.Spec.ServiceAccountName)
			_, err = s.client.CoreV1().ServiceAccounts(sandboxes).Get(t.Context(), pod.Spec.ServiceAccountName, metav1.GetOptions{})
			require.NoError(t, err)
		})
	}
}

// testAutoscaler turns the autoscaler of the gateways on and off, as the pages say.
func (s *server) testAutoscaler(t *testing.T) {
	if strings.HasPrefix(helm(t, "version", "--short"), "v3") {
		t.Skip("Helm 3 does not know that others change the number too: it has no --force-conflicts")
	}
	deployments := s.client.AppsV1().Deployments(namespace)
	replicas := func() int32 {
		d, err := deployments.Get(t.Context(), release+"-gateway", metav1.GetOptions{})
		require.NoError(t, err)
		return *d.Spec.Replicas
	}
	scale := func(n int32) { // as kubectl does, and the autoscaler
		now, err := deployments.GetScale(t.Context(), release+"-gateway", metav1.GetOptions{})
		require.NoError(t, err)
		now.Spec.Replicas = n
		_, err = deployments.UpdateScale(t.Context(), release+"-gateway", now, metav1.UpdateOptions{})
		require.NoError(t, err)
	}
	upgrade := func(flags ...string) {
		s.helm(t, append([]string{"upgrade", release, "berth", "--values", valueFile("minimal"), "--set", "crds.install=false"}, flags...)...)
	}
	require.EqualValues(t, 2, replicas())
	scale(3)
	upgrade("--set", "gateway.maxReplicas=9")
	require.EqualValues(t, 3, replicas())
	scale(7)
	upgrade("--set", "gateway.maxReplicas=9", "--set", "gateway.drainSeconds=7")
	require.EqualValues(t, 7, replicas(), "an upgrade sets back what the autoscaler has decided")
	upgrade("--force-conflicts") // the number is no longer helm's
	require.EqualValues(t, 2, replicas())
}

// testEarlierKeys upgrades a release whose keys are in its own namespace, and then moves the keys.
func (s *server) testEarlierKeys(t *testing.T) {
	const own = namespace + "-keys"
	keysIn := func(flags ...string) string {
		s.helm(t, append([]string{"upgrade", release, "berth", "--values", valueFile("minimal")}, flags...)...)
		d, err := s.client.AppsV1().Deployments(namespace).Get(t.Context(), "berth-allocator", metav1.GetOptions{})
		require.NoError(t, err)
		in := flagsOf(d.Spec.Template.Spec.Containers[0])["api-keys-namespace"]
		s.requireAccess(t, user(namespace, "berth-allocator"), true, "list", "secrets", in, "")
		return in
	}
	create := func(in string) {
		_, err := s.client.CoreV1().Secrets(in).Create(t.Context(),
			&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "first"}, Type: access.SecretType}, metav1.CreateOptions{})
		require.NoError(t, err)
	}
	const noCRDs = "--set=crds.install=false" // they take long
	require.Equal(t, own, keysIn(noCRDs))
	create(namespace)
	require.Equal(t, own, keysIn(noCRDs), "a Secret in the release's namespace brings no key back")

	// The release of an earlier version has not made the namespace.
	_, err := s.client.CoreV1().Namespaces().Patch(t.Context(), own, types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"meta.helm.sh/release-name":null}}}`), metav1.PatchOptions{})
	require.NoError(t, err)
	require.Equal(t, namespace, keysIn(noCRDs), "they stay valid")
	create(own)
	require.Equal(t, namespace, keysIn(noCRDs), "one key does not take the place of all")
	require.Equal(t, own, keysIn("--set", "api.keysNamespace="+own))
	require.Eventually(t, func() bool { return !s.may(t, user(namespace, "berth-allocator"), "list", "secrets", namespace) }, 10*time.Second, 20*time.Millisecond)
}

// may reports whether an account has a right.
func (s *server) may(t *testing.T, who, verb, resource, namespace string) bool {
	t.Helper()
	answer, err := s.client.AuthorizationV1().SubjectAccessReviews().Create(t.Context(), &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User: who, Groups: groups(who), ResourceAttributes: &authorizationv1.ResourceAttributes{Verb: verb, Resource: resource, Namespace: namespace},
	}}, metav1.CreateOptions{})
	require.NoError(t, err)
	return answer.Status.Allowed
}

// testUninstall comes after all that need the release.
func (s *server) testUninstall(t *testing.T) {
	s.helm(t, "uninstall", release)
	s.requireCRDs(t)
	_, err := s.client.AppsV1().Deployments(namespace).Get(t.Context(), "berth-allocator", metav1.GetOptions{})
	require.True(t, apierrors.IsNotFound(err), "%v", err)

	// Objects of the release would be made, and vanish with the CRD.
	crds := s.dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	hold := func(finalizers string) {
		_, err := crds.Patch(t.Context(), "sandboxes.berth.sh", types.MergePatchType, []byte(`{"metadata":{"finalizers":`+finalizers+`}}`), metav1.PatchOptions{})
		require.NoError(t, err)
	}
	hold(`["test.berth.sh/hold"]`)
	require.NoError(t, crds.Delete(t.Context(), "sandboxes.berth.sh", metav1.DeleteOptions{}))
	_, err = tryHelm(t, "install", release, "berth", "--values", valueFile("minimal"), "--kubeconfig", s.kubeconfig, "--namespace", namespace, "--no-hooks")
	require.ErrorContains(t, err, "the CRD sandboxes.berth.sh is being deleted")
	hold("[]")
	require.Eventually(t, func() bool {
		_, err := crds.Get(t.Context(), "sandboxes.berth.sh", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	}, time.Minute, 50*time.Millisecond)
}

// testPages runs the helm commands of the pages, as they are written, from the installation to the last upgrade.
func (s *server) testPages(t *testing.T) {
	const operations = "docs/operations.md"
	pages := map[string]string{}
	for _, page := range []string{"README.md", operations} {
		raw, err := os.ReadFile(filepath.Join("..", page))
		require.NoError(t, err)
		pages[page] = string(raw)
	}
	kind := readValues(t, "berth/values-kind.yaml")
	at, err := url.Parse(kind["publicURL"].(string))
	require.NoError(t, err)
	nodePort, _ := lookup(kind, "gateway\x00service\x00nodePort")
	require.Equal(t, at.Port(), fmt.Sprint(nodePort))
	require.Contains(t, pages["README.md"], "{containerPort: "+at.Port()+", hostPort: "+at.Port())
	require.Contains(t, pages["README.md"], " http://api."+at.Host+"/sandboxes")

	values := regexp.MustCompile("(?s)```yaml\n(publicURL.*?)```").FindStringSubmatch(pages[operations])
	require.NotNil(t, values)
	file := filepath.Join(t.TempDir(), "values.yaml")
	require.NoError(t, os.WriteFile(file, []byte(values[1]), 0o600))
	run := func(page, command string) {
		t.Helper()
		command = strings.NewReplacer("charts/berth", "berth", "values.yaml", file, "<earlier-chart>", "berth").Replace(command)
		words, err := exec.CommandContext(t.Context(), "sh", "-c", "printf '%s\\n' "+command).Output()
		require.NoError(t, err, command)
		args := strings.Fields(string(words))
		require.Contains(t, args, namespace, page)
		args = slices.DeleteFunc(args, func(arg string) bool { return arg == "--wait" }) // there are no controllers
		helm(t, append(args, "--kubeconfig", s.kubeconfig, "--no-hooks")...)
	}
	install := regexp.MustCompile(`(?m)^    kubectl create namespace (\S+)\n(?:    kubectl .*\n)*    helm (install (?:.*\\\n)*.*)$`)
	for page, text := range pages {
		found := install.FindStringSubmatch(text)
		require.NotNil(t, found, page)
		require.Equal(t, sandboxes, found[1], "%s: another namespace than this test has", page)
		run(page, found[2])
		_, err := s.client.CoreV1().ServiceAccounts(sandboxes).Get(t.Context(), "berth-sandbox", metav1.GetOptions{})
		require.NoError(t, err, page)
		if page == operations {
			key := s.accessKey(t)
			for _, command := range regexp.MustCompile(`(?m)^ +helm ((?:upgrade|rollback) .*)$`).FindAllStringSubmatch(text, -1) {
				run(page, command[1])
				require.Equal(t, key, s.accessKey(t), "%s: the links of private sandboxes are invalid", command)
				s.requireCRDs(t)
			}
			// The last one has taken the CRDs out of the release.
			s.helm(t, "upgrade", release, "berth", "--values", file)
		}
		s.helm(t, "uninstall", release)
	}
}

// accessKey returns the key of private sandboxes.
func (s *server) accessKey(t *testing.T) string {
	t.Helper()
	secret, err := s.client.CoreV1().Secrets(namespace).Get(t.Context(), release+"-access-key", metav1.GetOptions{})
	require.NoError(t, err)
	return string(secret.Data["key"])
}

// requireCRDs fails if a CRD is not there. All objects of its kind would have gone with it.
func (s *server) requireCRDs(t *testing.T) {
	t.Helper()
	crds := s.dynamic.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1", Resource: "customresourcedefinitions"})
	for _, raw := range crd.All() {
		var want unstructured.Unstructured
		require.NoError(t, yaml.Unmarshal(raw, &want.Object))
		_, err := crds.Get(t.Context(), want.GetName(), metav1.GetOptions{})
		require.NoError(t, err)
	}
}
