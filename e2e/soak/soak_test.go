package soak

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/api/v1alpha1"
	"github.com/berth-sandbox/berth/e2e/internal/programs"
	"github.com/berth-sandbox/berth/e2e/soak/history"
)

func TestNoRequestReachesTheWrongSandboxWhateverHappens(t *testing.T) {
	require.GreaterOrEqual(t, *durationFlag, 20*time.Second)
	g := newGround(t)
	perSecond := *rateFlag
	if perSecond == 0 {
		perSecond = 500
		if programs.Race {
			perSecond = 150
		}
	}
	// Allocators are kept running to the end of the test, faults stop first, then what
	// is asked for.
	keeping, stopKeeping := context.WithCancel(t.Context())
	working, stopWorking := context.WithCancel(t.Context())
	disturbing, stopDisturbing := context.WithTimeout(t.Context(), *durationFlag)
	var kept, disturbed, worked sync.WaitGroup
	t.Cleanup(func() {
		stopDisturbing()
		disturbed.Wait()
		stopWorking()
		worked.Wait()
		stopKeeping()
		kept.Wait()
	})
	g.keep(keeping, &kept)
	l := &load{ground: g, limiter: rate.NewLimiter(rate.Limit(perSecond), 10)}
	l.start(working, &worked)
	disturbed.Go(func() { g.disturb(disturbing, &disturbed) })
	disturbed.Go(func() { g.churn(disturbing) })
	disturbed.Wait()
	g.recovers(l)
	stopWorking()
	worked.Wait()
	g.writeRecords()
	g.writeReceived()
	g.judge()
}

// recovers waits until every gateway serves a sandbox again that it could not have
// known before.
func (g *ground) recovers(l *load) {
	g.Helper()
	random := g.random("recovery")
	var s history.Event
	g.eventually(func(ctx context.Context) error {
		s = g.call(ctx, random, history.Event{Kind: history.Claim, Key: "recovery", Timeout: time.Minute}, http.MethodPost, "/sandboxes",
			fmt.Sprintf(`{"templateID":%q,"timeout":60,"waitTimeout":3}`, poolName))
		if s.Code != http.StatusCreated {
			return fmt.Errorf("claim: %d %s %s", s.Code, s.Reason, s.Error)
		}
		return nil
	})
	g.knows(s.Sandbox)
	for _, w := range g.gateways {
		require.True(g, w.router.Running(), "%s has no router", w.name)
		g.eventually(func(ctx context.Context) error {
			e, _, host := l.begin(random, s.Sandbox, "get")
			e.Gateway = w.name
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+w.Addr.String()+"/", io.NopCloser(http.NoBody))
			if err != nil {
				return err
			}
			if e = l.send(e, w, r, host); e.PodUID == "" {
				return fmt.Errorf("%s answers %d %s %s", w.name, e.Code, e.Reason, e.Error)
			}
			return nil
		})
	}
}

// writeRecords writes down which pod each sandbox is, when all that were answered are
// on record.
func (g *ground) writeRecords() {
	g.Helper()
	var records v1alpha1.SandboxList
	g.eventually(func(ctx context.Context) error {
		if err := g.clients.Berth.Get().Namespace(namespace).Resource("sandboxes").Do(ctx).Into(&records); err != nil {
			return err
		}
		there := map[string]bool{}
		for _, r := range records.Items {
			there[r.Name] = true
		}
		g.mu.Lock()
		defer g.mu.Unlock()
		for id := range g.named {
			if !there[id] {
				return fmt.Errorf("sandbox %s was answered, and has no Sandbox object", id)
			}
		}
		return nil
	})
	for _, r := range records.Items {
		g.Add(history.Event{Kind: history.Record, Sandbox: r.Name, Pod: r.Spec.PodName, PodUID: r.Spec.PodUID, Address: r.Spec.PodIP, Reason: r.Status.Reason})
	}
}

