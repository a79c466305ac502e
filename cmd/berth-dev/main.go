// Command berth-dev is for people who develop Berth or try it out: a demo, and
// development clusters on this machine. No image contains it. The operators'
// commands are in command berth.
package main

import (
	"context"
	"io"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

type commands struct {
	Demo   demoCommand   `cmd:"" help:"Start everything on this machine, claim a sandbox and show a request reach it."`
	Up     upCommand     `cmd:"" help:"Start a cluster with Berth in the background."`
	Down   downCommand   `cmd:"" help:"Stop a cluster that \"up\" has started."`
	Status statusCommand `cmd:"" help:"List the running clusters and their parts. Fails when a part is down."`
	Serve  serveCommand  `cmd:"" hidden:"" help:"Be the background process of a cluster."`
	Build  buildCommand  `cmd:"" help:"Build or fetch etcd, kube-apiserver and Envoy if the cache lacks them."`

	Version kong.VersionFlag `help:"Print the version."`
}

// output is where commands write.
type output struct{ out, err io.Writer }

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		args = []string{"--help"}
	}
	var c commands
	k, err := cli.Parse(&c, "berth-dev", "Berth's demo and development clusters.", "BERTH_DEV", args, stdout, stderr)
	if err != nil {
		return err
	}
	k.BindTo(ctx, (*context.Context)(nil))
	return k.Run(&output{stdout, stderr})
}
