package support

import (
	"archive/tar"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/podnet"
)

// Bounds.
const (
	// fileBytes bounds a file, and totalBytes all files, before they are compressed.
	fileBytes  = 16 << 20
	totalBytes = 512 << 20
	// listed is how many objects of a kind are listed, sourceLimit how long a source may take, and atOnce how many are read
	// at a time.
	listed      = 1000
	sourceLimit = 30 * time.Second
	atOnce      = 8
)

// Source is one file of the archive.
type Source struct {
	// Name is the path in the archive.
	Name string
	// Read returns the content. It need not remove secrets.
	Read func(context.Context) ([]byte, error)
}

// Options say what is collected. Config and Namespace are required.
type Options struct {
	Config *rest.Config
	// Namespace is where the pools and the sandboxes are.
	Namespace string
	// Release is the namespace of Berth's pods. Empty: where there are such pods.
	Release string
	// Since is the age of the oldest line of a log.
	Since time.Duration
	// Sources are read besides those of the cluster.
	Sources []Source
	// Secrets are removed wherever they stand.
	Secrets []string
}

// File says what became of a source.
type File struct {
	Name  string `json:"name"`
	Bytes int    `json:"bytes"`
	// Truncated is true if the source has more than fits.
	Truncated bool   `json:"truncated,omitempty"`
	Error     string `json:"error,omitempty"`
}

// Index is the content of index.json.
type Index struct {
	Begun time.Time `json:"begun"`
	Ended time.Time `json:"ended"`
	Files []File    `json:"files"`
}

// Failed returns the sources that failed or are not whole.
func (i *Index) Failed() []File {
	return slices.DeleteFunc(slices.Clone(i.Files), func(f File) bool { return f.Error == "" && !f.Truncated })
}

// collection is one archive that is being written.
type collection struct {
	Options
	client *kubernetes.Clientset
	redact *redactor

	mu      sync.Mutex
	archive *tar.Writer
	dir     string
	left    int
	index   Index
	failed  error // writing the archive has
}

// Write writes an archive to w. dir is its directory. It fails if w does, or ctx ends; what fails otherwise is in the index.
func Write(ctx context.Context, w io.Writer, dir string, o Options) (*Index, error) {
	client, err := kubernetes.NewForConfig(o.Config)
	if err != nil {
		return nil, err
	}
	packed := gzip.NewWriter(w)
	c := &collection{Options: o, client: client, archive: tar.NewWriter(packed), dir: dir, left: totalBytes}
	c.index.Begun = time.Now().UTC()
	sources := append(c.fixed(), o.Sources...)
	pods, err := ownPods(ctx, client, o.Release)
	if err != nil {
		c.index.Files = append(c.index.Files, File{Name: "pods", Error: err.Error()})
	}
	namespaces := []string{o.Namespace}
	for _, p := range pods {
		if !slices.Contains(namespaces, p.Namespace) {
			namespaces = append(namespaces, p.Namespace)
		}
		sources = append(sources, c.ofPod(&p)...)
	}
	for _, n := range namespaces {
		sources = append(sources, c.objects(n)...)
	}
	c.redact = newRedactor(append(c.secrets(ctx, namespaces), o.Secrets...)...)
	c.all(ctx, sources)
	c.index.Ended = time.Now().UTC()
	slices.SortFunc(c.index.Files, func(a, b File) int { return cmp.Compare(a.Name, b.Name) })
	raw, err := json.MarshalIndent(c.index, "", " ")
	return &c.index, errors.Join(ctx.Err(), c.failed, err, c.put("index.json", raw), c.archive.Close(), packed.Close())
}

// all reads sources, a few at a time.
func (c *collection) all(ctx context.Context, sources []Source) {
	turns := make(chan struct{}, atOnce)
	var reading sync.WaitGroup
	for _, s := range sources {
		turns <- struct{}{}
		reading.Go(func() {
			defer func() { <-turns }()
			c.add(ctx, s)
		})
	}
	reading.Wait()
}

