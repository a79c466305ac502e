package instance_test

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/extproc/instance"
)

// dirEnv makes this test's binary a process with an instance.
const dirEnv = "BERTH_TEST_INSTANCE_DIR"

func TestMain(m *testing.M) {
	dir := os.Getenv(dirEnv)
	if dir == "" {
		os.Exit(m.Run())
	}
	i, err := instance.New(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	fmt.Println(i.ID())
	_, _ = os.Stdin.Read(make([]byte, 1)) // until it is killed
}

// process starts another process with an instance in dir.
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

func TestOnlyAProcessThatHasEndedIsFoundDead(t *testing.T) {
	dir := t.TempDir()
	i, err := instance.New(dir)
	require.NoError(t, err)
	require.Regexp(t, regexp.MustCompile(`^[a-z0-9-]{16,64}$`), i.ID())
	require.Empty(t, i.Dead(), "it takes itself for dead")
	first, _, endFirst := process(t, dir)
	second, stopped, endSecond := process(t, dir)
	require.NoError(t, stopped.Signal(syscall.SIGSTOP))
	require.Empty(t, i.Dead(), "a process that stands still may go on")
	endFirst()
	require.Equal(t, []string{first}, i.Dead())
	require.Equal(t, []string{first}, i.Dead(), "until it is forgotten")
	endSecond()
	require.ElementsMatch(t, []string{first, second}, i.Dead())
	require.NoError(t, i.Forget([]string{first, "unheard of"}))
	require.Equal(t, []string{second}, i.Dead())

	// Whoever comes after this process goes on with what it has not reported.
	require.NoError(t, i.Close(true))
	next, err := instance.New(dir)
	require.NoError(t, err)
	require.ElementsMatch(t, []string{i.ID(), second}, next.Dead())
	require.NoError(t, next.Forget(next.Dead()))
	require.NoError(t, next.Close(true))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "its own")
}

func TestWhatIsNoLockFileIsLeftAlone(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"router.sock", "envoy.yaml", "router-x.lock.new", "other.lock"} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	require.NoError(t, os.Mkdir(filepath.Join(dir, "directory.lock"), 0o700))
	i, err := instance.New(dir)
	require.NoError(t, err)
	require.Empty(t, i.Dead())
	require.NoError(t, i.Close(false))
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 5)
}

func TestADirectoryThatIsNotThereIsSaid(t *testing.T) {
	_, err := instance.New(filepath.Join(t.TempDir(), "none"))
	require.ErrorContains(t, err, "lock file of this instance")
	require.ErrorIs(t, err, os.ErrNotExist)
}

// One that takes its file away must not be found dead by a neighbour that has opened the
// file just before.
func TestAnInstanceThatTakesItsFileAwayIsNotFoundDead(t *testing.T) {
	dir := t.TempDir()
	neighbour, err := instance.New(dir)
	require.NoError(t, err)
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case <-stop:
				return
			default:
				neighbour.Dead()
			}
		}
	}()
	gone := map[string]bool{}
	for range 3000 {
		i, err := instance.New(dir)
		require.NoError(t, err)
		gone[i.ID()] = true
		require.NoError(t, i.Close(false))
	}
	close(stop)
	<-done
	for _, id := range neighbour.Dead() {
		require.False(t, gone[id], "%s has taken its file away", id)
	}
}

// A neighbour that gets the lock while the file is there reports this one as dead. The
// kernel tells in which order the two go.
func TestAnInstanceTakesItsFileAwayBeforeItLetsGoOfTheLock(t *testing.T) {
	for clean, want := range map[bool][]string{true: {"closed"}, false: {"taken away", "closed"}} {
		dir := t.TempDir()
		i, err := instance.New(dir)
		require.NoError(t, err)
		watch, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		require.NoError(t, err)
		defer unix.Close(watch)
		_, err = unix.InotifyAddWatch(watch, dir, unix.IN_DELETE|unix.IN_CLOSE)
		require.NoError(t, err)
		require.NoError(t, i.Close(clean))

		buffer := make([]byte, 4096)
		n, err := unix.Read(watch, buffer) // what has happened is there to be read
		require.NoError(t, err)
		var got []string
		for rest := buffer[:n]; len(rest) > 0; {
			mask := binary.NativeEndian.Uint32(rest[4:])
			name := rest[unix.SizeofInotifyEvent:][:binary.NativeEndian.Uint32(rest[12:])]
			rest = rest[unix.SizeofInotifyEvent+len(name):]
			require.Equal(t, i.ID()+".lock", string(bytes.TrimRight(name, "\x00")))
			if mask&unix.IN_DELETE != 0 {
				got = append(got, "taken away")
			} else {
				got = append(got, "closed")
			}
		}
		require.Equal(t, want, got)
	}
}
