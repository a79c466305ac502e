package process

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// defaultPath is PATH where neither the pod nor the call sets it.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// sdkShell is what E2B's SDKs start to run a command.
const sdkShell = "/bin/bash"

// start starts a process that nothing reads from yet. Its error is a *connect.Error.
func (s *Service) start(r *processpb.StartRequest, account accounts.Account) (*running, error) {
	config := r.GetProcess()
	if err := check(r); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	env := environment(os.Environ(), account, s.o.Sandbox.Config(), config.GetEnvs(), r.Pty != nil)
	dir, err := directory(config.Cwd, s.o.Sandbox.Config(), account)
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	path, err := lookPath(config.GetCmd(), dir, env["PATH"])
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	p := &running{config: config, tag: r.Tag, asleep: s.o.Freezer.Asleep, drained: make(chan struct{})}
	files, err := p.open(r, account)
	defer func() {
		for _, f := range files {
			f.Close()
		}
	}()
	if err == nil {
		p.child, err = s.o.Children.Start(path, append([]string{config.GetCmd()}, config.GetArgs()...), &syscall.ProcAttr{
			Dir: dir, Env: list(env), Files: []uintptr{files[0].Fd(), files[1].Fd(), files[2].Fd()},
			Sys: &syscall.SysProcAttr{Setsid: true, Setctty: p.terminal != nil, Credential: account.Credential()},
		})
	}
	if err != nil {
		p.closeOwn()
		return nil, startError(config.GetCmd(), dir, account.Name, err)
	}
	return p, nil
}

// check returns the first field of a request that no process can be started with.
func check(r *processpb.StartRequest) error {
	config := r.GetProcess()
	switch {
	case config.GetCmd() == "":
		return errors.New("process.cmd: must be set")
	case len(config.GetCmd()) > unix.PathMax || len(config.GetCwd()) > unix.PathMax:
		return fmt.Errorf("process.cmd and cwd: at most %d bytes", unix.PathMax)
	case len(r.GetTag()) > maxTag:
		return fmt.Errorf("tag: %d bytes, at most %d", len(r.GetTag()), maxTag)
	}
	for _, text := range append([]string{config.GetCmd(), config.GetCwd()}, config.GetArgs()...) {
		if strings.ContainsRune(text, 0) {
			return errors.New("process.cmd, args and cwd: must not have a zero byte")
		}
	}
	for name, value := range config.GetEnvs() {
		if name == "" || strings.ContainsAny(name, "=\x00") || strings.ContainsRune(value, 0) {
			return fmt.Errorf("process.envs: %.100q: a name must not be empty or have a =, and there must be no zero byte", name)
		}
	}
	_, err := size(r.GetPty().GetSize())
	return err
}

// environment returns the variables of a process: of the agent, its account, the proxy, the sandbox and the call.
// Later ones win.
func environment(
	own []string, account accounts.Account, config *initbox.Config, call map[string]string, terminal bool,
) map[string]string {
	env := map[string]string{"PATH": defaultPath}
	if terminal {
		env["TERM"] = "xterm-256color"
	}
	for _, entry := range own {
		if name, value, ok := strings.Cut(entry, "="); ok && name != initbox.PublicKeyEnv {
			env[name] = value
		}
	}
	env["HOME"], env["USER"], env["LOGNAME"] = account.Home, account.Name, account.Name
	if config != nil && config.Proxy != "" {
		proxied(env, config.Proxy)
	}
	if config != nil {
		// E2B's sandboxes have these two.
		env["E2B_SANDBOX"], env["E2B_SANDBOX_ID"] = "true", config.SandboxID
		for _, m := range []map[string]string{config.Envs, config.Secrets} {
			for name, value := range m {
				env[name] = value
			}
		}
	}
	for name, value := range call {
		env[name] = value
	}
	return env
}

// proxied sets the variables by which programs find a proxy. Some read names in upper case only, others in lower case
// only. Node.js reads them if the last one is set.
func proxied(env map[string]string, proxy string) {
	const local = "localhost,127.0.0.1,::1"
	for name, value := range map[string]string{"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "NO_PROXY": local} {
		env[name], env[strings.ToLower(name)] = value, value
	}
	env["NODE_USE_ENV_PROXY"] = "1"
}

// list returns variables in the form of execve(2), sorted.
func list(env map[string]string) []string {
	entries := make([]string, 0, len(env))
	for name, value := range env {
		entries = append(entries, name+"="+value)
	}
	slices.Sort(entries)
	return entries
}