// add reads a source into the archive.
func (c *collection) add(ctx context.Context, s Source) {
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	raw, err := s.Read(ctx)
	f := File{Name: s.Name}
	if err == nil && strings.HasSuffix(s.Name, ".json") {
		// A document that was cut off is not cleaned by the names of its fields, so it is not kept.
		if len(raw) > fileBytes {
			raw, err = nil, fmt.Errorf("larger than %d bytes", fileBytes)
		} else {
			raw, err = c.redact.object(raw)
		}
	} else {
		raw = c.redact.text(raw)
	}
	if err != nil {
		f.Error = string(c.redact.text([]byte(err.Error())))
	}
	if len(raw) > fileBytes {
		raw, f.Truncated = raw[:fileBytes], true
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(raw) > c.left {
		raw, f.Truncated = raw[:c.left], true
	}
	c.left -= len(raw)
	f.Bytes = len(raw)
	c.index.Files = append(c.index.Files, f)
	if len(raw) > 0 {
		c.failed = errors.Join(c.failed, c.put(s.Name, raw))
	}
}

// put writes a file. Nothing else may write meanwhile.
func (c *collection) put(name string, raw []byte) error {
	if err := c.archive.WriteHeader(&tar.Header{
		Name: path.Join(c.dir, name), Mode: 0o600, Size: int64(len(raw)), ModTime: c.index.Begun,
	}); err != nil {
		return err
	}
	_, err := c.archive.Write(raw)
	return err
}

// get reads a path of the API server.
func (c *collection) get(ctx context.Context, absolute string, query url.Values) ([]byte, error) {
	request := c.client.Discovery().RESTClient().Get().AbsPath(absolute)
	for name, values := range query {
		request = request.Param(name, values[0])
	}
	return request.Do(ctx).Raw()
}

func (c *collection) list(name, absolute string) Source {
	return Source{Name: name, Read: func(ctx context.Context) ([]byte, error) {
		return c.get(ctx, absolute, url.Values{"limit": {strconv.Itoa(listed)}})
	}}
}

// fixed are the sources of the cluster as a whole.
func (c *collection) fixed() []Source {
	return []Source{
		{Name: "kubernetes-version.json", Read: func(ctx context.Context) ([]byte, error) {
			return c.get(ctx, "/version", nil)
		}},
		c.list("objects/nodes.json", "/api/v1/nodes"),
	}
}

// objects are the kinds of a namespace.
func (c *collection) objects(namespace string) []Source {
	group := map[string][]string{
		"/api/v1":                      {"pods", "services", "events", "resourcequotas", "limitranges"},
		"/apis/apps/v1":                {"deployments", "replicasets"},
		"/apis/coordination.k8s.io/v1": {"leases"},
		"/apis/networking.k8s.io/v1":   {"networkpolicies"},
		"/apis/policy/v1":              {"poddisruptionbudgets"},
		"/apis/autoscaling/v2":         {"horizontalpodautoscalers"},
		"/apis/discovery.k8s.io/v1":    {"endpointslices"},
	}
	if namespace == c.Namespace {
		group["/apis/berth.sh/v1alpha1"] = []string{"sandboxpools", "sandboxes"}
	}
	var all []Source
	for prefix, kinds := range group {
		for _, kind := range kinds {
			all = append(all, c.list(fmt.Sprintf("objects/%s/%s.json", namespace, kind),
				fmt.Sprintf("%s/namespaces/%s/%s", prefix, namespace, kind)))
		}
	}
	return all
}

// ownPods returns Berth's pods of a namespace, or of all. The template of a pool may have Berth's labels too.
func ownPods(ctx context.Context, client kubernetes.Interface, namespace string) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	list, err := client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
		LabelSelector: "app.kubernetes.io/name=berth,app.kubernetes.io/component,!" + v1alpha1.LabelPool, Limit: listed})
	if err != nil {
		return nil, fmt.Errorf("pods of Berth: %w", err)
	}
	return list.Items, nil
}

