package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/signal"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/term"

	"github.com/berth-sandbox/berth/client"
	"github.com/berth-sandbox/berth/cmd/internal/cli"
)

// agent finds a sandbox and its agent. close closes its connections.
func (f *gatewayFlags) agent(ctx context.Context, id, user string) (a *client.Agent, shut func(), err error) {
	l, err := f.locate(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	if l.place.port != 0 || l.place.path != "" {
		return nil, nil, usage("%q: must be the ID of a sandbox", id)
	}
	transport, err := newTransport(l.CAFile, l.gatewayDialer())
	if err != nil {
		return nil, nil, cli.WithExitCode(cli.ExitUsage, err)
	}
	transport.DisableKeepAlives = false // input and resizing are calls of their own
	a, err = client.NewAgent(l.sandbox, client.AgentOptions{User: user, HTTP: &http.Client{Transport: transport}})
	if err != nil {
		return nil, nil, cli.WithExitCode(exitRefused, fmt.Errorf("%s: %w", id, err))
	}
	return a, transport.CloseIdleConnections, nil
}

// fromAgent gives an error of an agent, or of the gateway before it, its exit status.
func fromAgent(err error) error {
	var refusal *client.Error
	switch {
	case errors.As(err, &refusal) && refusal.Status == http.StatusNotFound, errors.As(err, &refusal) && refusal.Status == http.StatusGone:
		return cli.WithExitCode(exitNotFound, err)
	case errors.As(err, &refusal) && refusal.Status >= http.StatusInternalServerError:
		return cli.WithExitCode(exitUnreachable, err)
	case errors.As(err, &refusal):
		return cli.WithExitCode(exitRefused, err)
	}
	return err
}

type execCommand struct {
	gatewayFlags
	Stdin   bool              `short:"i" help:"Pass standard input to the command."`
	TTY     bool              `name:"tty" short:"t" help:"Give the command a terminal, of the size of this one. Implies --stdin."`
	User    string            `short:"u" help:"User that runs the command. The sandbox's default user if it is left out."`
	Env     map[string]string `short:"e" mapsep:"none" placeholder:"NAME=VALUE" help:"Environment variable of the command. Can be repeated."`
	Workdir string            `short:"w" placeholder:"DIR" help:"Directory to run it in."`
	ID      string            `arg:"" name:"sandbox" complete:"sandbox" help:"ID of a sandbox."`
	Args    []string          `arg:"" passthrough:"" name:"command" help:"Command and its arguments, after --."`
}

// Help implements kong.HelpProvider.
func (*execCommand) Help() string {
	return "The exit status is that of the command, or 128 and the number of the signal that has ended it. The first interrupt " +
		"sends SIGTERM to the command, the next one SIGKILL, and a third one leaves it. With --tty, Ctrl-C is input of the terminal."
}

// terminateWait bounds the call that ends a command.
const terminateWait = 10 * time.Second

// Run implements the command.
func (c *execCommand) Run(ctx context.Context, o *output) error {
	if len(c.Args) > 0 && c.Args[0] == "--" {
		c.Args = c.Args[1:]
	}
	if len(c.Args) == 0 {
		return usage("name a command: berth exec %s -- COMMAND", c.ID)
	}
	a, shut, err := c.agent(ctx, c.ID, c.User)
	if err != nil {
		return err
	}
	defer shut()
	command := client.Command{Args: c.Args, Envs: c.Env, Dir: c.Workdir, Stdout: o.raw.out, Stderr: o.raw.err}
	if c.Stdin || c.TTY {
		command.Stdin = os.Stdin
	}
	local := int(os.Stdin.Fd()) //nolint:gosec // a descriptor
	if c.TTY {
		size, err := sizeOf(local)
		if err != nil {
			return usage("--tty: standard input is not a terminal")
		}
		command.Terminal = &size
	}
	attached, cut := context.WithCancel(context.WithoutCancel(ctx)) // its output is read to the end
	defer cut()
	started := context.AfterFunc(ctx, cut)
	p, err := a.Start(attached, command)
	switch {
	case !started():
		return errors.New("interrupted before the agent had answered; the command may run")
	case err != nil:
		return fromAgent(err)
	}
	defer context.AfterFunc(ctx, func() { c.interrupt(attached, cut, o, p) })()
	if c.TTY {
		state, err := term.MakeRaw(local)
		if err != nil {
			return fmt.Errorf("--tty: %w", err)
		}
		defer func() { _ = term.Restore(local, state) }()
		defer resizes(attached, p, local)()
	}
	code, err := p.Wait()
	if err != nil {
		return fromAgent(err)
	}
	if code != 0 {
		return cli.WithExitCode(code, fmt.Errorf("the command ended with exit status %d", code))
	}
	return nil
}

// interrupt ends a command, kills it at the next signal, and gives up at the one after that. The command's end
// ends berth meanwhile.
func (c *execCommand) interrupt(ctx context.Context, cut func(), o *output, p *client.Process) {
	defer cut()
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt, syscall.SIGTERM)
	defer signal.Stop(again)
	for _, kill := range []bool{false, true} {
		call, cancel := context.WithTimeout(ctx, terminateWait)
		go func() {
			if err := p.Terminate(call, kill); err != nil && call.Err() == nil {
				fmt.Fprintf(o.err, "the command was not ended: %v\n", err)
			}
		}()
		select {
		case <-again:
		case <-ctx.Done():
		}
		cancel()
	}
}

