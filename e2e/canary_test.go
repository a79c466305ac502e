package e2e

import (
	"bufio"
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/stretchr/testify/require"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/dynamic"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// Secrets are given to claims that succeed, that need another pod, that fail and that are refused. Then they
// are looked for in everything that Berth and the cluster have written, show and run. Marks that must be found
// there, in the metadata of the claims and in the environment of a command, show that the search works.
//
// Invariant: P16
func TestSecretsOfClaimsAreWrittenNowhere(t *testing.T) {
	e := startHere(t, 0)
	c := &canaries{env: e, mark: "mark-" + rand.String(12), files: t.TempDir()}
	c.watchJournal()
	c.pool = e.otherPool("canary", canaryPods, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		s.Ports = []int32{8080}
	})
	limited, _ := e.storeKey(access.Caller{Key: e.pool + "-limited", Team: limitedTeam, Role: access.Member})
	c.succeed()
	c.takeAnotherPod()
	c.beRefused(limited)
	c.fail()
	e.runs(c.own[0], "read -r _") // until the end of the test, with the secret in its environment

	stored, shown := c.stored(), c.shown()
	require.NotEmpty(t, find(stored, "etcd", c.mark))
	require.NotEmpty(t, find(stored, "journal", c.mark))
	require.NotEmpty(t, find(stored, "sandboxes", c.mark))
	require.NotEmpty(t, find(shown, "", c.mark))
	running := processesOfTest(t)
	const ofTheCommand = 2 // the secret and the variable of the first claim
	for _, s := range c.secrets[:ofTheCommand] {
		require.Len(t, find(running, "", s), 1, "the command")
	}
	for i, s := range slices.Concat(c.secrets, c.tokens) {
		require.Empty(t, find(stored, "", s), "what must not be written")
		require.Empty(t, find(shown, "", s), "what must not be shown")
		if i >= ofTheCommand {
			require.Empty(t, find(running, "", s), "what no other process may have")
		}
	}
}

// canaryPods is how many pods a claim tries at most.
const canaryPods = 3

// canaries are secrets of claims.
type canaries struct {
	*env
	pool    string
	mark    string // is in the metadata of the claims
	files   string // the directory that files are written to
	secrets []string
	tokens  []string // access tokens of sandboxes
	own     []openapi.Sandbox

	mu      sync.Mutex
	journal []place // what was written to it
}

// secret makes a secret.
func (c *canaries) secret() string {
	s := "canary-" + rand.String(16)
	c.secrets = append(c.secrets, s)
	return s
}

// values are the fields of a claim that carry secrets: the first one as a secret.
func (c *canaries) values() string {
	secret := c.secret()
	name := filepath.Join(c.files, rand.String(8))
	return fmt.Sprintf(`"secrets":{"KEY":%q},"envVars":{"A":%q},"metadata":{"mark":%q},`+
		`"files":[{"path":%q,"content":%q},{"path":%q,"content":%q,"encoding":"base64"}]`,
		secret, c.secret(), c.mark, name, c.secret(), name+".raw", base64.StdEncoding.EncodeToString([]byte(c.secret())))
}

// single and batch are the two forms of a claim.
func (c *canaries) single(values string) (path, body string) {
	return "/sandboxes", fmt.Sprintf(`{"templateID":%q,"waitTimeout":60,%s}`, c.pool, values)
}

func (c *canaries) batch(values string) (path, body string) {
	return "/v1/claims", fmt.Sprintf(`{"pool":%q,"count":1,"waitTimeout":60,%s}`, c.pool, values)
}

// claim makes a claim and keeps the sandbox's token as a secret.
func (c *canaries) claim(path, body string) openapi.Sandbox {
	c.t.Helper()
	a := c.as(c.site.key(), http.MethodPost, path, body)
	require.Equal(c.t, http.StatusCreated, a.code, a.body)
	s := (&keyed{batch: path == "/v1/claims"}).answered(a)
	require.Len(c.t, s, 1, a.body)
	require.NotNil(c.t, s[0].EnvdAccessToken)
	c.tokens, c.own = append(c.tokens, *s[0].EnvdAccessToken), append(c.own, s[0])
	return s[0]
}

func (c *canaries) succeed() {
	c.t.Helper()
	c.claim(c.single(c.values()))
	c.claim(c.batch(c.values()))
}

