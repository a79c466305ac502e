package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/rest"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// page is docs/backup.md. What a test does not do word for word is not on it.
type page struct {
	*env
	commands map[string]bool // those on the page, and whether they were run
}

// pageCommand is a line of a block of code.
var pageCommand = regexp.MustCompile(`(?m)^ {4,}((?:berth|kubectl) .*)$`)

func readPage(e *env) *page {
	raw, err := os.ReadFile("../docs/backup.md")
	require.NoError(e.t, err)
	p := &page{e, map[string]bool{}}
	for _, m := range pageCommand.FindAllStringSubmatch(string(raw), -1) {
		p.commands[m[1]] = false
	}
	return p
}

// run runs a command of the page. Where it names a Deployment, its processes on this
// machine are meant.
func (p *page) run(line string) (string, error) {
	p.t.Helper()
	_, on := p.commands[line]
	require.True(p.t, on, "docs/backup.md does not say %q", line)
	p.commands[line] = true
	switch {
	case strings.HasSuffix(line, "scale deployment berth-allocator --replicas=0"):
		for _, a := range p.stack.Allocators {
			require.NoError(p.t, a.Stop(p.t.Context(), 20*time.Second))
		}
		return "", nil
	case strings.HasSuffix(line, "scale deployment berth-allocator --replicas=2"):
		p.startAllocators()
		return "", nil
	case strings.HasSuffix(line, "rollout restart deployment berth-gateway"):
		for _, g := range p.stack.Gateways {
			require.NoError(p.t, g.Envoy.Stop(p.t.Context(), 20*time.Second))
			require.NoError(p.t, g.Router.Stop(p.t.Context(), 20*time.Second))
			require.NoError(p.t, g.Router.Launch())
			require.NoError(p.t, g.Envoy.Launch())
		}
		return "", nil
	case strings.HasSuffix(line, "rollout status deployment berth-gateway"):
		for _, g := range p.stack.Gateways {
			require.NoError(p.t, g.Router.Wait(p.t.Context(), g.Router.Ready))
			require.NoError(p.t, g.Envoy.Wait(p.t.Context(), g.Envoy.Ready))
		}
		return "", nil
	}
	words := strings.Fields(line)
	require.Equal(p.t, "berth", words[0])
	if i := strings.Index(line, ` "`); i >= 0 { // one argument in quotes, the last one
		words = append(strings.Fields(line[:i]), strings.Trim(line[i+1:], `"`))
	}
	args := words[1:]
	for i, word := range args {
		if word == "sandboxes" {
			args[i] = p.site.namespace()
		}
	}
	if args[0] == "journal" {
		return berthLocal(p.env, append(args, "--kubeconfig="+p.cluster.Kubeconfig())...)
	}
	return p.berth(args...)
}

// startAllocators starts those that do not run, until one leads. Like a kubelet it starts
// again what has ended.
func (p *page) startAllocators() {
	p.t.Helper()
	p.eventually(func() error {
		for _, a := range p.stack.Allocators {
			if !a.Running() {
				require.NoError(p.t, a.Launch())
			}
		}
		_, err := p.stack.Leader(p.t.Context())
		return err
	})
}

func (p *page) stopAllocators() {
	p.t.Helper()
	for _, a := range p.stack.Allocators {
		require.NoError(p.t, a.Kill())
	}
}

// noneLeads requires that an allocator ends without leading, and says this.
func (p *page) noneLeads() {
	p.t.Helper()
	a := p.stack.Allocators[0]
	require.NoError(p.t, a.Launch())
	p.eventually(func() error {
		if a.Running() {
			return errors.New("it goes on")
		}
		return nil
	})
}

func (p *page) slots() v1alpha1.JournalSlotList {
	p.t.Helper()
	var all v1alpha1.JournalSlotList
	require.NoError(p.t,
		p.clients.Berth.Get().Namespace(p.site.namespace()).Resource("journalslots").Do(p.t.Context()).Into(&all))
	return all
}

func (p *page) deleteSlots(names ...string) {
	p.t.Helper()
	for _, name := range names {
		require.NoError(p.t,
			p.clients.Berth.Delete().Namespace(p.site.namespace()).Resource("journalslots").Name(name).Do(p.t.Context()).Error())
	}
}

