package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/api/metric"
)

const chartFiles = "../../charts/berth/files"

// The name of a ConfigMap's only key and its frame take some of its 1 MiB.
const maxDashboard = 900 << 10

func TestFilesOfTheChartAreTheGeneratedOnes(t *testing.T) {
	files, err := generate()
	require.NoError(t, err)
	var there []string
	for _, pattern := range []string{"dashboards/*", "rules/*"} {
		found, err := filepath.Glob(filepath.Join(chartFiles, pattern))
		require.NoError(t, err)
		there = append(there, found...)
	}
	require.Len(t, there, len(files))
	for name, content := range files {
		require.Less(t, len(content), maxDashboard, name)
		raw, err := os.ReadFile(filepath.Join(chartFiles, name))
		require.NoError(t, err)
		require.Equal(t, string(content), string(raw), "%s is stale: run make generate", name)
	}
}

// labelsOf returns the labels that the series of each name have, and those of what rules record.
func labelsOf(t *testing.T) map[string][]string {
	t.Helper()
	known := map[string][]string{}
	for _, of := range []metric.Program{metric.Allocator, metric.Router, metric.Egress} {
		for _, r := range metric.Table(of) {
			all := append([]string{namespace, pod}, r.Labels...)
			if r.Type != metric.TypeHistogram {
				known[r.Name] = all
				continue
			}
			h := metric.Histogram{Row: r}
			known[h.CountName()], known[h.SumName()], known[h.BucketName()] = all, all, append(slices.Clone(all), "le")
		}
	}
	for _, g := range rules().Groups {
		for _, r := range g.Rules {
			if r.Record != "" {
				require.NotContains(t, known, r.Record)
				known[r.Record] = []string{namespace}
			}
		}
	}
	return known
}

// filledIn is a query with values for Grafana's variables.
func filledIn(query string) string {
	return strings.NewReplacer("$__rate_interval", "5m", "$namespace", ".*", "$pool", ".*").Replace(query)
}

// wrong parses a query, and returns why it names something that is not known.
func wrong(known map[string][]string, query string) error {
	expr, err := parser.NewParser(parser.Options{}).ParseExpr(filledIn(query))
	if err != nil {
		return err
	}
	for _, node := range below(expr) {
		switch n := node.(type) {
		case *parser.VectorSelector:
			if known[n.Name] == nil {
				return fmt.Errorf("%s is not in the table", n.Name)
			}
			for _, m := range n.LabelMatchers {
				if m.Name != labels.MetricName && !slices.Contains(known[n.Name], m.Name) {
					return fmt.Errorf("%s has no label %s", n.Name, m.Name)
				}
			}
		case *parser.AggregateExpr: // every series below it must have the labels that it keeps
			for _, inner := range below(n.Expr) {
				if s, ok := inner.(*parser.VectorSelector); ok {
					for _, label := range n.Grouping {
						if !slices.Contains(known[s.Name], label) {
							return fmt.Errorf("%s has no label %s", s.Name, label)
						}
					}
				}
			}
		}
	}
	return nil
}

func below(expr parser.Expr) (all []parser.Node) {
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		all = append(all, node)
		return nil
	})
	return all
}

func TestEveryQueryNamesMetricsAndLabelsOfTheTable(t *testing.T) {
	known := labelsOf(t)
	for _, g := range rules().Groups {
		for _, r := range g.Rules {
			require.NoError(t, wrong(known, r.Expr), r.Expr)
		}
	}
	panels := 0
	for _, d := range dashboards() {
		for _, r := range d.rows {
			for _, p := range r.panels {
				require.NotEmpty(t, p.queries, p.title)
				for _, q := range p.queries {
					require.NoError(t, wrong(known, q.expr), q.expr)
					panels++
				}
			}
		}
	}
	require.Greater(t, panels, 80)
}

func TestQueriesWithWrongNamesOrLabelsAreFound(t *testing.T) {
	known := labelsOf(t)
	for _, good := range []string{"sum by (pool) (berth_allocator_pool_pods)", `rate(berth_router_requests_total{outcome="admitted"}[$__rate_interval])`} {
		require.NoError(t, wrong(known, good))
	}
	for _, bad := range []string{
		"sum by (pool) (berth_allocator_pool_podz)", "sum by (poool) (berth_allocator_pool_pods)", `berth_allocator_pool_pods{phase="warm"}`, "sum by (pool (x)",
		"sum by (pool) (rate(berth_router_requests_total[5m]))",
	} {
		require.Error(t, wrong(known, bad), bad)
	}
}

// Every metric is on a dashboard, or an operator does not see it.
func TestEveryMetricIsOnADashboard(t *testing.T) {
	var all strings.Builder
	for _, d := range dashboards() {
		for _, r := range d.rows {
			for _, p := range r.panels {
				for _, q := range p.queries {
					all.WriteString(q.expr + "\n")
				}
			}
		}
	}
	for _, of := range []metric.Program{metric.Allocator, metric.Router, metric.Egress} {
		for _, r := range metric.Table(of) {
			require.Regexp(t, r.Name+`\b|`+r.Name+`_(bucket|sum|count)\b`, all.String())
		}
	}
}

func TestEveryAlertIsWholeAndHasItsSectionInTheRunbook(t *testing.T) {
	raw, err := os.ReadFile("../../docs/runbook.md")
	require.NoError(t, err)
	sections := map[string]string{}
	for _, part := range strings.Split(string(raw), "\n## ")[1:] {
		title, body, _ := strings.Cut(part, "\n")
		sections[title] = body
	}
	alerts := map[string]bool{}
	for _, g := range rules().Groups {
		for _, r := range g.Rules {
			if r.Alert == "" {
				continue
			}
			alerts[r.Alert] = true
			require.Contains(t, []string{page, ticket}, r.Labels["severity"], r.Alert)
			require.NotEmpty(t, r.Annotations["summary"], r.Alert)
			require.NotEmpty(t, r.Annotations["description"], r.Alert)
			require.Equal(t, runbook+"#"+strings.ToLower(r.Alert), r.Annotations["runbook_url"])
			require.Contains(t, sections[r.Alert], "\n1. ", "%s has no steps in the runbook", r.Alert)
		}
	}
	for title := range sections {
		require.True(t, alerts[title] || !strings.HasPrefix(title, "Berth"), "the runbook has a section for %s, which is no alert", title)
	}
}
