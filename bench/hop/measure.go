package main

import (
	"bufio"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/envoy"
)

// cell is one kind of load.
type cell struct {
	Work        string `json:"work"`
	Connections int    `json:"connections"`
	Sandboxes   int    `json:"sandboxes"`
	// Rate is how many sandboxes that Envoy does not know are visited in a second. 0: a closed loop.
	Rate int `json:"rate,omitempty"`
}

func (c cell) String() string {
	if c.Rate > 0 {
		return fmt.Sprintf("%d new addresses a second", c.Rate)
	}
	return fmt.Sprintf("%s, %d connections, %d sandboxes", c.Work, c.Connections, c.Sandboxes)
}

// sample is what one turn of a scenario has shown. Times are in microseconds, CPU per request.
type sample struct {
	Requests  int     `json:"requests"`
	Failed    int     `json:"failed"`
	PerSecond float64 `json:"perSecond"`
	P50       float64 `json:"p50"`
	P99       float64 `json:"p99"`
	// EnvoyCPU is that of all threads of Envoy, EnvoyMainCPU that of its main thread.
	EnvoyCPU     float64 `json:"envoyCPU"`
	EnvoyMainCPU float64 `json:"envoyMainCPU"`
	RouterCPU    float64 `json:"routerCPU"`
	// EnvoyMainShare is the part of a core that the main thread of Envoy uses.
	EnvoyMainShare float64 `json:"envoyMainShare"`
	// CPU is the sum of Envoy and router.
	CPU          float64 `json:"cpu"`
	RouterAllocs float64 `json:"routerAllocs"`
	// In bytes.
	EnvoyRSS  int64 `json:"envoyRSS"`
	RouterRSS int64 `json:"routerRSS"`
}

// counters are totals of the processes of a scenario.
type counters struct {
	envoy, envoyMain, router time.Duration
	mallocs                  float64
}

// turn measures one scenario once.
func (s *site) turn(c *scenario, at cell, warm, duration time.Duration) (sample, error) {
	l := start(c.target, at.Work, at.Connections, at.Sandboxes, at.Rate)
	least := time.After(warm)
	l.warm.Wait()
	<-least
	before, err := s.read(c)
	if err != nil {
		l.end()
		return sample{}, err
	}
	began := time.Now()
	l.phase.Store(phaseMeasured)
	time.Sleep(duration)
	after, err := s.read(c)
	took := time.Since(began)
	seen := l.end()
	if err != nil {
		return sample{}, err
	}
	if seen.err != nil {
		fmt.Fprintf(os.Stderr, "%s, %s: %d failed: %v\n%s", c.name, at, seen.bad, seen.err, s.logs(c))
	}
	n := len(seen.took)
	if n == 0 {
		return sample{}, fmt.Errorf("%s, %s: no request was answered: %w", c.name, at, seen.err)
	}
	per := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 / float64(n) }
	quantile := func(q float64) float64 { return float64(seen.took[int(q*float64(n-1))]) / 1000 }
	r := sample{
		Requests: n, Failed: seen.bad, PerSecond: float64(n) / took.Seconds(), P50: quantile(.5), P99: quantile(.99),
		EnvoyCPU: per(after.envoy - before.envoy), EnvoyMainCPU: per(after.envoyMain - before.envoyMain),
		RouterCPU: per(after.router - before.router), RouterAllocs: (after.mallocs - before.mallocs) / float64(n),
		EnvoyRSS: rss(c.envoy), RouterRSS: rss(c.router),
	}
	r.EnvoyMainShare = (after.envoyMain - before.envoyMain).Seconds() / took.Seconds()
	r.CPU = r.EnvoyCPU + r.RouterCPU
	return r, nil
}

// read reads the counters. It costs the router one page, which is small against what a turn allocates.
func (s *site) read(c *scenario) (n counters, err error) {
	var errs [3]error
	if c.metrics != "" {
		n.mallocs, errs[0] = s.mallocs(c.metrics)
	}
	n.envoy, n.envoyMain, errs[1] = cpu(c.envoy)
	n.router, _, errs[2] = cpu(c.router)
	return n, errors.Join(errs[:]...)
}

