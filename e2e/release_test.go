package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/podnet"
)

// releaseReplicas is how many allocators and gateways a release has.
const releaseReplicas = 2

const (
	releaseName      = "berth"
	releaseNamespace = "berth-e2e"
	keysNamespace    = releaseNamespace + "-keys" // as the chart names it
	// sandboxNamespace is where pools and sandboxes are, apart from Berth's keys.
	sandboxNamespace = "berth-e2e-sandboxes"
	releaseDomain    = "sandbox.test" // never resolved: requests are sent to where the gateways are
	// releaseMaxStale is short, so that a router that was killed does not keep
	// released pods for long.
	releaseMaxStale = 20 * time.Second
)

// The ports of the containers.
const (
	portGateway = 8080
	portAPI     = 8081
	portAdmin   = 9901
)

// release is a site that helm has installed on a real cluster.
type release struct {
	kubeconfig string
	config     *rest.Config
	clients    *kube.Clients
	image      string
	apiKey     string
	// gatewayAddress and apiAddress are where the Services can be reached from
	// here; "" where they cannot, and pods are connected to one by one.
	gatewayAddress, apiAddress string
}

// installation says where and how to install.
type installation struct {
	kubeconfig   string
	values       map[string]any
	helmArgs     []string
	sandboxImage string
	// gatewayAddress and apiAddress are those of release.
	gatewayAddress, apiAddress string
}

// install installs the chart where the provider says. remove undoes it, also
// after an error.
func install(ctx context.Context, where string) (r *release, remove func() error, err error) {
	undo := func() error { return nil }
	var in installation
	if where == onKind {
		in, undo, err = createKind(ctx, 0)
	} else {
		in, err = fromEnvironment()
	}
	if err != nil {
		return nil, undo, err
	}
	r, err = in.install(ctx)
	if where == onKind {
		return r, undo, err // all of it goes with the cluster
	}
	return r, in.uninstall, err
}

// fromEnvironment describes the installation that the environment asks for.
func fromEnvironment() (installation, error) {
	in := installation{
		kubeconfig: os.Getenv(envKubeconfig), sandboxImage: os.Getenv(envSandboxImage),
		gatewayAddress: os.Getenv(envGateway), apiAddress: os.Getenv(envAPI),
		helmArgs: strings.Fields(os.Getenv(envHelmArgs)),
	}
	cidrs := strings.Split(os.Getenv(envPodCIDRs), ",")
	for _, required := range []string{envKubeconfig, envSandboxImage, envPodCIDRs} {
		if os.Getenv(required) == "" {
			return in, fmt.Errorf("%s is needed with %s=%s", required, envProvider, onKubeconfig)
		}
	}
	in.values = values(cidrs)
	return in, nil
}

// values are the chart's values that the suite needs.
func values(podCIDRs []string) map[string]any {
	return map[string]any{
		"publicURL": "http://" + releaseDomain,
		"podCIDRs":  podCIDRs,
		"maxStale":  releaseMaxStale.String(),
		"sandboxes": map[string]any{"namespace": sandboxNamespace},
		"allocator": map[string]any{"replicas": releaseReplicas},
		"gateway":   map[string]any{"replicas": releaseReplicas, "drainSeconds": 10},
	}
}

func (in installation) install(ctx context.Context) (*release, error) {
	config, err := clientcmd.BuildConfigFromFlags("", in.kubeconfig)
	if err != nil {
		return nil, err
	}
	clients, err := kube.NewClients(config, 0, 0)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(in.values)
	if err != nil {
		return nil, err
	}
	file, err := os.CreateTemp("", "berth-values-*.json")
	if err != nil {
		return nil, err
	}
	defer os.Remove(file.Name())
	_, err = file.Write(raw)
	if err := errors.Join(err, file.Close()); err != nil {
		return nil, err
	}
	// What the namespaces are labelled with is what the chart must be content with.
	for namespace, level := range map[string]string{releaseNamespace: "restricted", sandboxNamespace: "baseline"} {
		if _, err := clients.Kubernetes.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{
			Name: namespace, Labels: map[string]string{"pod-security.kubernetes.io/enforce": level},
		}}, metav1.CreateOptions{}); err != nil {
			return nil, err
		}
	}
	args := append([]string{
		"install", releaseName, filepath.Join("..", "charts", "berth"), "--namespace", releaseNamespace,
		"--values", file.Name(), "--wait", "--timeout", "5m",
	}, in.helmArgs...)
	r := &release{
		kubeconfig: in.kubeconfig, config: config, clients: clients, image: in.sandboxImage,
		gatewayAddress: in.gatewayAddress, apiAddress: in.apiAddress,
	}
	if err := r.helm(ctx, args...); err != nil {
		return nil, fmt.Errorf("%w\n%s", err, r.describe(ctx))
	}
	r.apiKey = access.NewKey()
	suite := access.Caller{Key: "suite", Team: "suite", Role: access.Admin}
	if err := createKey(ctx, clients, keysNamespace, r.apiKey, suite); err != nil {
		return nil, err
	}
	return r, r.waitComplete(ctx)
}