// takeAnotherPod claims while the agent of the first pod does not answer.
func (c *canaries) takeAnotherPod() {
	c.t.Helper()
	c.eventually(func() error {
		agents := c.stopAgents()
		var first *agentProcess
		answered, watched := make(chan struct{}), make(chan struct{})
		go func() { // the others go on when the first pod is taken
			defer close(watched)
			for first = connected(agents); first == nil; first = connected(agents) {
				select {
				case <-answered:
					return
				case <-time.After(time.Millisecond):
				}
			}
			for _, a := range agents {
				if a != first {
					a.goOn()
				}
			}
		}()
		s := c.claim(c.single(c.values()))
		close(answered)
		<-watched
		for _, a := range agents {
			a.goOn()
		}
		return c.thrownAway(s)
	})
}

// thrownAway returns an error if no claim has taken another pod than s before it took that of s. A probe may
// have made the connection to an agent, or a pod may have come after the others were stopped.
func (c *canaries) thrownAway(s openapi.Sandbox) error {
	c.t.Helper()
	for range 100 {
		var list v1alpha1.SandboxList
		err := c.clients.Berth.Get().Namespace(c.site.namespace()).Resource("sandboxes").Do(c.t.Context()).Into(&list)
		if err != nil || slices.ContainsFunc(list.Items, func(one v1alpha1.Sandbox) bool {
			return one.Spec.Pool == c.pool && one.Name != s.SandboxID &&
				one.Status.Reason == fact.ReasonConfigurationFailed && one.Status.Message != ""
		}) {
			return err
		}
		time.Sleep(50 * time.Millisecond)
	}
	return errors.New("no pod was thrown away")
}

// stopAgents waits for the warm pods and stops their agents.
func (c *canaries) stopAgents() (agents []*agentProcess) {
	c.t.Helper()
	for _, p := range c.warmPodsOf(c.pool, canaryPods) {
		a := findAgent(c.t, p)
		a.stop(c.t)
		agents = append(agents, a)
	}
	return agents
}

// beRefused makes claims that are refused for what is in them, or for the quota.
func (c *canaries) beRefused(limited string) {
	c.t.Helper()
	for field, bad := range map[string]string{ // what the answer names, and fields of a claim
		`secrets: the value of \"B\"`: fmt.Sprintf(`"secrets":{"B":"%s\u0000"}`, c.secret()),
		`envVars: the value of \"B\"`: fmt.Sprintf(`"envVars":{"B":"%s\u0000"}`, c.secret()),
		`files[0].path`:               fmt.Sprintf(`"files":[{"path":"/","content":%q}]`, c.secret()),
		`files[0].content`:            fmt.Sprintf(`"files":[{"path":"/a","encoding":"base64","content":%q}]`, c.secret()),
		`files.0.mode`:                fmt.Sprintf(`"files":[{"path":"/a","mode":"0999","content":%q}]`, c.secret()),
		`secrets.C`:                   fmt.Sprintf(`"secrets":{"C":[%q]}`, c.secret()),
		`secrets`:                     fmt.Sprintf(`"secrets":%q`, c.secret()),
		`envVars.D`:                   fmt.Sprintf(`"envVars":{"D":{"x":%q}}`, c.secret()),
		`files.0.encoding`:            fmt.Sprintf(`"files":[{"path":"/a","encoding":"hex","content":%q}]`, c.secret()),
		`body`:                        fmt.Sprintf(`"envVars":{"E":"%s}`, c.secret()), // no JSON
		`at most`:                     fmt.Sprintf(`"envVars":{"F":%q}`, c.secret()+strings.Repeat("x", 256<<10)),
	} {
		for _, form := range []func(string) (string, string){c.single, c.batch} {
			path, body := form(bad)
			a := c.as(c.site.key(), http.MethodPost, path, body)
			require.Contains(c.t, []int{http.StatusBadRequest, http.StatusRequestEntityTooLarge}, a.code, a.body)
			require.Contains(c.t, a.body, field)
			c.requireNone(a)
		}
	}
	a := c.as(c.site.key(), http.MethodPost, "/sandboxes",
		fmt.Sprintf(`{"templateID":%q,"secret":{"KEY":%q}}`, c.pool, c.secret())) // it is secrets
	require.Equal(c.t, http.StatusBadRequest, a.code, a.body)
	c.requireNone(a)

	path, body := c.single(c.values())
	first := sandboxOf(c.t, c.as(limited, http.MethodPost, path, body))
	c.tokens, c.own = append(c.tokens, *first.EnvdAccessToken), append(c.own, first)
	for _, form := range []func(string) (string, string){c.single, c.batch} {
		path, body := form(c.values())
		a := c.as(limited, http.MethodPost, path, body)
		require.Equal(c.t, apierror.QuotaExceeded, a.refusal(c.t).Reason, a.body)
		c.requireNone(a)
	}
}

