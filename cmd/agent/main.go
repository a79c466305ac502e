// Command agent runs in sandboxes, where it is installed as berth-agent. It serves E2B's SDKs, as package
// agent says.
//
//	berth-agent install DIR             copies itself to DIR/berth-agent, for an init container. With BERTH_EGRESS it
//	                                    first waits until the pod reaches the egress gateway only
//	berth-agent run                     serves, beside the image's own programs
//	berth-agent run -- COMMAND ARG...   serves, and runs the container's command as its child
//	berth-agent clean DIR FILE          removes what an earlier sandbox has left, see package recycle
//	berth-agent await FILE              has the pod recycled when the file changes, see package recycle
//
// # With a command
//
// The command gets the agent's environment, directory, user and standard streams, and the signals that
// the agent gets. When it ends, everything in the sandbox ends: the agent exits with its code, or with 128
// and the number of the signal that has ended it, as if the command were process 1. A command that cannot
// be started ends the agent with 127, or with 126 if the file is there. What the command leaves running
// is killed.
//
// # Without
//
// The agent runs until SIGTERM or SIGINT. It sends SIGTERM to all commands, kills what is left after five
// seconds, and exits with 0.
//
// A signal that comes while the sandbox is asleep continues the processes first (package freeze). One that tells it to
// end waits for the archive of a sandbox that is being stopped, if there is one (agent.Stop). If that becomes whole the
// processes are not continued: they are killed, and the agent exits with 0, because the sandbox goes on in another pod.
//
// Either way it reaps orphans. It exits with 1 when it cannot serve, and with 2 for wrong arguments.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/agent/canary"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/agent/recycle"
)

type flags struct {
	Run     runCommand     `cmd:"" help:"Serve the sandbox."`
	Install installCommand `cmd:"" help:"Copy this program to a directory, as berth-agent."`
	Clean   cleanCommand   `cmd:"" help:"Remove what an earlier sandbox has left in the pod outside of volumes."`
	Await   awaitCommand   `cmd:"" help:"Exit with 88 when a file changes, to have all containers of the pod restarted."`
}

type cleanCommand struct {
	Dir  string `arg:"" help:"Directory that no other container can write. It has to exist."`
	Life string `arg:"" help:"File whose content becomes the termination message at the end, when nothing is left."`
}

type awaitCommand struct {
	File string `arg:"" help:"File of a downward API volume."`
}

type runCommand struct {
	Listen   string            `default:":49983" help:"Address to serve on."`
	NewFiles string            `default:"UserRights" enum:"UserRights,Anywhere" help:"Where calls for a user make what is missing: as spec.agent.newFiles of a SandboxPool says."`
	Key      initbox.PublicKey `required:"" env:"BERTH_ALLOCATOR_KEY" help:"Public key of the allocator that configures the sandbox."`
	Command  []string          `arg:"" optional:"" passthrough:"" help:"Command of the container, run as a child. Its end ends the agent."`
}

type installCommand struct {
	Dir     string `arg:"" help:"Directory. It has to exist."`
	Egress  string `env:"BERTH_EGRESS" help:"If it is not empty: first wait until the network lets the pod reach the egress gateway only, as package canary tries it."`
	Gateway string `env:"BERTH_EGRESS_GATEWAY" help:"Addresses of the egress gateway, host:port, comma-separated."`
	Node    string `env:"BERTH_NODE_IPS" help:"Addresses of the node, comma-separated. No name server may answer there."`
	Public  string `env:"BERTH_EGRESS_PUBLIC" help:"Addresses outside the cluster that the network must not let the pod reach, ip:port, comma-separated."`
}

// anywhere is the value of --new-files that lets the agent make files in directories of root.
const anywhere = "Anywhere"

// forwarded are the signals that the container's command gets. SIGCHLD, SIGURG and SIGPIPE are about the
// agent's own process, and would crowd out the others.
var forwarded = []os.Signal{
	syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2,
	syscall.SIGALRM, syscall.SIGCONT, syscall.SIGTSTP, syscall.SIGTTIN, syscall.SIGTTOU, syscall.SIGWINCH,
}

// exit is an end with an exit code. A reason is printed.
type exit struct {
	code   int
	reason error
}

func (e *exit) Error() string {
	if e.reason == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.reason.Error()
}

