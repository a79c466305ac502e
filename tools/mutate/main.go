// Command mutate proves that tests fail when what they test is broken. Each file
// in patches breaks one promise and names the test that must notice:
//
//	Breaks: what is promised, and does not hold with this patch
//	Test: ./package TestName [further flags of go test]
//
//	--- a/...   a unified diff
//
// The patches are applied one after the other to a copy of the tree, and each test must
// then fail. With --check each patch only has to apply by itself, the package's tests to
// compile and the named test to be one of them, which is part of CI. Patches that touch
// different files are compiled together then. Names of patches choose some.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
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

// mutation is one patch.
type mutation struct {
	name, file string
	breaks     string
	pkg, test  string
	flags      []string
	touches    []string // files
}

// testLimit bounds one run of one test.
const testLimit = 5 * time.Minute

func run(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("mutate", flag.ContinueOnError)
	check := flags.Bool("check", false, "only apply and compile")
	if err := flags.Parse(args); err != nil {
		return err
	}
	mutations, err := read("tools/mutate/patches", flags.Args())
	if err != nil {
		return err
	}
	copied, err := copyTree(ctx)
	if err != nil {
		return err
	}
	defer os.RemoveAll(copied)
	all, try := len(mutations), mutation.try
	if *check {
		try = mutation.check
		mutations = inDoubt(ctx, copied, mutations)
		fmt.Fprintf(out, "%d patches apply and compile, together with others\n", all-len(mutations))
	}
	var failed []string
	for _, m := range mutations {
		began := time.Now()
		verdict, err := try(m, ctx, copied)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err != nil {
			failed = append(failed, m.name)
			verdict = err.Error()
		}
		fmt.Fprintf(out, "%-32s %5.1fs  %s\n", m.name, time.Since(began).Seconds(), verdict)
	}
	if len(failed) > 0 {
		return fmt.Errorf("%d of %d: %s", len(failed), all, strings.Join(failed, ", "))
	}
	return nil
}

// read reads the patches, those of these names if there are any.
func read(dir string, names []string) ([]mutation, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	var all []mutation
	for _, file := range files {
		m := mutation{name: strings.TrimSuffix(filepath.Base(file), ".patch")}
		if len(names) > 0 && !slices.Contains(names, m.name) {
			continue
		}
		raw, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if m.file, err = filepath.Abs(file); err != nil {
			return nil, err
		}
		said := true
		for line := range strings.Lines(string(raw)) {
			said = said && !strings.HasPrefix(line, "---")
			if !said {
				m.touches = append(m.touches, touched(line)...)
				continue
			}
			key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
			switch key {
			case "Breaks":
				m.breaks = value
			case "Test":
				fields := strings.Fields(value)
				if len(fields) < 2 {
					return nil, fmt.Errorf("%s: Test: must be a package and a test", file)
				}
				m.pkg, m.test, m.flags = fields[0], fields[1], fields[2:]
			}
		}
		if m.breaks == "" || m.test == "" {
			return nil, fmt.Errorf("%s: the lines Breaks: and Test: must come first", file)
		}
		all = append(all, m)
	}
	if len(all) == 0 || len(names) > 0 && len(all) != len(names) {
		return nil, fmt.Errorf("%d patches in %s are called %q", len(all), dir, names)
	}
	return all, nil
}

// copyTree copies what git knows of, as it is in the working tree.
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

// touched is the file that a line of a diff names: with "---" before the change, with
// "+++" after it.
func touched(line string) []string {
	for _, prefix := range []string{"--- a/", "+++ b/"} {
		if file, ok := strings.CutPrefix(strings.TrimSpace(line), prefix); ok {
			return []string{file}
		}
	}
	return nil
}

// apart puts the mutations into groups in which no two touch the same file. They do
// not meet then: what a patch leaves unused in a file, or needs there, no other one of
// its group can use or bring.
func apart(mutations []mutation) (groups [][]mutation) {
	var taken []map[string]bool // by the groups
	for _, m := range mutations {
		i := slices.IndexFunc(taken, func(files map[string]bool) bool {
			return !slices.ContainsFunc(m.touches, func(f string) bool { return files[f] })
		})
		if i < 0 {
			i = len(groups)
			groups, taken = append(groups, nil), append(taken, map[string]bool{})
		}
		groups[i] = append(groups[i], m)
		for _, f := range m.touches {
			taken[i][f] = true
		}
	}
	return groups
}

