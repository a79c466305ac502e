package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"sigs.k8s.io/yaml"

	"github.com/berth-sandbox/berth/api/openapi"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/printable"
)

// The IDs of the sandboxes that the stub knows.
const (
	first  = "k3x9k3x9k3x9k3x9k3x9"
	second = "p7q2p7q2p7q2p7q2p7q2"
	third  = "m4t6m4t6m4t6m4t6m4t6"
)

// stub answers calls with fixed values of the API's types. The commands are tested with a real API
// in e2e.
type stub struct {
	mu    sync.Mutex
	calls []string
	// claimed is the body of the latest claim.
	claimed string
	// network is the body of the latest change of rules.
	network string
	live    []openapi.Sandbox
	// logs is the log of the first sandbox until it has ended.
	logs  []openapi.SandboxLogEntry
	ended bool
	// noPods has batches refused, and noStore deletions of snapshots.
	noPods, noStore bool
}

func (s *stub) seen() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.calls
}

func sandboxOf(id, pool string, phase openapi.SandboxPhase, age time.Duration) openapi.Sandbox {
	return openapi.Sandbox{
		SandboxID: id, TemplateID: pool, Alias: pool, ClientID: "berth", EnvdVersion: "0.5.8", Domain: "sandbox.localhost:8000",
		URL: "http://8080-" + id + ".sandbox.localhost:8000/", State: openapi.SandboxStateRunning, Phase: phase,
		StartedAt: noon.Add(-age), EndAt: noon.Add(5 * time.Minute), PodName: pool + "-abcdef",
	}
}

// serve starts the stub.
func serve(t *testing.T) (s *stub, url string) {
	t.Helper()
	isolate(t)
	s = &stub{live: []openapi.Sandbox{
		sandboxOf(first, "python", openapi.SandboxPhaseRunning, 90*time.Second),
		sandboxOf(second, "node", openapi.SandboxPhaseStarting, 2*time.Second),
	}}
	s.live[0].User, s.live[0].Metadata, s.live[0].IdleTimeout = "ann", map[string]string{"job": "17", "a": "b"}, 600
	s.live[1].EndAt = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return s, server.URL
}

