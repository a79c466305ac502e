package main

import (
	"context"
	"io"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

func main() { cli.MainOfService(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	const description = "The router: answers Envoy where each request goes."
	_, err := cli.Parse(&f, "extproc", description, "BERTH_ROUTER", args, stdout, stderr)
	if err != nil {
		return err
	}
	podCIDRs, err := f.check()
	if err != nil {
		return err
	}
	log, err := cli.Logger(f.LogLevel, stderr)
	if err != nil {
		return err
	}
	defer log.Sync() //nolint:errcheck // stderr has nothing to sync
	r := &router{flags: f, podCIDRs: podCIDRs, log: log}
	defer r.close()
	if err := r.wire(ctx); err != nil {
		return err
	}
	return r.serve(ctx)
}
