// Command berth is for people who operate Berth. It prints Envoy's configuration, issues
// certificates, reads the journal, and lists what releases wait for and when sandboxes
// were last used. The images of the allocator and of the router contain it.
package main

import (
	"context"
	"fmt"
	"io"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

type commands struct {
	EnvoyConfig envoyConfigCommand `cmd:"" help:"Print Envoy's bootstrap configuration."`
	Certs       certsCommand       `cmd:"" help:"Certificates for the control stream."`
	Journal     journalCommand     `cmd:"" help:"The allocator's journal."`
	Fence       fenceCommand       `cmd:"" help:"What released sandboxes wait for."`
	LastActive  lastActiveCommand  `cmd:"" help:"When sandboxes were last used, and what happens next."`
	Version     versionCommand     `cmd:"" help:"Print the version."`
}

// output is where commands write.
type output struct{ out, err io.Writer }

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var c commands
	k, err := cli.Parse(&c, "berth", "Agent sandboxes behind one Envoy.", "BERTH", args, stdout, stderr)
	if err != nil {
		return err
	}
	k.BindTo(ctx, (*context.Context)(nil))
	return k.Run(&output{stdout, stderr})
}

type versionCommand struct{}

// Run implements the command.
func (versionCommand) Run(o *output) error {
	_, err := fmt.Fprintln(o.out, cli.Version())
	return err
}
