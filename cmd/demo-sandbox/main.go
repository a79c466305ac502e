// Command demo-sandbox is what runs in the sandboxes of demos and tests: an HTTP
// server that says who it is. Flags make it end by itself, refuse to end, or write
// down what reaches it.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/berth-sandbox/berth/internal/wait"
)

// flags is the command line; each flag may also come from the environment.
type flags struct {
	IP    string `name:"ip" env:"POD_IP" help:"Address to listen on; empty: all."`
	Ports []int  `env:"PORTS" default:"8080" help:"Ports to listen on."`

	Pod    string `env:"POD_NAME" help:"Pod name to answer with; empty: HOSTNAME."`
	PodUID string `name:"pod-uid" env:"POD_UID" help:"Pod UID to answer with."`

	ExitAfter     time.Duration `env:"EXIT_AFTER" help:"End by itself after this time; 0: never."`
	ExitCode      int           `env:"EXIT_CODE" help:"Exit code of an end by itself."`
	IgnoreSigterm bool          `env:"IGNORE_SIGTERM" help:"Go on after SIGTERM."`
	TermDelay     time.Duration `env:"TERM_DELAY" help:"Serve on for this long after SIGTERM."`
	SpawnChild    int           `env:"SPAWN_CHILD" help:"Start a copy in this process group that ignores SIGTERM and listens on this port; 0: none."`
	Record        string        `env:"RECORD" help:"Directory. Every request but those of probes is written to the end of the file <pod UID>.jsonl in it, a line of JSON each, before it is answered."`
	Relay         bool          `env:"RELAY" help:"Be an HTTP proxy to any address. For tests that reach a cluster only through its API server."`
}

// exit is an end with an exit code that was asked for.
type exit int

func (e exit) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdout, os.Stderr)
	var code exit
	switch {
	case errors.As(err, &code):
		os.Exit(int(code))
	case err != nil:
		fmt.Fprintln(os.Stderr, "demo-sandbox:", err)
		os.Exit(2)
	}
}

// run serves until ctx ends, SIGTERM comes or an end was asked for. It returns
// nil after a graceful end and an exit for an exit code other than 0.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	// Before anything that takes time: SIGTERM must never find the default action.
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM, os.Interrupt)
	defer signal.Stop(term)

	var f flags
	helped := false
	parser, err := kong.New(&f, kong.Name("demo-sandbox"), kong.Writers(stdout, stderr),
		kong.Description("An HTTP server that says which pod it is."), kong.Exit(func(int) { helped = true }))
	if err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	if _, err := parser.Parse(args); helped {
		return nil
	} else if err != nil {
		return fmt.Errorf("flags: %w", err)
	}
	if f.Pod == "" {
		f.Pod = os.Getenv("HOSTNAME")
	}
	if f.SpawnChild != 0 {
		if err := spawn(f.IP, f.SpawnChild, stdout, stderr); err != nil {
			return err
		}
	}
	return f.serve(ctx, term, stdout)
}

// serve listens on every port and waits for the first reason to end.
func (f *flags) serve(ctx context.Context, term <-chan os.Signal, stdout io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	s, err := newSandbox(f)
	if err != nil {
		return err
	}
	defer s.close()
	failed := make(chan error, len(f.Ports))
	var servers []*http.Server
	var serving sync.WaitGroup
	defer serving.Wait()
	for _, port := range f.Ports {
		var lc net.ListenConfig
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(f.IP, strconv.Itoa(port)))
		if err != nil {
			for _, server := range servers {
				_ = server.Close()
			}
			return fmt.Errorf("listen: %w", err)
		}
		handler := s.handler(l.Addr().(*net.TCPAddr).Port)
		if f.Relay {
			handler = relay(handler)
		}
		server := &http.Server{
			Handler: handler, ReadHeaderTimeout: time.Minute, Protocols: &http.Protocols{},
			BaseContext: func(net.Listener) context.Context { return ctx },
		}
		server.Protocols.SetHTTP1(true)
		server.Protocols.SetUnencryptedHTTP2(true) // as gRPC has it
		servers = append(servers, server)
		serving.Go(func() {
			if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				failed <- err
			}
		})
		fmt.Fprintln(stdout, "listening on", l.Addr())
	}
	var alarm <-chan time.Time
	if f.ExitAfter > 0 {
		timer := time.NewTimer(f.ExitAfter)
		defer timer.Stop()
		alarm = timer.C
	}
	err = f.await(ctx, s, term, alarm, failed, stdout)
	cancel() // requests that would last end here
	const drain = 500 * time.Millisecond
	grace, stop := context.WithTimeout(context.Background(), drain)
	defer stop()
	for _, server := range servers {
		if server.Shutdown(grace) != nil {
			_ = server.Close()
		}
	}
	return err
}

func (f *flags) await(ctx context.Context, s *sandbox, term <-chan os.Signal, alarm <-chan time.Time, failed <-chan error, stdout io.Writer) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case err := <-failed:
			return fmt.Errorf("serve: %w", err)
		case <-alarm:
			return ended(f.ExitCode)
		case code := <-s.exits:
			return ended(code)
		case <-term:
			fmt.Fprintln(stdout, "SIGTERM")
			if f.IgnoreSigterm {
				continue
			}
			wait.Sleep(ctx, f.TermDelay)
			return nil
		}
	}
}

func ended(code int) error {
	if code == 0 {
		return nil
	}
	return exit(code)
}

// spawn leaves a child behind on purpose: a node that stops the pod must stop it too.
func spawn(ip string, port int, stdout, stderr io.Writer) error {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("spawn child: %w", err)
	}
	child := exec.Command(self, "--ip", ip, "--ports", strconv.Itoa(port), "--ignore-sigterm")
	child.Stdout, child.Stderr = stdout, stderr
	child.Env = []string{"HOSTNAME=child-of-" + strconv.Itoa(os.Getpid())}
	if err := child.Start(); err != nil {
		return fmt.Errorf("spawn child: %w", err)
	}
	return nil
}