// secrets returns the values of the Secrets that can be read.
func (c *collection) secrets(ctx context.Context, namespaces []string) (known []string) {
	ctx, cancel := context.WithTimeout(ctx, sourceLimit)
	defer cancel()
	for _, n := range namespaces {
		file := File{Name: fmt.Sprintf("objects/%s/secrets.json", n)}
		list, err := c.client.CoreV1().Secrets(n).List(ctx, metav1.ListOptions{Limit: listed})
		var named []map[string]any
		if err != nil {
			file.Error = err.Error()
		} else {
			for _, s := range list.Items {
				var fields []string
				for field, value := range s.Data {
					if s.Type != "helm.sh/release.v1" { // large, and nowhere else
						known = append(known, string(value))
					}
					fields = append(fields, field)
				}
				slices.Sort(fields)
				named = append(named, map[string]any{
					"name": s.Name, "type": s.Type, "created": s.CreationTimestamp, "fields": fields})
			}
			raw, err := json.MarshalIndent(named, "", " ")
			file.Bytes = len(raw)
			c.failed = errors.Join(c.failed, err, c.put(file.Name, raw))
		}
		c.index.Files = append(c.index.Files, file)
	}
	return known
}

// pages are what the containers of Berth serve at their admin addresses, by container.
var pages = map[string]struct {
	port  int
	files map[string]string // path by name
}{
	"allocator": {9902, map[string]string{"metrics.txt": "/metrics"}},
	"router": {9901, map[string]string{
		"metrics.txt": "/metrics", "routes.json": "/admin/routes", "last-active.json": "/admin/last-active",
		"envoy-config.json": "/admin/envoy/config_dump", "envoy-stats.txt": "/admin/envoy/stats/prometheus",
		"envoy-info.json": "/admin/envoy/server_info",
	}},
}

// ofPod are the logs of a pod, and what its containers serve.
func (c *collection) ofPod(p *corev1.Pod) []Source {
	var all []Source
	dir := path.Join("pods", p.Namespace, p.Name)
	for _, log := range logsOf(p, c.Since) {
		log.LimitBytes = new(int64(fileBytes))
		name := "log.txt"
		if log.Previous {
			name = "previous.log.txt"
		}
		all = append(all, Source{Name: path.Join(dir, log.Container, name), Read: func(ctx context.Context) ([]byte, error) {
			return c.client.CoreV1().Pods(p.Namespace).GetLogs(p.Name, &log).DoRaw(ctx)
		}})
	}
	for _, s := range p.Status.ContainerStatuses {
		served := pages[s.Name]
		for name, page := range served.files {
			all = append(all, Source{Name: path.Join(dir, s.Name, name), Read: func(ctx context.Context) ([]byte, error) {
				return c.page(ctx, p, served.port, page)
			}})
		}
	}
	return all
}

// logsOf are the logs of the containers of a pod, and of those before their last restart.
func logsOf(p *corev1.Pod, since time.Duration) (all []corev1.PodLogOptions) {
	for _, s := range append(slices.Clone(p.Status.InitContainerStatuses), p.Status.ContainerStatuses...) {
		log := corev1.PodLogOptions{Container: s.Name, Timestamps: true, SinceSeconds: new(int64(since.Seconds()))}
		all = append(all, log)
		if log.Previous = true; s.RestartCount > 0 {
			all = append(all, log)
		}
	}
	return all
}

// page reads a page that a container serves on loopback.
func (c *collection) page(ctx context.Context, p *corev1.Pod, port int, page string) ([]byte, error) {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return podnet.Dial(ctx, c.Config, p.Namespace, p.Name, port)
	}
	transport := &http.Transport{DisableKeepAlives: true, DialContext: dial}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://localhost"+page, http.NoBody)
	if err != nil {
		return nil, err
	}
	response, err := transport.RoundTrip(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	raw, err := io.ReadAll(io.LimitReader(response.Body, fileBytes+1))
	if err == nil && response.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %.300s", response.Status, raw)
	}
	return raw, err
}
