// Command berth is the command line of Berth: for people who use sandboxes, and for those who
// operate an installation. The images of the allocator and of the router contain it.
//
// It finds the API by a flag, the environment, a context of the configuration file, or a
// development cluster that runs, in this order. A key that belongs to a context is sent to the
// address of that context only.
//
// # Exit statuses
//
//	0  done
//	1  another error
//	2  wrong arguments or configuration
//	3  not found: the sandbox, pool or router is unknown or has ended
//	4  refused: by a limit, a missing or unknown key, a role, or the state of the object
//	5  the API, or the part of Berth behind it, cannot be reached
package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/cmd/internal/cli"
	"github.com/berth-sandbox/berth/internal/printable"
)

type commands struct {
	Claim       claimCommand       `cmd:"" aliases:"up" help:"Claim a sandbox of a pool, or one with the files of a snapshot."`
	Ls          lsCommand          `cmd:"" help:"List live sandboxes."`
	Get         getCommand         `cmd:"" help:"Show live sandboxes."`
	Kill        killCommand        `cmd:"" help:"Release sandboxes."`
	Timeout     timeoutCommand     `cmd:"" help:"Move the end of a sandbox to a time from now."`
	Network     networkCommand     `cmd:"" help:"Replace what a sandbox may reach, in a pool with egress gateways. Without flags everything that its pool lets it reach."`
	Pause       pauseCommand       `cmd:"" help:"Have sandboxes fall asleep: they keep their memory and files, and use no CPU. Or stop them."`
	Resume      resumeCommand      `cmd:"" help:"Wake sandboxes that are asleep or stopped."`
	Keepalive   keepaliveCommand   `cmd:"" help:"Count as use of sandboxes."`
	Snapshot    snapshotCommand    `cmd:"" help:"Snapshots of the files of sandboxes."`
	Fork        forkCommand        `cmd:"" help:"Claim sandboxes that have the files of a sandbox."`
	Why         whyCommand         `cmd:"" help:"Say why sandboxes are alive, and until when."`
	Diagnose    diagnoseCommand    `cmd:"" help:"Say what is known of a sandbox, and why requests do not reach it."`
	Logs        logsCommand        `cmd:"" help:"Print the log of a sandbox."`
	Open        openCommand        `cmd:"" help:"Open a sandbox in the browser."`
	Exec        execCommand        `cmd:"" help:"Run a command in a sandbox that has the agent."`
	Cp          cpCommand          `cmd:"" help:"Copy a file to or from a sandbox that has the agent."`
	Console     consoleCommand     `cmd:"" help:"Open the web console in the browser, with the key of the context."`
	Curl        curlCommand        `cmd:"" help:"Run curl against a sandbox."`
	PortForward portForwardCommand `cmd:"" help:"Forward a local port to a port of a sandbox, for HTTP and WebSocket."`
	MCP         mcpCommand         `cmd:"" name:"mcp" help:"Offer sandboxes as tools to a program that speaks the Model Context Protocol."`
	Pools       poolsCommand       `cmd:"" help:"Pools of warm pods."`
	Events      eventsCommand      `cmd:"" help:"Print what happens to sandboxes."`
	Webhooks    webhooksCommand    `cmd:"" help:"URLs to which events are sent."`
	LastActive  lastActiveCommand  `cmd:"" help:"When sandboxes were last used, and what happens next."`
	Fence       fenceCommand       `cmd:"" help:"What released sandboxes wait for."`
	Journal     journalCommand     `cmd:"" help:"The allocator's journal."`
	Support     supportCommand     `cmd:"" help:"Write an archive of what is needed to judge an installation from afar."`
	Keys        keysCommand        `cmd:"" help:"API keys, in the Secrets of a cluster."`
	Check       checkCommand       `cmd:"" help:"Check from the outside that names, certificate, gateways and allocators work."`
	EnvoyConfig envoyConfigCommand `cmd:"" help:"Print Envoy's bootstrap configuration."`
	EgressEnvoy egressEnvoyCommand `cmd:"" name:"envoy-egress-config" help:"Print the bootstrap configuration of the Envoy of an egress gateway."`
	EnvoyDrain  envoyDrainCommand  `cmd:"" help:"Begin the planned end of an Envoy: its clients go elsewhere. A router that starts undoes it."`
	Certs       certsCommand       `cmd:"" help:"Certificates for the control stream."`
	Context     contextCommand     `cmd:"" help:"The installations that this command knows."`
	Completion  completionCommand  `cmd:"" help:"Print a script that completes arguments in a shell."`
	Complete    completeCommand    `cmd:"" name:"__complete" hidden:"" passthrough:"" help:"Print completions."`
	ShowVersion versionCommand     `cmd:"" name:"version" help:"Print the version."`

	Version kong.VersionFlag `help:"Print the version."`
}

// output is where commands write. What they write may come from anyone, so out and err show only printable
// characters. raw is for data, which another program reads, and for what this program has escaped itself.
type output struct {
	out, err io.Writer
	raw      struct{ out, err io.Writer }
	now      func() time.Time
}

func newOutput(stdout, stderr io.Writer, now func() time.Time) *output {
	o := &output{out: printable.Writer(stdout), err: printable.Writer(stderr), now: now}
	o.raw.out, o.raw.err = stdout, stderr
	return o
}

func main() { cli.Main(run) }

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) == 0 {
		args = []string{"help"}
	}
	if args[0] == "help" {
		args = append(slices.Clone(args[1:]), "--help")
	}
	var c commands
	k, err := cli.Parse(&c, "berth", "Sandboxes for AI agents behind one Envoy.", "", args, stdout, stderr)
	if err != nil {
		return err
	}
	k.BindTo(ctx, (*context.Context)(nil))
	return k.Run(newOutput(stdout, stderr, time.Now))
}

type versionCommand struct{}

// Run implements the command.
func (versionCommand) Run(o *output) error {
	_, err := fmt.Fprintln(o.out, cli.Version())
	return err
}
