package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// stop stops a sandbox, and waits until its pod is gone.
func (b *sleeper) stop() {
	b.t.Helper()
	pod := b.state().PodName
	a := b.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/pause", `{"memory":false}`)
	require.Equal(b.t, http.StatusNoContent, a.code, a.body)
	b.isStopped()
	b.podGoes(pod)
	b.beats(false)
}

func (b *sleeper) isStopped() {
	b.t.Helper()
	s := b.state()
	require.Equal(b.t, openapi.SandboxPhaseStopped, s.Phase)
	require.Equal(b.t, openapi.SandboxStatePaused, s.State)
	require.Empty(b.t, s.PodName)
}

func (b *sleeper) becomes(phase openapi.SandboxPhase) {
	b.t.Helper()
	b.eventually(func() error {
		if s := b.state(); s.Phase != phase {
			return fmt.Errorf("it is %s", s.Phase)
		}
		return nil
	})
}

func (b *sleeper) podGoes(pod string) {
	b.t.Helper()
	b.eventually(func() error {
		_, err := b.clients.Kubernetes.CoreV1().Pods(b.site.namespace()).Get(b.t.Context(), pod, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return nil
		}
		return errors.Join(fmt.Errorf("pod %s is there", pod), err)
	})
}

// connects wakes a sandbox, which is the same one as before.
func (b *sleeper) connects() openapi.Sandbox {
	b.t.Helper()
	a := b.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`)
	require.Equal(b.t, http.StatusCreated, a.code, a.body)
	var s openapi.Sandbox
	require.NoError(b.t, json.Unmarshal([]byte(a.body), &s))
	require.Equal(b.t, b.SandboxID, s.SandboxID)
	require.Equal(b.t, b.EnvdAccessToken, s.EnvdAccessToken)
	require.Equal(b.t, b.Metadata, s.Metadata)
	require.Equal(b.t, openapi.SandboxStateRunning, s.State)
	b.has(s.PodName)
	return s
}

// has requires that the sandbox serves requests in this pod, with the variables of its claim.
func (b *sleeper) has(pod string) {
	b.t.Helper()
	s := b.state()
	require.Equal(b.t, pod, s.PodName)
	b.reaches(b.client(), s)
	host := b.host(sandboxaccess.AgentPort, b.SandboxID)
	a, err := do(b.t.Context(), b.client(), http.MethodGet, "http://gateway/envs", host, "",
		sandboxaccess.AgentHeader, *b.EnvdAccessToken)
	require.NoError(b.t, err)
	require.Equal(b.t, http.StatusOK, a.code, a.body)
	require.JSONEq(b.t, `{"A":"1=2"}`, a.body)
}

// stoppable is what the claims of these tests have.
const stoppable = `"timeout":3600,"envVars":{"A":"1=2"},"metadata":{"job":"17"}`

// Invariant: P33
func TestStoppedSandboxGoesOnInAnotherPod(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "a/notes.txt"), "first")
	b := e.sleeper(e.snapshotPool("stop", dir), stoppable)
	client := e.client()
	for _, text := range []string{"second", "third"} { // E2B's own sandboxes have lost files at the second stop
		pod := b.state().PodName
		write(t, filepath.Join(dir, "a/notes.txt"), text)
		b.stop()
		refused := e.get(client, e.host(8080, b.SandboxID), "/").refusal(t)
		require.Equal(t, apierror.SandboxAsleep, refused.Reason)
		for _, c := range []struct{ method, path, body string }{
			{http.MethodPost, "/pause", `{"memory":false}`}, {http.MethodPost, "/pause", "{}"},
			{http.MethodPost, "/timeout", `{"timeout":60}`},
			{http.MethodGet, "/logs", ""}, {http.MethodPost, "/snapshots", "{}"},
		} {
			refused := e.api(c.method, "/sandboxes/"+b.SandboxID+c.path, c.body).refusal(t)
			require.Equal(t, apierror.SandboxState, refused.Reason, c.path)
		}
		require.NoError(t, os.RemoveAll(dir)) // sandboxes here share the files of this machine
		require.NotEqual(t, pod, b.connects().PodName)
		require.Equal(t, text, read(t, filepath.Join(dir, "a/notes.txt")))
		b.beats(false)
	}
	again := e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`)
	require.Equal(t, http.StatusOK, again.code, "it runs")

	// One that is asleep is stopped, too. Its end deletes its files.
	b.pause()
	b.stop()
	require.NotEmpty(t, store.keys(t, ""))
	e.release(b.SandboxID)
	e.gone(client, b.Sandbox)
	e.eventually(func() error {
		if left := store.keys(t, ""); len(left) > 0 {
			return fmt.Errorf("the store has %v", left)
		}
		return nil
	})
}

