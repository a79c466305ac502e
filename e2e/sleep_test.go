package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/internal/wait"
)

// sleeper is a sandbox in which a command writes to a file all the time.
type sleeper struct {
	*env
	openapi.Sandbox
	file string
}

func (e *env) sleeper(pool, claim string) *sleeper {
	e.t.Helper()
	s, _ := e.claimOf(pool, claim)
	b := &sleeper{e, s, filepath.Join(e.t.TempDir(), "beats")}
	// The file is opened once, so that it does not come back when the test removes it.
	script := "exec >> " + b.file + "; while :; do echo beat; sleep 0.1; done"
	ctx, leave := context.WithCancel(e.t.Context())
	defer leave() // a command goes on, and a stream that is open would be use
	stream, err := e.agentOf(s).Start(ctx, connect.NewRequest(&processpb.StartRequest{
		Process: &processpb.ProcessConfig{Cmd: "/bin/sh", Args: []string{"-c", script}},
	}))
	require.NoError(e.t, err)
	require.True(e.t, stream.Receive(), "%v", stream.Err())
	b.beats(true)
	return b
}

// beats waits until the command has written more, or expects that it does not.
func (b *sleeper) beats(want bool) {
	b.t.Helper()
	size := func() int64 {
		info, err := os.Stat(b.file)
		if err != nil {
			return 0
		}
		return info.Size()
	}
	before := size()
	if want {
		b.eventually(func() error {
			if size() == before {
				return fmt.Errorf("%s has %d bytes", b.file, before)
			}
			return nil
		})
		return
	}
	wait.Sleep(b.t.Context(), time.Second)
	require.Equal(b.t, before, size(), "a process runs")
}

func (b *sleeper) state() openapi.Sandbox {
	b.t.Helper()
	a := b.api(http.MethodGet, "/sandboxes/"+b.SandboxID, "")
	require.Equal(b.t, http.StatusOK, a.code, a.body)
	var s openapi.Sandbox
	require.NoError(b.t, json.Unmarshal([]byte(a.body), &s))
	return s
}

func (b *sleeper) pause() {
	b.t.Helper()
	a := b.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/pause", "{}")
	require.Equal(b.t, http.StatusNoContent, a.code, a.body)
	require.Equal(b.t, openapi.SandboxStatePaused, b.state().State)
	b.beats(false)
}

