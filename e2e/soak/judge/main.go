// Command judge judges the history of a soak again, from its file.
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/berth-sandbox/berth/e2e/soak/history"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "judge:", err)
		os.Exit(1)
	}
}

func run(args []string, stdout io.Writer) error {
	if len(args) != 1 {
		return errors.New("usage: judge FILE; the file is one that make soak has written")
	}
	file, err := os.Open(args[0])
	if err != nil {
		return err
	}
	defer file.Close()
	events, err := history.Read(file)
	if err != nil {
		return err
	}
	v := history.Judge(events)
	for _, m := range v.Mismatches {
		fmt.Fprintln(stdout, m)
	}
	fmt.Fprintln(stdout, v)
	if n := len(v.Mismatches); n > 0 {
		return fmt.Errorf("%d mismatches", n)
	}
	return nil
}
