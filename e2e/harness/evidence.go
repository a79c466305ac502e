package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-sandbox/berth/devcluster/proc"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

// Logs are the log files of Berth's programs and of pods in a cluster's directory; those of
// the control plane are left out.
func Logs(dir string) []string {
	all, _ := filepath.Glob(filepath.Join(dir, "*.log"))
	return slices.DeleteFunc(all, func(f string) bool {
		return strings.Contains(filepath.Base(f), "apiserver") || strings.Contains(filepath.Base(f), "etcd")
	})
}

// CheckLogs returns an error that names each log in which a program reports a data race or
// has panicked.
func CheckLogs(dir string) error {
	var errs []error
	for _, f := range Logs(dir) {
		raw, err := os.ReadFile(f)
		errs = append(errs, err)
		for _, bad := range []string{"WARNING: DATA RACE", "\npanic: ", "\nfatal error: "} {
			if i := bytes.Index(raw, []byte(bad)); i >= 0 {
				errs = append(errs, fmt.Errorf("%s: %.4000s", filepath.Base(f), strings.TrimSpace(string(raw[i:]))))
			}
		}
	}
	return errors.Join(errs...)
}

// ShowLogs prints the ends of all logs.
func ShowLogs(t testing.TB, dir string) {
	for _, f := range Logs(dir) {
		if raw, err := os.ReadFile(f); err == nil {
			t.Logf("%s:\n%s", filepath.Base(f), raw[max(0, len(raw)-3000):])
		}
	}
}

// dumpWait is how long a program may take to write its goroutines to its log.
const dumpWait = time.Second

// dumpGoroutines has Berth's Go programs write the stacks of their goroutines to their logs,
// which ends them. It is for a test that has failed.
func dumpGoroutines(s *stack.Stack) {
	var all []*proc.Server
	for _, a := range s.Allocators {
		all = append(all, a.Server)
	}
	for _, g := range s.Gateways {
		all = append(all, g.Router, g.Successor)
	}
	for _, p := range all {
		if pid := p.Pid(); pid != 0 {
			_ = p.Resume() // a program that stands still writes nothing
			_ = syscall.Kill(pid, syscall.SIGQUIT)
		}
	}
	time.Sleep(dumpWait)
}

// keep copies the history and other files to a new directory, with the goroutines of the test,
// if the test has failed. It does so once.
func (r *Run) keep(files []string) {
	if !r.Failed() || r.kept {
		return
	}
	r.kept = true
	dir, err := os.MkdirTemp("", "berth-"+filepath.Base(r.Name())+"-")
	if err != nil {
		r.Logf("no evidence is kept: %v", err)
		return
	}
	for _, f := range append(files, r.History.Name()) {
		raw, readErr := os.ReadFile(f)
		err = errors.Join(err, readErr, os.WriteFile(filepath.Join(dir, filepath.Base(f)), raw, 0o600))
	}
	var stacks bytes.Buffer
	err = errors.Join(err, pprof.Lookup("goroutine").WriteTo(&stacks, 2),
		os.WriteFile(filepath.Join(dir, "goroutines.txt"), stacks.Bytes(), 0o600))
	r.Logf("the history, the logs and the goroutines are kept in %s (%v)", dir, err)
}