// quarantined requires that nothing is handed out, and returns the name of the session
// that stands for the routers of before.
func (p *page) quarantined() string {
	p.t.Helper()
	p.eventually(func() error { // the leader may have just changed
		a, err := p.callAPI(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"metadata":{}}`, p.pool),
			p.site.key())
		switch {
		case err != nil:
			return err
		case a.code == http.StatusCreated:
			p.t.Fatal("a pod was handed out that routers of before may send requests to")
		case a.code != http.StatusServiceUnavailable || !strings.Contains(a.body, "the journal was begun anew"):
			return fmt.Errorf("%d: %s", a.code, a.body)
		}
		return nil
	})
	name, err := p.earlier()
	require.NoError(p.t, err)
	return name
}

// earlier is the session that stands for the routers of before.
func (p *page) earlier() (string, error) {
	p.t.Helper()
	out, err := p.run("berth fence sessions")
	if err != nil {
		return "", err
	}
	name := regexp.MustCompile(`earlier-journal-\w+`).FindString(out)
	if name == "" {
		return "", fmt.Errorf("no session stands for the routers of before: %s", out)
	}
	return name, nil
}

// endQuarantine does so as the page says.
func (p *page) endQuarantine(name string) {
	p.t.Helper()
	for _, line := range []string{"kubectl -n berth-system rollout restart deployment berth-gateway",
		"kubectl -n berth-system rollout status deployment berth-gateway"} {
		_, err := p.run(line)
		require.NoError(p.t, err)
	}
	p.eventually(func() error {
		if name == "earlier-journal-unknown" {
			_, err := p.run(`berth fence declare-dead earlier-journal-unknown --gone --reason "all gateways were restarted"`)
			return err
		}
		_, err := p.berth("fence", "declare-dead", name, "--gone", "--reason", "all gateways were restarted")
		return err
	})
}

// Invariant: P12
func TestBackupPageCommandsDoWhatTheySay(t *testing.T) {
	e := startLasting(t, 2, stack.Options{})
	p := readPage(e)
	client := e.client()
	live := e.claim()
	e.reaches(client, live)
	recorded := func(s rest.Sandbox) {
		t.Helper()
		e.eventually(func() error { _, err := e.record(s.SandboxID); return err })
	}
	recorded(live)

	t.Log("a slot is lost under a leader")
	p.deleteSlots("berth-200")
	e.eventually(func() error {
		_, err := berthLocal(e, "journal", "check", "--kubeconfig="+e.cluster.Kubeconfig())
		return err
	})

	t.Log("a slot is lost, and the leader")
	p.stopAllocators()
	p.deleteSlots("berth-200")
	p.noneLeads()
	_, err := p.run("berth journal check -n sandboxes")
	require.ErrorContains(t, err, "slot 200 of 256")
	out, err := p.run("berth journal begin -n sandboxes --dry-run")
	require.NoError(t, err)
	require.Contains(t, out, "berth-200")
	_, err = p.run("berth journal begin -n sandboxes")
	require.NoError(t, err)
	p.startAllocators()
	e.reaches(client, live)
	p.endQuarantine(p.quarantined())
	another := e.claim()
	e.reaches(e.client(), another)
	e.reaches(e.client(), live)
	recorded(another)

	t.Log("all slots are lost")
	p.stopAllocators()
	for _, s := range p.slots().Items {
		p.deleteSlots(s.Name)
	}
	p.noneLeads()
	_, err = p.run("berth journal begin -n sandboxes")
	require.NoError(t, err)
	p.startAllocators()
	e.reaches(e.client(), live)
	e.reaches(e.client(), another)
	p.endQuarantine(p.quarantined())
	e.release(another.SandboxID)
	e.gone(e.client(), another)

	t.Log("restored from a backup, and the page was followed")
	backup := p.slots()
	e.claim()
	_, err = p.run("kubectl -n berth-system scale deployment berth-allocator --replicas=0")
	require.NoError(t, err)
	p.restore(backup)
	_, err = p.run("berth journal begin -n sandboxes --restored")
	require.NoError(t, err)
	_, err = p.run("kubectl -n berth-system scale deployment berth-allocator --replicas=2")
	require.NoError(t, err)
	e.reaches(e.client(), live)
	p.endQuarantine(p.quarantined())

	t.Log("restored from a backup, which nothing shows but what routers have seen")
	recorded(e.claim())
	backup = p.slots()
	e.release(live.SandboxID) // one write
	p.stopAllocators()
	p.restore(backup)
	p.startAllocators()
	var name string
	e.eventually(func() (err error) {
		p.startAllocators() // the leader has ended
		name, err = p.earlier()
		return err
	})
	p.endQuarantine(name)

	t.Log("restored from a backup, of which Sandbox objects show that it is old")
	backup = p.slots()
	p.stopAllocators()
	p.startAllocators()
	recorded(e.claim())
	p.stopAllocators()
	p.restore(backup)
	p.noneLeads()
	p.startAllocators()
	p.quarantined()

	for line, was := range p.commands {
		require.True(t, was, "no test runs %q", line)
	}
}

// restore puts the slots back as they were.
func (p *page) restore(backup v1alpha1.JournalSlotList) {
	p.t.Helper()
	for i := range backup.Items {
		s := &backup.Items[i]
		var now v1alpha1.JournalSlot
		r := p.clients.Berth.Get().Namespace(s.Namespace).Resource("journalslots").Name(s.Name).Do(p.t.Context())
		require.NoError(p.t, r.Into(&now))
		raw, err := json.Marshal(map[string]any{"apiVersion": v1alpha1.GroupVersion().String(), "kind": "JournalSlot",
			"metadata": map[string]any{"name": s.Name, "namespace": s.Namespace,
				"resourceVersion": now.ResourceVersion}, "spec": s.Spec})
		require.NoError(p.t, err)
		err = p.clients.Berth.Put().Namespace(s.Namespace).Resource("journalslots").Name(s.Name).SetHeader("Content-Type",
			"application/json").Body(raw).Do(p.t.Context()).Error()
		require.False(p.t, apierrors.IsConflict(err), "something writes to the journal")
		require.NoError(p.t, err)
	}
}
