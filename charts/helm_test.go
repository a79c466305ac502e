package charts

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The release that the tests render, and the version of Kubernetes they render
// for: without one, what helm assumes depends on how it was built.
const (
	release     = "berth"
	namespace   = "berth-system"
	kubeVersion = "1.36.0"
)

// valueFiles are the names of the files in testdata/values.
func valueFiles() []string {
	return []string{"minimal", "kind", "ipv6", "full", "closed", "egress", "certificates"}
}

// findHelm returns the path of helm.
var findHelm = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("HELM"); path != "" {
		return path, nil
	}
	if path, err := exec.LookPath("helm"); err == nil {
		return path, nil
	}
	fmt.Fprintln(os.Stderr, "no helm on PATH: building the one of tools/helm.mod, if it is not in Go's build cache")
	cmd := exec.Command("go", "tool", "-modfile="+filepath.Join("..", "tools", "helm.mod"), "-n", "helm")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	return strings.TrimSpace(string(out)), err
})

// tryHelm runs helm and returns its standard output.
func tryHelm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	if testing.Short() {
		t.Skip("needs helm, which may have to be built: run without -short")
	}
	path, err := findHelm()
	require.NoError(t, err)
	cmd := exec.CommandContext(t.Context(), path, args...)
	// Nothing of the person's own is read or left behind: settings, a cluster, what
	// was discovered of one.
	cmd.Env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "HELM_") || strings.HasPrefix(v, "KUBECONFIG=")
	})
	home := t.TempDir()
	cmd.Env = append(cmd.Env, "HELM_CACHE_HOME="+home, "HELM_CONFIG_HOME="+home, "HELM_DATA_HOME="+home, "KUBECACHEDIR="+home, "KUBECONFIG="+os.DevNull)
	var out, problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &problems
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("helm %s: %w\n%s%s", strings.Join(args, " "), err, out.Bytes(), problems.Bytes())
	}
	return out.String(), nil
}

func helm(t *testing.T, args ...string) string {
	t.Helper()
	out, err := tryHelm(t, args...)
	require.NoError(t, err)
	return out
}

func valueFile(name string) string { return filepath.Join("testdata", "values", name+".yaml") }

// rendered keeps what template returned, by its arguments: most tests look at the
// same few renderings.
var rendered sync.Map

// template renders the chart with one of the files in testdata/values.
func template(t *testing.T, values string, args ...string) string {
	t.Helper()
	args = append([]string{"template", release, "berth", "--namespace", namespace, "--kube-version", kubeVersion, "--values", valueFile(values)}, args...)
	key := strings.Join(args, " ")
	if text, ok := rendered.Load(key); ok {
		return text.(string)
	}
	text := helm(t, args...)
	rendered.Store(key, text)
	return text
}

// object is one that the chart renders. typed is nil if the API server needs a
// CRD to know it.
type object struct {
	unstructured.Unstructured
	typed runtime.Object
}

// hook reports whether helm applies an object before the release, and not with it.
func (o object) hook() bool { return o.GetAnnotations()["helm.sh/hook"] != "" && !o.test() }

// test reports whether an object is there for "helm test" only.
func (o object) test() bool { return o.GetAnnotations()["helm.sh/hook"] == "test" }

func (o object) String() string {
	return fmt.Sprintf("%s %s/%s", o.GetKind(), o.GetNamespace(), o.GetName())
}

// render renders the chart and decodes everything, strictly.
func render(t *testing.T, values string, args ...string) []object {
	t.Helper()
	return decode(t, template(t, values, args...))
}

func decode(t *testing.T, text string) []object {
	t.Helper()
	strict := serializer.NewCodecFactory(scheme.Scheme, serializer.EnableStrict).UniversalDeserializer()
	var all []object
	reader := utilyaml.NewYAMLReader(bufio.NewReader(strings.NewReader(text)))
	for {
		document, err := reader.Read()
		if errors.Is(err, io.EOF) {
			return all
		}
		require.NoError(t, err)
		var o object
		require.NoError(t, yaml.Unmarshal(document, &o.Object), "%s", document)
		if len(o.Object) == 0 {
			continue // comments
		}
		if o.typed, _, err = strict.Decode(document, nil, nil); runtime.IsNotRegisteredError(err) {
			o.typed, err = nil, nil
		}
		require.NoError(t, err, "%s", document)
		all = append(all, o)
	}
}

// objectsOf returns the objects of one type.
func objectsOf[T runtime.Object](all []object) []T {
	var of []T
	for _, o := range all {
		if typed, ok := o.typed.(T); ok {
			of = append(of, typed)
		}
	}
	return of
}

// workload is a pod template with what makes pods of it.
type workload struct {
	name     string
	selector *metav1.LabelSelector // nil for a Job, which makes its own, and for a pod
	pod      corev1.PodTemplateSpec
}

// containers returns those of the pod, the first to start first.
func (w workload) containers() []corev1.Container {
	return slices.Concat(w.pod.Spec.InitContainers, w.pod.Spec.Containers)
}

func (w workload) container(t *testing.T, name string) corev1.Container {
	t.Helper()
	for _, c := range w.containers() {
		if c.Name == name {
			return c
		}
	}
	require.Failf(t, "no such container", "%s has no container %s", w.name, name)
	return corev1.Container{}
}

func workloads(all []object) []workload {
	var found []workload
	for _, d := range objectsOf[*appsv1.Deployment](all) {
		found = append(found, workload{d.Name, d.Spec.Selector, d.Spec.Template})
	}
	for _, j := range objectsOf[*batchv1.Job](all) {
		found = append(found, workload{j.Name, nil, j.Spec.Template})
	}
	for _, p := range objectsOf[*corev1.Pod](all) {
		found = append(found, workload{p.Name, nil, corev1.PodTemplateSpec{ObjectMeta: p.ObjectMeta, Spec: p.Spec}})
	}
	return found
}

func findWorkload(t *testing.T, all []object, name string) workload {
	t.Helper()
	for _, w := range workloads(all) {
		if w.name == name {
			return w
		}
	}
	require.Failf(t, "no such workload", "%s", name)
	return workload{}
}

// flagsOf returns a container's flags by name. Arguments that are no flags have
// no place here, but for the names of commands.
func flagsOf(c corev1.Container) map[string]string {
	flags := map[string]string{}
	for _, arg := range c.Args {
		if arg, ok := strings.CutPrefix(arg, "--"); ok { // one without a value is on
			name, value, _ := strings.Cut(arg, "=")
			flags[name] = value
		}
	}
	return flags
}