func sizeOf(terminal int) (client.TerminalSize, error) {
	columns, rows, err := term.GetSize(terminal)
	return client.TerminalSize{Columns: columns, Rows: rows}, err
}

// resizes keeps the size of a command's terminal that of the local one, until stop.
func resizes(ctx context.Context, p *client.Process, terminal int) (stop func()) {
	changed, ended := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(changed, syscall.SIGWINCH)
	ctx, cancel := context.WithCancel(ctx)
	go func() {
		defer close(ended)
		for {
			select {
			case <-changed:
				if size, err := sizeOf(terminal); err == nil {
					_ = p.Resize(ctx, size) // the next change tries again
				}
			case <-ctx.Done():
				return
			}
		}
	}()
	return func() {
		signal.Stop(changed)
		cancel()
		<-ended
	}
}

type cpCommand struct {
	gatewayFlags
	User        string `short:"u" help:"User that reads or owns the file in the sandbox. Its default user if it is left out."`
	Source      string `arg:"" help:"File: a path, - for standard input, or ID:PATH in a sandbox."`
	Destination string `arg:"" help:"File: a path, - for standard output, or ID:PATH in a sandbox. After a / at its end the name of the source follows."`
}

// Help implements kong.HelpProvider.
func (*cpCommand) Help() string {
	return "One of the two is in a sandbox. It copies one file; for directories: " +
		"tar c DIR | berth exec -i ID -- tar x, and back."
}

// remote splits ID:PATH. A path with a colon begins with / or ./.
func remote(text string) (id, file string, ok bool) {
	id, file, ok = strings.Cut(text, ":")
	return id, file, ok && id != "" && file != "" && !strings.Contains(id, "/")
}

// Run implements the command.
func (c *cpCommand) Run(ctx context.Context, o *output) error {
	from, source, download := remote(c.Source)
	to, destination, upload := remote(c.Destination)
	if download == upload {
		return usage("one of %q and %q must be ID:PATH in a sandbox, and the other one a file here", c.Source, c.Destination)
	}
	if upload {
		from = to
	}
	a, shut, err := c.agent(ctx, from, c.User)
	if err != nil {
		return err
	}
	defer shut()
	if upload {
		return c.upload(ctx, a, destination)
	}
	return c.download(ctx, o, a, source)
}

func (c *cpCommand) upload(ctx context.Context, a *client.Agent, to string) error {
	file := os.Stdin
	if c.Source != "-" {
		var err error
		if file, err = os.Open(c.Source); err != nil {
			return err
		}
		defer file.Close()
		if info, err := file.Stat(); err != nil || info.IsDir() {
			return cmp.Or(err, usage("%s is a directory: tar c %[1]s | berth exec -i ID -- tar x", c.Source))
		}
	}
	if strings.HasSuffix(to, "/") {
		to += filepath.Base(c.Source)
	}
	return fromAgent(a.WriteFile(ctx, to, file))
}

func (c *cpCommand) download(ctx context.Context, o *output, a *client.Agent, from string) (err error) {
	to := c.Destination
	if info, err := os.Stat(to); err == nil && info.IsDir() || strings.HasSuffix(to, "/") {
		to = filepath.Join(to, path.Base(from))
	}
	file, err := a.Open(ctx, from)
	if err != nil {
		return fromAgent(err)
	}
	defer file.Close()
	if to == "-" {
		_, err = io.Copy(o.raw.out, file)
		return err
	}
	if info, err := os.Stat(to); err == nil && !info.Mode().IsRegular() { // such as a named pipe
		local, err := os.OpenFile(to, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = io.Copy(local, file)
		return errors.Join(err, local.Close())
	}
	return replace(to, file)
}

// replace writes a file. One that exists keeps its mode and, if that fails, its contents.
func replace(to string, contents io.Reader) error {
	mode := os.FileMode(0o644)
	if target, err := filepath.EvalSymlinks(to); err == nil {
		to = target
		if info, err := os.Stat(to); err == nil {
			mode = info.Mode().Perm()
		}
	}
	local, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+"-*")
	if err != nil {
		return err
	}
	_, err = io.Copy(local, contents)
	if err = errors.Join(err, local.Chmod(mode), local.Close()); err == nil {
		err = os.Rename(local.Name(), to)
	}
	if err != nil {
		return errors.Join(err, os.Remove(local.Name()))
	}
	return nil
}