// Invariant: P33
func TestSleepersAreStoppedAfterTheirTime(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	file := filepath.Join(dir, "notes.txt")
	write(t, file, "first")
	name := e.snapshotPool("after", dir)

	timed := e.sleeper(name, `"timeout":8,"autoPause":true,"autoPauseMemory":false,"envVars":{"A":"1=2"}`)
	pod := timed.state().PodName
	timed.becomes(openapi.SandboxPhaseStopped)
	timed.podGoes(pod)
	require.Equal(t, apierror.SandboxAsleep, e.get(e.client(), e.host(8080, timed.SandboxID), "/").refusal(t).Reason)
	timed.isStopped()
	timed.connects()
	e.release(timed.SandboxID)

	idle := e.sleeper(name, `"timeout":3600,"onIdle":"Sleep","idleTimeout":5,"stopAfter":1,"envVars":{"A":"1=2"}`)
	pod = idle.state().PodName
	idle.becomes(openapi.SandboxPhaseStopped)
	idle.podGoes(pod)
	write(t, file, "second")
	var served string
	e.eventually(func() error { // a request wakes it, as it wakes one that is asleep because it was idle
		a := e.get(e.client(), e.host(8080, idle.SandboxID), "/")
		if a.code == http.StatusOK {
			served = a.identity(t).Pod
			return nil
		}
		return fmt.Errorf("%d %s", a.code, a.body)
	})
	require.NotEqual(t, pod, served)
	idle.has(served)
	require.Equal(t, "first", read(t, file))
}

// Invariant: P34
func TestPauseBeyondTheBoundStopsTheLongestAsleep(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	file := filepath.Join(dir, "notes.txt")
	write(t, file, "first")
	name := e.snapshotPool("crowded", dir)
	e.patchPool(name, `{"spec":{"maxAsleep":1}}`)
	both := []*sleeper{e.sleeper(name, stoppable), e.sleeper(name, stoppable)}
	pod := both[0].state().PodName
	for _, b := range both {
		a := b.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/pause", "{}")
		require.Equal(t, http.StatusNoContent, a.code, a.body)
	}
	both[0].becomes(openapi.SandboxPhaseStopped)
	both[0].podGoes(pod)
	require.Equal(t, openapi.SandboxPhaseAsleep, both[1].state().Phase)
	write(t, file, "second")
	both[0].connects()
	require.Equal(t, "first", read(t, file))
}