// directory returns where a process starts. A home directory that does not exist is replaced by /; one
// that is asked for has to exist.
func directory(cwd *string, config *initbox.Config, account accounts.Account) (string, error) {
	name, from := account.Home, ""
	switch {
	case cwd != nil && *cwd != "":
		name, from = *cwd, "cwd"
	case config != nil && config.Workdir != "":
		name, from = config.Workdir, "the sandbox's working directory"
	}
	if rest, ok := strings.CutPrefix(name, "~"); ok && (rest == "" || rest[0] == '/') {
		name = account.Home + rest
	}
	if !filepath.IsAbs(name) {
		name = filepath.Join(account.Home, name)
	}
	info, err := os.Stat(name)
	switch {
	case errors.Is(err, fs.ErrPermission): // the account may have the right
		return name, nil
	case err == nil && info.IsDir():
		return name, nil
	case from == "":
		return "/", nil
	case err == nil:
		return "", fmt.Errorf("%s %q is not a directory", from, name)
	}
	return "", fmt.Errorf("%s %q does not exist", from, name)
}

// lookPath returns the file of a command. The directories of PATH have it if it is a name without slash.
func lookPath(command, dir, path string) (string, error) {
	if strings.Contains(command, "/") {
		return command, nil
	}
	for _, d := range filepath.SplitList(path) {
		if !filepath.IsAbs(d) {
			d = filepath.Join(dir, d)
		}
		file := filepath.Join(d, command)
		if info, err := os.Stat(file); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return file, nil
		}
	}
	return "", fmt.Errorf("the command %q is in no directory of PATH (%s)", command, path)
}

// open makes the ends of the process's pipes or terminal. It returns those that the child gets, to be
// closed by the caller, also after an error.
func (p *running) open(r *processpb.StartRequest, account accounts.Account) (files []*os.File, err error) {
	if r.Pty != nil {
		return p.openTerminal(r.GetPty(), account)
	}
	var theirs, ours *os.File
	if r.Stdin == nil || r.GetStdin() {
		ours, theirs, err = pipe(false)
	} else {
		theirs, err = os.Open(os.DevNull)
	}
	if err != nil {
		return nil, err
	}
	p.input = newInput(ours, false)
	files = append(files, theirs)
	for range 2 { // standard output, standard error
		ours, theirs, err := pipe(true)
		if err != nil {
			return files, err
		}
		p.sources = append(p.sources, ours)
		files = append(files, theirs)
	}
	return files, nil
}

// pipe returns the ends of a pipe: ours, from which this process reads or to which it writes, does not
// block a thread.
func pipe(reads bool) (ours, theirs *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, os.NewSyscallError("pipe2", err)
	}
	if !reads {
		fds[0], fds[1] = fds[1], fds[0]
	}
	if err := unix.SetNonblock(fds[0], true); err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("fcntl", err), unix.Close(fds[0]), unix.Close(fds[1]))
	}
	return os.NewFile(uintptr(fds[0]), "pipe"), os.NewFile(uintptr(fds[1]), "pipe"), nil
}

// closeOwn closes what open has made for a process that was not started.
func (p *running) closeOwn() {
	p.closeSources()
	if p.input != nil {
		p.input.abandon()
	}
}

// startError returns the answer to a start that the system has refused.
func startError(command, dir, account string, err error) error {
	if errors.Is(err, children.ErrPaused) {
		return connect.NewError(connect.CodeUnavailable, err)
	}
	var errno syscall.Errno
	errors.As(err, &errno)
	code, text := connect.CodeInternal, ""
	switch errno {
	case syscall.ENOENT:
		code, text = connect.CodeInvalidArgument, "the image lacks it, or the interpreter that it names"
		if command == sdkShell {
			text += "; E2B's SDKs run every command with it"
		}
	case syscall.ENOTDIR, syscall.ENOEXEC, syscall.E2BIG, syscall.EISDIR, syscall.ELOOP, syscall.ENAMETOOLONG:
		code = connect.CodeInvalidArgument
	case syscall.EACCES, syscall.EPERM:
		code = connect.CodePermissionDenied
		text = fmt.Sprintf("user %q must have the right to execute it, and to enter %q", account, dir)
	case syscall.EAGAIN, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.ENOSPC:
		code, text = connect.CodeResourceExhausted, "the sandbox has no process, memory or descriptor left"
	}
	if text != "" {
		text = ": " + text
	}
	return connect.NewError(code, fmt.Errorf("command %q: %w%s", command, err, text))
}