// uninstall leaves the cluster as it was, but for the CRDs.
func (in installation) uninstall() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	config, err := clientcmd.BuildConfigFromFlags("", in.kubeconfig)
	if err != nil {
		return err
	}
	clients, err := kube.NewClients(config, 0, 0)
	if err != nil {
		return err
	}
	r := &release{kubeconfig: in.kubeconfig, config: config, clients: clients}
	// Allocators remove the finalizers of pools and sandboxes.
	errs := []error{clients.Berth.Delete().Namespace(sandboxNamespace).Resource("sandboxpools").Do(ctx).Error()}
	errs = append(errs, poll(ctx, func(ctx context.Context) error {
		var left v1alpha1.SandboxPoolList
		if err := clients.Berth.Get().Namespace(sandboxNamespace).Resource("sandboxpools").Do(ctx).Into(&left); err != nil {
			return err
		}
		if len(left.Items) > 0 {
			return fmt.Errorf("%d pools are left", len(left.Items))
		}
		return nil
	}))
	errs = append(errs, r.helm(ctx, "uninstall", releaseName, "--namespace", releaseNamespace, "--wait"))
	for _, namespace := range []string{releaseNamespace, keysNamespace, sandboxNamespace} {
		errs = append(errs, clients.Kubernetes.CoreV1().Namespaces().Delete(ctx, namespace, metav1.DeleteOptions{}))
	}
	return errors.Join(errs...)
}

// helm runs helm: the one on PATH, or the one that is pinned in tools. What it
// discovers of the cluster does not outlive the call: the next one may be another
// cluster at the same address.
func (r *release) helm(ctx context.Context, args ...string) error {
	cache, err := os.MkdirTemp("", "berth-helm-")
	if err != nil {
		return fmt.Errorf("helm: %w", err)
	}
	defer os.RemoveAll(cache)
	argv := []string{"helm"}
	if _, err := exec.LookPath("helm"); err != nil {
		argv = []string{"go", "tool", "-modfile=" + filepath.Join("..", "tools", "helm.mod"), "helm"}
	}
	argv = append([]string{"env", "KUBECACHEDIR=" + cache}, argv...)
	return command(ctx, append(append(argv, args...), "--kubeconfig", r.kubeconfig)...)
}

// command runs a program to its end.
func command(ctx context.Context, argv ...string) error {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", strings.Join(argv, " "), err, out)
	}
	return nil
}

// poll calls check until it returns nil.
func poll(ctx context.Context, check func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	ticker := time.NewTicker(200 * time.Millisecond)
	defer ticker.Stop()
	for {
		err := check(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w; last: %w", context.Cause(ctx), err)
		case <-ticker.C:
		}
	}
}

// waitComplete waits until all replicas are ready and one allocator leads.
func (r *release) waitComplete(ctx context.Context) error {
	err := poll(ctx, func(ctx context.Context) error {
		list, err := r.clients.Kubernetes.AppsV1().Deployments(releaseNamespace).List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) < 2 {
			return fmt.Errorf("%d deployments, not 2 or more", len(list.Items))
		}
		for _, d := range list.Items {
			if !complete(&d) {
				return fmt.Errorf("deployment %s: %+v", d.Name, d.Status)
			}
		}
		return nil
	})
	return errors.Join(err, r.waitLeader(ctx))
}

// waitEnded waits until no pod of the release is on its way out.
func (r *release) waitEnded(ctx context.Context) error {
	return poll(ctx, func(ctx context.Context) error {
		pods, err := r.clients.Kubernetes.CoreV1().Pods(releaseNamespace).List(ctx,
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/component"})
		if err != nil {
			return err
		}
		for _, p := range pods.Items {
			if p.DeletionTimestamp != nil {
				return fmt.Errorf("pod %s is still ending", p.Name)
			}
		}
		return nil
	})
}

func complete(d *appsv1.Deployment) bool {
	return d.Status.ObservedGeneration == d.Generation && d.Status.Replicas == releaseReplicas &&
		d.Status.ReadyReplicas == releaseReplicas && d.Status.UpdatedReplicas == releaseReplicas
}

// closeConnections closes the connections to the API server, which client-go
// keeps for the next client of the same configuration.
func (r *release) closeConnections() error {
	client, err := rest.HTTPClientFor(r.config)
	if err != nil {
		return err
	}
	utilnet.CloseIdleConnectionsFor(client.Transport)
	return nil
}

func (r *release) restConfig() *rest.Config { return r.config }
func (r *release) namespace() string        { return sandboxNamespace }
func (r *release) domain() string           { return releaseDomain }
func (r *release) sandboxImage() string     { return r.image }
func (r *release) key() string              { return r.apiKey }

func (r *release) front(ctx context.Context) (net.Conn, error) {
	return r.dial(ctx, r.gatewayAddress, "gateway", portGateway)
}

func (r *release) api(ctx context.Context) (net.Conn, error) {
	return r.dial(ctx, r.apiAddress, "allocator", portAPI)
}

// dial connects to a Service's address or, if there is none, to a port of any
// ready pod behind it.
func (r *release) dial(ctx context.Context, address, component string, port int) (net.Conn, error) {
	if address != "" {
		return (&net.Dialer{}).DialContext(ctx, "tcp", address)
	}
	pods, err := r.ready(ctx, component)
	if err != nil {
		return nil, err
	}
	if len(pods) == 0 {
		return nil, fmt.Errorf("no pod of %s is ready", component)
	}
	return podnet.Dial(ctx, r.config, releaseNamespace, pods[0].Name, port)
}

func (r *release) fronts(ctx context.Context) ([]dialer, error) { return r.gateways(ctx, portGateway) }
func (r *release) admins(ctx context.Context) ([]dialer, error) { return r.gateways(ctx, portAdmin) }

// gateways connect to a port of each gateway's pod.
func (r *release) gateways(ctx context.Context, port int) ([]dialer, error) {
	pods, err := r.ready(ctx, "gateway")
	var all []dialer
	for _, p := range pods {
		all = append(all, func(ctx context.Context) (net.Conn, error) {
			return podnet.Dial(ctx, r.config, releaseNamespace, p.Name, port)
		})
	}
	return all, err
}

// ready lists the pods of a component that are ready and not on their way out.
func (r *release) ready(ctx context.Context, component string) ([]corev1.Pod, error) {
	list, err := r.clients.Kubernetes.CoreV1().Pods(releaseNamespace).List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component=" + component})
	if err != nil {
		return nil, err
	}
	var pods []corev1.Pod
	for _, p := range list.Items {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
				pods = append(pods, p)
			}
		}
	}
	return pods, nil
}

