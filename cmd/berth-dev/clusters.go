package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sync/errgroup"

	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/devcluster/stack"
)

type named struct {
	Name string `default:"dev" help:"Name of the cluster."`
}

type upCommand struct {
	named
	shape
}

// Run implements the command.
func (c *upCommand) Run(ctx context.Context, o *output) error {
	if _, err := c.check(); err != nil {
		return err
	}
	switch _, err := devcluster.Lookup(c.Name); {
	case err == nil:
		return fmt.Errorf("--name %s: %w; \"berth-dev status\" shows it, \"berth-dev down --name %s\" ends it",
			c.Name, devcluster.ErrRunning, c.Name)
	case !errors.Is(err, devcluster.ErrNotRunning):
		return err
	}
	// The build runs in the foreground, so that its progress is visible.
	if err := (&buildCommand{}).Run(ctx, o); err != nil {
		return err
	}
	if c.CodeInterpreter {
		packages, err := stack.InterpreterPackages()
		if err != nil {
			return err
		}
		if _, err := packages.Dir(ctx, o.err); err != nil {
			return err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	output, err := os.CreateTemp("", "berth-up-")
	if err != nil {
		return err
	}
	defer os.Remove(output.Name())
	defer output.Close()
	cmd := exec.Command(self, append([]string{"serve", "--name", c.Name}, c.args()...)...)
	cmd.Stdout, cmd.Stderr = output, output
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // Ctrl-C in this terminal must not end the cluster
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		if s, err := devcluster.Lookup(c.Name); err == nil && s.Ready {
			return show(o, s)
		}
		select {
		case <-ctx.Done():
			_ = cmd.Process.Signal(syscall.SIGTERM) // fails if the process has just ended
			if err := <-ended; err != nil {
				return fmt.Errorf("interrupted, and the cluster did not end well: %w", err)
			}
			return errors.New("interrupted; the cluster was stopped")
		case err := <-ended:
			log, _ := os.ReadFile(output.Name())
			return fmt.Errorf("--name %s: the cluster did not start: %w\n%s", c.Name, err, log)
		case <-ticker.C:
		}
	}
}

type serveCommand struct {
	named
	shape
}

// Run implements the command. It owns the cluster until it gets a signal to end. It
// restarts the parts of the cluster that end.
func (c *serveCommand) Run(ctx context.Context, o *output) (err error) {
	shape, err := c.check()
	if err != nil {
		return err
	}
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	registration, err := devcluster.Acquire(c.Name, stop)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, registration.Close()) }()
	e, err := startEnvironment(ctx, registration.Dir(), shape, o.err, func(step string) { fmt.Fprintln(o.out, step) })
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.stop()) }()
	if c.CodeInterpreter {
		if err := e.createInterpreterPool(ctx, o.err); err != nil {
			return err
		}
	}
	withdraw, err := e.publish(c.Name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, withdraw()) }()
	f, err := os.Create(filepath.Join(e.cluster.Dir(), "parts.log"))
	if err != nil {
		return err
	}
	defer f.Close()
	log := zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewDevelopmentEncoderConfig()), zapcore.Lock(f),
		zap.InfoLevel))
	parts := e.parts()
	registration.Serve(func() devcluster.State {
		return devcluster.State{
			Kubeconfig: e.cluster.Kubeconfig(), URLs: e.urls(), Environment: e.variables(), Parts: states(parts),
		}
	})
	keep(ctx, parts, log)
	return nil
}

type downCommand struct{ named }

// Run implements the command.
func (c *downCommand) Run(ctx context.Context, o *output) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := devcluster.RequestStop(ctx, c.Name); err != nil {
		return fmt.Errorf("--name %s: %w", c.Name, err)
	}
	_, err := fmt.Fprintf(o.out, "%s is down\n", c.Name)
	return err
}

type statusCommand struct{}

// Run implements the command.
func (statusCommand) Run(o *output) error {
	all, err := devcluster.List()
	if err != nil {
		return err
	}
	if len(all) == 0 {
		_, err := fmt.Fprintln(o.out, "no cluster is running; start one with: berth-dev up")
		return err
	}
	var errs []error
	for _, s := range all {
		errs = append(errs, show(o, s))
		for _, p := range s.Parts {
			if !p.Running {
				errs = append(errs, fmt.Errorf("%s: %s is down; parts.log says when it is started again", s.Name, p.Name))
			}
		}
	}
	return errors.Join(errs...)
}

func show(o *output, s devcluster.State) error {
	state := "starting"
	if s.Ready {
		state = "up"
	}
	fmt.Fprintf(o.out, "%s is %s (process %d, since %s)\n", s.Name, state, s.PID, s.Started.Format(time.DateTime))
	for _, p := range s.Parts {
		fmt.Fprintf(o.out, "  %-18s %s\n", p.Name, partState(p))
	}
	for _, name := range slices.Sorted(maps.Keys(s.URLs)) {
		fmt.Fprintf(o.out, "  %-18s %s\n", name, s.URLs[name])
	}
	if s.Kubeconfig == "" {
		return nil
	}
	fmt.Fprintf(o.out, "  %-18s %s\n\nTo use it, paste:\n\n", "logs", filepath.Dir(s.Kubeconfig))
	for _, name := range slices.Sorted(maps.Keys(s.Environment)) {
		fmt.Fprintf(o.out, "  export %s=%s\n", name, quoted(s.Environment[name]))
	}
	berth, err := berthPath()
	if err != nil {
		return err
	}
	fmt.Fprintf(o.out, `
  %[2]s claim %[1]s                      # claims a sandbox
  %[2]s curl SANDBOXID/hello             # sends a request to it
  curl -d '{"templateID":%[1]q}' $BERTH_API_URL/sandboxes   # the same without berth; "url" is the address
  curl -X DELETE $BERTH_API_URL/sandboxes/SANDBOXID

curl and browsers resolve names below localhost. Node, Python and others may not: they reach a sandbox at $E2B_SANDBOX_URL
with the headers E2b-Sandbox-Id and E2b-Sandbox-Port. With --tls, E2B_DOMAIN alone is enough where the names resolve.
Pods are processes of this machine: "kubectl logs" and "kubectl exec" do not work, their output is in the directory of the
logs, and a pool needs a command in its template.
`, demoPool, quoted(berth))
	return nil
}

// berthPath is where the command berth is: beside this program, unless it was not built.
func berthPath() (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", err
	}
	path := filepath.Join(filepath.Dir(self), "berth")
	if _, err := os.Stat(path); err != nil {
		return "berth", nil //nolint:nilerr // then it may be on the PATH
	}
	return path, nil
}

// quoted is a text as one word of a shell.
func quoted(text string) string {
	if !strings.ContainsFunc(text, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune("_-./:@,", r)
	}) {
		return text
	}
	return "'" + strings.ReplaceAll(text, "'", `'\''`) + "'"
}

type buildCommand struct{}

// Run implements the command. The download of Envoy runs beside the build.
func (buildCommand) Run(ctx context.Context, o *output) error {
	both, ctx := errgroup.WithContext(ctx)
	both.Go(func() error {
		_, _, err := devcluster.ControlPlaneBinaries(ctx, o.err)
		return err
	})
	both.Go(func() error {
		_, err := devcluster.EnvoyBinary(ctx, o.err)
		return err
	})
	return both.Wait()
}