func (s *stub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.calls = append(s.calls, r.Method+" "+r.URL.String())
	s.mu.Unlock()
	if r.URL.Path == "/sandboxes" || r.URL.Path == "/v1/claims" {
		body, _ := io.ReadAll(r.Body)
		s.claimed = string(body)
	}
	_, path, _ := strings.Cut(r.URL.Path, "/sandboxes/")
	id, rest, _ := strings.Cut(path, "/")
	switch path := r.URL.Path; {
	case r.Method == http.MethodPost && path == "/sandboxes":
		answer(w, http.StatusCreated, s.live[0])
	case path == "/v1/claims" && s.noPods:
		refuse(w, http.StatusTooManyRequests, "pool_empty", "no pod is warm")
	case path == "/v1/claims":
		answer(w, http.StatusCreated, openapi.Claims{Sandboxes: s.live, Ended: []string{"gone"}})
	case path == "/snapshots" && r.URL.Query().Get("name") == "none":
		answer(w, http.StatusOK, []openapi.Snapshot{})
	case path == "/snapshots":
		kept := snapshotOf("work:v1")
		kept.ExpiresAt, kept.LeftOut, kept.SizeBytes = nil, nil, 900
		answer(w, http.StatusOK, []openapi.Snapshot{snapshotOf("work:default"), kept})
	case strings.HasPrefix(path, "/templates/") && s.noStore:
		refuse(w, http.StatusInternalServerError, "snapshot_failed", "the store is away")
	case path == "/templates/nosuch":
		refuse(w, http.StatusNotFound, "snapshot_not_found", "there is no such snapshot")
	case strings.HasPrefix(path, "/templates/"):
		w.WriteHeader(http.StatusNoContent)
	case rest == "network" && id == second:
		refuse(w, http.StatusConflict, "egress_missing", "there is no egress gateway")
	case rest == "network":
		body, _ := io.ReadAll(r.Body)
		s.network = string(body)
		w.WriteHeader(http.StatusNoContent)
	case rest == "snapshots" && id == second:
		refuse(w, http.StatusBadGateway, "snapshot_failed", "paths[0]: /work is a symbolic link")
	case rest == "snapshots" && id == first:
		var body openapi.CreateSnapshotJSONRequestBody
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			panic(err)
		}
		name := "p7q2"
		if body.Name != nil {
			name = *body.Name
		}
		if !strings.Contains(name, ":") {
			name += ":default"
		}
		answer(w, http.StatusCreated, snapshotOf(name))
	case path == "/v1/sandboxes":
		all := []openapi.SandboxRecord{}
		for _, one := range s.live {
			if pool := r.URL.Query().Get("pool"); pool == "" || pool == one.TemplateID {
				all = append(all, recordOf(one))
			}
		}
		if r.URL.Query().Get("phase") == "released,ended" {
			all = []openapi.SandboxRecord{released(s.live[0])}
		}
		answer(w, http.StatusOK, openapi.SandboxRecords{Sandboxes: all})
	case path == "/v1/pools":
		answer(w, http.StatusOK, openapi.Pools{Pools: []openapi.Pool{poolOf("node"), poolOf("python")}})
	case path == "/v1/pools/python/diagnostics":
		answer(w, http.StatusOK, openapi.PoolDiagnostics{
			Pool: poolOf("python"), Pods: []openapi.PodDiagnostics{brokenPod()}, PodsOthers: 2,
			Failures: []openapi.PodFailure{
				{PodName: "python-c", Reason: "ImagePullFailed", Message: "container main: ErrImagePull", At: noon.Add(-time.Minute)},
				{PodName: "python-b", Reason: "Deleted", At: noon.Add(-time.Hour)},
			},
		})
	case strings.HasPrefix(path, "/v1/pools/"):
		answer(w, http.StatusOK, poolOf("python"))
	case path == "/v1/events":
		if r.Header.Get("Last-Event-ID") != "" {
			refuse(w, http.StatusUnauthorized, "unauthorized", "the key was revoked")
			return
		}
		at := noon.Format(time.RFC3339)
		fmt.Fprintf(w, "id: 1.4\nevent: gap\ndata: {\"reason\":\"leaderChanged\",\"message\":\"events may be lost\"}\n\n"+
			"id: 1.5\nevent: created\ndata: {\"type\":\"created\",\"at\":%q,\"sandboxID\":%q,\"pool\":\"python\",\"team\":\"a\"}\n\n"+
			"id: 1.6\nevent: released\ndata: {\"type\":\"released\",\"at\":%q,\"sandboxID\":%q,\"pool\":\"python\",\"reason\":\"Killed\"}\n\n",
			at, first, at, first)
	case path == "/events/webhooks/nosuch" || path == "/events/webhooks/nosuch/deliveries":
		refuse(w, http.StatusNotFound, "not_found", `webhook "nosuch": there is none of this ID`)
	case path == "/events/webhooks" && r.Method == http.MethodGet:
		off := webhookOf("w2")
		off.Enabled = false
		answer(w, http.StatusOK, []openapi.Webhook{webhookOf("w1"), off})
	case path == "/events/webhooks":
		answer(w, http.StatusCreated, webhookOf("w3"))
	case strings.HasSuffix(path, "/deliveries"):
		answer(w, http.StatusOK, []openapi.WebhookDelivery{
			{ID: "d2", WebhookID: "w1", EventID: "e2", EventType: "sandbox.lifecycle.killed", SandboxID: first, Timestamp: noon, Attempt: 2, Status: openapi.Failed, DurationMs: 31, ResponseHTTPStatusCode: new(503), ErrorMessage: new("the answer is 503")},
			{ID: "d1", WebhookID: "w1", EventID: "e1", EventType: "sandbox.lifecycle.created", SandboxID: first, Timestamp: noon, Attempt: 1, Status: openapi.Success, DurationMs: 12, ResponseHTTPStatusCode: new(204)},
		})
	case strings.HasPrefix(path, "/events/webhooks/"):
		answer(w, http.StatusOK, webhookOf(strings.TrimPrefix(path, "/events/webhooks/")))
	case path == "/v1/last-active" && r.URL.Query().Get("id") == "nosuch":
		answer(w, http.StatusOK, openapi.LastActive{Now: noon, Sandboxes: []openapi.Activity{}})
	case path == "/v1/last-active":
		answer(w, http.StatusOK, openapi.LastActive{Now: noon, Sandboxes: []openapi.Activity{*s.why(first).Activity, *s.why(second).Activity}, Truncated: 2})
	case path == "/v1/fences":
		answer(w, http.StatusOK, fencesOf())
	case path == "/v1/sessions":
		answer(w, http.StatusOK, sessionsOf())
	case strings.HasPrefix(path, "/v1/sessions/"):
		answer(w, http.StatusOK, openapi.DeadDeclared{SessionID: "router-b", Fences: 1})
	case id != first && id != second && id != third:
		refuse(w, http.StatusNotFound, "sandbox_not_found", "there is no such sandbox")
	case r.Method == http.MethodDelete, rest == "timeout", rest == "keepalive", rest == "pause":
		w.WriteHeader(http.StatusNoContent)
	case rest == "logs":
		s.answerLogs(w, r, id)
	case rest == "diagnostics" && id == third:
		answer(w, http.StatusOK, openapi.SandboxDiagnostics{
			Sandbox: killed(), PodProblem: "the pod does not exist any more", Warnings: brokenPod().Warnings,
			LogLines: []string{"reading data.csv", "\x1b[31m90 %\r"},
		})
	case rest == "diagnostics" && id == second:
		answer(w, http.StatusOK, openapi.SandboxDiagnostics{Sandbox: recordOf(s.live[1]), Pod: new(brokenPod()), Egress: egressOf()})
	case rest == "diagnostics":
		answer(w, http.StatusOK, openapi.SandboxDiagnostics{Sandbox: recordOf(s.live[0]), PodProblem: "the pod does not exist any more"})
	case rest == "route":
		answer(w, http.StatusOK, routeOf(id))
	case strings.HasPrefix(path, "/v1/"):
		answer(w, http.StatusOK, s.why(id))
	default:
		answer(w, http.StatusOK, s.live[map[string]int{first: 0, second: 1}[id]])
	}
}

