package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"time"
)

// report is the result of a run, and its JSON form.
type report struct {
	Machine   machine     `json:"machine"`
	Rounds    int         `json:"rounds"`
	Seconds   float64     `json:"secondsPerTurn"`
	Scenarios []described `json:"scenarios"`
	Cells     []result    `json:"cells"`
	// reference and control are names of scenarios.
	title, reference, control string
	// notes are lines of a table about first requests.
	notes []string
}

// machine is where and with what a run was made.
type machine struct {
	Date     string            `json:"date"`
	Commit   string            `json:"commit"`
	CPU      string            `json:"cpu"`
	Cores    int               `json:"cores"`
	Kernel   string            `json:"kernel"`
	Versions map[string]string `json:"versions"`
	// Load is how many tasks ran or waited, in the minute before the run and in its last minute.
	LoadBefore string `json:"loadBefore"`
	LoadAfter  string `json:"loadAfter"`
}

type described struct {
	Name    string  `json:"name"`
	About   string  `json:"about"`
	Streams streams `json:"extProcStreams"`
}

// result is one cell. Rows are those of the scenarios, in their order.
type result struct {
	cell
	Rows []row `json:"rows"`
}

type row struct {
	Scenario string   `json:"scenario"`
	Samples  []sample `json:"samples"`
	// Median has the median of each figure, Ratio the ratios to the reference of the same round.
	Median sample            `json:"median"`
	Ratio  map[string]spread `json:"ratio"`
}

// figures are the ratios of a row.
var figures = []struct {
	name string
	of   func(sample) float64
}{
	{"cpu", func(s sample) float64 { return s.CPU }},
	{"envoyCPU", func(s sample) float64 { return s.EnvoyCPU }},
	{"routerCPU", func(s sample) float64 { return s.RouterCPU }},
	{"p50", func(s sample) float64 { return s.P50 }},
	{"p99", func(s sample) float64 { return s.P99 }},
	{"perSecond", func(s sample) float64 { return s.PerSecond }},
}

func newReport(s *site, o options, title string) *report {
	r := &report{
		title: title, Rounds: o.rounds, Seconds: o.duration.Seconds(),
		Machine: machine{
			Date: time.Now().UTC().Format(time.DateOnly), Kernel: output("uname", "-sr"), LoadBefore: loadAverage(),
			Commit: output("git", "describe", "--always", "--dirty", "--abbrev=12"),
			CPU:    cpuModel(), Cores: runtime.NumCPU(),
			Versions: map[string]string{"go": runtime.Version(), "envoy": envoyVersion(s.envoyBin)},
		},
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, m := range info.Deps {
			if m.Path == "google.golang.org/grpc" {
				r.Machine.Versions["grpc-go"] = m.Version
			}
		}
	}
	return r
}

// describe adds a scenario and what its Envoy has counted. If it is there, the counts are added.
func (r *report) describe(s *site, c *scenario) error {
	n, err := s.streams(c)
	i := slices.IndexFunc(r.Scenarios, func(d described) bool { return d.Name == c.name })
	if i < 0 {
		r.Scenarios = append(r.Scenarios, described{Name: c.name, About: c.about, Streams: n})
		return err
	}
	r.Scenarios[i].Streams = r.Scenarios[i].Streams.add(n)
	return err
}

// output is what a program prints, "" if it fails.
func output(program string, args ...string) string {
	raw, err := exec.Command(program, args...).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(raw))
}

func envoyVersion(bin string) string {
	parts := strings.Split(output(bin, "--version"), "/")
	if len(parts) < 2 {
		return ""
	}
	return parts[len(parts)-4]
}

func cpuModel() string {
	raw, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(raw)) {
		if name, ok := strings.CutPrefix(line, "model name"); ok {
			return strings.TrimSpace(strings.TrimLeft(name, "\t :"))
		}
	}
	return runtime.GOARCH
}

func loadAverage() string {
	raw, _ := os.ReadFile("/proc/loadavg")
	one, _, _ := strings.Cut(string(raw), " ")
	return one
}

// add adds a cell. samples are by scenario and round.
func (r *report) add(at cell, all []*scenario, samples [][]sample) {
	reference := slices.IndexFunc(all, func(c *scenario) bool { return c.name == r.reference })
	one := result{cell: at}
	for i, of := range samples {
		row := row{Scenario: all[i].name, Samples: of, Median: medians(of), Ratio: map[string]spread{}}
		for _, f := range figures {
			ratios := make([]float64, len(of))
			for round := range of {
				if to := f.of(samples[reference][round]); to > 0 {
					ratios[round] = f.of(of[round]) / to
				}
			}
			row.Ratio[f.name] = spreadOf(ratios)
		}
		one.Rows = append(one.Rows, row)
	}
	r.Cells = append(r.Cells, one)
}

func medians(of []sample) sample {
	median := func(f func(sample) float64) float64 {
		numbers := make([]float64, len(of))
		for i := range of {
			numbers[i] = f(of[i])
		}
		return spreadOf(numbers).Median
	}
	m := sample{
		Requests: int(median(func(s sample) float64 { return float64(s.Requests) })), PerSecond: median(figures[5].of),
		P50: median(figures[3].of), P99: median(figures[4].of), EnvoyCPU: median(figures[1].of),
		RouterCPU: median(figures[2].of), CPU: median(figures[0].of),
		EnvoyMainCPU:   median(func(s sample) float64 { return s.EnvoyMainCPU }),
		EnvoyMainShare: median(func(s sample) float64 { return s.EnvoyMainShare }),
		RouterAllocs:   median(func(s sample) float64 { return s.RouterAllocs }),
		EnvoyRSS:       int64(median(func(s sample) float64 { return float64(s.EnvoyRSS) })),
		RouterRSS:      int64(median(func(s sample) float64 { return float64(s.RouterRSS) })),
	}
	for i := range of {
		m.Failed += of[i].Failed
	}
	return m
}

