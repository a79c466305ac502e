package proc

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"syscall"
	"time"
)

// guardScript reads one order per line until end of file. End of file means that
// this process has died or has closed the supervisor. "+N" and "-N" add and remove a
// process group, "/dir" adds a directory. Directories are removed last. The script
// retries that for a while, because a killed process may still finish a write.
const guardScript = `trap '' INT TERM HUP QUIT
groups=' '
while IFS= read -r order; do
	case $order in
	+*) groups="$groups${order#+} " ;;
	-*) case $groups in *" ${order#-} "*)
		groups="${groups%% ${order#-} *} ${groups#* ${order#-} }" ;;
	esac ;;
	/*) set -- "$@" "$order" ;;
	esac
done
for g in $groups; do kill -s KILL -- "-$g"; done
for dir; do
	tries=0
	while ! rm -rf -- "$dir" && [ $tries -lt 50 ]; do
		tries=$((tries + 1))
		sleep 0.1
	done
done
`

// guardLimit bounds the wait for the guard's end. It removes directories first.
const guardLimit = 30 * time.Second

// guard is the shell process that cleans up after this process has ended. Its
// methods are not safe for concurrent use.
type guard struct {
	cmd    *exec.Cmd
	orders io.WriteCloser
}

func startGuard() (*guard, error) {
	// Only the guard may hold the read end, and only this process the write end.
	// Another holder of the write end would hide the death of this process. Both are
	// close-on-exec, so no child inherits them.
	r, w, err := os.Pipe()
	if err != nil {
		return nil, fmt.Errorf("pipe to the guard: %w", err)
	}
	defer r.Close()
	cmd := exec.Command("/bin/sh", "-c", guardScript, "berth-guard")
	cmd.Dir = "/"
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.Stdin = r
	// Stdout and Stderr stay nil, which is /dev/null. A reader of this process's
	// output must see end of file when this process dies, not when the guard does.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		w.Close()
		return nil, fmt.Errorf("start the guard: %w", err)
	}
	return &guard{cmd: cmd, orders: w}, nil
}

func (g *guard) addGroup(pgid int) error    { return g.order("+" + strconv.Itoa(pgid)) }
func (g *guard) removeGroup(pgid int) error { return g.order("-" + strconv.Itoa(pgid)) }
func (g *guard) addDir(dir string) error    { return g.order(dir) }

func (g *guard) order(line string) error {
	if _, err := io.WriteString(g.orders, line+"\n"); err != nil {
		return fmt.Errorf("guard process %d does not answer, was it killed? %w", g.cmd.Process.Pid, err)
	}
	return nil
}

// end lets the guard do its work and waits for it.
func (g *guard) end() error {
	g.orders.Close()
	t := time.AfterFunc(guardLimit, func() { _ = g.cmd.Process.Kill() })
	defer t.Stop()
	if err := g.cmd.Wait(); err != nil {
		return fmt.Errorf("guard: %w", err)
	}
	return nil
}
