package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// lives judges the answers of demo sandboxes: a process serves one sandbox.
type lives struct {
	e  *env
	mu sync.Mutex
	// of is the sandbox of each process that has answered. pods are the pods of all sandboxes, released the
	// sandboxes whose release was answered.
	of       map[string]string
	pods     map[string]int
	released []string
	requests int
	wrong    []string
	// each is called after each release, with how many there were.
	each func(n int)
}

// ask sends a request to a sandbox, and returns the status.
func (l *lives) ask(client *http.Client, id string) int {
	host := l.e.host(int(stack.DemoPorts()[0]), id)
	a, err := do(l.e.t.Context(), client, http.MethodGet, "http://gateway/", host, "")
	if err != nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.requests++
	if a.code != http.StatusOK {
		return a.code
	}
	var i struct {
		Start string   `json:"start"`
		Hosts []string `json:"hosts"`
	}
	if err := json.Unmarshal([]byte(a.body), &i); err != nil {
		l.wrong = append(l.wrong, a.body)
		return a.code
	}
	if other, known := l.of[i.Start]; known && other != id {
		l.wrong = append(l.wrong, fmt.Sprintf("a process has answered for %s and for %s", other, id))
	}
	l.of[i.Start] = id
	if !slices.Equal(i.Hosts, []string{host}) {
		l.wrong = append(l.wrong, fmt.Sprintf("the process of %s has got requests for %v", id, i.Hosts))
	}
	return a.code
}

// live claims a sandbox, uses it and releases it.
func (l *lives) live(client *http.Client, pool string) {
	s, _ := l.e.claimOf(pool, `"timeout":600`)
	l.mu.Lock()
	l.pods[s.PodName]++
	l.mu.Unlock()
	l.e.eventually(func() error { // the network of a real cluster may be late
		if code := l.ask(client, s.SandboxID); code != http.StatusOK {
			return fmt.Errorf("%s: %d", s.SandboxID, code)
		}
		return nil
	})
	for range 3 {
		l.ask(client, s.SandboxID)
	}
	l.e.release(s.SandboxID)
	l.mu.Lock()
	l.released = append(l.released, s.SandboxID)
	n := len(l.released)
	l.mu.Unlock()
	if l.each != nil {
		l.each(n)
	}
}

// disturb sends requests to sandboxes that were released a short while ago, until done is closed.
func (l *lives) disturb(client *http.Client, done <-chan struct{}) {
	for {
		select {
		case <-done:
			return
		case <-time.After(20 * time.Millisecond):
		}
		l.mu.Lock()
		last := slices.Clone(l.released[max(0, len(l.released)-10):])
		l.mu.Unlock()
		for _, id := range last {
			l.ask(client, id)
		}
	}
}

// liveAndDie has n sandboxes live in a pool of this many pods, and returns how many lives each pod had, and the
// lives per second.
func (e *env) liveAndDie(pool string, pods, n int, each func(n int)) (map[string]int, float64) {
	l := &lives{e: e, of: map[string]string{}, pods: map[string]int{}, each: each}
	done := make(chan struct{})
	var disturbers, users sync.WaitGroup
	disturbers.Go(func() { l.disturb(e.client(), done) })
	next := make(chan struct{}, n)
	for range n {
		next <- struct{}{}
	}
	close(next)
	began := time.Now()
	for range pods {
		client := e.client()
		users.Go(func() {
			for range next {
				l.live(client, pool)
			}
		})
	}
	users.Wait()
	took := time.Since(began)
	close(done)
	disturbers.Wait()
	require.Empty(e.t, l.wrong)
	require.Len(e.t, l.released, n)
	e.t.Logf("%s: %d lives on %d pods in %v (%.2f per second), %d requests judged, %d processes",
		pool, n, len(l.pods), took.Round(time.Second), float64(n)/took.Seconds(), l.requests, len(l.of))
	return l.pods, float64(n) / took.Seconds()
}

// On this machine the leader is killed meanwhile, when a sandbox was just released and others are in all stages.
//
// Invariant: I1, I3, I5
func TestRecycledPodsServeOneSandboxAtATime(t *testing.T) {
	const most = int32(5)
	pool := func(e *env, name string, reuse v1alpha1.Reuse) string {
		return e.otherPool(name, most, func(s *v1alpha1.SandboxPoolSpec) {
			m := most
			s.Reuse, s.MaxPods = reuse, &m
		})
	}
	if shared == nil {
		e := startLongAlone(t, 0, stack.Options{Allocators: releaseReplicas, Gateways: releaseReplicas})
		pods, _ := e.liveAndDie(pool(e, "recycled", v1alpha1.ReuseRecycle), int(most), 30, func(n int) {
			if n == 12 {
				require.NoError(t, e.site.killLeader(t.Context()))
				require.NoError(t, e.site.waitLeader(t.Context()))
			}
		})
		require.Less(t, len(pods), 20, "pods were recycled: %v", pods)
		return
	}
	e := start(t, 0)
	n := 30
	if *longFlag {
		n = 200
	}
	pods, fast := e.liveAndDie(pool(e, "recycled", v1alpha1.ReuseRecycle), int(most), n, nil)
	require.Less(t, len(pods), n*2/3, "pods were recycled: %v", pods)
	if !*longFlag {
		return
	}
	_, slow := e.liveAndDie(pool(e, "fresh", v1alpha1.ReuseNever), int(most), 40, nil)
	t.Logf("lives per second: %.2f recycled, %.2f with new pods: %.2f times", fast, slow, fast/slow)
}

