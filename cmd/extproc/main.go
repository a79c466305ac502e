package main

import (
	"context"
	"io"
	"os"
	"runtime/debug"

	"github.com/berth-sandbox/berth/api/metric"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// gcPercent lets the heap grow to five times what is live. Nearly all of that is routes, which stay. With
// Go's default of 100 the collector marked all of them after little garbage: with 100,000 routes that took
// 10 to 18 us per request, and with 400 nothing that could be measured. GOMEMLIMIT bounds the heap, which
// the chart sets. GOMAXPROCS stays that of Go, which obeys the CPU limit of a container: a lower one saves a
// tenth, and bounds how many requests a second a large gateway takes.
const gcPercent = 400

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	cli.MainOfService(run)
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	const description = "The router: answers Envoy where each request to a sandbox goes, or of a sandbox."
	_, err := cli.Parse(&f, "extproc", description, "BERTH_ROUTER", args, stdout, stderr)
	if err != nil {
		return err
	}
	ranges, err := f.check()
	if err != nil {
		return err
	}
	log, err := cli.Logger(f.LogLevel, stderr)
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // stderr has nothing to sync
	r := &router{flags: f, ranges: ranges, log: log}
	defer r.close()
	if err := r.wire(ctx, metric.NewRegistry(r.program())); err != nil {
		return err
	}
	return r.serve(ctx)
}
