package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// ending is a sandbox, how it is ended, and what its record says then.
type ending struct {
	id      string
	end     func() // nil: it ends by itself
	reason  string
	message string // a part of it; "": there is none
	code    *int32
	log     string // a part of its last log lines, where the nodes keep logs; "": there are none
	racing  bool   // its kubelet removes the log, and may be the first
}

// Invariant: I5
func TestNextLeaderSaysWhySandboxesEnded(t *testing.T) {
	e := startDisturbing(t, 0)
	endings := append(e.endings(), e.endingsOfKubelet()...)
	for i := range endings {
		if endings[i].end != nil {
			endings[i].end()
		}
	}
	brokenImage := e.brokenImage()
	e.expectRecords(endings)
	brokenImage()
	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t, e.site.waitLeader(t.Context()))
	e.expectRecords(endings)
}

// expectRecords waits until the pods of the sandboxes are gone, and compares their records.
func (e *env) expectRecords(endings []ending) {
	e.t.Helper()
	for _, c := range endings {
		var d openapi.SandboxDiagnostics
		e.eventually(func() error {
			a := e.api(http.MethodGet, "/v1/sandboxes/"+c.id+"/diagnostics", "")
			require.Equal(e.t, http.StatusOK, a.code, a.body)
			d = openapi.SandboxDiagnostics{}
			require.NoError(e.t, json.Unmarshal([]byte(a.body), &d))
			if d.Sandbox.Phase != openapi.RecordPhaseEnded || d.Pod != nil {
				return fmt.Errorf("%s, expected for %s, has not ended: %s", c.id, c.reason, a.body)
			}
			return nil
		})
		require.Equal(e.t, c.reason, d.Sandbox.Reason, d.Sandbox.Message)
		require.Contains(e.t, d.Sandbox.Message, c.message, c.reason)
		require.Equal(e.t, c.message == "", d.Sandbox.Message == "", d.Sandbox.Message)
		require.Equal(e.t, c.code, d.Sandbox.ExitCode, c.reason)
		require.NotNil(e.t, d.Sandbox.Workload, c.reason)
		require.NotEmpty(e.t, d.Sandbox.Workload.Images, c.reason)
		lines := strings.Join(d.LogLines, "\n")
		if e.processes != nil || c.racing && lines == "" {
			c.log = "" // the nodes of a devcluster serve no logs
		}
		require.Contains(e.t, lines, c.log, c.reason)
		require.Equal(e.t, c.log == "", lines == "", "%s: %s", c.reason, lines)
	}
}

// keepsLog is a change of a pool whose records have log lines.
func keepsLog(change func(*v1alpha1.SandboxPoolSpec)) func(*v1alpha1.SandboxPoolSpec) {
	return func(s *v1alpha1.SandboxPoolSpec) {
		s.Records = &v1alpha1.PoolRecords{LogLines: 20}
		change(s)
	}
}

