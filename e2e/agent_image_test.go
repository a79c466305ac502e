package e2e

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"

	"connectrpc.com/connect"
	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/sandboxaccess"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// ran is how a command ended.
type ran struct {
	out    string
	code   int32
	status string
	err    error
}

// command runs a command through the agent of a sandbox, as a user of it ("": the default user), with a terminal
// if it is asked for.
func (e *env) command(s openapi.Sandbox, user string, terminal bool, argv ...string) (r ran) {
	e.t.Helper()
	noInput := false
	q := &processpb.StartRequest{Stdin: &noInput, Process: &processpb.ProcessConfig{Cmd: argv[0], Args: argv[1:]}}
	if terminal {
		q.Pty = &processpb.PTY{Size: &processpb.PTY_Size{Cols: 80, Rows: 24}}
	}
	request := connect.NewRequest(q)
	if user != "" {
		request.Header().Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte(user+":")))
	}
	stream, err := e.agentOf(s).Start(e.t.Context(), request)
	if err != nil {
		return ran{err: err}
	}
	defer stream.Close()
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		data := event.GetData()
		r.out += string(data.GetStdout()) + string(data.GetStderr()) + string(data.GetPty())
		if end := event.GetEnd(); end != nil {
			r.code, r.status = end.GetExitCode(), end.GetStatus()
		}
	}
	r.err = stream.Err()
	return r
}

// bash runs a script as commands.run of E2B's SDKs does.
func (e *env) bash(s openapi.Sandbox, user, script string) ran {
	e.t.Helper()
	return e.command(s, user, false, "/bin/bash", "-l", "-c", script)
}

// file writes (POST) or reads (GET) a file through the agent of a sandbox.
func (e *env) file(s openapi.Sandbox, method, path, content string) answer {
	e.t.Helper()
	a, err := do(e.t.Context(), e.client(), method, "http://gateway/files?path="+url.QueryEscape(path),
		e.host(sandboxaccess.AgentPort, s.SandboxID), content, "Content-Type", "application/octet-stream",
		sandboxaccess.AgentHeader, *s.EnvdAccessToken)
	require.NoError(e.t, err)
	return a
}

// keepsFiles writes a file and reads it again.
func (e *env) keepsFiles(s openapi.Sandbox, path string) {
	e.t.Helper()
	content := "content of " + path
	a := e.file(s, http.MethodPost, path, content)
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	a = e.file(s, http.MethodGet, path, "")
	require.Equal(e.t, http.StatusOK, a.code, a.body)
	require.Equal(e.t, content, a.body)
}

// says logs what a caller sees, and requires words of it.
func (e *env) says(what, seen string, words ...string) {
	e.t.Helper()
	e.t.Logf("%s: %s", what, seen)
	for _, w := range words {
		require.Contains(e.t, seen, w, what)
	}
}