// fail makes a claim that no agent answers.
func (c *canaries) fail() {
	c.t.Helper()
	c.eventually(func() error {
		agents := c.stopAgents()
		path, body := c.batch(c.values())
		a := c.as(c.site.key(), http.MethodPost, path, body)
		for _, one := range agents {
			one.goOn()
		}
		if a.code == http.StatusCreated {
			s := (&keyed{batch: true}).answered(a)
			c.tokens, c.own = append(c.tokens, *s[0].EnvdAccessToken), append(c.own, s...)
			return errors.New("a pod was taken that came after the others were stopped")
		}
		require.GreaterOrEqual(c.t, a.code, http.StatusBadRequest, a.body)
		c.requireNone(a)
		return nil
	})
}

// requireNone requires that an answer has no secret in it.
func (c *canaries) requireNone(a answer) {
	c.t.Helper()
	for _, s := range c.secrets {
		require.Empty(c.t, find([]place{{"answer", []byte(a.body)}}, "", s))
	}
}

// place is what was found somewhere.
type place struct {
	name    string
	content []byte
}

// find returns the names of the places, of those whose names contain of, that have s: as it is, in hexadecimal
// digits or in base64.
func find(all []place, of, s string) (names []string) {
	forms := [][]byte{[]byte(s), []byte(hex.EncodeToString([]byte(s)))}
	for before := range 3 { // the bytes before it in its first group of three
		b := []byte(strings.Repeat("\x00", before) + s)
		encoded := base64.RawStdEncoding.EncodeToString(b[:len(b)/3*3])
		forms = append(forms, []byte(encoded[(before+2)/3*4:]))
	}
	for _, p := range all {
		has := func(form []byte) bool { return bytes.Contains(p.content, form) }
		if strings.Contains(p.name, of) && slices.ContainsFunc(forms, has) {
			names = append(names, p.name)
		}
	}
	return names
}

// watchJournal keeps what is written to the journal, decompressed, until the test ends.
func (c *canaries) watchJournal() {
	c.t.Helper()
	decoder, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1))
	require.NoError(c.t, err)
	c.t.Cleanup(decoder.Close)
	slots, err := c.dynamic().Resource(v1alpha1.GroupVersion().WithResource("journalslots")).
		Namespace(c.site.namespace()).Watch(c.t.Context(), metav1.ListOptions{})
	require.NoError(c.t, err)
	var all sync.WaitGroup
	all.Go(func() {
		for event := range slots.ResultChan() {
			raw, err := json.Marshal(event.Object)
			if err != nil {
				c.t.Error(err)
			}
			var slot v1alpha1.JournalSlot
			if err := json.Unmarshal(raw, &slot); err != nil {
				c.t.Error(err)
			}
			records, err := decoder.DecodeAll(slot.Spec.Data, nil)
			if err != nil {
				c.t.Errorf("slot %s: %v", slot.Name, err)
			}
			c.mu.Lock()
			c.journal = append(c.journal, place{"journal: " + slot.Name, records})
			c.mu.Unlock()
		}
	})
	c.t.Cleanup(func() {
		slots.Stop()
		all.Wait()
	})
}

func (c *canaries) dynamic() dynamic.Interface {
	c.t.Helper()
	d, err := dynamic.NewForConfig(c.site.restConfig())
	require.NoError(c.t, err)
	return d
}

// stored is what is written: the journal, all objects of the API server, and the files of the cluster,
// which are etcd's data and the logs of all programs, those of pods too.
func (c *canaries) stored() []place {
	c.t.Helper()
	c.mu.Lock()
	all := slices.Clone(c.journal)
	c.mu.Unlock()
	found, err := discovery.NewDiscoveryClientForConfig(c.site.restConfig())
	require.NoError(c.t, err)
	_, lists, err := found.ServerGroupsAndResources()
	require.NoError(c.t, err)
	objects := c.dynamic()
	for _, list := range lists {
		version, err := schema.ParseGroupVersion(list.GroupVersion)
		require.NoError(c.t, err)
		for _, r := range list.APIResources {
			if !slices.Contains(r.Verbs, "list") {
				continue
			}
			got, err := objects.Resource(version.WithResource(r.Name)).List(c.t.Context(), metav1.ListOptions{})
			require.NoError(c.t, err, r.Name)
			raw, err := got.MarshalJSON()
			require.NoError(c.t, err)
			all = append(all, place{"objects: " + r.Name, raw})
		}
	}
	require.NoError(c.t, filepath.WalkDir(c.cluster.Dir(), func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return ignoreMissing(err)
		}
		raw, err := os.ReadFile(path)
		all = append(all, place{"file: " + path, raw})
		return ignoreMissing(err)
	}))
	return all
}