// requests waits until the pod of the sandbox requests so much CPU.
func (b *sleeper) requests(cpu string) {
	b.t.Helper()
	b.eventually(func() error {
		p, err := b.clients.Kubernetes.CoreV1().Pods(b.site.namespace()).Get(b.t.Context(), b.PodName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := p.Spec.Containers[0].Resources.Requests.Cpu().String(); got != cpu {
			return fmt.Errorf("pod %s requests %s", p.Name, got)
		}
		return nil
	})
}

// Invariant: P27, P29
func TestPausedSandboxKeepsEverythingAndUsesNothing(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("sleep", 1, func(s *v1alpha1.SandboxPoolSpec) {
		agentPool(s)
		s.Template.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("50m")}
	})
	b := e.sleeper(pool, `"timeout":3600`)
	client := e.client()
	for range 2 {
		b.requests("50m")
		b.pause()
		b.requests("20m")
		refused := e.get(client, e.host(8080, b.SandboxID), "/").refusal(t)
		require.Equal(t, apierror.SandboxAsleep, refused.Reason)
		for path, body := range map[string]string{"/pause": "{}", "/timeout": `{"timeout":60}`} {
			refused := e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+path, body).refusal(t)
			require.Equal(t, apierror.SandboxState, refused.Reason)
		}
		a := e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`)
		require.Equal(t, http.StatusCreated, a.code, a.body)
		b.beats(true)
		e.reaches(client, b.Sandbox)
		require.Equal(t, openapi.SandboxStateRunning, b.state().State)
	}
	b.pause()
	e.release(b.SandboxID)
	e.gone(client, b.Sandbox)
}

// Invariant: P28
func TestPoolThatCannotSleepNamesItsProbe(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	p := e.newPool(e.pool+"-unfit", 1)
	agentPool(&p.Spec)
	p.Spec.OnIdle = v1alpha1.OnEndSleep
	p.Spec.Template.Spec.Containers[0].LivenessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{
		TCPSocket: &corev1.TCPSocketAction{Port: intstr.FromInt32(8080)},
	}}
	e.createPool(p)
	const field = "spec.template.spec.containers[0].livenessProbe: "
	e.eventually(func() error {
		status := e.readPool(p.Name).Status
		c := meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		if c == nil || c.Reason != v1alpha1.PoolSleepRefused || !strings.Contains(c.Message, field) {
			return fmt.Errorf("its conditions are %+v", status.Conditions)
		}
		return nil
	})
	refused := e.api(http.MethodPost, "/v2/sandboxes", `{"templateID":"`+p.Name+`","autoPause":true}`).refusal(t)
	require.Equal(t, apierror.NotImplemented, refused.Reason)
	require.Contains(t, refused.Message, "autoPause: "+field)
}

// Invariant: P27
func TestRequestWakesASandboxThatAllowsIt(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("wakes", 2, agentPool)
	client := e.client()

	idle := e.sleeper(pool, `"timeout":3600,"onIdle":"Sleep","idleTimeout":5`)
	e.eventually(func() error {
		if s := idle.state(); s.Phase != openapi.SandboxPhaseAsleep {
			return fmt.Errorf("it is %s", s.Phase)
		}
		return nil
	})
	idle.beats(false)
	e.reaches(client, idle.Sandbox)
	idle.beats(true)

	private := e.sleeper(pool, `"timeout":3600,"wakeOnTraffic":true,"access":"token"`)
	private.pause()
	host := e.host(8080, private.SandboxID)
	require.Equal(t, http.StatusForbidden, e.get(client, host, "/").code, "a request without the token")
	require.Equal(t, openapi.SandboxStatePaused, private.state().State)
	answers := make(chan answer, 20)
	for range cap(answers) {
		go func() {
			a, err := do(t.Context(), client, http.MethodGet, "http://gateway/", host, "",
				sandboxaccess.TokenHeader, *private.TrafficAccessToken)
			if err != nil {
				a.body = err.Error()
			}
			answers <- a
		}()
	}
	for range cap(answers) {
		a := <-answers
		require.Equal(t, http.StatusOK, a.code, a.body)
	}
	private.beats(true)
}

// Invariant: P27
func TestNextLeaderKeepsSandboxesAsleep(t *testing.T) {
	e := startHere(t, 0)
	pool := e.otherPool("leaders", 1, agentPool)
	b := e.sleeper(pool, `"timeout":3600`)
	b.pause()
	require.NoError(t, e.site.killLeader(t.Context()))
	e.eventually(func() error {
		a, err := e.callAPI(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`, e.site.key())
		if err == nil && a.code != http.StatusCreated {
			err = fmt.Errorf("%d %s", a.code, a.body)
		}
		return err
	})
	b.beats(true)
	e.reaches(e.client(), b.Sandbox)
}

// The time of a sandbox whose pool says so ends in sleep.
func TestTimeoutOfASandboxBecomesItsSleep(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	pool := e.otherPool("timeouts", 1, agentPool)
	b := e.sleeper(pool, `"timeout":8,"autoPause":true`)
	require.Equal(t, openapi.Pause, b.state().Lifecycle.OnTimeout)
	e.eventually(func() error {
		if s := b.state(); s.Phase != openapi.SandboxPhaseAsleep {
			return fmt.Errorf("it is %s", s.Phase)
		}
		return nil
	})
	b.beats(false)
	a := e.api(http.MethodPost, "/v2/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`)
	require.Equal(t, http.StatusCreated, a.code, a.body)
	b.beats(true)
	e.release(b.SandboxID)
	want := []string{"created", "paused", "resumed", "killed"} // no update: the sleep and the wake have moved the end
	e.eventually(func() error {
		var events []openapi.LifecycleEvent
		a := e.api(http.MethodGet, "/events/sandboxes/"+b.SandboxID+"?orderAsc=true", "")
		if err := json.Unmarshal([]byte(a.body), &events); err != nil {
			return fmt.Errorf("%d %s: %w", a.code, a.body, err)
		}
		var types []string
		for _, event := range events {
			types = append(types, strings.TrimPrefix(string(event.Type), "sandbox.lifecycle."))
		}
		if !slices.Equal(types, want) {
			return fmt.Errorf("its events are %v", types)
		}
		return nil
	})
}
