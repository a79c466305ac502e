package rest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/inspect"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// logged is a sandbox whose log has so many lines, one a second from noon on.
func logged(lines int) *fake {
	f := &fake{
		sandboxes: map[string]core.Sandbox{"aa1": record("aa1", core.Running), "gone": record("gone", core.Ended)},
		inspected: map[string]inspect.Pod{"python-x": {Object: &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main"}}}}}},
	}
	for i := range lines {
		f.log += fmt.Sprintf("%s line %d\n", noon.Add(time.Duration(i)*time.Second).Format(time.RFC3339Nano), i)
	}
	return f
}

func TestLogsAreSelectedByTimeDirectionAndText(t *testing.T) {
	for query, want := range map[string]string{
		"v2?limit=2":           "8 9",
		"v2?limit=2&cursor=%d": "4 5",
		"v2?limit=2&cursor=%d&direction=backward":  "3 2",
		"v2?direction=backward&limit=3":            "9 8 7",
		"v2?search=line+7":                         "7",
		"v2?limit=1&level=debug":                   "9",
		"v2?level=error":                           "",
		"v1?limit=3":                               "7 8 9",
		"v1?start=%d&limit=2":                      "4 5",
		"v1?start=%d":                              "4 5 6 7 8 9",
		"v2?cursor=%d&direction=backward&search=1": "1",
	} {
		f := logged(10)
		path, ok := strings.CutPrefix(query, "v1?")
		if path = "/sandboxes/aa1/logs?" + path; !ok {
			path = "/v2/sandboxes/aa1/logs?" + strings.TrimPrefix(query, "v2?")
		}
		if strings.Contains(path, "%d") {
			path = fmt.Sprintf(path, noon.Add(4*time.Second).UnixMilli())
		}
		w := call(handler(t, f), "GET", path, "")
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		var got []string
		if ok {
			var logs openapi.SandboxLogs
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &logs))
			require.Len(t, logs.LogEntries, len(logs.Logs))
			for _, l := range logs.Logs {
				got = append(got, strings.TrimPrefix(l.Line, "line "))
			}
		} else {
			var logs openapi.SandboxLogsV2
			require.NoError(t, json.Unmarshal(w.Body.Bytes(), &logs))
			for _, l := range logs.Logs {
				got = append(got, strings.TrimPrefix(l.Message, "line "))
			}
		}
		require.Equal(t, want, strings.Join(got, " "), query)
		require.Equal(t, "main", f.logOptions.Container)
	}
}

func TestLogsAreBounded(t *testing.T) {
	long := noon.Format(time.RFC3339Nano) + " " + strings.Repeat("x", 100<<10) + "\n"
	for _, last := range []bool{true, false} {
		lines, err := selectLines(strings.NewReader(strings.Repeat(long, 200)), logQuery{limit: 1000, last: last})
		require.NoError(t, err)
		size := 0
		for _, l := range lines {
			size += len(l.text)
		}
		require.LessOrEqual(t, size, logKept)
		require.Greater(t, size, logKept/2)
	}
}

func TestMissingLogsAreRefusedWithAdvice(t *testing.T) {
	f := logged(1)
	f.logErr = inspect.ErrNoLogs
	require.Contains(t, refusal(t, call(handler(t, f), "GET", "/sandboxes/aa1/logs", ""), 501, apierror.NotImplemented).Message, "read the log where the pod runs")
	refusal(t, call(handler(t, f), "GET", "/v2/sandboxes/gone/logs", ""), 404, apierror.SandboxGone)
	refusal(t, call(handler(t, f), "GET", "/v2/sandboxes/none/logs", ""), 404, apierror.SandboxNotFound)
	f.logErr = errors.New("broken")
	require.Equal(t, 500, call(handler(t, f), "GET", "/sandboxes/aa1/logs", "").Code)
}

