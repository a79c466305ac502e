// Command judge judges recorded histories again: those of make soak and make reap-soak, and
// those that failed tests keep. It prints what happened, each judge that ran and what it
// found. The exit code is 1 if a judge found a violation or a file is no history.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/berth-sandbox/berth/e2e/history"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}

func run(files []string, stdout io.Writer) error {
	if len(files) == 0 {
		return errors.New("usage: judge FILE..., each a history")
	}
	var errs []error
	for _, name := range files {
		violations, err := judge(name, stdout)
		switch {
		case err != nil:
			errs = append(errs, err)
		case violations > 0:
			errs = append(errs, fmt.Errorf("%s: %d violations", name, violations))
		}
	}
	return errors.Join(errs...)
}

// judge judges one file and returns how many violations there are.
func judge(name string, stdout io.Writer) (violations int, err error) {
	h, err := history.Open(name)
	if err != nil {
		return 0, err
	}
	judges, err := history.Judges(h.Settings.Suite)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	fmt.Fprintf(stdout, "%s: suite %s, seed %d, %d events\n%v", name, h.Settings.Suite, h.Settings.Seed, len(h.Events),
		history.Count(h))
	for _, j := range judges {
		all := j.Find(h)
		fmt.Fprintf(stdout, "judge %-13s %d violations\n", j.Name, len(all))
		for _, v := range all {
			fmt.Fprintf(stdout, "    %v\n", v)
		}
		violations += len(all)
	}
	return violations, nil
}