// What a sandbox may leave behind in a pod is gone in the next life: what root can leave, and what a user can whose
// pod is what the Pod Security Standard restricted allows. Only a real kubelet keeps any of it.
//
// Invariant: I3
func TestRecycledPodKeepsNothingOfASandbox(t *testing.T) {
	if where, err := provider(); err != nil || where != onKind {
		t.Skipf("needs containers: only on the provider %s", onKind)
	}
	e := start(t, 0)
	yes, no, uid := true, false, int64(1000)
	const look = `/usr/bin/python3 -c '
import os
kept = ["/etc/resolv.conf", "/etc/hosts", "/etc/hostname", "/dev/shm", "/dev/mqueue", "/dev/termination-log"]
print("files", [f for f in ["/dev/shm/dirt", "/dev/mqueue/dirt", "/root/dirt", "/tmp/dirt"] if os.path.exists(f)])
print("dirty", [f for f in kept if os.path.isfile(f) and "left-behind" in open(f).read()])
print("modes", [oct(os.stat(f).st_mode & 0o7777) + ":" + str(os.stat(f).st_uid) for f in kept[:5]])
for kind in ["shm", "sem", "msg"]: print(kind, len(open("/proc/sysvipc/" + kind).readlines()) - 1)
all = [p for p in os.listdir("/proc") if p.isdigit()]
print("processes", [p for p in all if open("/proc/" + p + "/cmdline", "rb").read().startswith(b"sleep")])
print("sockets", open("/proc/net/unix").read().count("@dirt"), open("/proc/net/tcp").read().count(":1F99 "))
print("raw", int([l.split()[1] for l in open("/proc/self/status") if l.startswith("CapBnd")][0], 16) >> 13 & 1)
'`
	const dirt = `/usr/bin/python3 -c '
import ctypes, os, socket
kept = ["/etc/resolv.conf", "/etc/hosts", "/etc/hostname"]
for f in kept + ["/dev/shm/dirt", "/root/dirt", "/tmp/dirt", "/dev/termination-log"]:
    open(f, "a").write("# left-behind\n")
c = ctypes.CDLL(None)
os.close(c.mq_open(b"/dirt", os.O_CREAT | os.O_RDWR, 0o600, None))
for f in kept + ["/dev/shm", "/dev/mqueue"]:
    os.chown(f, 500, 500)
    os.chmod(f, 0o700)
unix, tcp = socket.socket(socket.AF_UNIX), socket.socket()
unix.bind("\0dirt"); unix.listen(); unix.set_inheritable(True)
tcp.bind(("", 0x1f99)); tcp.listen(); tcp.set_inheritable(True)
if os.fork() == 0:
    os.setsid()
    for fd in range(3): os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.execv("/bin/sleep", ["sleep", "1000"])
os.setresuid(-1, 500, -1)
assert c.shmget(0xbeef, 4096, 0o1666) >= 0 and c.semget(0xbeef, 1, 0o1666) >= 0 and c.msgget(0xbeef, 0o1666) >= 0
'`
	const dirtOfUser = `/usr/bin/python3 -c '
import ctypes, os
open("/dev/shm/dirt", "a").write("# left-behind\n")
c = ctypes.CDLL(None)
os.close(c.mq_open(b"/dirt", os.O_CREAT | os.O_RDWR, 0o600, None))
assert c.shmget(0xbeef, 4096, 0o1600) >= 0 and c.semget(0xbeef, 1, 0o1600) >= 0 and c.msgget(0xbeef, 0o1600) >= 0
if os.fork() == 0:
    os.setsid()
    for fd in range(3): os.dup2(os.open("/dev/null", os.O_RDWR), fd)
    os.execv("/bin/sleep", ["sleep", "1000"])
'`
	const clean = "files []\ndirty []\nmodes ['0o644:0', '0o644:0', '0o644:0', '0o1777:0', '0o1777:0']\n" +
		"shm 0\nsem 0\nmsg 0\nprocesses []\nsockets 0 0\nraw 0\n"
	const left = `(?s)dirt.*shm 1\nsem 1\nmsg 1\nprocesses \['\d+'\]\n`
	e.livesAfterDirt("root", look, dirt, clean, left+"sockets 1 1", nil)
	e.livesAfterDirt("user", look, dirtOfUser, clean, left, func(spec *corev1.PodSpec) {
		spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &uid}
		spec.Containers[0].SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: &no,
			ReadOnlyRootFilesystem: &yes, Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
	})
}

// livesAfterDirt has sandboxes run the script dirt as a user, one after the other in one pod. The script look prints
// clean before that, and what matches left after it.
func (e *env) livesAfterDirt(user, look, dirt, clean, left string, change func(*corev1.PodSpec)) {
	one := int32(1)
	pool := e.otherPool("dirt-of-"+user, 1, func(s *v1alpha1.SandboxPoolSpec) {
		s.Reuse, s.MaxPods = v1alpha1.ReuseRecycle, &one
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		c := &s.Template.Spec.Containers[0]
		*c = corev1.Container{Name: c.Name, Image: pythonImage}
		if change != nil {
			change(&s.Template.Spec)
		}
	})
	pod, last := "", ""
	for range 3 {
		s, _ := e.claimOf(pool, `"envVars":{"GREETING":"hello"}`)
		e.eventually(func() error {
			if a := e.file(s, http.MethodGet, "/etc", ""); a.code >= http.StatusBadGateway {
				return fmt.Errorf("%d %s", a.code, a.body)
			}
			return nil
		})
		require.True(e.t, pod == "" || s.PodName == pod, "the pod was recycled")
		require.NotEqual(e.t, last, s.SandboxID)
		pod, last = s.PodName, s.SandboxID
		require.Equal(e.t, clean, e.bash(s, user, look).out)
		r := e.bash(s, user, dirt)
		require.Zero(e.t, r.code, r.out)
		require.Regexp(e.t, left, e.bash(s, user, look).out)
		e.release(s.SandboxID)
	}
}