// answerLogs answers with the lines of the stub's log as the API does.
func (s *stub) answerLogs(w http.ResponseWriter, r *http.Request, id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		refuse(w, http.StatusNotFound, "sandbox_gone", "this sandbox has been released")
		return
	}
	if s.logs == nil || id == second {
		refuse(w, http.StatusNotImplemented, "not_implemented", "the node of the pod serves no logs")
		return
	}
	query := r.URL.Query()
	limit, err := strconv.Atoi(query.Get("limit"))
	if err != nil || query.Has("direction") {
		panic(r.URL.String())
	}
	all := s.logs
	if cursor, err := strconv.ParseInt(query.Get("cursor"), 10, 64); err == nil {
		all = slices.DeleteFunc(slices.Clone(all), func(l openapi.SandboxLogEntry) bool { return l.Timestamp.UnixMilli() < cursor })
		all = all[:min(limit, len(all))]
	}
	answer(w, http.StatusOK, openapi.SandboxLogsV2{Logs: all[max(0, len(all)-limit):]})
}

// egressOf has something of everything that a diagnosis shows.
func egressOf() *openapi.SandboxEgress {
	return &openapi.SandboxEgress{
		Claim:    &openapi.EgressRules{Allow: []string{"api.example.com", "*.example.org"}, Deny: []string{"0.0.0.0/0"}},
		Admitted: 12, Refused: 3, Open: 1, SentBytes: 5 << 20, ReceivedBytes: 100, Gateways: 2, GatewaysSilent: 1,
		Destinations: []openapi.EgressDestination{
			{Host: "api.example.com", Port: 443, Count: 12, LastAt: noon.Add(-time.Second)},
			{Host: "2001:db8::1", Port: 443, Reason: "egress_refused", Count: 3, LastAt: noon.Add(-time.Minute)},
		},
	}
}