func TestMetricsAreThoseOfThePod(t *testing.T) {
	pool := fullPool("python")
	pool.Spec.Template.Spec.Containers[0].Resources.Limits = corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("2"), corev1.ResourceMemory: resource.MustParse("1Gi"),
	}
	f := logged(0)
	f.pools = []*v1alpha1.SandboxPool{pool}
	f.usage = map[string]inspect.Usage{"aa1": {At: noon, CPU: 0.5, Memory: 1 << 20}}
	const item = `{"timestamp":"2030-01-01T12:00:00Z","timestampUnix":1893499200,"cpuCount":2,"cpuUsedPct":25,"memUsed":1048576,"memTotal":1073741824,"memCache":0,"diskUsed":0,"diskTotal":0}`
	require.JSONEq(t, "["+item+"]", call(handler(t, f), "GET", "/v2/sandboxes/aa1/metrics?start=1893499200&end=1893499200", "").Body.String())
	for _, query := range []string{"start=1893499201", "end=1893499199"} {
		require.Equal(t, "[]", call(handler(t, f), "GET", "/sandboxes/aa1/metrics?"+query, "").Body.String())
	}
	require.JSONEq(t, `{"sandboxes":{"aa1":`+item+`}}`, call(handler(t, f), "GET", "/sandboxes/metrics?sandbox_ids=aa1,gone,none,aa1", "").Body.String())
	require.Equal(t, []string{"aa1"}, f.measured)
	require.JSONEq(t, `{"sandboxes":{}}`, call(handler(t, f), "GET", "/sandboxes/metrics?sandbox_ids=none", "").Body.String())
	refusal(t, call(handler(t, f), "GET", "/sandboxes/metrics", ""), 400, apierror.BadRequest)
	refusal(t, call(handler(t, f), "GET", "/sandboxes/gone/metrics", ""), 404, apierror.SandboxGone)
	f.usage["aa1"] = inspect.Usage{At: noon, CPU: 1, Memory: 1, CPUs: 4, MemoryTotal: 2, Cache: 3, Disk: 5, DiskTotal: 6}
	require.JSONEq(t, `[{"timestamp":"2030-01-01T12:00:00Z","timestampUnix":1893499200,"cpuCount":4,"cpuUsedPct":25,`+
		`"memUsed":1,"memTotal":2,"memCache":3,"diskUsed":5,"diskTotal":6}]`,
		call(handler(t, f), "GET", "/sandboxes/aa1/metrics", "").Body.String(), "an agent has measured it")
	for i := range 3 { // which kept these
		f.series = append(f.series, inspect.Usage{At: noon.Add(time.Duration(15*i-45) * time.Second), CPUs: 1})
	}
	times := func(query string) (all []int64) {
		var list []struct{ TimestampUnix int64 }
		require.NoError(t, json.Unmarshal(call(handler(t, f), "GET", "/sandboxes/aa1/metrics"+query, "").Body.Bytes(), &list))
		for _, m := range list {
			all = append(all, m.TimestampUnix-noon.Unix())
		}
		return all
	}
	require.Equal(t, []int64{-45, -30, -15, 0}, times(""))
	require.Equal(t, []int64{-30, -15}, times(fmt.Sprintf("?start=%d&end=%d", noon.Unix()-30, noon.Unix()-15)), "the ends belong to it")
	f.usageErr = inspect.ErrNoMetrics
	require.Contains(t, refusal(t, call(handler(t, f), "GET", "/sandboxes/aa1/metrics", ""), 501, apierror.NotImplemented).Message, "metrics-server")
}

