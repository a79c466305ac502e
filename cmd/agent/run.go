package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent"
	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/files"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/agent/process"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// grace is how long commands have to end after SIGTERM, and then the rest after SIGKILL.
const grace = 5 * time.Second

// Bounds of a connection. Envoy closes its connections sooner than idle, so that no request finds one that the
// agent is about to close, and passes on smaller headers.
const (
	idle      = 2 * time.Minute
	maxHeader = 128 << 10
)

// run serves until the end that the package's comment describes, or until ctx ends.
func (c *runCommand) run(ctx context.Context, signals <-chan os.Signal, log *slog.Logger) error {
	// Processes of the same user could read the access token in this one's memory.
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return os.NewSyscallError("prctl PR_SET_DUMPABLE", err)
	}
	table := children.New()
	reaping, stop := context.WithCancel(context.Background())
	reaped := make(chan error, 1)
	go func() { reaped <- table.Run(reaping) }()
	defer func() {
		stop()
		<-reaped //nolint:errcheck // it is in the select below
	}()
	// Before the reaper ends: it sees that none is left.
	defer table.KillAll(grace)

	freezer, err := freeze.New(freeze.Options{Children: table})
	if err != nil {
		return err
	}
	handler, processes, closeRest, err := c.handler(table, freezer, log)
	if err != nil {
		return err
	}
	defer closeRest()
	defer processes.Close()
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: idle, MaxHeaderBytes: maxHeader,
		ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelWarn)}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	defer func() {
		_ = server.Close()
		<-failed //nolint:errcheck // http.ErrServerClosed, or it was read
	}()

	c.sayServing(log, listener.Addr())

	command, err := c.start(table)
	if err != nil {
		return err
	}
	pass := func(s os.Signal) (over bool) {
		wake(freezer, s)
		if over = c.forward(command, s); over {
			end(processes)
		}
		return over
	}
	// held is the signal to end that waits for an archive.
	var held os.Signal
	archive := new(agent.Stop)
	passHeld := func() (over bool) {
		archive = new(agent.Stop)
		return pass(held)
	}
	for {
		select {
		case err := <-failed:
			close(failed)
			return err
		case err := <-reaped:
			close(reaped)
			return err
		case <-command.Done():
			return ended(command.Status())
		case <-ctx.Done():
			return nil
		case s := <-signals:
			if begun := handler.Stopping(); begun != nil && held == nil && ends(s) {
				held, archive = s, begun
				log.Info("told to end while the files are archived, to be stopped: the processes stay as they are")
			} else if pass(s) {
				return nil
			}
		case <-archive.Awake:
			if passHeld() {
				return nil
			}
		case whole := <-archive.Ended:
			if whole || passHeld() {
				return nil
			}
		}
	}
}

// wake has the processes run, which would else get a signal only after the sandbox has slept. A sandbox that was told to
// end does not fall asleep again.
func wake(freezer *freeze.Freezer, s os.Signal) {
	if ends(s) {
		freezer.End()
		return
	}
	freezer.Wake()
}

// ends reports whether a signal tells the sandbox to end.
func ends(s os.Signal) bool {
	return s == syscall.SIGTERM || s == syscall.SIGINT || s == syscall.SIGQUIT
}

// sayServing logs that the agent serves, and how long after the begin of its process.
func (c *runCommand) sayServing(log *slog.Logger, at net.Addr) {
	attributes := []any{"address", at}
	// The fields behind the name of the program, which is in parentheses. The 20th of these is the begin, in
	// hundredths of a second since the machine's start: proc_pid_stat(5).
	const begin = 20
	text, err := os.ReadFile("/proc/self/stat")
	if fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])); err == nil && len(fields) > begin {
		if ticks, err := strconv.ParseInt(fields[begin-1], 10, 64); err == nil {
			attributes = append(attributes, "after", bootclock.Now()-time.Duration(ticks)*10*time.Millisecond)
		}
	}
	log.Info("the agent serves", attributes...)
}

