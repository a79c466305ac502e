package lockfile_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/extproc/lockfile"
)

// dirEnv makes this test's binary a router process.
const dirEnv = "BERTH_TEST_LOCKFILE_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(dirEnv)
	if dir == "" {
		os.Exit(m.Run())
	}
	i, err := lockfile.New(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(i.ID())
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
}

// process starts another router process with a lock file in dir.
func process(t *testing.T, dir string) (id string, p *os.Process, end func()) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), dirEnv+"="+dir)
	cmd.Stderr = os.Stderr
	stdin, err := cmd.StdinPipe()
	require.NoError(t, err)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	ended := false
	end = func() {
		if !ended {
			ended = true
			_ = cmd.Process.Kill()
			stdin.Close()
			_ = cmd.Wait()
		}
	}
	t.Cleanup(end)
	return line[:len(line)-1], cmd.Process, end
}

// Invariant: I3
func TestOnlyAnEndedProcessIsFoundDead(t *testing.T) {
	dir := t.TempDir()
	i, err := lockfile.New(dir)
	require.NoError(t, err)
	require.Regexp(t, regexp.MustCompile(`^[a-z0-9-]{16,64}$`), i.ID())
	require.Empty(t, i.Dead(), "it takes itself for dead")
	first, _, endFirst := process(t, dir)
	second, stopped, endSecond := process(t, dir)
	require.NoError(t, stopped.Signal(syscall.SIGSTOP))
	require.Empty(t, i.Dead(), "a stopped process may continue")
	endFirst()
	require.Equal(t, []string{first}, i.Dead())
	require.Equal(t, []string{first}, i.Dead(), "until it is forgotten")
	endSecond()
	require.ElementsMatch(t, []string{first, second}, i.Dead())
	require.NoError(t, i.Forget([]string{first, "unheard of"}))
	require.Equal(t, []string{second}, i.Dead())

	// A later process reports what this one has not reported.
	require.NoError(t, i.Close(true))
	next, err := lockfile.New(dir)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{i.ID(), second}, next.Dead())
	require.NoError(t, next.Forget(next.Dead()))
	require.NoError(t, next.Close(true))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 2, "its own, and the secret")
}

func TestOtherFilesAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"router.sock", "envoy.yaml", "router-x.lock.new", "other.lock"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "directory.lock"), 0o700))
	i, err := lockfile.New(dir)
	require.NoError(t, err)
	require.Empty(t, i.Dead())
	require.NoError(t, i.Close(false))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 6, "and the secret")
}

// Two routers of one gateway may start at the same time.
// Invariant: I3
func TestRoutersOfOneDirectoryShareTheirSecret(t *testing.T) {
	dir := t.TempDir()
	secrets := make([][]byte, 20)
	var all sync.WaitGroup
	for i := range secrets {
		all.Go(func() {
			if f, err := lockfile.New(dir); err == nil {
				secrets[i] = f.Secret()
			}
		})
	}
	all.Wait()
	require.Len(t, secrets[0], 32)
	for _, s := range secrets {
		require.Equal(t, secrets[0], s)
	}
	stat, err := os.Stat(filepath.Join(dir, "gateway.secret"))
	require.NoError(t, err)
	require.EqualValues(t, 0o600, stat.Mode())
	other, err := lockfile.New(t.TempDir())
	require.NoError(t, err)
	require.NotEqual(t, secrets[0], other.Secret())
}

func TestDamagedSecretOfTheGatewayIsAnError(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "gateway.secret"), []byte("short"), 0o600))
	_, err := lockfile.New(dir)
	require.ErrorContains(t, err, "gateway.secret: 5 bytes, not 32: delete it")
	left, err := filepath.Glob(filepath.Join(dir, "*.lock*"))
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestMissingDirectoryIsAnError(t *testing.T) {
	_, err := lockfile.New(filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "lock file of this router")
	require.ErrorIs(t, err, os.ErrNotExist)
}

// A router that removes its file must not be found dead by a router that has opened the
// file just before.
func TestRouterThatRemovesItsFileIsNotFoundDead(t *testing.T) {
	dir := t.TempDir()
	other, err := lockfile.New(dir)
	require.NoError(t, err)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				other.Dead()
			}
		}
	}()
	gone := map[string]bool{}
	for range 3000 {
		i, err := lockfile.New(dir)
		require.NoError(t, err)
		gone[i.ID()] = true
		require.NoError(t, i.Close(false))
	}
	close(stop)
	<-done
	for _, id := range other.Dead() {
		require.False(t, gone[id], "%s has removed its file", id)
	}
}

// A router that gets the lock while the file exists reports this one as dead. The
// kernel reports the order of the two.
// Invariant: I3
func TestFileIsRemovedBeforeTheLockIsReleased(t *testing.T) {
	for clean, want := range map[bool][]string{true: {"closed"}, false: {"removed", "closed"}} {
		dir := t.TempDir()
		i, err := lockfile.New(dir)
		require.NoError(t, err)
		watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		require.NoError(t, err)
		defer unix.Close(watch)
		_, err = unix.InotifyAddWatch(watch, dir, unix.IN_DELETE|unix.IN_CLOSE)
		require.NoError(t, err)
		require.NoError(t, i.Close(clean))

		buffer := make([]byte, 4096)
		n, err := unix.Read(watch, buffer) // the events are ready
		require.NoError(t, err)
		var got []string
		for rest := buffer[:n]; len(rest) > 0; {
			mask := binary.NativeEndian.Uint32(rest[4:])
			name := rest[unix.SizeofInotifyEvent:][:binary.NativeEndian.Uint32(rest[12:])]
			rest = rest[unix.SizeofInotifyEvent+len(name):]
			require.Equal(t, i.ID()+".lock", string(bytes.TrimRight(name, "\x00")))
			if mask&unix.IN_DELETE != 0 {
				got = append(got, "removed")
			} else {
				got = append(got, "closed")
			}
		}
		require.Equal(t, want, got)
	}
}
