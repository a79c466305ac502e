// Command hop measures what the hop through Berth costs, beside other ways to the same sandboxes, in one run: the
// ways take turns, in rounds of rotating order. Each figure comes with its ratio to a stock ext_proc server that
// does nothing (package stock), and with the spread over the rounds. The reference runs twice: how far its two
// rows are apart is the noise of the run.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-sandbox/berth/bench/hop/table"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/proc"
)

// options are the flags.
type options struct {
	out            string
	rounds         int
	warm, duration time.Duration
	cells          []cell
	only           string
	ablate         bool
	addresses      bool
	requests       int
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx)
	stop()
	if err != nil {
		log.Fatal(err)
	}
}

// quick are the cells of the requirements. They answer in three minutes.
const quick = "get/16/1000,get/64/1000"

// whole is the default: every workload, number of connections and number of sandboxes, but not every product. The most
// sandboxes come last, because Envoy then closes thousands of connections.
const whole = "get/16/1000,get/64/1000,get/1/1000,get/64/1,get/16/100,get/64/100," +
	"post/1/1000,post/16/1000,post/64/1000,websocket/1/100,websocket/16/100,websocket/64/100,get/64/10000"

func run(ctx context.Context) error {
	var o options
	var cells string
	flag.StringVar(&o.out, "out", "", "directory for the report; empty: standard output only")
	flag.IntVar(&o.rounds, "rounds", 5, "rounds of each cell")
	flag.DurationVar(&o.warm, "warm", 300*time.Millisecond,
		"least warm-up of each turn; it visits each sandbox in any case")
	flag.DurationVar(&o.duration, "duration", time.Second, "how long each turn is measured")
	flag.StringVar(&cells, "cells", "", "work/connections/sandboxes, comma-separated; or quick; empty: the default")
	flag.StringVar(&o.only, "only", "", "scenarios, comma-separated; empty: all. The reference and its control always run")
	flag.BoolVar(&o.ablate, "ablate", false, "Berth without one part each, beside the whole")
	flag.BoolVar(&o.addresses, "addresses", false, "what addresses cost that Envoy does not know yet")
	flag.IntVar(&o.requests, "requests", 0,
		"instead of the comparison, this many requests through Berth, of whose ext_proc streams none may fail")
	flag.Parse()
	switch {
	case o.requests > 0:
		cells = "get/64/1000"
	case cells == "quick", cells == "" && o.ablate:
		cells = quick
	case cells == "":
		cells = whole
	}
	var err error
	if o.cells, err = parseCells(cells); err != nil {
		return err
	}
	s, err := newSite(ctx, o)
	if err != nil {
		return err
	}
	defer func() { _ = s.sup.Close() }()
	defer s.leader.server.Stop()
	switch {
	case o.ablate:
		return s.ablate(o)
	case o.addresses:
		return s.addresses(o)
	case o.requests > 0:
		return s.count(o)
	}
	return s.compare(o)
}

// count sends requests through Berth, and fails if Envoy has counted a failed ext_proc stream, a message that it
// did not expect, or a timeout.
func (s *site) count(o options) error {
	berth := &scenario{name: nameBerth, about: "Berth's bootstrap and router", kind: kindBerth}
	if err := s.start(berth); err != nil {
		return err
	}
	report := newReport(s, o, fmt.Sprintf("%d requests through Berth", o.requests))
	report.reference = nameBerth
	var samples []sample
	var n streams
	for n.Started < o.requests {
		one, err := s.turn(berth, o.cells[0], o.warm, o.duration)
		if err != nil {
			return err
		}
		samples = append(samples, one)
		if n, err = s.streams(berth); err != nil {
			return err
		}
	}
	report.Rounds = len(samples)
	report.add(o.cells[0], []*scenario{berth}, [][]sample{samples})
	if err := report.describe(s, berth); err != nil {
		return err
	}
	if err := report.write(o.out, "requests"); err != nil {
		return err
	}
	if failed := report.Cells[0].Rows[0].Median.Failed; failed+n.Failed+n.Spurious+n.TimedOut > 0 {
		return fmt.Errorf("%d requests failed; Envoy counts %+v", failed, n)
	}
	if n.Sent != n.Started || n.Received != n.Started {
		return fmt.Errorf("not one message each way for each stream: Envoy counts %+v", n)
	}
	return nil
}