// endings are those for which no kubelet is needed. ObjectDeleted is not one of them: who deletes the object of a
// sandbox deletes its record.
func (e *env) endings() []ending {
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	base := e.otherPool("reasons", 6, keepsLog(func(*v1alpha1.SandboxPoolSpec) {}))
	never := e.otherPool("never", 1, keepsLog(func(s *v1alpha1.SandboxPoolSpec) {
		s.Template.Spec.RestartPolicy = corev1.RestartPolicyNever
	}))
	silent := e.otherPool("silent", 1, func(*v1alpha1.SandboxPoolSpec) {})
	short := e.otherPool("short", 1, keepsLog(func(s *v1alpha1.SandboxPoolSpec) { s.MaxLifetimeSeconds = new(int32(3)) }))
	deleted := e.otherPool("deleted", 1, keepsLog(func(*v1alpha1.SandboxPoolSpec) {}))
	hook := func(name, path string) string {
		return e.otherPool(name, 1, keepsLog(func(s *v1alpha1.SandboxPoolSpec) {
			s.PostStart = &v1alpha1.PostStartHook{Path: path, TimeoutSeconds: 60, FailurePolicy: v1alpha1.Fail}
			s.StartupTimeoutSeconds = new(int32(2))
		}))
	}
	fails := func(pool string) string {
		a := e.api(http.MethodPost, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"waitTimeout":60}`, pool))
		id := a.refusal(e.t).SandboxID
		require.NotEmpty(e.t, id)
		return id
	}
	claim := func(pool, more string) openapi.Sandbox {
		s, _ := e.claimOf(pool, more)
		return s
	}
	const long = `"timeout":3600`
	killed, restarted, failed, evicted := claim(base, long), claim(base, long), claim(never, long), claim(base, long)
	podDeleted, lost := claim(base, long), claim(base, long)
	unrecorded := claim(silent, long)
	poolDeleted := claim(deleted, long)
	const listening = "listening on"
	return []ending{
		{id: fails(hook("refuses", "/ready?value=neither")), reason: fact.ReasonStartFailed,
			message: "postStart: the sandbox answered 400", log: listening},
		{id: fails(hook("hangs", "/sleep?ms=600000")), reason: fact.ReasonStartupTimeout, log: listening},
		{id: killed.SandboxID, end: func() { e.release(killed.SandboxID) }, reason: fact.ReasonKilled},
		{id: claim(base, `"timeout":2`).SandboxID, reason: fact.ReasonEndTime},
		{id: claim(base, `"timeout":3600,"idleTimeout":5`).SandboxID, reason: fact.ReasonIdleTimeout},
		{id: claim(short, long).SandboxID, reason: fact.ReasonMaxLifetime},
		{id: restarted.SandboxID, end: e.breaks(restarted, "/exit?code=7"), reason: fact.ReasonUnexpectedRestart,
			message: "container sandbox: exit code 7", code: new(int32(7)), log: listening},
		{id: failed.SandboxID, end: e.breaks(failed, "/exit?code=3"), reason: fact.ReasonFailed,
			message: "container sandbox: exit code 3", code: new(int32(3)), log: listening},
		{id: unrecorded.SandboxID, end: e.breaks(unrecorded, "/exit?code=3"), reason: fact.ReasonUnexpectedRestart,
			message: "exit code 3", code: new(int32(3))}, // its pool keeps no log
		{id: evicted.SandboxID, end: func() {
			require.NoError(e.t, pods.EvictV1(e.t.Context(),
				&policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: evicted.PodName}}))
		}, reason: fact.ReasonEvicted, message: "EvictionByEvictionAPI", log: listening},
		{id: podDeleted.SandboxID, end: func() {
			require.NoError(e.t, pods.Delete(e.t.Context(), podDeleted.PodName, metav1.DeleteOptions{}))
		}, reason: fact.ReasonPodDeleted},
		// As the garbage collector of kube-controller-manager does it when a node is gone. Its disruption controller
		// takes the condition back from a pod that goes on.
		{id: lost.SandboxID, end: func() {
			const condition = `{"status":{"phase":"Failed","conditions":[{"type":"DisruptionTarget","status":"True",` +
				`"reason":"DeletionByPodGC","message":"PodGC: node no longer exists"}]}}`
			_, err := pods.Patch(e.t.Context(), lost.PodName, types.StrategicMergePatchType, []byte(condition),
				metav1.PatchOptions{}, "status")
			require.NoError(e.t, err)
			require.NoError(e.t, pods.Delete(e.t.Context(), lost.PodName, *metav1.NewDeleteOptions(0)))
		}, reason: fact.ReasonNodeLost, message: "DeletionByPodGC: PodGC: node no longer exists"},
		{id: poolDeleted.SandboxID, end: func() {
			require.NoError(e.t, e.deletePool(e.t.Context(), deleted))
		}, reason: fact.ReasonPoolDeleted},
	}
}

// breaks returns a function that ends a sandbox by a request to it.
func (e *env) breaks(s openapi.Sandbox, path string) func() {
	return func() {
		e.t.Helper()
		client := e.client()
		e.eventually(func() error {
			a, err := do(e.t.Context(), client, http.MethodGet, "http://gateway"+path, e.host(8080, s.SandboxID), "")
			switch {
			case err != nil:
				return err
			case a.code == http.StatusOK, a.code == http.StatusNotFound, a.code == http.StatusGone:
				return nil // or the answer to an earlier one was lost
			}
			return fmt.Errorf("%d %s", a.code, a.body)
		})
	}
}

// greedy is a server that uses memory or disk without an end. It is the first process of its container.
const greedy = `
import http.server

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/memory":
            print("memory is short", flush=True)
            kept = [b"x" * (16 << 20) for _ in range(64)]
        if self.path == "/disk":
            print("disk is short", flush=True)
            with open("/tmp/large", "wb") as f:
                f.write(b"x" * (64 << 20))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args):
        pass

http.server.ThreadingHTTPServer(("", 8080), Handler).serve_forever()
`

// endingsOfKubelet are those that only a real kubelet brings about.
func (e *env) endingsOfKubelet() []ending {
	if where, err := provider(); err != nil || where != onKind {
		return nil
	}
	pool := func(name string, bound corev1.ResourceName, limit string) openapi.Sandbox {
		s, _ := e.claimOf(e.otherPool(name, 1, keepsLog(func(s *v1alpha1.SandboxPoolSpec) {
			c := &s.Template.Spec.Containers[0]
			c.Image, c.Command, c.Args, c.Env = pythonImage, []string{"python3", "-c", greedy}, nil, nil
			c.Resources.Limits = corev1.ResourceList{bound: resource.MustParse(limit)}
		})), `"timeout":3600`)
		return s
	}
	memory := pool("memory", corev1.ResourceMemory, "96Mi")
	disk := pool("disk", corev1.ResourceEphemeralStorage, "8Mi")
	return []ending{
		{id: memory.SandboxID, end: e.breaks(memory, "/memory"), reason: fact.ReasonOOMKilled,
			message: "container sandbox: exit code 137 OOMKilled", code: new(int32(137)), log: "memory is short"},
		{id: disk.SandboxID, end: e.breaks(disk, "/disk"), reason: fact.ReasonEvicted,
			message: "Evicted: ", log: "disk is short", racing: true},
	}
}

// brokenImage makes a pool whose image cannot be pulled, and returns a function that waits until its condition and
// its diagnostics quote the kubelet.
func (e *env) brokenImage() func() {
	if where, err := provider(); err != nil || where != onKind {
		return func() {}
	}
	p := e.newPool(e.pool+"-image", 1)
	const image = "127.0.0.1:1/berth-e2e/none:1" // nothing listens there
	p.Spec.Template.Spec.Containers[0].Image = image
	e.createPool(p)
	return func() {
		e.t.Helper()
		e.eventually(func() error {
			c := meta.FindStatusCondition(e.readPool(p.Name).Status.Conditions, v1alpha1.PoolDegraded)
			if c == nil || c.Reason != core.PodImagePull || !strings.Contains(c.Message, image) {
				return fmt.Errorf("Degraded: %+v", c)
			}
			var d openapi.PoolDiagnostics
			a := e.api(http.MethodGet, "/v1/pools/"+p.Name+"/diagnostics", "")
			require.NoError(e.t, json.Unmarshal([]byte(a.body), &d), a.body)
			if len(d.Pods) != 1 || len(d.Pods[0].Warnings) == 0 || len(d.Pods[0].Containers) != 1 {
				return errors.New(a.body)
			}
			require.Contains(e.t, []string{"ErrImagePull", "ImagePullBackOff"}, d.Pods[0].Containers[0].Reason)
			return nil
		})
	}
}
