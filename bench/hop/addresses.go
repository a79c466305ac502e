package main

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/berth-sandbox/berth/envoy"
)

// ORIGINAL_DST makes a host object for each address, and copies the map of them on the main thread for each new one.

const (
	// rotation is how many addresses take turns. At the highest rate each rests for longer than Envoy keeps an
	// address without requests, which is two cleanup intervals of 5 s.
	rotation = 60_000
	// rest is after how long Envoy has forgotten all addresses.
	rest = 11 * time.Second
	// burst is how many clients visit a new sandbox at once.
	burst = 64
	// bursts is how many sandboxes are visited so.
	bursts = 200
)

// rates are new addresses a second.
var rates = []int{100, 1000, 3000}

// addresses measures what new addresses cost.
func (s *site) addresses(o options) error {
	all := []*scenario{
		{name: nameReference, about: "the stock configuration and server", kind: kindStock, once: true},
		{name: nameControl, about: "the same in other processes: the control", kind: kindStock, once: true},
		{name: nameBerth, about: "Berth's bootstrap and router", kind: kindBerth, once: true},
		{name: "looks", about: "Berth without looks at the open requests", kind: kindBerth, once: true,
			args: []string{"--envoy-admin=/nowhere"}},
	}
	report := newReport(s, o, "New addresses")
	report.reference, report.control = nameReference, nameControl
	for _, c := range all {
		if err := s.start(c); err != nil {
			return err
		}
	}
	for _, rate := range rates {
		at := cell{Work: workGet, Connections: burst, Sandboxes: rotation, Rate: rate}
		began := time.Now()
		samples := make([][]sample, len(all))
		for round := range o.rounds {
			for i := range all {
				which := (i + round) % len(all)
				// The warm-up lasts until Envoy forgets as many addresses as it learns.
				one, err := s.turn(all[which], at, rest, o.duration)
				if err != nil {
					return err
				}
				samples[which] = append(samples[which], one)
			}
		}
		report.add(at, all, samples)
		fmt.Fprintf(os.Stderr, "%s: %v\n", at, time.Since(began).Round(time.Second))
	}
	for _, c := range all {
		for _, clients := range []int{1, burst} {
			text, err := s.firstRequests(c, clients)
			if err != nil {
				return err
			}
			report.notes = append(report.notes, text)
			time.Sleep(rest)
		}
		if err := report.describe(s, c); err != nil {
			return err
		}
	}
	return report.write(o.out, "addresses")
}

// firstRequests visits new sandboxes, each with so many clients at once, and says what Envoy then holds.
func (s *site) firstRequests(c *scenario, clients int) (string, error) {
	before, err := s.memory(c)
	if err != nil {
		return "", err
	}
	l := &load{target: c.target, work: workGet, sandboxes: bursts, rate: 1}
	workers := make([]*worker, clients)
	for i := range workers {
		workers[i] = &worker{load: l}
	}
	var took []time.Duration
	for sandbox := range bursts {
		var mu sync.Mutex
		var all sync.WaitGroup
		for _, w := range workers {
			all.Go(func() {
				began := time.Now()
				if err := w.exchange(sandbox); err != nil {
					w.fail(err)
				}
				mu.Lock()
				defer mu.Unlock()
				took = append(took, time.Since(began))
			})
		}
		all.Wait()
	}
	hosts, err := s.hosts(c)
	if err != nil {
		return "", err
	}
	after, err := s.memory(c)
	for _, w := range workers {
		w.hangUp()
	}
	if err == nil {
		err = l.all.err
	}
	slices.Sort(took)
	return fmt.Sprintf("| %s | %d | %.1f | %d | %.1f | %.1f |",
		c.name, clients, float64(hosts)/bursts, (after-before)/bursts,
		float64(took[len(took)/2].Microseconds())/1000, float64(took[len(took)*99/100].Microseconds())/1000), err
}

// hosts is how many host objects Envoy has for the sandboxes.
func (s *site) hosts(c *scenario) (n int, err error) {
	var all struct {
		Clusters []struct {
			Name  string
			Hosts []struct{} `json:"host_statuses"`
		} `json:"cluster_statuses"`
	}
	err = s.get(envoy.AdminClient(c.adminSocket), "http://envoy/clusters?format=json", &all)
	for _, of := range all.Clusters {
		if strings.HasPrefix(of.Name, "pods") {
			n += len(of.Hosts)
		}
	}
	return n, err
}

// memory is how many bytes Envoy has allocated.
func (s *site) memory(c *scenario) (int, error) {
	var page struct{ Allocated string }
	if err := s.get(envoy.AdminClient(c.adminSocket), "http://envoy/memory", &page); err != nil {
		return 0, err
	}
	return strconv.Atoi(page.Allocated)
}