func TestDiagnosticsShowPodContainersWarningsAndNode(t *testing.T) {
	f := logged(0)
	f.pools = []*v1alpha1.SandboxPool{fullPool("python")}
	p := f.inspected["python-x"]
	p.Object.Name, p.Object.UID, p.Object.CreationTimestamp, p.Object.Spec.NodeName = "python-x", "u", metav1.NewTime(noon), "n1"
	p.Object.Status = corev1.PodStatus{Phase: corev1.PodPending, ContainerStatuses: []corev1.ContainerStatus{{
		Name: "main", Image: "python:3", RestartCount: 2, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled", FinishedAt: metav1.NewTime(noon)}},
	}}}
	p.Warnings = []corev1.Event{{Reason: "Failed", Message: "pull", Count: 4, LastTimestamp: metav1.NewTime(noon)}}
	p.Node = &corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}
	f.inspected["python-x"] = p
	f.podFailures = []core.PodFailure{{Pod: "python-z", Reason: core.PodOOMKilled, Why: "exit code 137", At: noon}, {Pod: "python-y", Reason: core.PodDeleted, At: noon}}
	const pod = `{"name":"python-x","uid":"u","phase":"Pending","createdAt":"2030-01-01T12:00:00Z","deleting":false,"conditions":[],"node":"n1","nodeProblem":"the node is cordoned",
		"containers":[{"name":"main","image":"python:3","init":false,"ready":false,"restarts":2,"state":"waiting","reason":"ImagePullBackOff","message":"no such image","lastEnd":"exit code 137 (OOMKilled) at 2030-01-01T12:00:00Z"}],
		"warnings":[{"reason":"Failed","message":"pull","count":4,"lastSeen":"2030-01-01T12:00:00Z"}]}`
	w := call(handler(t, f), "GET", "/v1/sandboxes/aa1/diagnostics", "")
	require.JSONEq(t, `{"sandbox":{"phase":"running",`+recordJSON+`},"pod":`+pod+`}`, w.Body.String())
	var all openapi.PoolDiagnostics
	w = call(handler(t, f), "GET", "/v1/pools/python/diagnostics", "")
	require.NoError(t, json.Unmarshal(w.Body.Bytes(), &all), w.Body)
	require.Len(t, all.Pods, 1)
	require.Equal(t, 3, all.PodsOthers)
	require.Equal(t, []openapi.PodFailure{
		{PodName: "python-z", Reason: core.PodOOMKilled, Message: "exit code 137", At: noon}, {PodName: "python-y", Reason: core.PodDeleted, At: noon},
	}, all.Failures)
	require.Equal(t, "ImagePullBackOff", all.Pods[0].Containers[0].Reason)
	f.inspected, f.warnings, f.lastLines = nil, p.Warnings, []string{"last", "words"}
	require.NotContains(t, call(handler(t, f), "GET", "/v1/sandboxes/aa1/diagnostics", "").Body.String(), "words", "it has not ended")
	body := call(handler(t, f), "GET", "/v1/sandboxes/gone/diagnostics", "").Body.String()
	require.Contains(t, body, "does not exist any more")
	require.Contains(t, body, `"logLines":["last","words"]`)
	for _, other := range []string{"/v1/sandboxes?phase=ended", "/v1/sandboxes/gone", "/v1/sandboxes/gone/route"} {
		require.NotContains(t, call(handler(t, f), "GET", other, "").Body.String(), "words", other)
	}
	require.Contains(t, body, `"warnings":[{"count":4,"lastSeen":"2030-01-01T12:00:00Z","message":"pull","reason":"Failed"}]`)
	refusal(t, call(handler(t, f), "GET", "/v1/sandboxes/none/diagnostics", ""), 404, apierror.SandboxNotFound)
	refusal(t, call(handler(t, f), "GET", "/v1/pools/ruby/diagnostics", ""), 404, apierror.PoolNotFound)
}

// Invariant: P39
func TestDiagnosticsShowRulesAndUseOfEgress(t *testing.T) {
	f := logged(0)
	f.egress = openapi.SandboxEgress{Admitted: 3, Gateways: 1, Destinations: []openapi.EgressDestination{}}
	get := func() *openapi.SandboxEgress {
		w := call(handler(t, f), "GET", "/v1/sandboxes/aa1/diagnostics", "")
		return bodyAs[openapi.SandboxDiagnostics](t, w.Body).Egress
	}
	require.Nil(t, get(), "it uses no egress gateway")
	s := f.sandboxes["aa1"]
	s.Agent.Egress, s.Network = true, core.EgressRules{Deny: []string{"0.0.0.0/0"}}
	f.sandboxes["aa1"] = s
	want := f.egress
	want.Claim, want.Ports = &openapi.EgressRules{Allow: []string{}, Deny: []string{"0.0.0.0/0"}}, []int{}
	require.Equal(t, &want, get(), "what its pool says is not known")
	s.PoolEgress = &core.PoolEgress{EgressRules: core.EgressRules{Allow: []string{"a.example.com"}}, Ports: []uint16{8443}}
	f.sandboxes["aa1"] = s
	want.Pool, want.Ports = &openapi.EgressRules{Allow: []string{"a.example.com"}, Deny: []string{}}, []int{8443}
	require.Equal(t, &want, get())
	s.ReleasedAt = noon
	f.sandboxes["aa1"] = s
	require.Nil(t, get(), "it has ended")
}

func TestHealthNeedsNoKeyAndNamesTheVersion(t *testing.T) {
	h := handlerWithKeys(t, &fake{}, keysIn(map[string]string{"team": keyOne}))
	w := call(h, "GET", "/health", "")
	require.Equal(t, 200, w.Code, w.Body)
	require.Contains(t, w.Body.String(), `"status":"ok","message":"ok"`)
	require.Equal(t, 200, call(h, "GET", "/dashboard/health", "").Code, "of E2B's dashboard")
	refusal(t, call(h, "GET", "/v1/pools", ""), 401, apierror.Unauthorized)
	refusal(t, call(handler(t, &fake{followers: true}), "GET", "/health", ""), 503, apierror.NotLeader)
}
