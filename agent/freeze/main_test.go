package freeze_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// table reaps for all tests of this package, and is the parent of all processes that they freeze. So they are not
// parallel.
var table = children.New()

// role is set in the environment of a test's process that is to be another program.
const role = "BERTH_TEST_ROLE"

func TestMain(m *testing.M) {
	if name := os.Getenv(role); name != "" {
		os.Unsetenv(role)
		if err := roles[name](); err != nil {
			fmt.Fprintln(os.Stderr, name+":", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := reaping(m.Run)
	if err := goleak.Find(); code == 0 && err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// reaping runs f while the table reaps, and kills what f leaves.
func reaping(f func() int) int {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- table.Run(ctx) }()
	code := f()
	table.KillAll(time.Minute)
	cancel()
	if err := <-ended; err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// roles are the programs that a test's process can be.
var roles = map[string]func() error{
	// spawner starts programs all the time. Go's parent waits in vfork(2).
	"spawner": func() error {
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				for exec.Command("true").Run() == nil {
				}
			})
		}
		all.Wait()
		return io.EOF
	},
	// headless runs without its first thread.
	"headless": func() error {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			return fmt.Errorf("thread %d", unix.Gettid())
		}
		go func() {
			for {
				fmt.Println("running")
				time.Sleep(time.Millisecond)
			}
		}()
		_, _, errno := unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
		return errno
	},
	// root becomes root, where its file says so, and stays.
	"root": func() error {
		if err := unix.Setresuid(0, 0, 0); err != nil {
			return err
		}
		fmt.Println("root")
		select {}
	},
	// agent freezes a process of its own and one of root.
	"agent": func() error {
		var failed error
		reaping(func() int { failed = freezeRoot(os.Getenv("ROOT_PROGRAM")); return 0 })
		return failed
	},
}

// outcome is what the role agent prints.
type outcome struct {
	Refusal *initbox.Refusal
	Root    int    // process of root
	States  string // of both processes
}

func freezeRoot(program string) error {
	own, err := table.Start("/bin/sleep", []string{"sleep", "1000"}, &syscall.ProcAttr{})
	if err != nil {
		return err
	}
	out, theirs, err := os.Pipe()
	if err != nil {
		return err
	}
	defer out.Close()
	root, err := table.Start(program, []string{"root"}, &syscall.ProcAttr{Env: []string{role + "=root"},
		Files: []uintptr{0, theirs.Fd(), 2}})
	theirs.Close()
	if err != nil {
		return err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return fmt.Errorf("process of root: %q: %w", line, err)
	}
	f, err := freeze.New(freeze.Options{Children: table})
	if err != nil {
		return err
	}
	_, err = f.Obey(order(initbox.Freeze, 1))
	time.Sleep(100 * time.Millisecond) // a process stops when it is scheduled
	o := outcome{Root: root.PID, States: state(own.PID) + state(root.PID)}
	o.Refusal, _ = err.(*initbox.Refusal) //nolint:errorlint // nil of that type is no error
	return json.NewEncoder(os.Stdout).Encode(o)
}

func order(kind initbox.Kind, counter uint64) initbox.Order {
	return initbox.Order{SandboxID: "a", Kind: kind, Term: 1, Counter: counter}
}

// freezer is a Freezer that has nothing to stop yet, and is awake when the test ends.
func freezer(t testing.TB, hold time.Duration) *freeze.Freezer {
	t.Helper()
	f, err := freeze.New(freeze.Options{Children: table, Hold: hold, Bound: time.Minute})
	require.NoError(t, err)
	t.Cleanup(func() {
		f.End()
		table.KillAll(time.Minute)
		require.Empty(t, below(os.Getpid()))
	})
	return f
}

// shell starts a shell with a script, and returns what it writes.
func shell(t testing.TB, script string) (*children.Child, *bufio.Reader) {
	t.Helper()
	return program(t, "/bin/sh", []string{"sh", "-c", script}, os.Environ())
}

func program(t testing.TB, path string, argv, env []string) (*children.Child, *bufio.Reader) {
	t.Helper()
	out, theirs, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { out.Close() })
	c, err := table.Start(path, argv, &syscall.ProcAttr{Env: env, Files: []uintptr{0, theirs.Fd(), 2},
		Sys: &syscall.SysProcAttr{Setsid: true}})
	theirs.Close()
	require.NoError(t, err)
	return c, bufio.NewReader(out)
}

// python starts Python with a script.
func python(t testing.TB, script string) (*children.Child, *bufio.Reader) {
	t.Helper()
	path, err := exec.LookPath("python3")
	require.NoError(t, err)
	return program(t, path, []string{"python3", "-c", script}, os.Environ())
}

func number(t testing.TB, out *bufio.Reader) (n int) {
	t.Helper()
	_, err := fmt.Fscan(out, &n)
	require.NoError(t, err)
	return n
}

// below returns the descendants of a process, as the kernel lists them by threads.
func below(pid int) (all []int) {
	threads, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, thread := range threads {
		text, _ := os.ReadFile(thread)
		for _, f := range strings.Fields(string(text)) {
			child, _ := strconv.Atoi(f)
			all = append(append(all, child), below(child)...)
		}
	}
	return all
}

// state returns the letter for what a process does, "" if it is gone.
func state(pid int) string { return stateOf(fmt.Sprintf("/proc/%d/stat", pid)) }

func stateOf(file string) string {
	text, _ := os.ReadFile(file)
	f := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+1:]))
	if len(f) == 0 {
		return ""
	}
	return f[0]
}

// threads returns the letters of all threads of some processes.
func threads(pids ...int) (letters string) {
	for _, pid := range pids {
		files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
		for _, file := range files {
			letters += stateOf(file)
		}
	}
	return letters
}

// requireStill requires that no descendant of the test runs, and returns the letters of their threads.
func requireStill(t testing.TB) string {
	t.Helper()
	letters := threads(below(os.Getpid())...)
	require.Empty(t, strings.Trim(letters, "TtDZX"), letters)
	return letters
}

func obey(t testing.TB, f *freeze.Freezer, o initbox.Order) initbox.Obeyed {
	t.Helper()
	obeyed, err := f.Obey(o)
	require.NoError(t, err)
	return obeyed
}
