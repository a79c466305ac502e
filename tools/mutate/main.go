// Command mutate proves that tests fail when the promise that they guard is broken.
//
// The files in breaks list breaks. A break names a promise, the test that must go red,
// and the edits that break the promise:
//
//	# tools/mutate/breaks/fence.yaml
//	- name: fence-skipped
//	  promise: "I3: a released pod is deleted only after its fence"
//	  test: ./allocator/core TestReleasedPodStaysUntilEveryRouterAcknowledged
//	  edits:
//	  - package: allocator/core/fence
//	    decl: (*Ledger).Advance
//	    old: len(f.waiting) > 0
//	    new: "false"
//
// The value of test is a package, a test and flags of the test, if it needs any. An edit
// replaces old by new in one declaration: a function, a method, a type, a constant or a
// variable. The tool finds a declaration by its name, in any file of the package. White
// space and line breaks in old stand for any. The old text must occur once in the
// declaration, unless the edit says "all: true". An edit of a file that is not Go has a
// file instead of a package and a declaration.
//
// Without flags the tool applies one break after the other and runs its test, which must
// fail. With --check it runs no test. It reports every break that does not apply, does not
// compile or names a test that does not exist. CI runs that. Arguments choose breaks by
// their names, or all breaks of a file by the file's name without ".yaml".
//
// Go files stay as they are: the compiler reads the changed ones from elsewhere (go build
// -overlay). A file that is not Go is changed in place while the test of its break runs.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutate:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mutate", flag.ContinueOnError)
	checkOnly := flags.Bool("check", false, "only apply and compile the breaks and look for their tests")
	if err := flags.Parse(args); err != nil {
		return err
	}
	mutations, err := read("tools/mutate/breaks", flags.Args())
	if err != nil {
		return err
	}
	var failed []string
	if *checkOnly {
		failed = check(ctx, mutations, out)
	} else {
		failed = try(ctx, mutations, out)
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d: %s", len(failed), len(mutations), strings.Join(failed, ", "))
	}
	return nil
}

// check reports the breaks that do not apply, do not compile or name no existing test.
func check(ctx context.Context, mutations []mutation, out io.Writer) (failed []string) {
	report := func(m mutation, err error) {
		failed = append(failed, m.Name)
		fmt.Fprintf(out, "%s (%s):\n\t%s\n", m.Name, m.file, strings.ReplaceAll(err.Error(), "\n", "\n\t"))
	}
	changes := map[string]change{} // by the name of the break
	var applied []mutation
	for _, m := range mutations {
		changed, err := m.apply()
		if err := errors.Join(err, m.findTest()); err != nil {
			report(m, err)
			continue
		}
		changes[m.Name] = changed
		applied = append(applied, m)
	}
	var folders []string
	for _, m := range applied {
		folders = append(folders, m.folders()...)
	}
	slices.Sort(folders)
	types, err := newChecker(ctx, slices.Compact(folders))
	if err != nil {
		fmt.Fprintln(out, err)
		return append(failed, "all")
	}
	for _, m := range applied {
		folders := m.folders()
		if len(folders) == 0 || len(folders) == 1 && types.check(folders[0], changes[m.Name]) == nil {
			continue
		}
		// One package may use what another one declares anew. Besides, the go command has the last word.
		if err := compile(ctx, folders, changes[m.Name]); err != nil {
			report(m, fmt.Errorf("does not compile:\n%w", err))
		}
	}
	good := len(mutations) - len(failed)
	fmt.Fprintf(out, "%d of %d breaks apply, compile and name an existing test\n", good, len(mutations))
	return failed
}

// try runs the test of each break and reports the breaks that their tests do not notice.
func try(ctx context.Context, mutations []mutation, out io.Writer) (failed []string) {
	for _, m := range mutations {
		began := time.Now()
		verdict, err := m.try(ctx)
		if ctx.Err() != nil {
			return failed
		}
		if err != nil {
			failed = append(failed, m.Name)
			verdict = err.Error()
		}
		fmt.Fprintf(out, "%-32s %5.1fs  %s\n", m.Name, time.Since(began).Seconds(), verdict)
	}
	return failed
}

// try applies the break and runs its test. The error says why the test did not go red.
func (m mutation) try(ctx context.Context) (verdict string, err error) {
	changed, err := m.apply()
	if err != nil {
		return "", err
	}
	for file, content := range changed {
		if filepath.Ext(file) == ".go" {
			continue
		}
		original, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		defer os.WriteFile(file, original, 0o644) //nolint:errcheck // git shows a file that was not restored
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return "", err
		}
	}
	pkg, test, flags := m.goTest()
	args := []string{"test", "-vet=off", pkg, "-count=1", "-run", "^" + test + "$", "-args"}
	out, err := command(ctx, changed, append(args, flags...)...)
	switch {
	case err == nil && strings.Contains(out, "no tests to run"):
		return "", fmt.Errorf("no test %s in %s", test, pkg)
	case err == nil:
		return "", fmt.Errorf("%s did not notice: %s", test, m.Promise)
	case strings.Contains(out, "[build failed]"):
		return "", fmt.Errorf("does not compile:\n%s", out)
	case !strings.Contains(out, "--- FAIL: "):
		return "", fmt.Errorf("%s did not fail, but ended otherwise:\n%s", test, out)
	}
	return "noticed by " + test, nil
}

// folders returns the folders of the packages that a break changes.
func (m mutation) folders() (all []string) {
	for _, e := range m.Edits {
		if e.Package != "" && !slices.Contains(all, e.Package) {
			all = append(all, e.Package)
		}
	}
	return all
}

// compile compiles the packages in these folders, with their tests.
func compile(ctx context.Context, folders []string, changed change) error {
	// The one check of vet that never finds anything: vet type-checks, without linking.
	args := []string{"vet", "-buildtag"}
	for _, folder := range folders {
		args = append(args, "./"+folder)
	}
	if out, err := command(ctx, changed, args...); err != nil {
		return errors.New(strings.TrimSpace(out))
	}
	return nil
}

// testLimit bounds one run of one test.
const testLimit = 5 * time.Minute

// command runs the go command on the changed tree. Go commands that a test runs see the
// same tree, because the overlay is in the environment.
func command(ctx context.Context, changed change, args ...string) (string, error) {
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	replace := map[string]string{}
	for file, content := range changed {
		if filepath.Ext(file) != ".go" {
			continue
		}
		real, err := filepath.Abs(file)
		if err != nil {
			return "", err
		}
		replace[real] = filepath.Join(dir, fmt.Sprintf("%d.go", len(replace)))
		if err := os.WriteFile(replace[real], content, 0o600); err != nil {
			return "", err
		}
	}
	raw, err := json.Marshal(map[string]any{"Replace": replace})
	if err != nil {
		return "", err
	}
	overlay := filepath.Join(dir, "overlay.json")
	if err := os.WriteFile(overlay, raw, 0o600); err != nil {
		return "", err
	}
	limit, cancel := context.WithTimeout(ctx, testLimit)
	defer cancel()
	cmd := exec.CommandContext(limit, "go", args...)
	cmd.Env = append(os.Environ(), "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -overlay="+overlay))
	out, err := cmd.CombinedOutput()
	return string(out), err
}
