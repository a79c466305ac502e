package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/berth-sandbox/berth/allocator/access"
	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

var prometheusFlag = flag.String("e2e.prometheus", "",
	"path of prometheus, which scrapes a Berth whose dashboards and alerts are judged")

// A real Prometheus scrapes a Berth under load. Each query of each panel of the chart has data. Three alerts fire when
// parts fail, and end when these work again. Their pauses ("for") are shortened to 2 s.
func TestDashboardsHaveDataAndAlertsFireAndEnd(t *testing.T) {
	if *prometheusFlag == "" {
		t.Skip("needs Prometheus: -e2e.prometheus=$(tools/prometheus prometheus)")
	}
	e := startDamaging(t, owners, 2, stack.Options{
		Allocators: 2, Gateways: 2, RouterArgs: []string{"--sandbox-requests-per-second=1"},
	})
	p := e.startPrometheus()
	e.useEverything()
	e.eventually(func() error { // the pools fill again, and the router that was killed joins
		if names := p.firing(t); len(names) > 0 {
			return fmt.Errorf("fires: %v", names)
		}
		return nil
	})

	fires := func(alert string, fail, repair func()) {
		fail()
		e.eventually(func() error {
			if !slices.Contains(p.firing(t), alert) {
				return fmt.Errorf("%s does not fire: %v", alert, p.firing(t))
			}
			return nil
		})
		repair()
		e.eventually(func() error {
			if slices.Contains(p.firing(t), alert) {
				return fmt.Errorf("%s does not end", alert)
			}
			return nil
		})
	}
	never := e.newPool(e.pool+"-never", 2)
	never.Spec.Template.Spec.Containers[0].ReadinessProbe.HTTPGet.Port = intstr.FromInt32(1)
	within := int32(10)
	never.Spec.ReadyWithinSeconds = &within
	fires("BerthPoolLacksPods", func() { e.createPool(never) }, func() {
		p.hasData(e, "berth_allocator_pod_failures_total")
		require.NoError(t, e.deletePool(t.Context(), never.Name))
	})
	for _, q := range panelQueries(t) {
		p.hasData(e, q)
	}
	envoy := e.stack.Gateways[1].Envoy
	fires("BerthCannotTellWhatIsOpen",
		func() { require.NoError(t, envoy.Pause()) }, func() { require.NoError(t, envoy.Resume()) })
	fires("BerthHasNoLeader", func() {
		for _, a := range e.stack.Allocators {
			require.NoError(t, a.Kill())
		}
	}, func() {
		for _, a := range e.stack.Allocators {
			require.NoError(t, a.Start(t.Context()))
		}
	})
}

// useEverything does what has metrics.
func (e *env) useEverything() {
	client := e.throughGateway(0)
	s := e.claim()
	var requests sync.WaitGroup
	for range 8 {
		requests.Go(func() {
			for range 300 { // 2,000 may come at once
				_, _ = do(e.t.Context(), client, http.MethodGet, "http://gateway/", e.host(8080, s.SandboxID), "")
			}
		})
	}
	requests.Wait()
	e.get(client, e.host(8080, "aaaaaaaaaaaaaaaaaaaa"), "/")
	e.release(s.SandboxID)
	limited, _ := e.storeKey(access.Caller{Key: e.pool + "-limited", Team: limitedTeam, Role: access.Member})
	for _, c := range []struct{ key, path, body string }{
		{limited, "/sandboxes", fmt.Sprintf(`{"templateID":%q,"timeout":300,"waitTimeout":60}`, e.pool)},
		// It ends by itself.
		{e.site.key(), "/v1/claims", fmt.Sprintf(`{"pool":%q,"count":1,"timeout":2,"waitTimeout":60}`, e.pool)},
	} {
		require.Equal(e.t, http.StatusCreated, e.as(c.key, http.MethodPost, c.path, c.body).code)
	}
	one := int32(1)
	recycled := e.otherPool("recycled", 1, func(s *v1alpha1.SandboxPoolSpec) {
		s.Reuse, s.MaxPods = v1alpha1.ReuseRecycle, &one
	})
	r, _ := e.claimOf(recycled, `"timeout":300`)
	e.release(r.SandboxID)
	router := e.stack.Gateways[1].Router
	require.NoError(e.t, router.Kill())
	require.NoError(e.t, router.Start(e.t.Context()))
}

// prometheus is a running Prometheus.
type prometheus struct{ url string }