// noise is how far the control is from the reference in a cell, as a share, by the medians of the sum of CPU.
func (r *report) noise(of result) float64 {
	for _, w := range of.Rows {
		if w.Scenario == r.control {
			return math.Abs(w.Ratio["cpu"].Median - 1)
		}
	}
	return 0
}

// noisy is the noise above which a cell must not be quoted.
const noisy = 0.05

func (r *report) write(dir, name string) error {
	r.Machine.LoadAfter = loadAverage()
	var text strings.Builder
	r.markdown(&text)
	fmt.Println(text.String())
	if dir == "" {
		return nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	raw, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	// Each sample is one line.
	raw = regexp.MustCompile(`\{[^{}\[\]]*\}`).ReplaceAllFunc(raw, func(o []byte) []byte {
		return bytes.Join(bytes.Fields(o), []byte(" "))
	})
	if err := os.WriteFile(filepath.Join(dir, name+".json"), append(raw, '\n'), 0o644); err != nil {
		return err
	}
	if r.reference == nameReference && r.notes == nil {
		for file, svg := range r.charts() {
			if err := os.WriteFile(filepath.Join(dir, file), []byte(svg), 0o644); err != nil {
				return err
			}
			fmt.Fprintf(&text, "\n![%s](%s)\n", strings.TrimSuffix(file, ".svg"), file)
		}
	}
	return os.WriteFile(filepath.Join(dir, name+".md"), []byte(text.String()), 0o644)
}

// markdown writes the report for readers.
func (r *report) markdown(w *strings.Builder) {
	fmt.Fprintf(w, "# %s\n\n", r.title)
	r.head(w)
	for _, c := range r.Cells {
		fmt.Fprintf(w, "\n## %s\n\n", c.cell)
		if n := r.noise(c); r.control != "" {
			fmt.Fprintf(w, "The control differs by %.0f %% in CPU.", 100*n)
			if n > noisy {
				w.WriteString(" **Do not quote this cell.**")
			}
			w.WriteString("\n\n")
		}
		fmt.Fprintln(w, "| scenario | requests/s | p50 us | p99 us | CPU us: Envoy | its main thread (of a core) "+
			"| router | sum | CPU ratio | router CPU ratio | p50 ratio | p99 ratio | router allocs | Envoy MB | router MB |")
		w.WriteString("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n")
		for _, x := range c.Rows {
			m := x.Median
			fmt.Fprintf(w, "| %s | %.0f | %.0f | %.0f | %.1f | %.1f (%.0f %%) | %.1f | %.1f "+
				"| %s | %.2f | %s | %s | %.1f | %d | %d |\n",
				x.Scenario, m.PerSecond, m.P50, m.P99, m.EnvoyCPU, m.EnvoyMainCPU, 100*m.EnvoyMainShare, m.RouterCPU, m.CPU,
				x.Ratio["cpu"], x.Ratio["routerCPU"].Median, x.Ratio["p50"], x.Ratio["p99"], m.RouterAllocs,
				m.EnvoyRSS>>20, m.RouterRSS>>20)
			if m.Failed > 0 {
				fmt.Fprintf(w, "| **%d exchanges of %s failed** | | | | | | | | | | | | | | |\n", m.Failed, x.Scenario)
			}
		}
	}
	r.firstRequests(w)
}

func (r *report) firstRequests(w *strings.Builder) {
	if r.notes == nil {
		return
	}
	fmt.Fprintf(w, "\n## First requests to a new sandbox at once\n\n%d sandboxes in turn.\n\n", bursts)
	w.WriteString("| scenario | clients at once | host objects a sandbox | bytes of Envoy a sandbox | p50 ms | p99 ms |\n")
	w.WriteString("|---|---|---|---|---|---|\n" + strings.Join(r.notes, "\n") + "\n")
}

func (r *report) head(w *strings.Builder) {
	m := r.Machine
	fmt.Fprintf(w, "%s, commit %s. %d cores of %s, %s. Envoy %s, grpc-go %s, %s. Load average %s before, %s after.\n",
		m.Date, m.Commit, m.Cores, m.CPU, m.Kernel, m.Versions["envoy"], m.Versions["grpc-go"], m.Versions["go"],
		m.LoadBefore, m.LoadAfter)
	fmt.Fprintf(w, "%d rounds of rotating order, %.1f s for each turn. Ratios are "+
		"to `%s` in the same round: the median, and the range in brackets.\n\n", r.Rounds, r.Seconds, r.reference)
	if r.control != "" {
		fmt.Fprintf(w, "The control is `%s`: how far it is from `%s` is the noise of a cell. ", r.control, r.reference)
		fmt.Fprintf(w, "A cell in which that is above %.0f %% must not be quoted.\n\n", 100*noisy)
	}
	w.WriteString("| scenario | | ext_proc streams | messages sent | received | streams failed | " +
		"spurious messages | timeouts |\n|---|---|---|---|---|---|---|---|\n")
	for _, d := range r.Scenarios {
		n := d.Streams
		fmt.Fprintf(w, "| %s | %s | %d | %d | %d | %d | %d | %d |\n",
			d.Name, d.About, n.Started, n.Sent, n.Received, n.Failed, n.Spurious, n.TimedOut)
	}
}

func (s spread) String() string { return fmt.Sprintf("%.2f (%.2f-%.2f)", s.Median, s.Least, s.Most) }