func parseCells(text string) (all []cell, err error) {
	for one := range strings.SplitSeq(text, ",") {
		parts := strings.Split(one, "/")
		if len(parts) != 3 || !slices.Contains([]string{workGet, workPost, workWebSocket}, parts[0]) {
			return nil, fmt.Errorf("cell %q: must be work/connections/sandboxes", one)
		}
		connections, err1 := strconv.Atoi(parts[1])
		sandboxes, err2 := strconv.Atoi(parts[2])
		if err := errors.Join(err1, err2); err != nil || connections < 1 || sandboxes < 1 {
			return nil, fmt.Errorf("cell %q: must have numbers above 0: %w", one, err)
		}
		all = append(all, cell{Work: parts[0], Connections: connections, Sandboxes: sandboxes})
	}
	return all, nil
}

// newSite builds the programs and starts the leader.
func newSite(ctx context.Context, o options) (*site, error) {
	most, err := mostSandboxes()
	if err != nil {
		return nil, err
	}
	s := &site{ctx: ctx}
	for i := range o.cells {
		c := &o.cells[i]
		if c.Sandboxes > most {
			fmt.Fprintf(os.Stderr, "%s: only %d sandboxes, because of the limit of open files (ulimit -n)\n", c, most)
			c.Sandboxes = most
		}
		s.sandbox = max(s.sandbox, c.Sandboxes)
	}
	if o.addresses {
		s.sandbox = rotation // visited over connections that end at once
	}
	if s.envoyBin, err = devcluster.EnvoyBinary(ctx, os.Stderr); err != nil {
		return nil, err
	}
	if s.sup, err = proc.New(); err != nil {
		return nil, err
	}
	if s.dir, err = s.sup.TempDir("", "hop-"); err != nil {
		return nil, err
	}
	s.bin = filepath.Join(s.dir, "bin")
	if err := os.Mkdir(s.bin, 0o700); err != nil {
		return nil, err
	}
	fmt.Fprintln(os.Stderr, "building the programs")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", s.bin+"/",
		"./cmd/extproc", "./bench/hop/stock", "./bench/hop/proxy", "./bench/hop/backend")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build: %w: %s", err, out)
	}
	s.leader, err = startLeader(s.sandbox)
	return s, err
}

// mostSandboxes is how many sandboxes the limit of open files allows: each worker of Envoy keeps a connection to each,
// and sometimes a second one. An Envoy without free files leaves its clients waiting. The processes that are started
// get the hard limit.
func mostSandboxes() (int, error) {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	limit.Cur = limit.Max
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("raise the limit of open files: %w", err)
	}
	const others = 1000 // files
	return int(min(limit.Max, table.Max)-others) / (concurrency + 1), nil
}

// compare runs all scenarios over all cells.
func (s *site) compare(o options) error {
	var all []*scenario
	for _, c := range scenarios() {
		always := c.name == nameReference || c.name == nameControl
		if o.only == "" || always || slices.Contains(strings.Split(o.only, ","), c.name) {
			all = append(all, c)
		}
	}
	report := newReport(s, o, "The hop")
	report.reference, report.control = nameReference, nameControl
	if err := s.measure(all, o, report); err != nil {
		return err
	}
	return report.write(o.out, "hop")
}

// measure starts scenarios, and adds to the report what they do in each cell and what they are.
func (s *site) measure(all []*scenario, o options, report *report) error {
	for _, c := range all {
		if err := s.start(c); err != nil {
			return err
		}
	}
	for _, at := range o.cells {
		began := time.Now()
		samples, err := s.rounds(all, at, o)
		if err != nil {
			return err
		}
		report.add(at, all, samples)
		fmt.Fprintf(os.Stderr, "%s: %v\n", at, time.Since(began).Round(time.Second))
	}
	for _, c := range all {
		if err := report.describe(s, c); err != nil {
			return err
		}
	}
	return nil
}

// ablate runs Berth without one part each. They take turns in groups, each with the whole, because many idle
// Envoys and routers would disturb one another.
func (s *site) ablate(o options) error {
	const groupSize = 6
	var chosen []*scenario
	for _, c := range ablations() {
		if o.only == "" || slices.Contains(strings.Split(o.only, ","), c.name) {
			chosen = append(chosen, c)
		}
	}
	report := newReport(s, o, "The hop without one part")
	report.reference, report.control = nameBerth, nameBerth+"-again"
	for group := range slices.Chunk(chosen, groupSize) {
		all := append([]*scenario{
			{name: nameBerth, about: "Berth's bootstrap and router", kind: kindBerth},
			{name: report.control, about: "the same in other processes: the control", kind: kindBerth},
			{name: nameReference, about: "the stock configuration and server", kind: kindStock},
		}, group...)
		if err := s.measure(all, o, report); err != nil {
			return err
		}
		for _, c := range all {
			s.stop(c)
			if c.traces > 0 && s.leader.spans.Load() == 0 {
				return fmt.Errorf("scenario %s: no span has arrived", c.name)
			}
		}
	}
	return report.write(o.out, "ablation")
}