// brokenPod has something of everything that a diagnosis shows.
func brokenPod() openapi.PodDiagnostics {
	return openapi.PodDiagnostics{
		Name: "python-abcdef", UID: "u", Phase: "Pending", PodIP: "10.0.0.1", CreatedAt: noon.Add(-time.Minute), Deleting: true,
		Conditions: []openapi.Condition{
			{Type: "PodScheduled", Status: "True"}, {Type: "Ready", Status: "False", Reason: "ContainersNotReady", Message: "containers with unready status: [main]"},
		},
		Containers: []openapi.ContainerDiagnostics{
			{Name: "init", Image: "image:1", Init: true, Ready: true, State: openapi.ContainerDiagnosticsStateTerminated, Reason: "Completed", ExitCode: new(0)},
			{
				Name: "main", Image: "image:2", Restarts: 3, State: openapi.ContainerDiagnosticsStateWaiting, Reason: "CrashLoopBackOff",
				Message: "back-off 40s", LastEnd: "exit code 1 (Error) at 2030-01-01T11:59:30Z",
			},
		},
		Node: "node-1", NodeProblem: "the node is cordoned",
		Warnings: []openapi.PodWarning{{Reason: "BackOff", Message: "Back-off restarting failed container", Count: 4, LastSeen: noon.Add(-20 * time.Second)}},
	}
}

func (s *stub) why(id string) openapi.SandboxExplanation {
	a := &openapi.Activity{
		SandboxID: id, Pool: "python", LastActive: noon.Add(-12 * time.Second), AgeSeconds: 12, Kind: "open", Open: 2,
		Router: new("router-a"), IdleTimeout: 60, Awaits: []string{}, Asks: []string{},
		Next: &openapi.NextRelease{Reason: openapi.IdleTimeout, At: noon.Add(48 * time.Second), InSeconds: 48},
	}
	e := openapi.SandboxExplanation{Sandbox: recordOf(s.live[0]), Now: noon, Activity: a}
	if id == third {
		return openapi.SandboxExplanation{Sandbox: killed(), Now: noon}
	}
	if id == second {
		a.Kind, a.Why, a.Next.InSeconds, a.Router, a.Open = "unknown", new("a router has ended"), 0, nil, 0
		a.MinBytesPerMinute, a.Awaits = new(int64(2048)), []string{"router-b"}
		e.Sandbox = recordOf(s.live[1])
	}
	return e
}

func recordOf(s openapi.Sandbox) openapi.SandboxRecord {
	r := openapi.SandboxRecord{
		SandboxID: s.SandboxID, Pool: s.TemplateID, Team: "a", User: s.User, Phase: openapi.RecordPhase(s.Phase),
		ClaimedAt: s.StartedAt, IdleTimeout: s.IdleTimeout, Metadata: s.Metadata, PodName: s.PodName, PodIP: "10.0.0.1",
		URL: s.URL, DefaultPort: 8080, Ports: []int{},
	}
	if s.EndAt.Year() < 9999 {
		r.EndAt = &s.EndAt
	}
	return r
}

func released(s openapi.Sandbox) openapi.SandboxRecord {
	r := recordOf(s)
	r.Phase, r.ReleasedAt, r.Reason = openapi.RecordPhaseReleased, &noon, "Killed"
	return r
}

