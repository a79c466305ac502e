package pods

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

func TestLastLinesAreBoundedAndUTF8(t *testing.T) {
	long := strings.Repeat("é", 6000)
	for name, c := range map[string]struct {
		text  string
		lines int
		want  []string
	}{
		"nothing":            {"", 5, nil},
		"an empty line":      {"\n", 5, nil},
		"fewer than asked":   {"a\nb\n", 5, []string{"a", "b"}},
		"no end of the line": {"a\nb", 5, []string{"a", "b"}},
		"the last ones":      {"a\nb\n\nc\n", 2, []string{"", "c"}},
		"not UTF-8":          {"a\xffb\n", 5, []string{"a\ufffdb"}},
		"too long":           {"first\n" + long + "\n", 5, []string{"..." + long[len(long)-logKept+4:]}},
	} {
		t.Run(name, func(t *testing.T) {
			got := lastLines(c.text, c.lines)
			require.Equal(t, c.want, got)
			all := strings.Join(got, "")
			require.LessOrEqual(t, len(all), logKept)
			require.True(t, utf8.ValidString(all))
		})
	}
}

func TestLogIsThatOfTheContainerThatEnded(t *testing.T) {
	at := metav1.NewTime(time.Unix(5, 0))
	end := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, FinishedAt: at}}
	runs := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	waits := corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}
	for name, c := range map[string]struct {
		reason   string
		phase    corev1.PodPhase
		second   corev1.ContainerStatus
		want     string
		previous bool
	}{
		"failed":               {fact.ReasonFailed, corev1.PodFailed, corev1.ContainerStatus{State: end}, "second", false},
		"restarted":            {fact.ReasonUnexpectedRestart, corev1.PodRunning, corev1.ContainerStatus{State: runs, LastTerminationState: end}, "second", true},
		"about to restart":     {fact.ReasonOOMKilled, corev1.PodRunning, corev1.ContainerStatus{State: waits, LastTerminationState: end}, "second", true},
		"restarted, and ended": {fact.ReasonFailed, corev1.PodFailed, corev1.ContainerStatus{State: end, LastTerminationState: end}, "second", false},
		"restarted long ago":   {fact.ReasonEvicted, corev1.PodRunning, corev1.ContainerStatus{State: runs, LastTerminationState: end}, "first", false},
		"did not start":        {fact.ReasonStartFailed, corev1.PodRunning, corev1.ContainerStatus{State: runs}, "first", false},
		"no container ended":   {fact.ReasonFailed, corev1.PodFailed, corev1.ContainerStatus{State: runs}, "first", false},
	} {
		t.Run(name, func(t *testing.T) {
			c.second.Name = "second"
			container, previous := logOf(&corev1.Pod{
				Spec:   corev1.PodSpec{Containers: []corev1.Container{{Name: "first"}, {Name: "second"}}},
				Status: corev1.PodStatus{Phase: c.phase, ContainerStatuses: []corev1.ContainerStatus{{Name: "first", State: runs}, c.second}},
			}, c.reason)
			require.Equal(t, c.want, container)
			require.Equal(t, c.previous, previous)
		})
	}
}

func TestLogOfAnotherPodIsNotRead(t *testing.T) {
	var query string
	code, log, life, recycledMeanwhile := http.StatusOK, "a\nb\n", "", false
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case !strings.HasSuffix(r.URL.Path, "/log"):
			w.Header().Set("Content-Type", "application/json")
			p := corev1.Pod{
				TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}, ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "u"},
				Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}},
			}
			if life != "" {
				p.Annotations = map[string]string{v1alpha1.AnnotationLife: life}
				p.Spec.InitContainers = []corev1.Container{{Name: awaitName, RestartPolicyRules: []corev1.ContainerRestartRule{{}}}}
			}
			_ = json.NewEncoder(w).Encode(p)
		case code != http.StatusOK:
			http.Error(w, "no kubelet", code)
		default:
			query = r.URL.RawQuery
			_, _ = w.Write([]byte(log))
			if recycledMeanwhile {
				life = "1"
			}
		}
	}))
	defer api.Close()
	clients, err := kube.NewClients(&rest.Config{Host: api.URL, Transport: &http.Transport{DisableKeepAlives: true}}, 0, 0)
	require.NoError(t, err)
	var events []core.Event
	w, err := NewWriter(WriterOptions{Options: kube.Options{
		Clients: clients, Namespace: "default", Log: zap.NewNop(), Submit: func(ev core.Event) { events = append(events, ev) },
	}, Settings: Settings{ServeOn: time.Second}})
	require.NoError(t, err)
	read := func(id string) error {
		return w.ReadLog(t.Context(), core.ReadLog{Sandbox: core.Sandbox{
			Binding: core.Binding{ID: "x"}, Pod: fact.PodKeyOf("default", "p", id), Cause: core.Cause{Reason: fact.ReasonEvicted},
		}}, 2)
	}
	require.NoError(t, read("u"))
	require.Equal(t, []core.Event{core.LogRead{ID: "x", Lines: []string{"a", "b"}}}, events)
	require.Equal(t, "container=main&limitBytes=2097152&tailLines=2", query)
	require.NoError(t, read("another"))
	log = "unable to retrieve container logs for containerd://d504"
	require.ErrorContains(t, read("u"), "the kubelet has removed it")
	log, code = "c\n", http.StatusNotFound
	require.NoError(t, read("u"), "it was deleted meanwhile")
	code = http.StatusInternalServerError
	require.Error(t, read("u"))
	require.Len(t, events, 1)
	code, life = http.StatusOK, "0"
	require.NoError(t, read("u/0"))
	require.Len(t, events, 2)
	recycledMeanwhile = true
	for range 2 {
		require.NoError(t, read("u/0"))
		require.Len(t, events, 2, "the log may be that of the next sandbox")
	}
}
