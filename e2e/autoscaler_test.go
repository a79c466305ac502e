package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// TestAutoscalerMovesTheWarmPods applies the HorizontalPodAutoscaler of docs/operations.md. The name of the pool is
// the only change. The test itself is the metrics API.
func TestAutoscalerMovesTheWarmPods(t *testing.T) {
	if where, err := provider(); err != nil || where != onKind {
		t.Skipf("needs a controller manager, and a cluster that reaches this machine: only on the provider %s", onKind)
	}
	e := start(t, 2)
	var metric atomic.Int64
	e.serveExternalMetric(&metric)
	h := e.documentedAutoscaler()
	hpas := e.clients.Kubernetes.AutoscalingV2().HorizontalPodAutoscalers(e.site.namespace())
	_, err := hpas.Create(t.Context(), h, metav1.CreateOptions{})
	require.NoError(t, err)
	t.Cleanup(func() { _ = hpas.Delete(context.Background(), h.Name, metav1.DeleteOptions{}) })

	for _, c := range []struct{ metric, warm int32 }{{5, 5}, {1, *h.Spec.MinReplicas}, {0, *h.Spec.MinReplicas}, {4, 4}} {
		metric.Store(int64(c.metric))
		e.eventually(func() error {
			seen, err := hpas.Get(t.Context(), h.Name, metav1.GetOptions{})
			require.NoError(t, err)
			pool := e.readPool(e.pool)
			warm := len(e.pods(map[string]string{v1alpha1.LabelPhase: v1alpha1.PhaseWarm}))
			if pool.Spec.Warm != c.warm || pool.Status.Warm != c.warm || warm != int(c.warm) || len(e.pods(nil)) != warm {
				return fmt.Errorf("metric %d: spec.warm is %d, status %+v, %d warm pods; the autoscaler: %+v",
					c.metric, pool.Spec.Warm, pool.Status, warm, seen.Status)
			}
			return nil
		})
	}
}

// documentedAutoscaler is the one of docs/operations.md, for the pool of the test.
func (e *env) documentedAutoscaler() *autoscalingv2.HorizontalPodAutoscaler {
	page, err := os.ReadFile("../docs/operations.md")
	require.NoError(e.t, err)
	block := regexp.MustCompile("(?s)```yaml\n([^`]*kind: HorizontalPodAutoscaler.*?)```").FindSubmatch(page)
	require.NotNil(e.t, block)
	var h autoscalingv2.HorizontalPodAutoscaler
	require.NoError(e.t, yaml.UnmarshalStrict([]byte(strings.ReplaceAll(string(block[1]), "python", e.pool)), &h))
	return &h
}

// The API of external metrics.
const (
	metricsGroup   = "external.metrics.k8s.io"
	metricsVersion = "v1beta1"
	metricsService = "external-metrics"
)

// serveExternalMetric serves external metrics to the cluster: every metric has the value, if it is asked for with the
// pool of the test.
func (e *env) serveExternalMetric(value *atomic.Int64) {
	const path = "/apis/" + metricsGroup + "/" + metricsVersion
	mux := http.NewServeMux()
	answer := func(w http.ResponseWriter, kind, version string, fields map[string]any) {
		fields["kind"], fields["apiVersion"] = kind, version
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(fields)
	}
	mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
		answer(w, "APIResourceList", "v1", map[string]any{
			"groupVersion": metricsGroup + "/" + metricsVersion, "resources": []any{},
		})
	})
	mux.HandleFunc("GET "+path+"/namespaces/{namespace}/{metric}", func(w http.ResponseWriter, r *http.Request) {
		items := []any{}
		if r.PathValue("namespace") == e.site.namespace() && r.FormValue("labelSelector") == "pool="+e.pool {
			items = append(items, map[string]any{
				"metricName": r.PathValue("metric"), "metricLabels": map[string]string{"pool": e.pool},
				"timestamp": metav1.Now(), "value": fmt.Sprint(value.Load()),
			})
		}
		answer(w, "ExternalMetricValueList", metricsGroup+"/"+metricsVersion, map[string]any{
			"metadata": map[string]any{}, "items": items,
		})
	})
	server := httptest.NewUnstartedServer(mux)
	require.NoError(e.t, server.Listener.Close())
	host := e.hostOfKind()
	var err error
	server.Listener, err = net.Listen("tcp", net.JoinHostPort(host, "0"))
	require.NoError(e.t, err)
	server.StartTLS()
	e.t.Cleanup(server.Close)
	e.serviceAt(host, int32(server.Listener.Addr().(*net.TCPAddr).Port))
	e.registerMetrics()
}

// serviceAt makes a Service without a selector, at the address of this machine.
func (e *env) serviceAt(host string, port int32) {
	services := e.clients.Kubernetes.CoreV1().Services(e.site.namespace())
	_, err := services.Create(e.t.Context(), &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: metricsService},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "https", Port: 443}}},
	}, metav1.CreateOptions{})
	require.NoError(e.t, err)
	e.t.Cleanup(func() { _ = services.Delete(context.Background(), metricsService, metav1.DeleteOptions{}) })
	slices := e.clients.Kubernetes.DiscoveryV1().EndpointSlices(e.site.namespace())
	_, err = slices.Create(e.t.Context(), &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: metricsService, Labels: map[string]string{discoveryv1.LabelServiceName: metricsService},
		},
		AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{Addresses: []string{host}}},
		Ports: []discoveryv1.EndpointPort{{Name: new("https"), Port: &port}},
	}, metav1.CreateOptions{})
	require.NoError(e.t, err)
}

// registerMetrics has the API server ask the Service for external metrics.
func (e *env) registerMetrics() {
	const registrations = "/apis/apiregistration.k8s.io/v1/apiservices"
	api := e.clients.Kubernetes.Discovery().RESTClient()
	name := metricsVersion + "." + metricsGroup
	body, err := json.Marshal(map[string]any{
		"kind": "APIService", "apiVersion": "apiregistration.k8s.io/v1", "metadata": map[string]any{"name": name},
		"spec": map[string]any{
			"group": metricsGroup, "version": metricsVersion, "groupPriorityMinimum": 100, "versionPriority": 100,
			"service":               map[string]any{"namespace": e.site.namespace(), "name": metricsService},
			"insecureSkipTLSVerify": true,
		},
	})
	require.NoError(e.t, err)
	require.NoError(e.t, api.Post().AbsPath(registrations).Body(body).SetHeader("Content-Type", "application/json").
		Do(e.t.Context()).Error())
	e.t.Cleanup(func() { _ = api.Delete().AbsPath(registrations, name).Do(context.Background()).Error() })
	e.eventually(func() error {
		return api.Get().AbsPath("/apis", metricsGroup, metricsVersion).Do(e.t.Context()).Error()
	})
}

// hostOfKind is the address at which a kind cluster reaches this machine.
func (e *env) hostOfKind() string {
	out, err := exec.CommandContext(e.t.Context(), "docker", "network", "inspect", "kind", "--format",
		"{{json .IPAM.Config}}").Output()
	require.NoError(e.t, err)
	var networks []struct{ Gateway string }
	require.NoError(e.t, json.Unmarshal(out, &networks))
	for _, n := range networks {
		if ip := net.ParseIP(n.Gateway); ip.To4() != nil {
			return n.Gateway
		}
	}
	require.FailNow(e.t, "the network of kind has no IPv4 gateway", string(out))
	return ""
}