// killed is the record of a sandbox that the kernel has killed.
func killed() openapi.SandboxRecord {
	return openapi.SandboxRecord{
		SandboxID: third, Pool: "python", Team: "a", User: "ann", Phase: openapi.RecordPhaseEnded, ClaimedAt: noon.Add(-time.Hour),
		StartedAt: new(noon.Add(-59 * time.Minute)), ReleasedAt: new(noon.Add(-time.Minute)), PodName: "python-abcdef", PodIP: "10.0.0.1",
		Reason: "OOMKilled", Message: "container main: exit code 137 OOMKilled", ExitCode: new(int32(137)),
		Workload: &openapi.Workload{
			Images:   []string{"python:3", "proxy:1"},
			Requests: openapi.Resources{CPU: "500m"}, Limits: openapi.Resources{CPU: "1", Memory: "1Gi"},
		},
	}
}

func snapshotOf(name string) openapi.Snapshot {
	return openapi.Snapshot{
		SnapshotID: name, Names: []string{name}, SandboxID: first, Pool: "python", CreatedAt: noon.Add(-time.Hour),
		ExpiresAt: new(noon.Add(24 * time.Hour)), SizeBytes: 5 << 20, Files: 120, Bytes: 3 << 30, Paths: []string{"/home/user", "/work"},
		LeftOut: map[string]int{"socket": 2, "mount": 1},
	}
}

func routeOf(id string) openapi.RouteExplanation {
	r := openapi.RouteExplanation{
		SandboxID: id, Routable: true, Why: "it is live", Phase: openapi.RecordPhaseRunning, PodName: "python-abcdef",
		PodIP: "10.0.0.1", DefaultPort: 8080, Ports: []int{8080, 3000},
		Routers: []openapi.RouterOfRoute{{SessionID: "router-a", Address: "10.1.0.1", Connected: true, State: "acknowledged"}},
	}
	if id == second {
		fence := fencesOf().Fences[0]
		r.Routable, r.Why, r.Fence, r.RoutersOthers, r.PodNotReady = false, "it is starting", &fence, 3, "CrashLoopBackOff"
	}
	return r
}

func poolOf(name string) openapi.Pool {
	p := openapi.Pool{
		Name: name, CreatedAt: noon.Add(-time.Hour), Generation: 1, Spec: openapi.PoolSpec{Warm: 3, Images: []string{"image:1"}, IdleTimeout: 3600},
		Counts: openapi.PoolCounts{Warm: 2, Pending: 1, Claimed: 4, WaitingClaims: 5},
		Conditions: []openapi.Condition{
			{Type: "Ready", Status: "False", Reason: "Filling", Message: "2 of 3 pods are warm"}, {Type: "Degraded", Status: "False", Reason: "Healthy"},
		},
	}
	if name == "python" {
		p.Spec.MaxWarm, p.Spec.MaxPods = 6, 10
	}
	return p
}

func sessionsOf() openapi.Sessions {
	return openapi.Sessions{Truncated: 1, Sessions: []openapi.ListedSession{
		{SessionID: "router-a", Address: new("10.1.0.1"), Connected: true, LastHeardSeconds: new(0.2), ExpiresInSeconds: 909, Sent: new(int64(3)), Acknowledged: new(int64(2)), Fences: 1},
		{SessionID: "router-b", Egress: true, ExpiresInSeconds: 889, Fences: 1},
	}}
}