// startPrometheus starts one that scrapes all allocators and routers once a second, as the chart's PodMonitor has it,
// and has the chart's rules.
func (e *env) startPrometheus() prometheus {
	t, dir := e.t, e.t.TempDir()
	rules, err := os.ReadFile("../charts/berth/files/rules/berth.yaml")
	require.NoError(t, err)
	rules = regexp.MustCompile(`(?m)^(    for:) .*$`).ReplaceAll(rules, []byte("$1 2s"))
	config := "global: {scrape_interval: 1s, evaluation_interval: 1s}\nrule_files: [rules.yaml]\n" +
		"scrape_configs:\n- job_name: berth\n  static_configs:\n"
	target := func(admin, pod string) {
		config += fmt.Sprintf("  - {targets: [%q], labels: {namespace: berth-system, pod: %s}}\n",
			strings.TrimPrefix(admin, "http://"), pod)
	}
	for i, a := range e.stack.Allocators {
		target(a.Admin, fmt.Sprint("allocator-", i))
	}
	for i, g := range e.stack.Gateways {
		target(g.Admin, fmt.Sprint("gateway-", i))
	}
	for name, content := range map[string]string{"rules.yaml": string(rules), "prometheus.yaml": config} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600))
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	address := l.Addr().String()
	require.NoError(t, l.Close())
	log, err := os.Create(filepath.Join(dir, "log"))
	require.NoError(t, err)
	cmd := exec.Command(*prometheusFlag, "--config.file="+filepath.Join(dir, "prometheus.yaml"),
		"--storage.tsdb.path="+filepath.Join(dir, "data"), "--web.listen-address="+address)
	cmd.Stdout, cmd.Stderr = log, log
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait() // says that it was killed
		log.Close()
		if t.Failed() {
			text, _ := os.ReadFile(log.Name())
			t.Logf("prometheus: %s", text)
		}
	})
	p := prometheus{"http://" + address}
	e.eventually(func() error { _, err := p.count("up"); return err })
	return p
}

// get makes a call of Prometheus' API.
func (p prometheus) get(path string, data any) error {
	r, err := http.Get(p.url + "/api/v1/" + path)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	answer := struct {
		Error string `json:"error"`
		Data  any    `json:"data"`
	}{Data: data}
	if err := json.NewDecoder(r.Body).Decode(&answer); err != nil {
		return err
	}
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%d %s", r.StatusCode, answer.Error)
	}
	return nil
}

// count returns how many series a query has.
func (p prometheus) count(query string) (int, error) {
	var data struct {
		Result []json.RawMessage `json:"result"`
	}
	err := p.get("query?query="+url.QueryEscape(query), &data)
	return len(data.Result), err
}

// hasData waits until a query has a series.
func (p prometheus) hasData(e *env, query string) {
	e.t.Helper()
	e.eventually(func() error {
		if n, err := p.count(query); err != nil || n == 0 {
			return fmt.Errorf("no data for %s, or %w", query, err)
		}
		return nil
	})
}

// firing returns the names of the alerts that fire.
func (p prometheus) firing(t *testing.T) (names []string) {
	t.Helper()
	var data struct {
		Alerts []struct {
			State  string            `json:"state"`
			Labels map[string]string `json:"labels"`
		} `json:"alerts"`
	}
	require.NoError(t, p.get("alerts", &data))
	for _, a := range data.Alerts {
		if a.State == "firing" {
			names = append(names, a.Labels["alertname"])
		}
	}
	return names
}

// panelQueries returns the queries of all panels of the chart's dashboards, with values for Grafana's variables.
func panelQueries(t *testing.T) (all []string) {
	t.Helper()
	files, err := filepath.Glob("../charts/berth/files/dashboards/*.json")
	require.NoError(t, err)
	for _, file := range files {
		raw, err := os.ReadFile(file)
		require.NoError(t, err)
		var board struct {
			Panels []struct {
				Targets []struct {
					Expr string `json:"expr"`
				} `json:"targets"`
			} `json:"panels"`
		}
		require.NoError(t, json.Unmarshal(raw, &board))
		for _, p := range board.Panels {
			for _, q := range p.Targets {
				filled := strings.NewReplacer("$__rate_interval", "1m", "$namespace", ".*", "$pool", ".*").Replace(q.Expr)
				all = append(all, filled)
			}
		}
	}
	require.Greater(t, len(all), 100)
	return all
}