// handler wires what serves the sandbox.
func (c *runCommand) handler(table *children.Table, freezer *freeze.Freezer, log *slog.Logger) (
	handler *agent.Agent, processes *process.Service, closeRest func(), err error,
) {
	keys, err := initbox.NewKeys(c.Key)
	if err != nil {
		return nil, nil, nil, err
	}
	// Only in a container are the files of the accounts the sandbox's own.
	directory, err := accounts.New(os.Getpid() == 1)
	if err != nil {
		log.Warn("commands run as the agent's own user", "error", err)
	}
	var fileService *files.Service
	a, err := agent.New(agent.Options{Log: log, Keys: keys, Accounts: directory, Freezer: freezer,
		WriteFile: func(account accounts.Account, f initbox.File) error {
			return fileService.Write(account, f.Path, f.Data, fs.FileMode(f.Mode))
		}})
	if err != nil {
		return nil, nil, nil, err
	}
	processes, err = process.New(process.Options{Sandbox: a, Children: table, Freezer: freezer})
	if err != nil {
		return nil, nil, nil, err
	}
	fileService, err = files.New(files.Options{Account: a.Account, Anywhere: c.NewFiles == anywhere,
		Dir: func() string { return a.Config().Workdir }})
	if err != nil {
		return nil, nil, nil, err
	}
	a.Handle(processes.Handler())
	a.Handle(fileService.Filesystem())
	a.HandleSigned(files.Path, fileService.Files(), func(r *http.Request, token string) error {
		return files.CheckSignature(r, token, time.Now())
	})
	a.HandleOpen("GET /busy", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if processes.Running() == 0 || freezer.Asleep() {
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	measuring, stop := context.WithCancel(context.Background())
	measured := make(chan struct{})
	go func() {
		defer close(measured)
		a.KeepSeries(measuring)
	}()
	return a, processes, func() {
		stop()
		<-measured
		_ = fileService.Close()
	}, nil
}

// start starts the container's command. Without one it returns a child that never ends.
func (c *runCommand) start(table *children.Table) (*children.Child, error) {
	argv := c.Command
	if len(argv) > 0 && argv[0] == "--" {
		argv = argv[1:]
	}
	if len(argv) == 0 {
		return &children.Child{}, nil
	}
	path, err := exec.LookPath(argv[0])
	if err == nil || errors.Is(err, exec.ErrDot) {
		var child *children.Child
		child, err = table.Start(path, argv, &syscall.ProcAttr{Env: environment(), Files: []uintptr{0, 1, 2}})
		if err == nil {
			return child, nil
		}
	}
	code := 126
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		code = 127
	}
	return nil, &exit{code, fmt.Errorf("the container's command: %w", err)}
}

// environment returns that of the container, without what is for the agent only.
func environment() (own []string) {
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, initbox.PublicKeyEnv+"=") {
			own = append(own, entry)
		}
	}
	return own
}

// forward passes a signal on to the command. It returns true if there is none and the signal ends the
// agent.
func (c *runCommand) forward(command *children.Child, s os.Signal) bool {
	if command.PID == 0 {
		return s == syscall.SIGTERM || s == os.Interrupt
	}
	_ = command.Signal(s.(syscall.Signal)) // it has ended
	return false
}

// end asks all commands to end, and returns when they have or grace has passed.
func end(processes *process.Service) {
	processes.Signal(syscall.SIGTERM)
	limit := time.NewTimer(grace)
	defer limit.Stop()
	look := time.NewTicker(10 * time.Millisecond)
	defer look.Stop()
	for processes.Running() > 0 {
		select {
		case <-look.C:
		case <-limit.C:
			return
		}
	}
}

// ended returns the end of the agent after that of its command.
func ended(status syscall.WaitStatus) error {
	switch {
	case status.Signaled():
		return &exit{code: 128 + int(status.Signal())}
	case status.ExitStatus() != 0:
		return &exit{code: status.ExitStatus()}
	}
	return nil
}