// leader returns the pod of the allocator that holds the lease.
func (r *release) leader(ctx context.Context) (*corev1.Pod, error) {
	lease, err := r.clients.Kubernetes.CoordinationV1().Leases(sandboxNamespace).Get(ctx, "berth-allocator",
		metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	pods, err := r.ready(ctx, "allocator")
	if err != nil {
		return nil, err
	}
	holder := ""
	if lease.Spec.HolderIdentity != nil {
		holder = *lease.Spec.HolderIdentity
	}
	for _, p := range pods {
		if strings.Contains(holder, "_"+p.Name+"-") {
			return &p, nil
		}
	}
	return nil, fmt.Errorf("the lease is held by %q, which is none of the pods", holder)
}

func (r *release) waitLeader(ctx context.Context) error {
	return poll(ctx, func(ctx context.Context) error {
		_, err := r.leader(ctx)
		return err
	})
}

func (r *release) killLeader(ctx context.Context) error {
	p, err := r.leader(ctx)
	if err != nil {
		return err
	}
	return r.kill(ctx, p)
}

func (r *release) killGateway(ctx context.Context) error {
	pods, err := r.ready(ctx, "gateway")
	if err != nil {
		return err
	}
	if len(pods) == 0 {
		return errors.New("no gateway is ready")
	}
	return r.kill(ctx, &pods[0])
}

// kill ends a pod without a grace period.
func (r *release) kill(ctx context.Context, p *corev1.Pod) error {
	pods := r.clients.Kubernetes.CoreV1().Pods(p.Namespace)
	if err := pods.Delete(ctx, p.Name,
		metav1.DeleteOptions{GracePeriodSeconds: new(int64),
			Preconditions: metav1.NewUIDPreconditions(string(p.UID))}); err != nil {
		return err
	}
	return r.waitGone(ctx, p)
}

func (r *release) waitGone(ctx context.Context, p *corev1.Pod) error {
	pods := r.clients.Kubernetes.CoreV1().Pods(p.Namespace)
	return poll(ctx, func(ctx context.Context) error {
		now, err := pods.Get(ctx, p.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err) || err == nil && now.UID != p.UID:
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("pod %s is still there", p.Name)
	})
}

func (r *release) logs(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	t.Log(r.describe(ctx))
}

// describe tells the state of the release's pods and the end of their logs.
func (r *release) describe(ctx context.Context) string {
	pods, err := r.clients.Kubernetes.CoreV1().Pods(releaseNamespace).List(ctx,
		metav1.ListOptions{LabelSelector: "app.kubernetes.io/component"})
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	for _, p := range pods.Items {
		fmt.Fprintf(&b, "pod %s: %s %+v\n", p.Name, p.Status.Phase, p.Status.Conditions)
		for _, c := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			fmt.Fprintf(&b, "  container %s: ready %v, %d restarts, %+v\n", c.Name, c.Ready, c.RestartCount, c.State)
			lines := int64(30)
			stream, err := r.clients.Kubernetes.CoreV1().Pods(releaseNamespace).GetLogs(p.Name,
				&corev1.PodLogOptions{Container: c.Name, TailLines: &lines}).Stream(ctx)
			if err != nil {
				fmt.Fprintf(&b, "    %v\n", err)
				continue
			}
			raw, _ := io.ReadAll(stream)
			_ = stream.Close()
			b.Write(raw)
		}
	}
	return b.String()
}