// Invariant: P33
func TestNextLeaderWakesWhatWasStopped(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 3, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	file := filepath.Join(dir, "notes.txt")
	write(t, file, "first")
	b := e.sleeper(e.snapshotPool("led", dir), stoppable)
	b.stop()
	require.NoError(t, e.site.killLeader(t.Context()))
	require.NoError(t, e.site.waitLeader(t.Context()))
	b.isStopped()
	write(t, file, "second")
	former := b.connects().PodName
	require.Equal(t, "first", read(t, file))

	// The next one ends while a pod gets the files.
	b.stop()
	write(t, file, "third")
	store.holds.Store(true)
	answered := make(chan answer, 1)
	go func() {
		a, _ := e.callAPI(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`, e.site.key())
		answered <- a
	}()
	select {
	case <-store.stalled:
	case <-time.After(time.Minute):
		t.Fatal("no archive is read")
	}
	require.NoError(t, e.site.killLeader(t.Context()))
	store.holds.Store(false)
	close(store.goOn)
	require.NoError(t, e.site.waitLeader(t.Context()))
	<-answered // the call may have been made again at the next leader
	var s openapi.Sandbox
	e.eventually(func() error {
		a, err := e.callAPI(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", `{"timeout":600}`, e.site.key())
		if err == nil && a.code/100 != 2 {
			err = fmt.Errorf("%d %s", a.code, a.body)
		}
		if err == nil {
			err = json.Unmarshal([]byte(a.body), &s)
		}
		return err
	})
	require.NotEqual(t, former, s.PodName)
	b.has(s.PodName)
	require.Equal(t, "first", read(t, file))
}

// Invariant: P33
func TestStopOfADeadLeaderLeavesItsSandboxAsleep(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "notes.txt"), "first")
	b := e.sleeper(e.snapshotPool("unstopped", dir), stoppable)
	pod := b.state().PodName
	store.stalls.Store(true)
	answered := make(chan answer, 1)
	go func() {
		a, _ := e.callAPI(http.MethodPost, "/sandboxes/"+b.SandboxID+"/pause", `{"memory":false}`, e.site.key())
		answered <- a
	}()
	select {
	case <-store.stalled:
	case <-time.After(time.Minute):
		t.Fatal("no archive comes")
	}
	require.NoError(t, e.site.killLeader(t.Context()))
	store.stalls.Store(false)
	close(store.goOn)
	require.NoError(t, e.site.waitLeader(t.Context()))
	require.NotEqual(t, http.StatusNoContent, (<-answered).code)
	b.beats(false)
	require.Equal(t, openapi.SandboxPhaseAsleep, b.state().Phase)
	require.Equal(t, pod, b.connects().PodName)
	b.beats(true)
}

// Invariant: P33
func TestEvictedSleeperGoesOnInAnotherPod(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	file := filepath.Join(dir, "notes.txt")
	write(t, file, "first")
	b := e.sleeper(e.snapshotPool("evicted", dir), stoppable+`,"stopAfter":3600`)
	pod := b.state().PodName
	b.pause()
	beats := read(t, b.file)
	pods := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace())
	require.NoError(t, pods.EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod}}))
	b.becomes(openapi.SandboxPhaseStopped)
	b.podGoes(pod)
	b.isStopped()
	write(t, file, "second")
	require.NotEqual(t, pod, b.connects().PodName)
	require.Equal(t, "first", read(t, file))
	require.Equal(t, beats, read(t, b.file), "its processes ran again in the former pod")

	// Without an archive it ends.
	pod = b.state().PodName
	b.pause()
	store.refuses.Store(true)
	require.NoError(t, pods.EvictV1(t.Context(), &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod}}))
	e.gone(e.client(), b.Sandbox)
}

func TestStoreThatIsAwayStopsNothing(t *testing.T) {
	store := newObjects(t)
	e := startAlone(t, 0, stack.Options{Allocators: 2, AllocatorArgs: []string{store.flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	write(t, filepath.Join(dir, "notes.txt"), "first")
	b := e.sleeper(e.snapshotPool("unkept", dir), stoppable)
	store.refuses.Store(true)
	refused := e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/pause", `{"memory":false}`).refusal(t)
	require.Equal(t, apierror.StoreUnavailable, refused.Reason)
	require.Equal(t, openapi.SandboxPhaseAsleep, b.state().Phase)
	b.connects()
	b.beats(true)
	store.refuses.Store(false)
	b.stop()
	store.refuses.Store(true)
	refused = e.api(http.MethodPost, "/sandboxes/"+b.SandboxID+"/connect", "{}").refusal(t)
	require.Equal(t, apierror.StartFailed, refused.Reason)
	b.isStopped()
	store.refuses.Store(false)
	b.connects()
}

func TestStopNeedsAnObjectStore(t *testing.T) {
	onThisMachine(t, "the agent of a real cluster is in an image")
	e := start(t, 0)
	p := e.newPool(e.pool+"-unstored", 1)
	agentPool(&p.Spec)
	p.Spec.StopAfter = &metav1.Duration{Duration: time.Minute}
	e.createPool(p)
	e.eventually(func() error {
		status := e.readPool(p.Name).Status
		c := meta.FindStatusCondition(status.Conditions, v1alpha1.PoolDegraded)
		if c == nil || c.Reason != v1alpha1.PoolStopRefused {
			return fmt.Errorf("its conditions are %+v", status.Conditions)
		}
		return nil
	})
	s, _ := e.claimOf(e.otherPool("unstopped", 1, agentPool), `"timeout":600`)
	claim := `{"templateID":"` + s.TemplateID + `",`
	for path, body := range map[string]string{
		"/sandboxes/" + s.SandboxID + "/pause": `{"memory":false}`,
		"/v2/sandboxes":                        claim + `"autoPause":true,"autoPauseMemory":false}`,
		"/sandboxes":                           claim + `"stopAfter":60}`,
	} {
		refused := e.api(http.MethodPost, path, body).refusal(t)
		require.Equal(t, apierror.NotImplemented, refused.Reason)
		require.Contains(t, refused.Message, "--snapshots")
	}
}

func TestStockSDKsStopAndConnectSandboxes(t *testing.T) {
	e := startAlone(t, 0, stack.Options{AllocatorArgs: []string{newObjects(t).flag()}})
	dir := filepath.Join(t.TempDir(), "work")
	environment := append(e.overHTTP(), "DIR="+dir, "POOL="+e.snapshotPool("sdkstop", dir))
	e.eachSDK(newSDKs, "stops", environment)
}