// cpu returns how long the threads of a process have run, by the scheduler's accounts, and how long the first has.
func cpu(p *proc.Process) (all, first time.Duration, err error) {
	if p == nil {
		return 0, 0, nil
	}
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", p.Pid()))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("process %d has ended, or this kernel has no schedstat", p.Pid())
	}
	for _, file := range files {
		raw, readErr := os.ReadFile(file)
		if readErr != nil {
			continue // the thread has ended
		}
		ran, _, _ := strings.Cut(string(raw), " ")
		ns, parseErr := strconv.ParseInt(ran, 10, 64)
		if parseErr != nil {
			return 0, 0, fmt.Errorf("%s: %w", file, parseErr)
		}
		all += time.Duration(ns)
		if strings.Contains(file, fmt.Sprintf("/task/%d/", p.Pid())) {
			first = time.Duration(ns)
		}
	}
	return all, first, err
}

// rss is the memory of a process in bytes, 0 if it is not known.
func rss(p *proc.Process) int64 {
	if p == nil {
		return 0
	}
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.Pid()))
	if err != nil {
		return 0
	}
	pages, _ := strconv.ParseInt(strings.Fields(string(raw))[1], 10, 64)
	return pages * int64(os.Getpagesize())
}

// mallocs reads how many objects a Go program has allocated.
func (s *site) mallocs(url string) (float64, error) {
	r, err := http.NewRequestWithContext(s.ctx, http.MethodGet, url, http.NoBody)
	if err != nil {
		return 0, err
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	for lines := bufio.NewScanner(response.Body); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "go_memstats_mallocs_total "); ok {
			return strconv.ParseFloat(value, 64)
		}
	}
	return 0, fmt.Errorf("%s has no go_memstats_mallocs_total", url)
}

// streams are Envoy's counters of ext_proc since it began.
type streams struct {
	Started  int `json:"started"`
	Sent     int `json:"messagesSent"`
	Received int `json:"messagesReceived"`
	Failed   int `json:"failed"`
	Spurious int `json:"spurious"`
	TimedOut int `json:"timedOut"`
}

func (s *site) streams(c *scenario) (n streams, err error) {
	if c.kind != kindStock && c.kind != kindBerth {
		return n, nil
	}
	var all struct {
		Stats []struct {
			Name  string
			Value int
		}
	}
	err = s.get(envoy.AdminClient(c.adminSocket), "http://envoy/stats?format=json&filter=ext_proc", &all)
	counts := map[string]*int{
		"streams_started": &n.Started, "stream_msgs_sent": &n.Sent, "stream_msgs_received": &n.Received,
		"streams_failed": &n.Failed, "spurious_msgs_received": &n.Spurious, "message_timeouts": &n.TimedOut,
	}
	for _, stat := range all.Stats {
		if count, ok := counts[stat.Name[strings.LastIndexByte(stat.Name, '.')+1:]]; ok {
			*count += stat.Value
		}
	}
	return n, err
}

// add adds the counts of another Envoy.
func (n streams) add(other streams) streams {
	return streams{
		n.Started + other.Started, n.Sent + other.Sent, n.Received + other.Received,
		n.Failed + other.Failed, n.Spurious + other.Spurious, n.TimedOut + other.TimedOut,
	}
}

// rounds lets the scenarios take turns, in rounds of rotating order, and returns the samples by scenario.
func (s *site) rounds(all []*scenario, at cell, o options) ([][]sample, error) {
	samples := make([][]sample, len(all))
	for round := range o.rounds {
		for i := range all {
			if err := s.ctx.Err(); err != nil {
				return nil, err
			}
			which := (i + round) % len(all)
			one, err := s.turn(all[which], at, o.warm, o.duration)
			if err != nil {
				return nil, err
			}
			samples[which] = append(samples[which], one)
		}
	}
	return samples, nil
}

// spread is the middle of some numbers, and their range.
type spread struct {
	Median float64 `json:"median"`
	Least  float64 `json:"least"`
	Most   float64 `json:"most"`
}

func spreadOf(numbers []float64) spread {
	sorted := slices.Sorted(slices.Values(numbers))
	n := len(sorted)
	return spread{(sorted[(n-1)/2] + sorted[n/2]) / 2, sorted[0], sorted[n-1]}
}
