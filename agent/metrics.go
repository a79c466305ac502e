package agent

import (
	"errors"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Metrics is the JSON body of GET /metrics. Sizes are in bytes.
type Metrics struct {
	// Timestamp is in seconds of Unix time.
	Timestamp int64 `json:"ts"`
	// CPUCount is how many CPUs the sandbox may use at once. A part of one counts as one.
	CPUCount int `json:"cpu_count"`
	// CPUUsedPct is the share of CPUCount in use since the call before, or since the agent's start.
	CPUUsedPct float64 `json:"cpu_used_pct"`
	MemTotal   uint64  `json:"mem_total"`
	// MemUsed leaves out the cache that can be given back at once.
	MemUsed   uint64 `json:"mem_used"`
	MemCache  uint64 `json:"mem_cache"`
	DiskTotal uint64 `json:"disk_total"`
	DiskUsed  uint64 `json:"disk_used"`
}

// minSample is the shortest time over which CPUUsedPct is measured: calls in a row get one value.
const minSample = time.Second

// meter measures the sandbox. Its container has a limit in cgroups v2; where it has none, the machine's
// values count.
type meter struct {
	root string // of the file system

	mu   sync.Mutex
	last struct {
		at   time.Time
		used time.Duration
		pct  float64
	}
}

func newMeter(root string, now time.Time) *meter {
	m := &meter{root: root}
	m.last.at = now
	m.last.used, _ = m.cpuUsed() // the next read says why
	return m
}

func (m *meter) read(now time.Time) (*Metrics, error) {
	r := &Metrics{Timestamp: now.Unix(), CPUCount: m.cpus()}
	used, err := m.cpuUsed()
	if err != nil {
		return nil, err
	}
	r.CPUUsedPct = m.share(now, used, r.CPUCount)
	if err := m.memory(r); err != nil {
		return nil, err
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(m.root, &disk); err != nil {
		return nil, &os.PathError{Op: "statfs", Path: m.root, Err: err}
	}
	r.DiskTotal = disk.Blocks * uint64(disk.Bsize)
	r.DiskUsed = (disk.Blocks - disk.Bfree) * uint64(disk.Bsize)
	return r, nil
}

// share returns the percentage of CPU time since the last measurement.
func (m *meter) share(now time.Time, used time.Duration, cpus int) float64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	elapsed := now.Sub(m.last.at)
	if elapsed < minSample {
		return m.last.pct
	}
	pct := 100 * float64(used-m.last.used) / float64(elapsed) / float64(cpus)
	m.last.at, m.last.used, m.last.pct = now, used, min(max(pct, 0), 100)
	return m.last.pct
}

func (m *meter) cpus() int {
	text, err := m.file("sys/fs/cgroup/cpu.max")
	if f := strings.Fields(text); err == nil && len(f) == 2 {
		quota, err1 := strconv.Atoi(f[0])
		period, err2 := strconv.Atoi(f[1])
		if err1 == nil && err2 == nil && quota > 0 && period > 0 {
			return (quota + period - 1) / period
		}
	}
	return runtime.NumCPU()
}

// cpuUsed returns the CPU time of all processes so far.
func (m *meter) cpuUsed() (time.Duration, error) {
	if text, err := m.file("sys/fs/cgroup/cpu.stat"); err == nil {
		if usec, ok := field(text, "usage_usec"); ok {
			return time.Duration(usec) * time.Microsecond, nil
		}
	}
	text, err := m.file("proc/stat")
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(text, "\n")
	f := strings.Fields(line)
	const idle, iowait, guest = 4, 5, 9 // guest and what follows is in user and nice
	var ticks uint64
	for i, n := range f {
		if v, err := strconv.ParseUint(n, 10, 64); err == nil && i != idle && i != iowait && i < guest {
			ticks += v
		}
	}
	const perSecond = 100 // USER_HZ
	return time.Duration(ticks) * time.Second / perSecond, nil
}

func (m *meter) memory(r *Metrics) error {
	info, err := m.file("proc/meminfo")
	if err != nil {
		return err
	}
	kilobytes := func(name string) uint64 {
		n, _ := field(info, name+":")
		return n << 10
	}
	r.MemTotal = kilobytes("MemTotal")
	r.MemUsed = r.MemTotal - min(r.MemTotal, kilobytes("MemAvailable"))
	r.MemCache = kilobytes("Cached")
	limit, err := m.file("sys/fs/cgroup/memory.max")
	if err != nil {
		return nil // the cgroup of the machine has no limit
	}
	if n, err := strconv.ParseUint(strings.TrimSpace(limit), 10, 64); err == nil {
		r.MemTotal = min(r.MemTotal, n)
	}
	current, err := m.file("sys/fs/cgroup/memory.current")
	if err != nil {
		return err
	}
	used, err := strconv.ParseUint(strings.TrimSpace(current), 10, 64)
	if err != nil {
		return err
	}
	stat, err := m.file("sys/fs/cgroup/memory.stat")
	if err != nil {
		return err
	}
	inactive, _ := field(stat, "inactive_file")
	r.MemUsed = used - min(used, inactive)
	r.MemCache, _ = field(stat, "file")
	return nil
}

func (m *meter) file(name string) (string, error) {
	text, err := os.ReadFile(filepath.Join(m.root, name))
	return string(text), err
}

// field returns the number that follows a name at the beginning of a line.
func field(text, name string) (uint64, bool) {
	for line := range strings.Lines(text) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == name {
			n, err := strconv.ParseUint(f[1], 10, 64)
			return n, err == nil
		}
	}
	return 0, false
}

func (a *Agent) metrics(w http.ResponseWriter, _ *http.Request) {
	a.answerMetrics(w, func(m *Metrics) any { return m })
}

func (a *Agent) answerMetrics(w http.ResponseWriter, body func(*Metrics) any) {
	m, err := a.meter.read(time.Now())
	switch {
	case errors.Is(err, fs.ErrNotExist):
		Error(w, http.StatusNotImplemented, "the sandbox has no /proc: "+err.Error())
	case err != nil:
		Error(w, http.StatusInternalServerError, err.Error())
	default:
		writeJSON(w, http.StatusOK, body(m))
	}
}