// inDoubt returns the mutations of the groups that do not compile, of which each is to
// be checked alone.
func inDoubt(ctx context.Context, dir string, mutations []mutation) (left []mutation) {
	for _, group := range apart(mutations) {
		if compile(ctx, dir, group) != nil {
			left = append(left, group...)
		}
	}
	return left
}

// compile applies a group of mutations, of which no two touch the same file, checks that
// it compiles and has the tests, and takes them back.
func compile(ctx context.Context, dir string, group []mutation) (err error) {
	var packages []string
	for _, m := range group {
		if err := m.apply(ctx, dir); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, m.apply(ctx, dir, "--reverse")) }()
		if !slices.Contains(packages, m.pkg) {
			packages = append(packages, m.pkg)
		}
	}
	// Whether it compiles, without linking. Of what vet finds that is all.
	if out, err := command(ctx, dir, append([]string{"vet", "-buildtag"}, packages...)...); err != nil {
		return fmt.Errorf("does not compile:\n%s", out)
	}
	for _, m := range group {
		there, err := hasTest(filepath.Join(dir, m.pkg), m.test)
		if err != nil {
			return err
		}
		if !there {
			return fmt.Errorf("there is no test %s in %s", m.test, m.pkg)
		}
	}
	return nil
}

// apply changes the tree in dir as the patch says, or with --reverse back.
func (m mutation) apply(ctx context.Context, dir string, reverse ...string) error {
	cmd := exec.CommandContext(ctx, "git", append(append([]string{"apply"}, reverse...), m.file)...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("does not apply: %s", strings.TrimSpace(string(out)))
	}
	return nil
}

func command(ctx context.Context, dir string, args ...string) (string, error) {
	limit, cancel := context.WithTimeout(ctx, testLimit)
	defer cancel()
	cmd := exec.CommandContext(limit, "go", args...)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	return string(out), err
}

// check applies the mutation, sees whether it compiles, and takes it back. The error
// says what is wrong with it.
func (m mutation) check(ctx context.Context, dir string) (verdict string, err error) {
	return "applies and compiles", compile(ctx, dir, []mutation{m})
}

// try applies the mutation, runs its test and takes the mutation back. The error says
// what is wrong with it.
func (m mutation) try(ctx context.Context, dir string) (verdict string, err error) {
	if err := m.apply(ctx, dir); err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, m.apply(ctx, dir, "--reverse")) }()
	goTest := func(args ...string) (string, error) {
		return command(ctx, dir, append([]string{"test", "-vet=off"}, args...)...)
	}
	// Compiled alone first: a test that does not compile fails too.
	if out, err := goTest("-c", "-o", os.DevNull, m.pkg); err != nil {
		return "", fmt.Errorf("does not compile:\n%s", out)
	}
	out, err := goTest(append([]string{m.pkg, "-count=1", "-run", "^" + m.test + "$", "-args"}, m.flags...)...)
	switch {
	case err == nil && strings.Contains(out, "no tests to run"):
		return "", fmt.Errorf("there is no test %s in %s", m.test, m.pkg)
	case err == nil:
		return "", fmt.Errorf("%s did not notice: %s", m.test, m.breaks)
	case !strings.Contains(out, "--- FAIL: "):
		return "", fmt.Errorf("%s did not fail, but ended otherwise:\n%s", m.test, out)
	}
	return "noticed by " + m.test, nil
}

// hasTest reports whether the package in dir has a test, or a fuzz test, of this name
// among the files that are built here. What comes after a slash names a subtest, which
// only running it can find.
func hasTest(dir, name string) (bool, error) {
	name, _, _ = strings.Cut(name, "/")
	if !strings.HasPrefix(name, "Test") && !strings.HasPrefix(name, "Fuzz") {
		return false, nil
	}
	pkg, err := build.ImportDir(dir, 0)
	if err != nil {
		return false, err
	}
	for _, file := range slices.Concat(pkg.TestGoFiles, pkg.XTestGoFiles) {
		parsed, err := parser.ParseFile(token.NewFileSet(), filepath.Join(dir, file), nil, parser.SkipObjectResolution)
		if err != nil {
			return false, err
		}
		for _, d := range parsed.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && f.Name.Name == name {
				return true, nil
			}
		}
	}
	return false, nil
}