// agentPool makes a pool whose first container has this image and no command, and claims a sandbox.
func (e *env) agentPool(name, image string, change func(*corev1.PodSpec, *corev1.Container)) openapi.Sandbox {
	e.t.Helper()
	pool := e.otherPool(name, 1, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
		c := &s.Template.Spec.Containers[0]
		*c = corev1.Container{Name: c.Name, Image: image}
		if change != nil {
			change(&s.Template.Spec, c)
		}
	})
	s, _ := e.claimOf(pool, `"envVars":{"GREETING":"hello"}`)
	e.eventually(func() error { // the network of a real cluster may be late
		if a := e.file(s, http.MethodGet, "/etc", ""); a.code >= http.StatusBadGateway {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	e.t.Logf("%s: %s", image, e.logged(s, "the agent serves"))
	return s
}

// logged returns the line in the log of a sandbox that has these words.
func (e *env) logged(s openapi.Sandbox, words string) string {
	e.t.Helper()
	log, err := e.clients.Kubernetes.CoreV1().Pods(e.site.namespace()).GetLogs(s.PodName,
		&corev1.PodLogOptions{Container: "sandbox"}).DoRaw(e.t.Context())
	require.NoError(e.t, err)
	line := regexp.MustCompile(`(?m)^.*` + words + `.*$`).FindString(string(log))
	require.NotEmpty(e.t, line, string(log))
	return line
}

// What an image has decides what works. What does not work is said in words.
func TestAgentWorksInImagesOfEveryKind(t *testing.T) {
	if where, err := provider(); err != nil || where != onKind {
		t.Skipf("needs images that are made here: only on the provider %s", onKind)
	}
	e := start(t, 0)
	e.allAtOnce(map[string]func(e *env){
		"Python":                (*env).agentBesidePython,
		"one static program":    (*env).agentBesideOneProgram,
		"neither root nor disk": (*env).agentWithoutRights,
		"root with less":        (*env).agentOfBoundRoot,
	})
}

// The image has accounts and a shell, and its user is root.
func (e *env) agentBesidePython() {
	s := e.agentPool("python", pythonImage, func(_ *corev1.PodSpec, c *corev1.Container) {
		c.Resources.Limits = corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")}
	})
	r := e.bash(s, "", `id -un; pwd; python3 -c 'import os; print(os.environ["GREETING"], 6*7)'`)
	require.NoError(e.t, r.err)
	require.Equal(e.t, "user\n/home/user\nhello 42\n", r.out)
	require.Equal(e.t, "root\n/root\n", e.bash(s, "root", "id -un; pwd").out)
	require.Equal(e.t, "guest\n", e.bash(s, "guest", "id -un").out)
	r = e.bash(s, "ghost", "true")
	require.Equal(e.t, connect.CodeUnauthenticated, connect.CodeOf(r.err))
	e.says("unknown user", r.err.Error(), `the sandbox has no user "ghost"`)
	r = e.command(s, "", true, "/bin/bash", "-c", "stty size")
	require.Equal(e.t, "24 80", strings.TrimSpace(r.out), r)
	e.keepsFiles(s, "/home/user/new/file")
	e.keepsFiles(s, "relative")
	a := e.file(s, http.MethodPost, "/etc/file", "")
	require.Equal(e.t, http.StatusForbidden, a.code, a.body)
	e.says("file of root", a.body, "/etc/file", "permission denied")

	// Where the kernel ends all of a container, the sandbox goes with it. Else the command alone ends.
	r = e.bash(s, "", "exec python3 -c 'x = bytearray(400 << 20)'")
	if r.err == nil {
		e.says("out of memory", fmt.Sprintf("exit code %d, %s", r.code, r.status), "signal: killed")
		require.Equal(e.t, "hello\n", e.bash(s, "", "echo $GREETING").out)
		e.restartsItsAgent(s, "root")
		return
	}
	e.says("out of memory", r.err.Error())
	e.endedByARestart(s)
}

// restartsItsAgent ends the agent by a command in the sandbox, which ends with that.
func (e *env) restartsItsAgent(s openapi.Sandbox, user string) {
	e.t.Helper()
	r := e.command(s, user, false, "/bin/sh", "-c", "kill $PPID; sleep 1000")
	e.t.Logf("a command whose agent ends: %+v (%v)", r, r.err)
	e.endedByARestart(s)
}

func (e *env) endedByARestart(s openapi.Sandbox) {
	e.t.Helper()
	e.eventually(func() error {
		if a := e.get(e.client(), e.host(sandboxaccess.AgentPort, s.SandboxID), "/health"); a.code != http.StatusGone {
			return fmt.Errorf("%d %s", a.code, a.body)
		}
		return nil
	})
	e.eventually(func() error {
		record, err := e.record(s.SandboxID)
		if err == nil && record.Status.Reason != "UnexpectedRestart" {
			err = fmt.Errorf("%+v", record.Status)
		}
		return err
	})
}

// The image has no shell, no accounts and no /tmp.
func (e *env) agentBesideOneProgram() {
	s := e.agentPool("bare", bareImage, func(_ *corev1.PodSpec, c *corev1.Container) {
		c.Command, c.Args = []string{"/demo-sandbox"}, []string{"--ports=8080"}
	})
	require.Equal(e.t, http.StatusOK, e.get(e.client(), e.host(8080, s.SandboxID), "/").code, "the image's own program")
	r := e.bash(s, "", "true")
	require.Equal(e.t, connect.CodeInvalidArgument, connect.CodeOf(r.err))
	e.says("no shell", r.err.Error(), `command "/bin/bash"`, "the image lacks it", "E2B's SDKs run every command with it")
	r = e.command(s, "", false, "no-such-program")
	e.says("no program", r.err.Error(), `the command "no-such-program" is in no directory of PATH`)
	r = e.command(s, "", false, "/demo-sandbox", "--help")
	require.Contains(e.t, r.out, "Usage: demo-sandbox", r)
	r = e.command(s, "", true, "/demo-sandbox", "--help")
	require.Contains(e.t, r.out, "Usage: demo-sandbox", "with a terminal: %v", r)
	e.keepsFiles(s, "/home/user/file")
	e.keepsFiles(s, "relative")
	a := e.file(s, http.MethodPost, "/tmp/file", "")
	e.says("no /tmp", fmt.Sprint(a.code, " ", a.body), "directory /tmp cannot be made: permission denied")
}

// The pod is what the restricted standard allows, and can write to its volume only.
func (e *env) agentWithoutRights() {
	yes, no, uid := true, false, int64(1000)
	s := e.agentPool("strict", pythonImage, func(spec *corev1.PodSpec, c *corev1.Container) {
		spec.SecurityContext = &corev1.PodSecurityContext{RunAsNonRoot: &yes, RunAsUser: &uid}
		home := corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}
		spec.Volumes = []corev1.Volume{{Name: "home", VolumeSource: home}}
		c.SecurityContext = &corev1.SecurityContext{AllowPrivilegeEscalation: &no, ReadOnlyRootFilesystem: &yes,
			Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
		c.Env = []corev1.EnvVar{{Name: "HOME", Value: "/home/user"}}
		c.VolumeMounts = []corev1.VolumeMount{{Name: "home", MountPath: "/home/user"}}
	})
	const script = `id -u; pwd; python3 -c 'import os; print(os.environ["GREETING"])'`
	for _, user := range []string{"", "user", "1000"} {
		require.Equal(e.t, "1000\n/home/user\nhello\n", e.bash(s, user, script).out, "as %q", user)
	}
	r := e.bash(s, "root", "true")
	require.Equal(e.t, connect.CodeUnauthenticated, connect.CodeOf(r.err))
	e.says("another user", r.err.Error(), `this sandbox runs everything as its own user "1000"`, `may not act as "root"`)
	r = e.command(s, "", true, "/bin/bash", "-c", "stty size")
	require.Equal(e.t, "24 80", strings.TrimSpace(r.out), r)
	e.keepsFiles(s, "/home/user/new/file")
	e.keepsFiles(s, "relative")
	a := e.file(s, http.MethodPost, "/etc/file", "")
	e.says("read-only file system", fmt.Sprint(a.code, " ", a.body), "/etc/file", "read-only file system")
	r = e.bash(s, "", "echo > /file")
	e.says("read-only file system, of a command", r.out, "Read-only file system")
	e.restartsItsAgent(s, "")
}

// Root cannot make the default user on a read-only disk, and acts for no other user without capabilities.
func (e *env) agentOfBoundRoot() {
	yes := true
	s := e.agentPool("readonly", pythonImage, func(_ *corev1.PodSpec, c *corev1.Container) {
		c.SecurityContext = &corev1.SecurityContext{ReadOnlyRootFilesystem: &yes}
	})
	require.Equal(e.t, "root\n", e.bash(s, "", "id -un").out)
	require.Equal(e.t, "root\n", e.bash(s, "user", "id -un").out)
	require.Equal(e.t, "guest\n", e.bash(s, "guest", "id -un").out)
	e.says("no default user", e.logged(s, "commands run as the agent's own user"), "read-only file system")

	s = e.agentPool("dropped", pythonImage, func(_ *corev1.PodSpec, c *corev1.Container) {
		c.SecurityContext = &corev1.SecurityContext{Capabilities: &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}}}
	})
	require.Equal(e.t, "root\n", e.bash(s, "", "id -un").out)
	require.Equal(e.t, "root\n", e.bash(s, "user", "id -un").out)
	r := e.bash(s, "guest", "id -un")
	require.Equal(e.t, connect.CodeUnauthenticated, connect.CodeOf(r.err))
	e.says("root without capabilities", r.err.Error(), `its agent may not act as "guest"`)
	e.keepsFiles(s, "/root/file")
}

// An agent that starts again has lost its configuration.
// Invariant: P16
func TestRestartedAgentEndsItsSandbox(t *testing.T) {
	onThisMachine(t, "that of a real cluster is in TestAgentWorksInImagesOfEveryKind")
	e := start(t, 0)
	pool := e.otherPool("agents", 1, func(s *v1alpha1.SandboxPoolSpec) {
		s.Agent = &v1alpha1.PoolAgent{Enabled: true, Port: sandboxaccess.AgentPort}
	})
	s, _ := e.claimOf(pool, `"envVars":{}`)
	e.restartsItsAgent(s, "")

	keeps := e.newPool(e.pool+"-keeps", 0)
	keeps.Spec.Agent = &v1alpha1.PoolAgent{Enabled: true}
	keeps.Spec.OnRestart = v1alpha1.KeepOnRestart
	create := e.clients.Berth.Post().Namespace(e.site.namespace()).Resource("sandboxpools").Body(keeps)
	require.ErrorContains(t, create.Do(t.Context()).Error(), "spec.agent: needs spec.onRestart Release")
}