// ignoreMissing is for files that are removed while they are being read.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// shown is what Berth's programs answer, to an admin too, but for the calls that are made for the
// tokens: reading one sandbox.
func (c *canaries) shown() (all []place) {
	c.t.Helper()
	get := func(client *http.Client, url string, headers ...string) {
		c.t.Helper()
		a, err := do(c.t.Context(), client, http.MethodGet, url, "", "", headers...)
		require.NoError(c.t, err)
		require.NotEqual(c.t, http.StatusNotFound, a.code, url)
		all = append(all, place{url, []byte(a.body + fmt.Sprint(a.header))})
	}
	const profiles = "/debug/pprof/"
	pages := []string{"/metrics", "/healthz", profiles + "goroutine?debug=2", profiles + "heap", profiles + "cmdline"}
	for _, a := range c.stack.Allocators {
		for _, page := range pages {
			get(http.DefaultClient, a.Admin+page)
		}
	}
	for _, g := range c.stack.Gateways {
		for _, page := range slices.Concat(pages, []string{"/admin/last-active", "/admin/routes"}) {
			get(http.DefaultClient, g.Admin+page)
		}
		for _, page := range []string{"/clusters", "/stats/prometheus"} {
			get(g.EnvoyAdmin, "http://envoy"+page)
		}
	}
	id := c.own[0].SandboxID
	api := c.clientOf(c.site.api, 0)
	for _, path := range []string{
		"/sandboxes", "/v2/sandboxes", "/v1/sandboxes", "/v1/sandboxes/" + id, "/v1/sandboxes/" + id + "/diagnostics",
		"/v1/sandboxes/" + id + "/route", "/v1/pools", "/v1/pools/" + c.pool, "/v1/pools/" + c.pool + "/diagnostics",
		"/v1/last-active", "/v1/fences", "/v1/sessions", "/sandboxes/" + id + "/logs", "/templates/" + c.pool,
	} {
		get(api, "http://api"+path, "X-API-Key", c.site.key())
	}
	return append(all, place{"/v1/events", c.events()})
}

// events reads the stream of events from its beginning until all sandboxes were in it.
func (c *canaries) events() (raw []byte) {
	c.t.Helper()
	r, err := http.NewRequestWithContext(c.t.Context(), http.MethodGet, "http://api/v1/events", http.NoBody)
	require.NoError(c.t, err)
	r.Header.Set("X-API-Key", c.site.key())
	r.Header.Set("Last-Event-ID", "0.0")
	response, err := c.clientOf(c.site.api, 0).Do(r)
	require.NoError(c.t, err)
	defer response.Body.Close()
	left := idsOf(c.own)
	for lines := bufio.NewScanner(response.Body); len(left) > 0; {
		require.True(c.t, lines.Scan(), "%v: the stream ends before %v", lines.Err(), left)
		raw = append(raw, lines.Bytes()...)
		left = slices.DeleteFunc(left, func(id string) bool { return strings.Contains(lines.Text(), id) })
	}
	return raw
}

// processesOfTest are the arguments and environments of the processes that this test has started, and of those
// that they have started.
func processesOfTest(t *testing.T) (all []place) {
	t.Helper()
	children := map[string][]string{}
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	require.NoError(t, err)
	for _, file := range files {
		raw, _ := os.ReadFile(file) // it may have ended
		_, after, _ := strings.Cut(string(raw), ") ")
		if fields := strings.Fields(after); len(fields) > 1 { // state, parent
			children[fields[1]] = append(children[fields[1]], filepath.Base(filepath.Dir(file)))
		}
	}
	for next := children[strconv.Itoa(os.Getpid())]; len(next) > 0; next = next[1:] {
		next = append(next, children[next[0]]...)
		for _, of := range []string{"cmdline", "environ"} {
			raw, _ := os.ReadFile(filepath.Join("/proc", next[0], of)) // it may have ended
			all = append(all, place{fmt.Sprintf("process %s: %s", next[0], of), raw})
		}
	}
	return all
}