func main() {
	// Before anything that takes time: no signal may find its default action.
	signals := make(chan os.Signal, len(forwarded))
	signal.Notify(signals, forwarded...)
	err := run(context.Background(), os.Args[1:], signals, os.Stdout, os.Stderr)
	var ended *exit
	switch {
	case err == nil:
	case errors.As(err, &ended) && ended.reason == nil:
		os.Exit(ended.code)
	default:
		fmt.Fprintln(os.Stderr, "berth-agent:", err)
		if ended != nil {
			os.Exit(ended.code)
		}
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, signals <-chan os.Signal, stdout, stderr io.Writer) error {
	var f flags
	helped := false
	parser, err := kong.New(&f, kong.Name("berth-agent"), kong.Writers(stdout, stderr),
		kong.Description("The agent in a sandbox: commands and files for E2B's SDKs."),
		kong.Exit(func(int) { helped = true }))
	if err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	k, err := parser.Parse(args)
	switch {
	case helped:
		return nil
	case err != nil:
		return &exit{2, fmt.Errorf("flags: %w", err)}
	case k.Selected().Name == "install":
		if err := f.Install.closed(ctx, signals); err != nil {
			return err
		}
		return f.Install.install()
	case k.Selected().Name == "clean":
		return f.Clean.clean()
	case k.Selected().Name == "await":
		return f.Await.await(ctx, signals)
	}
	return f.Run.run(ctx, signals, slog.New(slog.NewTextHandler(stderr, nil)))
}

// terminationLog is where the kubelet reads the termination message.
const terminationLog = "/dev/termination-log"

func (c *cleanCommand) clean() error {
	life, err := os.ReadFile(c.Life)
	if err != nil {
		return err
	}
	if err := recycle.Clean("/", c.Dir); err != nil {
		return err
	}
	return os.WriteFile(terminationLog, life, 0o666)
}

// patience is how long a network may take to enforce the policy of a new pod.
const patience = 30 * time.Second

// closed waits until the pod reaches the egress gateway only. A signal to end is an error.
func (c *installCommand) closed(ctx context.Context, signals <-chan os.Signal) error {
	if c.Egress == "" {
		return nil
	}
	resolvConf, err := os.ReadFile("/etc/resolv.conf")
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	pod := canary.Pod{Getenv: os.Getenv, ResolvConf: resolvConf, Gateway: c.Gateway, Node: c.Node, Public: c.Public}
	targets, err := pod.Targets()
	if err != nil {
		return err
	}
	return awaitClosed(ctx, signals, pod.Reached(), targets, patience, terminationLog)
}

// awaitClosed writes to the file message what is wrong when patience is over.
func awaitClosed(
	ctx context.Context, signals <-chan os.Signal, gateway, targets []canary.Target, patience time.Duration, message string,
) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	tried := make(chan error, 1)
	go func() { tried <- canary.Await(ctx, gateway, targets, patience) }()
	for {
		select {
		case s := <-signals:
			if ends(s) {
				cancel()
			}
		case err := <-tried:
			if err == nil || ctx.Err() != nil {
				return err
			}
			// The allocator reads it in the status of the pod.
			return errors.Join(err, os.WriteFile(message, []byte(err.Error()), 0o666))
		}
	}
}

// install replaces DIR/berth-agent, so that a reader sees a whole program.
func (c *installCommand) install() error {
	source, err := os.Open("/proc/self/exe")
	if err != nil {
		return err
	}
	defer source.Close()
	target, err := os.CreateTemp(c.Dir, ".berth-agent-*")
	if err != nil {
		return err
	}
	defer os.Remove(target.Name())
	defer target.Close()
	if _, err := io.Copy(target, source); err != nil {
		return err
	}
	if err := target.Chmod(0o755); err != nil {
		return err
	}
	if err := target.Close(); err != nil {
		return err
	}
	return os.Rename(target.Name(), filepath.Join(c.Dir, "berth-agent"))
}

// await ends with recycle.ExitCode when the file has changed, and with 0 on SIGTERM and SIGINT.
func (c *awaitCommand) await(ctx context.Context, signals <-chan os.Signal) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	changed := make(chan error, 1)
	go func() { changed <- recycle.Await(ctx, c.File) }()
	for {
		select {
		case err := <-changed:
			if err == nil {
				err = &exit{code: recycle.ExitCode}
			}
			return err
		case s := <-signals:
			if s == syscall.SIGTERM || s == syscall.SIGINT {
				return nil
			}
		}
	}
}
