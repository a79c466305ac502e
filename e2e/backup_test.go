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

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// page is docs/backup.md. A test runs every command on it, word for word.
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

// run runs a command of the page. A command on a Deployment is done to the processes of this
// machine.
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
			require.NoError(p.t, g.Router.Wait(p.t.Context(), g.Router.Check))
			require.NoError(p.t, g.Envoy.Wait(p.t.Context(), g.Envoy.Check))
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

// startAllocators starts those that do not run until one leads, as a kubelet does.
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

// noneLeads requires that an allocator ends and does not lead.
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

// quarantined requires that no pod is handed out, and returns the name of the session that stands
// for the earlier routers.
func (p *page) quarantined() string {
	p.t.Helper()
	p.eventually(func() error { // the leader may have just changed
		a, err := p.callAPI(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"metadata":{}}`, p.pool),
			p.site.key())
		switch {
		case err != nil:
			return err
		case a.code == http.StatusCreated:
			p.t.Fatal("a pod was handed out to which earlier routers may send requests")
		case a.code != http.StatusServiceUnavailable || !strings.Contains(a.body, "the journal was begun anew"):
			return fmt.Errorf("%d: %s", a.code, a.body)
		}
		return nil
	})
	name, err := p.earlier()
	require.NoError(p.t, err)
	return name
}

// earlier is the session that stands for the earlier routers.
func (p *page) earlier() (string, error) {
	p.t.Helper()
	out, err := p.run("berth fence sessions")
	if err != nil {
		return "", err
	}
	name := regexp.MustCompile(`earlier-journal-\w+`).FindString(out)
	if name == "" {
		return "", fmt.Errorf("no session stands for the earlier routers: %s", out)
	}
	return name, nil
}

// endQuarantine ends a quarantine as the page says.
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

// Every command of docs/backup.md is run, in the situations that the page describes.
//
// It takes more than 20 s because allocators are ended and started again for each situation.
// Invariant: P12
func TestBackupPageCommandsDoWhatTheySay(t *testing.T) {
	e := startDamaging(t, long, 2, stack.Options{})
	p := readPage(e)
	live := e.claim()
	e.reaches(e.client(), live)
	p.recorded(live)
	p.slotIsLost(live)
	p.allSlotsAreLost(live)
	p.backupIsRestored(live)
	p.oldBackupIsFound(live)
	for line, was := range p.commands {
		require.True(t, was, "no test runs %q", line)
	}
}

// recorded waits until a sandbox has an object.
func (p *page) recorded(s openapi.Sandbox) {
	p.t.Helper()
	p.eventually(func() error { _, err := p.record(s.SandboxID); return err })
}

// slotIsLost deletes a slot under a leader, and then another time with the leader.
func (p *page) slotIsLost(live openapi.Sandbox) {
	p.t.Helper()
	p.deleteSlots("berth-200")
	p.eventually(func() error {
		_, err := berthLocal(p.env, "journal", "check", "--kubeconfig="+p.cluster.Kubeconfig())
		return err
	})
	p.stopAllocators()
	p.deleteSlots("berth-200")
	p.noneLeads()
	_, err := p.run("berth journal check -n sandboxes")
	require.ErrorContains(p.t, err, "slot 200 of 256")
	out, err := p.run("berth journal begin -n sandboxes --dry-run")
	require.NoError(p.t, err)
	require.Contains(p.t, out, "berth-200")
	_, err = p.run("berth journal begin -n sandboxes")
	require.NoError(p.t, err)
	p.startAllocators()
	p.reaches(p.client(), live)
	p.endQuarantine(p.quarantined())
}

// allSlotsAreLost deletes the whole journal.
func (p *page) allSlotsAreLost(live openapi.Sandbox) {
	p.t.Helper()
	another := p.claim()
	p.reaches(p.client(), another)
	p.reaches(p.client(), live)
	p.recorded(another)
	p.stopAllocators()
	for _, s := range p.slots().Items {
		p.deleteSlots(s.Name)
	}
	p.noneLeads()
	_, err := p.run("berth journal begin -n sandboxes")
	require.NoError(p.t, err)
	p.startAllocators()
	p.reaches(p.client(), live)
	p.reaches(p.client(), another)
	p.endQuarantine(p.quarantined())
	p.release(another.SandboxID)
	p.gone(p.client(), another)
}

// backupIsRestored restores a backup as the page says.
func (p *page) backupIsRestored(live openapi.Sandbox) {
	p.t.Helper()
	backup := p.slots()
	p.claim()
	_, err := p.run("kubectl -n berth-system scale deployment berth-allocator --replicas=0")
	require.NoError(p.t, err)
	p.restoreSlots(backup)
	_, err = p.run("berth journal begin -n sandboxes --restored")
	require.NoError(p.t, err)
	_, err = p.run("kubectl -n berth-system scale deployment berth-allocator --replicas=2")
	require.NoError(p.t, err)
	p.reaches(p.client(), live)
	p.endQuarantine(p.quarantined())
}

// oldBackupIsFound restores a backup and does not follow the page. First only the routers know
// that it is old. Then Sandbox objects show it.
func (p *page) oldBackupIsFound(live openapi.Sandbox) {
	p.t.Helper()
	p.recorded(p.claim())
	backup := p.slots()
	p.release(live.SandboxID) // one write
	p.stopAllocators()
	p.restoreSlots(backup)
	p.startAllocators()
	var name string
	p.eventually(func() (err error) {
		p.startAllocators() // the leader has ended
		name, err = p.earlier()
		return err
	})
	p.endQuarantine(name)

	backup = p.slots()
	p.stopAllocators()
	p.startAllocators()
	p.recorded(p.claim())
	p.stopAllocators()
	p.restoreSlots(backup)
	p.noneLeads()
	p.startAllocators()
	p.quarantined()
}

// restoreSlots puts the slots back as they were.
func (p *page) restoreSlots(backup v1alpha1.JournalSlotList) {
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