func fencesOf() openapi.Fences {
	fence := openapi.Fence{SandboxID: first, Pool: "python", PodName: "python-abcdef", PodIP: "10.0.0.1", ReleasedAt: noon, Reason: "Killed", Phase: openapi.FencePhaseSessions}
	open := fence
	open.SandboxID, open.Phase, open.ConnectWindowEndsInSeconds = second, openapi.FencePhaseConnectWindow, new(5.0)
	fence.WaitsFor = []openapi.AwaitedSession{
		{SessionID: "router-a", Connected: true, Until: openapi.AwaitedSessionUntilAcknowledged, LastHeardSeconds: new(0.2), Acknowledged: new(int64(2)), Needed: new(int64(3))},
		{SessionID: "router-b", Until: openapi.AwaitedSessionUntilExpired, ExpiresInSeconds: 889},
	}
	fence.WaitsForOthers = 4
	return openapi.Fences{Fences: []openapi.Fence{fence, open}}
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func refuse(w http.ResponseWriter, status int, reason, message string) {
	answer(w, status, openapi.Error{Code: status, Reason: reason, Message: message})
}

func webhookOf(id string) openapi.Webhook {
	return openapi.Webhook{
		ID: id, TeamID: "a", Name: "billing", CreatedAt: noon, URL: "https://hooks.example.com/berth", Enabled: true,
		Events: []openapi.EventType{"sandbox.lifecycle.created", "sandbox.lifecycle.killed"},
	}
}

func TestStoppedSandboxIsDiagnosedWithoutAPod(t *testing.T) {
	s, url := serve(t)
	s.live[0].Phase, s.live[0].PodName = openapi.SandboxPhaseStopped, ""
	stdout, _, err := command(t.Context(), "diagnose", first, "--api-url="+url)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^Pod: +none$`, stdout)
	require.Contains(t, stdout, ", stopped\n")
}

func TestOutputOfEveryCommandIsTheGoldenFile(t *testing.T) {
	s, url := serve(t)
	s.logs = logOf(2)
	var all strings.Builder
	for _, line := range []string{
		"claim python", "claim python -o name", "claim python -o json", "claim python --count=3 --at-least=2",
		"claim python --count=1 --at-least=2", "claim python --count=0", "ls", "ls --no-headers", "ls -o wide", "ls -o name",
		"ls -o json", "ls -o yaml", "ls --pool=node", "ls --pool=none", "ls -m job=17 -o name", "ls --phase=released,ended -o wide", "get " + first, "get " + first + " -o yaml",
		"get " + first + " " + second + " -o json", "get nosuch", "kill " + first, "kill " + first + " nosuch",
		"kill --all --pool=node", "timeout " + first + " 10m", "network " + first + " --deny-out=0.0.0.0/0 --allow-out=*.example.com", "network " + second, "keepalive " + first, "pause " + first, "pause --stop " + first + " nosuch", "resume " + first, "why " + first + " " + second,
		"why " + first + " -o json", "last-active", "last-active -o wide", "last-active --id=nosuch", "open --print " + first,
		"open --print " + first + ":3000/a?b=c", "diagnose " + first, "diagnose " + second, "diagnose " + third, "diagnose " + first + " -o json", "pools ls", "pools ls -o wide", "pools get python -o yaml", "pools diagnose python",
		"pools scale python --warm=3 --max-pods=10", "pools scale python", "events", "events -o wide --no-headers", "fence ls", "fence ls -o name", "fence sessions", "fence sessions -o yaml",
		"fence declare-dead router-b --gone --reason=burnt",
		"webhooks ls", "webhooks ls -o wide", "webhooks ls -o name", "webhooks create https://hooks.example.com/berth --name=billing --event=killed --secret-file=testdata/help.golden",
		"webhooks create https://hooks.example.com/berth --name=billing --secret-file=nosuch", "webhooks enable w1 nosuch", "webhooks disable w1", "webhooks rotate w1 --secret-file=testdata/help.golden",
		"snapshot create " + first + " --name=work:v1", "snapshot create " + first + " -o json", "snapshot create " + second, "snapshot create nosuch",
		"snapshot ls", "snapshot ls -o wide", "snapshot ls -o name", "snapshot ls --name=none", "snapshot rm work:v1 nosuch",
		"fork " + first + " --count=2 --timeout=1h", "fork " + second, "fork " + first + " --count=0", "fork " + first + " --timeout=1ms",
		"webhooks delete w1 w2", "webhooks deliveries w1", "webhooks deliveries w1 -o wide", "webhooks deliveries nosuch",
	} {
		stdout, stderr, err := command(t.Context(), append(strings.Fields(line), "--api-url="+url)...)
		all.WriteString("$ berth " + line + "\n" + stdout)
		if stderr != "" {
			all.WriteString("(stderr) " + stderr)
		}
		if err != nil {
			all.WriteString("(error) " + strings.ReplaceAll(err.Error(), url, "http://api") + "\n")
		}
		if code := cli.ExitCode(err); code != 0 {
			all.WriteString("(exit status " + string(rune('0'+code)) + ")\n")
		}
		all.WriteString("\n")
	}
	golden(t, "output", all.String())
}

// What others have written reaches no terminal, and ends no command, in any format.
//
// Invariant: P18
func TestUnprintableValuesAreEscapedInEveryFormat(t *testing.T) {
	s, url := serve(t)
	const evil = "a\u009b2Jb\x7f\u202e\ufffe\x1b]0;\U000e0001c\nd"
	s.live[0].User, s.live[0].Metadata, s.live[0].TemplateID = evil, map[string]string{evil: evil}, evil
	s.logs = []openapi.SandboxLogEntry{{Message: evil, Timestamp: noon}}
	for _, line := range []string{
		"ls -o wide", "ls -o yaml", "ls -o json", "get " + first + " -o yaml", "get " + first + " -o json", "why " + first + " -o yaml",
		"diagnose " + first, "diagnose " + first + " -o yaml", "events -o yaml", "events -o wide", "events",
	} {
		stdout, stderr, _ := command(t.Context(), append(strings.Fields(line), "--api-url="+url)...)
		for _, text := range []string{stdout, stderr} {
			require.Equal(t, printable.Text(text), text, line)
		}
		if !strings.HasPrefix(line, "events") {
			require.Contains(t, stdout, `a\u009b2Jb\u007f\u202e\ufffe\u001b]0;\udb40\udc01c`, line)
		}
	}
	out, err := berth(t, "ls", "-o", "json", "--api-url="+url)
	require.NoError(t, err)
	var all []openapi.SandboxRecord
	require.NoError(t, json.Unmarshal([]byte(out), &all))
	require.Equal(t, evil, all[0].User, "JSON keeps the value")
	require.Equal(t, map[string]string{evil: evil}, all[0].Metadata)
	out, err = berth(t, "ls", "-o", "yaml", "--api-url="+url)
	require.NoError(t, err)
	require.NoError(t, yaml.Unmarshal([]byte(out), &all))
	require.Equal(t, printable.Text(evil), all[0].User)
}

// rulesJSON are rules with a header.
const rulesJSON = `{"api.example":[{"transform":{"headers":{"Authorization":"Bearer canary"}}}]}`

func TestRulesThatAreNoJSONAreNotRepeated(t *testing.T) {
	s, url := serve(t)
	rules := filepath.Join(t.TempDir(), "rules.json")
	require.NoError(t, os.WriteFile(rules, []byte(`{"api.example":"canary"}`), 0o600))
	for _, command := range []string{"claim", "network"} {
		_, err := berth(t, command, first, "--api-url="+url, "--rules="+rules)
		require.Equal(t, cli.ExitUsage, cli.ExitCode(err))
		require.ErrorContains(t, err, "--rules: ")
		require.NotContains(t, err.Error(), "canary")
	}
	require.Empty(t, s.seen())
	require.NoError(t, os.WriteFile(rules, []byte(rulesJSON), 0o600))
	out, err := berth(t, "network", first, "--api-url="+url, "--rules="+rules, "--deny-out=0.0.0.0/0")
	require.NoError(t, err)
	require.Equal(t, first+" denied 0.0.0.0/0, allowed nothing, with headers for api.example\n", out)
	require.JSONEq(t, `{"denyOut":["0.0.0.0/0"],"rules":`+rulesJSON+`}`, s.network)
}

func TestClaimAndBatchSendTheSameOptions(t *testing.T) {
	s, url := serve(t)
	rules := filepath.Join(t.TempDir(), "rules.json")
	require.NoError(t, os.WriteFile(rules, []byte(rulesJSON), 0o600))
	flags := []string{
		"--api-url=" + url, "--timeout=1m", "--idle-timeout=30s", "--wait=0s", "-ma=b", "--user=ann", "--access=token",
		"--mask-host=localhost:${PORT}", "--https-port=443", "--https-port=8443",
		"--allow-out=*.example.com", "--allow-out=192.0.2.1", "--deny-out=0.0.0.0/0", "--rules=" + rules,
	}
	options := `"access":"token",%s"idleTimeout":30,"metadata":{"a":"b"},` +
		`"network":{"allowOut":["*.example.com","192.0.2.1"],"denyOut":["0.0.0.0/0"],"httpsPorts":[443,8443],"maskRequestHost":"localhost:${PORT}","rules":` + rulesJSON + `},%s"timeout":60,"user":"ann","waitTimeout":0}`
	_, err := berth(t, append([]string{"claim", "python"}, flags...)...)
	require.NoError(t, err)
	require.JSONEq(t, "{"+fmt.Sprintf(options, "", `"templateID":"python",`), s.claimed)
	_, _, err = command(t.Context(), append([]string{"claim", "python", "--count=3", "--at-least=2"}, flags...)...)
	require.NoError(t, err)
	require.JSONEq(t, "{"+fmt.Sprintf(options, `"atLeast":2,"count":3,`, `"pool":"python",`), s.claimed)
}

func TestNetworkReplacesTheRulesOfASandbox(t *testing.T) {
	for _, c := range []struct {
		flags      []string
		body, says string
	}{
		{nil, `{}`, first + " may reach whatever its pool lets it reach\n"},
		{[]string{"--deny-out=0.0.0.0/0"}, `{"denyOut":["0.0.0.0/0"]}`, first + " denied 0.0.0.0/0, allowed nothing\n"},
		{
			[]string{"--deny-out=0.0.0.0/0", "--allow-out=a.example", "--allow-out=*.b.example"},
			`{"allowOut":["a.example","*.b.example"],"denyOut":["0.0.0.0/0"]}`, first + " denied 0.0.0.0/0, allowed a.example,*.b.example\n",
		},
	} {
		s, url := serve(t)
		out, err := berth(t, append([]string{"network", first, "--api-url=" + url}, c.flags...)...)
		require.NoError(t, err)
		require.Equal(t, c.says, out)
		require.Equal(t, []string{"PUT /sandboxes/" + first + "/network"}, s.seen())
		require.JSONEq(t, c.body, s.network)
	}
	s, url := serve(t)
	_, err := berth(t, "network", second, "--api-url="+url)
	require.ErrorContains(t, err, "no egress gateway")
	require.Equal(t, exitRefused, cli.ExitCode(err))
	require.Len(t, s.seen(), 1)
}

func TestKillOfAllNeedsAFilterOrYes(t *testing.T) {
	s, url := serve(t)
	for _, args := range [][]string{{}, {"--all"}, {"--pool=node"}, {first, "--all"}} {
		_, err := berth(t, append([]string{"kill", "--api-url=" + url}, args...)...)
		require.Equal(t, cli.ExitUsage, cli.ExitCode(err), "%v: %v", args, err)
	}
	require.Empty(t, s.seen())
	_, err := berth(t, "kill", "--all", "-y", "--api-url="+url)
	require.NoError(t, err)
	require.Equal(t, []string{"GET /v1/sandboxes?limit=1000", "DELETE /sandboxes/" + first, "DELETE /sandboxes/" + second}, s.seen())
}