// writeReceived writes down what the pods have.
func (g *ground) writeReceived() {
	g.Helper()
	files, err := filepath.Glob(filepath.Join(g.records, "*.jsonl"))
	require.NoError(g, err)
	for _, name := range files {
		raw, err := os.ReadFile(name)
		require.NoError(g, err)
		lines := bufio.NewScanner(strings.NewReader(string(raw)))
		for lines.Scan() {
			var r struct {
				At                                       int64
				Pod, PodUID, Host, Method, Path, Request string
			}
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				// A pod that is killed while it writes may leave the last line unfinished.
				require.True(g, !lines.Scan() && !strings.HasSuffix(string(raw), "\n"), "%s: %v", name, err)
				break
			}
			g.Add(history.Event{
				Kind: history.Received, Began: time.Duration(r.At), Sandbox: sandboxOf(r.Host), Request: r.Request,
				Pod: r.Pod, PodUID: r.PodUID, What: r.Method + " " + r.Path,
			})
		}
		require.NoError(g, lines.Err())
	}
}

// judge judges the file.
func (g *ground) judge() {
	g.Helper()
	require.NoError(g, g.Flush())
	file, err := os.Open(g.file)
	require.NoError(g, err)
	defer file.Close()
	events, err := history.Read(file)
	require.NoError(g, err)
	v := history.Judge(events)
	for i, m := range v.Mismatches {
		if i == 30 {
			g.Errorf("and %d more", len(v.Mismatches)-i)
			break
		}
		g.Error(m)
	}
	g.Logf("seed %d, %v:\n%s", g.seed, *durationFlag, v)
	for _, m := range tooFew(v, *durationFlag) {
		g.Error(m)
	}
}

// tooFew says what has not happened often enough for the verdict to mean anything.
func tooFew(v history.Verdict, lasted time.Duration) []string {
	var all []string
	least := func(what string, count int, perMinute float64) {
		if want := int(math.Round(perMinute * lasted.Minutes())); count < want {
			all = append(all, fmt.Sprintf("nothing is proven: %s: %d, expected %d at least", what, count, want))
		}
	}
	least("requests", v.Requests, 2000)
	least("requests received by pods", v.Received, 500)
	least("claims answered", v.Claims, 15)
	least("releases acknowledged by all routers", v.Acknowledged, 3)
	least("addresses used again", v.Reuses, 10)
	least("requests for a sandbox that was gone", v.After, 100)
	least("requests for a sandbox that was gone, with another one at its address", v.Tempted, 50)
	for _, f := range append(faults(), fault{name: "pod-deleted by force"}, fault{name: "pod-deleted plainly"}) {
		least("faults "+f.name, v.Faults[f.name], 0.5)
	}
	for _, what := range []string{"get", "post", "http2", "slow", "websocket"} {
		least("requests "+what, v.What[what], 5)
	}
	return all
}

func TestARunInWhichNothingHappensFails(t *testing.T) {
	full := history.Verdict{
		Requests: 4000, Received: 1000, Claims: 30, Acknowledged: 6, Reuses: 20, After: 200, Tempted: 100,
		Faults: map[string]int{"pod-deleted by force": 1, "pod-deleted plainly": 1}, What: map[string]int{"get": 10, "post": 10, "http2": 10, "slow": 10, "websocket": 10},
	}
	for _, f := range faults() {
		full.Faults[f.name] = 1
	}
	require.Empty(t, tooFew(full, 2*time.Minute))
	require.Len(t, tooFew(full, 4*time.Minute), 7+len(full.Faults)+len(full.What))
	full.Tempted--
	require.Len(t, tooFew(full, 2*time.Minute), 1)
	require.NotEmpty(t, tooFew(history.Verdict{}, 20*time.Second))
}

// The schedule is the seed's, and a round has everything in it.
func TestARoundHasEveryFaultAndIsRepeatedByItsSeed(t *testing.T) {
	names := func(seed uint64) (all []string) {
		for _, f := range round((&ground{seed: seed}).random("faults")) {
			all = append(all, f.name)
		}
		return all
	}
	require.Equal(t, names(1), names(1))
	require.NotEqual(t, names(1), names(2))
	require.ElementsMatch(t, names(1), names(2))
	for _, f := range faults() {
		require.Contains(t, names(1), f.name)
	}
}
