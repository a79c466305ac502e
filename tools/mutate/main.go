// Command mutate proves that tests fail when the promise that they guard is broken.
//
// The files in breaks list breaks. A break names a promise, the test that must go red,
// and the edits that break the promise:
//
//	# tools/mutate/breaks/fence.yaml
//	- name: fence-skipped
//	  promise: "I3: a released pod is deleted only after its fence"
//	  test: ./allocator/core TestReleasedPodIsDeletedAfterItsFence
//	  edits:
//	  - package: allocator/core
//	    decl: (*Core).advanceFence
//	    old: len(f.waiting) > 0
//	    new: "false"
//
// The value of test is a package, a test and flags of the test, if it needs any. An edit
// replaces old by new in one declaration: a function, a method, a type, a constant or a
// variable. The tool finds a declaration by its name, in any file of the package. It
// compares token by token, so that line breaks, indentation and comments do not matter.
// The old text must occur once in the declaration, unless the edit says "all: true". An
// edit of a file that is not Go has a file instead of a package and a declaration; there
// only the amount of white space does not matter.
//
// Without flags the tool applies one break after the other to a copy of the tree and runs
// its test, which must fail. With --check it runs no test. It reports every break that
// does not apply, does not compile or names a test that does not exist. CI runs that.
// Arguments choose breaks by their names, or all breaks of a file by the file's name
// without ".yaml".
package main

import (
	"context"
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
	judge := try
	if *checkOnly {
		judge = check
	}
	failed, err := judge(ctx, mutations, out)
	if err != nil {
		return err
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d: %s", len(failed), len(mutations), strings.Join(failed, ", "))
	}
	return nil
}

// check reports the breaks that do not apply, do not compile or name no existing test.
// It leaves the tree as it is: the compiler reads the changed files from elsewhere.
func check(ctx context.Context, mutations []mutation, out io.Writer) (failed []string, err error) {
	t := newTree(".")
	changes := map[string]change{} // by the name of the break
	var sound []mutation
	report := func(m mutation, err error) {
		failed = append(failed, m.Name)
		fmt.Fprintf(out, "%s (%s):\n\t%s\n", m.Name, m.file, strings.ReplaceAll(err.Error(), "\n", "\n\t"))
	}
	for _, m := range mutations {
		changed, err := m.apply(t)
		if err := errors.Join(err, m.findTest(t)); err != nil {
			report(m, err)
			continue
		}
		changes[m.Name] = changed
		sound = append(sound, m)
	}
	for _, group := range apart(sound, changes) {
		if compile(ctx, group, changes) == nil {
			continue
		}
		for _, m := range group {
			if err := compile(ctx, []mutation{m}, changes); err != nil {
				report(m, err)
			}
		}
	}
	good := len(mutations) - len(failed)
	fmt.Fprintf(out, "%d of %d breaks apply, compile and name an existing test\n", good, len(mutations))
	return failed, ctx.Err()
}

// try runs the test of each break and reports the breaks that their tests do not notice.
func try(ctx context.Context, mutations []mutation, out io.Writer) (failed []string, err error) {
	dir, err := copyTree(ctx)
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	t := newTree(dir)
	for _, m := range mutations {
		began := time.Now()
		verdict, err := m.try(ctx, t)
		if ctx.Err() != nil {
			return failed, ctx.Err()
		}
		if err != nil {
			failed = append(failed, m.Name)
			verdict = err.Error()
		}
		fmt.Fprintf(out, "%-32s %5.1fs  %s\n", m.Name, time.Since(began).Seconds(), verdict)
	}
	return failed, nil
}

// try applies the break to the tree, runs its test and restores the tree. The error says
// why the test did not go red.
func (m mutation) try(ctx context.Context, t *tree) (verdict string, err error) {
	changed, err := m.apply(t)
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, changed.restore(t)) }()
	if err := changed.write(t); err != nil {
		return "", err
	}
	pkg, test, flags := m.goTest()
	// A test that does not compile fails too, so compile it first.
	if out, err := command(ctx, t.dir, "test", "-vet=off", "-c", "-o", os.DevNull, pkg); err != nil {
		return "", fmt.Errorf("does not compile:\n%s", out)
	}
	args := []string{"test", "-vet=off", pkg, "-count=1", "-run", "^" + test + "$", "-args"}
	out, err := command(ctx, t.dir, append(args, flags...)...)
	switch {
	case err == nil && strings.Contains(out, "no tests to run"):
		return "", fmt.Errorf("no test %s in %s", test, pkg)
	case err == nil:
		return "", fmt.Errorf("%s did not notice: %s", test, m.Promise)
	case !strings.Contains(out, "--- FAIL: "):
		return "", fmt.Errorf("%s did not fail, but ended otherwise:\n%s", test, out)
	}
	return "noticed by " + test, nil
}

// copyTree copies the files that git knows, as they are in the working tree.
func copyTree(ctx context.Context) (string, error) {
	list, err := exec.CommandContext(ctx, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard").Output()
	if err != nil {
		return "", fmt.Errorf("git ls-files: %w", err)
	}
	dir, err := os.MkdirTemp("", "mutate-")
	if err != nil {
		return "", err
	}
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list), "\x00"), "\x00") {
		content, err := os.ReadFile(name)
		if errors.Is(err, os.ErrNotExist) { // deleted, and not yet committed
			continue
		}
		target := filepath.Join(dir, name)
		if err == nil {
			err = os.MkdirAll(filepath.Dir(target), 0o755)
		}
		if err == nil {
			err = os.WriteFile(target, content, 0o644)
		}
		if err != nil {
			os.RemoveAll(dir)
			return "", err
		}
	}
	return dir, nil
}

// apart puts the breaks into groups in which no two change the same file. Breaks of one
// group cannot hide each other's errors: one break cannot use an import or a variable that
// another one leaves unused.
func apart(mutations []mutation, changes map[string]change) (groups [][]mutation) {
	var taken []map[string]bool // by the groups
	for _, m := range mutations {
		i := slices.IndexFunc(taken, func(files map[string]bool) bool {
			for file := range changes[m.Name] {
				if files[file] {
					return false
				}
			}
			return true
		})
		if i < 0 {
			i = len(groups)
			groups, taken = append(groups, nil), append(taken, map[string]bool{})
		}
		groups[i] = append(groups[i], m)
		for file := range changes[m.Name] {
			taken[i][file] = true
		}
	}
	return groups
}

// compile compiles the packages that a group of breaks changes and those of its tests.
func compile(ctx context.Context, group []mutation, changes map[string]change) error {
	all := change{}
	var packages []string
	for _, m := range group {
		pkg, _, _ := m.goTest()
		packages = append(packages, pkg)
		for _, e := range m.Edits {
			if e.Package != "" {
				packages = append(packages, "./"+e.Package)
			}
		}
		for file, content := range changes[m.Name] {
			all[file] = content
		}
	}
	overlay, remove, err := all.overlay()
	if err != nil {
		return err
	}
	defer remove()
	slices.Sort(packages)
	// The one check of vet that never finds anything: vet type-checks, without linking.
	args := append([]string{"vet", "-overlay", overlay, "-buildtag"}, slices.Compact(packages)...)
	if out, err := command(ctx, ".", args...); err != nil {
		return fmt.Errorf("does not compile:\n%s", strings.TrimSpace(out))
	}
	return nil
}

// testLimit bounds one run of one test.
const testLimit = 5 * time.Minute

func command(ctx context.Context, dir string, args ...string) (string, error) {
	limit, cancel := context.WithTimeout(ctx, testLimit)
	defer cancel()
	cmd := exec.CommandContext(limit, "go", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}
