// Command agent runs in sandboxes, where it is installed as berth-agent. It serves E2B's SDKs, as package
// agent says.
package main

import (
	"context"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/files"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/agent/process"
)

type flags struct {
	Run runCommand `cmd:"" help:"Serve the sandbox."`
}

type runCommand struct {
	Listen string            `default:":49983" help:"Address to serve on."`
	Key    initbox.PublicKey `required:"" env:"BERTH_ALLOCATOR_KEY" help:"Public key of the allocator that configures the sandbox."`
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "berth-agent:", err)
		os.Exit(2)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	var f flags
	helped := false
	parser, err := kong.New(&f, kong.Name("berth-agent"), kong.Writers(stdout, stderr),
		kong.Description("The agent in a sandbox: commands and files for E2B's SDKs."), kong.Exit(func(int) { helped = true }))
	if err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	if _, err := parser.Parse(args); helped {
		return nil
	} else if err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	return f.Run.serve(ctx, slog.New(slog.NewTextHandler(stderr, nil)))
}

func (c *runCommand) serve(ctx context.Context, log *slog.Logger) error {
	keys, err := initbox.NewKeys(c.Key)
	if err != nil {
		return err
	}
	directory, err := accounts.New(os.Getpid() == 1)
	if err != nil {
		log.Warn("the default user is the agent's own", "error", err)
	}
	a, err := agent.New(agent.Options{Log: log, Keys: keys, Accounts: directory,
		WriteFile: func(account accounts.Account, f initbox.File) error {
			return files.Write(account, f.Path, f.Data, fs.FileMode(f.Mode))
		}})
	if err != nil {
		return err
	}
	fileService, err := files.New(files.Options{Account: a.Account, Dir: func() string { return a.Config().Workdir }})
	if err != nil {
		return err
	}
	defer func() { _ = fileService.Close() }()
	a.Handle(fileService.Filesystem())
	a.HandleSigned(files.Path, fileService.Files(), func(r *http.Request, token string) error {
		return files.CheckSignature(r, token, time.Now())
	})
	table := children.New()
	processes, err := process.New(process.Options{Sandbox: a, Children: table})
	if err != nil {
		return err
	}
	a.Handle(processes.Handler())
	reaped := make(chan error, 1)
	reaping, stop := context.WithCancel(context.Background())
	go func() { reaped <- table.Run(reaping) }()
	defer func() {
		processes.Close()
		stop()
		_ = <-reaped // it has been reported
	}()
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: a, ReadHeaderTimeout: 10 * time.Second}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
		return server.Close()
	}
}
