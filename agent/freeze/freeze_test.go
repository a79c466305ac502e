package freeze_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

// Invariant: P28
func TestParentsStopFirstAndChildrenContinueFirst(t *testing.T) {
	f := freezer(t, time.Hour)
	parent, out := shell(t, "i=0; while [ $i -lt 50 ]; do sleep 1000 & i=$((i+1)); done; echo $!; wait")
	last := number(t, out)
	first := below(parent.PID)[0]
	var freezing, thawing, wrong atomic.Int32
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			// What is read second is later. A change of what goes on makes the pair worthless.
			f0, t0 := freezing.Load(), thawing.Load()
			switch {
			case f0 > t0:
				for _, child := range []int{first, last} {
					if state(child) == "T" && state(parent.PID) != "T" && freezing.Load() == f0 && thawing.Load() == t0 {
						wrong.Add(1)
					}
				}
			case state(parent.PID) != "T" && (state(first) == "T" || state(last) == "T") && freezing.Load() == f0:
				wrong.Add(1)
			}
		}
	}()
	for n := range uint64(20) {
		freezing.Add(1)
		require.Equal(t, 51, obey(t, f, order(initbox.Freeze, 2*n+1)).Processes)
		require.Equal(t, strings.Repeat("T", 51), requireStill(t))
		thawing.Add(1)
		require.Equal(t, 51, obey(t, f, order(initbox.Thaw, 2*n+2)).Processes)
		require.NotContains(t, threads(below(os.Getpid())...), "T")
	}
	close(stop)
	<-stopped
	require.Zero(t, wrong.Load())
}

// Invariant: P28
func TestForkLoopsAreStoppedEveryTime(t *testing.T) {
	f := freezer(t, time.Hour)
	for range 4 {
		shell(t, fmt.Sprintf("while kill -0 %d; do (:); done", os.Getpid())) // it ends with the test
	}
	for n := range uint64(100) {
		obey(t, f, order(initbox.Freeze, 2*n+1))
		before := below(os.Getpid())
		requireStill(t)
		time.Sleep(time.Millisecond)
		requireStill(t)
		require.ElementsMatch(t, before, below(os.Getpid()))
		obey(t, f, order(initbox.Thaw, 2*n+2))
	}
}

// Invariant: P28
func TestProcessesThatChangeTheirParentAreStopped(t *testing.T) {
	f := freezer(t, time.Hour)
	// Each process starts the next one and ends, until there have been 500.
	const hopper = `hop() { n=$1; [ $n -eq 0 ] || (hop $((n-1))) & }; echo begun; hop 500`
	for n := range uint64(20) {
		_, out := shell(t, hopper)
		_, err := out.ReadString('\n')
		require.NoError(t, err)
		obey(t, f, order(initbox.Freeze, 2*n+1))
		requireStill(t)
		time.Sleep(5 * time.Millisecond)
		requireStill(t)
		obey(t, f, order(initbox.Thaw, 2*n+2))
		_, err = io.Copy(io.Discard, out) // until all have ended
		require.NoError(t, err)
	}
}

// Invariant: P28
func TestParentThatWaitsInVforkCountsAsStopped(t *testing.T) {
	f := freezer(t, time.Hour)
	// The child goes on in the memory of its parent, which waits. Go can do this only to start a program.
	const parent = `
import ctypes, os, time
if ctypes.CDLL(None).vfork() == 0:
    os.write(1, b"child\n")
    time.sleep(1000)
`
	c, lines := python(t, parent)
	line, err := lines.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "child\n", line)
	child := below(c.PID)
	require.Len(t, child, 1)
	for n := range uint64(10) {
		require.Equal(t, 2, obey(t, f, order(initbox.Freeze, 2*n+1)).Processes)
		require.Equal(t, "DT", state(c.PID)+state(child[0]))
		require.Equal(t, 2, obey(t, f, order(initbox.Thaw, 2*n+2)).Processes)
	}
}

// Invariant: P28
func TestProcessInTheMiddleOfForkIsWaitedFor(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can hold up a fork")
	}
	f := freezer(t, time.Hour)
	// The fork waits until its event is read from a userfaultfd(2).
	const forker = `
import ctypes, fcntl, mmap, os, struct, time
fd = ctypes.CDLL(None).syscall(323, os.O_CLOEXEC)
fcntl.ioctl(fd, 0xc018aa3f, bytearray(struct.pack("QQQ", 0xaa, 2, 0)))
page = mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
start = ctypes.addressof(ctypes.c_char.from_buffer(page))
fcntl.ioctl(fd, 0xc020aa00, bytearray(struct.pack("QQQQ", start, 4096, 1, 0)))
print(fd, flush=True)
os.fork()
time.sleep(1000)
`
	c, out := python(t, forker)
	theirs := number(t, out)
	pidfd, err := unix.PidfdOpen(c.PID, 0)
	require.NoError(t, err)
	defer unix.Close(pidfd)
	events, err := unix.PidfdGetfd(pidfd, theirs, 0)
	require.NoError(t, err)
	defer unix.Close(events)
	require.Eventually(t, func() bool { return state(c.PID) == "D" }, time.Minute, time.Millisecond)

	type result struct {
		initbox.Obeyed
		error
	}
	frozen := make(chan result, 1)
	go func() {
		obeyed, err := f.Obey(order(initbox.Freeze, 1))
		frozen <- result{obeyed, err}
	}()
	select {
	case r := <-frozen:
		t.Fatalf("%+v while a process is being started", r)
	case <-time.After(200 * time.Millisecond):
	}
	var event [32]byte // struct uffd_msg
	n, err := unix.Read(events, event[:])
	require.NoError(t, err)
	require.Len(t, event, n)
	require.NoError(t, unix.Close(int(binary.NativeEndian.Uint32(event[8:])))) // that of the child
	r := <-frozen
	require.NoError(t, r.error)
	require.Equal(t, 2, r.Processes)
	require.Equal(t, "TT", requireStill(t))
}

// Invariant: P28
func TestProgramsThatStartOthersAllTheTimeAreStopped(t *testing.T) {
	f := freezer(t, time.Hour)
	program(t, "/proc/self/exe", []string{"spawner"}, append(os.Environ(), role+"=spawner"))
	for n := range uint64(100) {
		obey(t, f, order(initbox.Freeze, 2*n+1))
		requireStill(t)
		obey(t, f, order(initbox.Thaw, 2*n+2))
	}
}

// Invariant: P28
func TestProcessWithoutItsFirstThreadIsStopped(t *testing.T) {
	f := freezer(t, time.Hour)
	c, out := program(t, "/proc/self/exe", []string{"headless"}, append(os.Environ(), role+"=headless"))
	_, err := out.ReadString('\n')
	require.NoError(t, err)
	require.Eventually(t, func() bool { return state(c.PID) == "Z" }, time.Minute, time.Millisecond)
	require.Equal(t, 1, obey(t, f, order(initbox.Freeze, 1)).Processes)
	require.Contains(t, requireStill(t), "T")
	obey(t, f, order(initbox.Thaw, 2))
	require.NotContains(t, threads(c.PID), "T")
}

// Invariant: P28
func TestStoppedJobStaysStoppedAfterThaw(t *testing.T) {
	f := freezer(t, time.Hour)
	_, out := shell(t, "sleep 1000 & echo $!; sleep 1001 & kill -STOP $!; echo $!; wait")
	runs, job := number(t, out), number(t, out)
	require.Eventually(t, func() bool { return state(job) == "T" }, time.Minute, time.Millisecond)
	for n := range uint64(10) {
		require.Equal(t, 2, obey(t, f, order(initbox.Freeze, 3*n+1)).Processes)
		require.Equal(t, "TT", state(runs)+state(job))
		if n%2 == 0 {
			obey(t, f, order(initbox.Keep, 3*n+2))
		}
		require.Equal(t, 2, obey(t, f, order(initbox.Thaw, 3*n+3)).Processes)
		require.NotEqual(t, "T", state(runs))
		require.Equal(t, "T", state(job))
	}
}

// Invariant: P28
func TestFrozenProcessesContinueAfterTheHold(t *testing.T) {
	const hold = 50 * time.Millisecond
	f := freezer(t, hold)
	c, _ := shell(t, "exec sleep 1000")
	obey(t, f, order(initbox.Freeze, 1))
	require.Eventually(t, func() bool { return !f.Asleep() }, time.Minute, time.Millisecond)
	require.NotEqual(t, "T", state(c.PID))

	obey(t, f, order(initbox.Keep, 2)) // it has continued meanwhile
	obey(t, f, order(initbox.Thaw, 3))
	obey(t, f, order(initbox.Freeze, 4))
	obey(t, f, order(initbox.Keep, 5))
	time.Sleep(4 * hold)
	require.True(t, f.Asleep())
	requireStill(t)
	f.Wake() // a signal
	require.False(t, f.Asleep())
	require.NotEqual(t, "T", state(c.PID))
}

// Invariant: P28
func TestOrdersOlderThanTheNewestAreSuperseded(t *testing.T) {
	f := freezer(t, time.Hour)
	c, _ := shell(t, "exec sleep 1000")
	next := initbox.Order{SandboxID: "a", Kind: initbox.Freeze, Term: 2, Counter: 1}
	for i, step := range []struct {
		order     initbox.Order
		processes int // -1: superseded
		asleep    bool
	}{
		{order(initbox.Freeze, 5), 1, true},
		{order(initbox.Freeze, 5), 1, true}, // again
		{order(initbox.Thaw, 5), -1, true},
		{order(initbox.Thaw, 4), -1, true},
		{order(initbox.Keep, 6), 1, true},
		{order(initbox.Freeze, 5), -1, true},
		{order(initbox.Keep, 6), 1, true},
		{order(initbox.Thaw, 7), 1, false},
		{order(initbox.Thaw, 7), 1, false},
		{order(initbox.Keep, 6), -1, false},
		{order(initbox.Freeze, 5), -1, false},
		{order(initbox.Thaw, 8), 0, false},
		{order(initbox.Keep, 9), 1, true},
		{next, 1, true},
		{order(initbox.Thaw, 100), -1, true},
	} {
		obeyed, err := f.Obey(step.order)
		if step.processes < 0 {
			require.ErrorIs(t, err, freeze.ErrSuperseded, i)
		} else {
			require.NoError(t, err, i)
			require.Equal(t, step.processes, obeyed.Processes, i)
		}
		require.Equal(t, step.asleep, f.Asleep(), i)
		require.Equal(t, step.asleep, state(c.PID) == "T", i)
	}
}

// Invariant: P28
func TestRepeatedOrderHoldsAfterASelfMadeWake(t *testing.T) {
	f := freezer(t, time.Hour)
	c, _ := shell(t, "exec sleep 1000")
	for _, kind := range []initbox.Kind{initbox.Freeze, initbox.Keep} {
		o := order(kind, uint64(len(kind)))
		if kind == initbox.Keep {
			o.Term++
		}
		obey(t, f, o)
		f.Wake()
		require.NotEqual(t, "T", state(c.PID))
		require.Equal(t, 1, obey(t, f, o).Processes)
		require.Equal(t, "T", state(c.PID))
	}
}

// Invariant: P28
func TestProcessOfAnotherUserIsNamedAndAllRun(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root makes a program that runs as another user")
	}
	const unprivileged = 65534
	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		require.NoError(t, os.Chmod(d, 0o755))
	}
	self, err := os.ReadFile("/proc/self/exe")
	require.NoError(t, err)
	for name, mode := range map[string]os.FileMode{"agent": 0o755, "root": 0o755 | os.ModeSetuid} {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), self, 0o755))
		require.NoError(t, os.Chmod(filepath.Join(dir, name), mode))
	}
	cmd := exec.Command(filepath.Join(dir, "agent"))
	cmd.Dir, cmd.Stderr = "/", os.Stderr
	cmd.Env = append(os.Environ(), role+"=agent", "ROOT_PROGRAM="+filepath.Join(dir, "root"))
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: unprivileged, Gid: unprivileged}}
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var o outcome
	require.NoError(t, json.NewDecoder(stdout).Decode(&o))
	require.NoError(t, cmd.Process.Kill())
	require.NoError(t, syscall.Kill(o.Root, syscall.SIGKILL))
	require.Equal(t, &initbox.Refusal{Reason: initbox.NotPermitted, PID: o.Root}, o.Refusal)
	require.NotContains(t, o.States, "T")
	require.Contains(t, o.Refusal.Error(), "process "+strconv.Itoa(o.Root)+" of user 0 cannot be stopped")
}

// Invariant: P28
func TestEndContinuesAllAndStopsNoneAfterwards(t *testing.T) {
	f := freezer(t, time.Hour)
	c, _ := shell(t, "exec sleep 1000")
	obey(t, f, order(initbox.Freeze, 1))
	f.End()
	require.False(t, f.Asleep())
	require.NotEqual(t, "T", state(c.PID))
	for counter, kind := range []initbox.Kind{initbox.Freeze, initbox.Freeze, initbox.Keep} {
		_, err := f.Obey(order(kind, uint64(counter)))
		if counter == 0 {
			require.ErrorIs(t, err, freeze.ErrSuperseded)
			continue
		}
		var refusal *initbox.Refusal
		require.ErrorAs(t, err, &refusal)
		require.Equal(t, initbox.Ending, refusal.Reason)
		require.NotEqual(t, "T", state(c.PID))
	}
	obey(t, f, order(initbox.Thaw, 10))
}

// Invariant: P28
func TestNoProcessIsStartedWhileAsleep(t *testing.T) {
	f := freezer(t, time.Hour)
	obey(t, f, order(initbox.Freeze, 1))
	_, err := table.Start("/bin/true", []string{"true"}, &syscall.ProcAttr{})
	require.ErrorIs(t, err, children.ErrPaused)
	obey(t, f, order(initbox.Thaw, 2))
	_, err = table.Start("/bin/true", []string{"true"}, &syscall.ProcAttr{})
	require.NoError(t, err)
}

func TestTwoHundredProcessesFreezeAndThaw(t *testing.T) {
	f := freezer(t, time.Hour)
	for range 2 {
		_, out := shell(t, "i=0; while [ $i -lt 99 ]; do sleep 1000 & i=$((i+1)); done; echo $!; wait")
		number(t, out)
	}
	for n := range uint64(10) {
		begun := time.Now()
		require.Equal(t, 200, obey(t, f, order(initbox.Freeze, 2*n+1)).Processes)
		froze := time.Since(begun)
		requireStill(t)
		begun = time.Now()
		require.Equal(t, 200, obey(t, f, order(initbox.Thaw, 2*n+2)).Processes)
		t.Logf("200 processes frozen in %v, thawed in %v", froze, time.Since(begun))
	}
}

// Invariant: P28
func TestTimersStandStillWhileAsleep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, err := freeze.New(freeze.Options{Children: children.New()})
		require.NoError(t, err)
		begun, fires := time.Now(), make(chan time.Duration, 9)
		after := func(d time.Duration) func() {
			return f.AfterFunc(d, func() { fires <- time.Since(begun) })
		}
		fired := func() (all []time.Duration) {
			synctest.Wait()
			for len(fires) > 0 {
				all = append(all, <-fires)
			}
			return all
		}
		stops := []func(){after(time.Second), after(3 * time.Second)}
		after(4 * time.Second)()
		time.Sleep(2 * time.Second)
		obey(t, f, order(initbox.Keep, 1))
		stops = append(stops, after(5*time.Second))
		after(time.Second)()
		time.Sleep(time.Hour)
		require.Equal(t, []time.Duration{time.Second}, fired())
		obey(t, f, order(initbox.Thaw, 2))
		time.Sleep(time.Hour)
		require.Equal(t, []time.Duration{time.Hour + 3*time.Second, time.Hour + 7*time.Second}, fired())
		obey(t, f, order(initbox.Keep, 3))
		obey(t, f, order(initbox.Thaw, 4))
		time.Sleep(time.Hour)
		require.Empty(t, fired())
		for _, stop := range stops {
			stop()
		}
	})
}

// Invariant: P31
func TestHoldKeepsProcessesStoppedUntilItsRelease(t *testing.T) {
	const hold = 50 * time.Millisecond
	f := freezer(t, hold)
	c, _ := shell(t, "exec sleep 1000")
	_, _, err := f.Hold(t.Context(), 1, 1)
	require.ErrorIs(t, err, freeze.ErrAwake)
	for n := range uint64(2) {
		// The second time a freeze is ordered again meanwhile.
		obey(t, f, order(initbox.Freeze, 4*n+2))
		ctx, release, err := f.Hold(t.Context(), 1, 4*n+3)
		require.NoError(t, err)
		if n == 1 {
			obey(t, f, order(initbox.Freeze, 4*n+3))
		}
		time.Sleep(4 * hold)
		require.NoError(t, ctx.Err())
		requireStill(t)
		_, _, err = f.Hold(t.Context(), 1, 4*n+4)
		require.ErrorIs(t, err, freeze.ErrHeld)
		release()
		require.ErrorIs(t, ctx.Err(), context.Canceled)
		require.Eventually(t, func() bool { return !f.Asleep() }, time.Minute, time.Millisecond)
		require.NotEqual(t, "T", state(c.PID))
	}
}

// Invariant: P31
func TestThawEndsTheHoldAndDoesNotWaitForIt(t *testing.T) {
	f := freezer(t, time.Hour)
	c, _ := shell(t, "exec sleep 1000")
	for n, thaw := range []func(){
		func() { obey(t, f, order(initbox.Thaw, 10)) },
		f.Wake, // a signal
		f.End,
	} {
		obey(t, f, order(initbox.Keep, uint64(20*n+1)))
		ctx, release, err := f.Hold(t.Context(), 1, uint64(20*n+1))
		require.NoError(t, err)
		thaw()
		require.ErrorIs(t, context.Cause(ctx), freeze.ErrAwake)
		require.False(t, f.Asleep())
		require.NotEqual(t, "T", state(c.PID))
		release()
	}
}

// Invariant: P31
func TestOrdersOlderThanAHoldAreSuperseded(t *testing.T) {
	f := freezer(t, time.Hour)
	obey(t, f, order(initbox.Freeze, 5))
	_, _, err := f.Hold(t.Context(), 1, 4)
	require.ErrorIs(t, err, freeze.ErrSuperseded)
	_, release, err := f.Hold(t.Context(), 1, 8)
	require.NoError(t, err)
	release()
	_, _, err = f.Hold(t.Context(), 1, 7)
	require.ErrorIs(t, err, freeze.ErrSuperseded)
	for _, o := range []initbox.Order{order(initbox.Freeze, 5), order(initbox.Thaw, 7)} {
		_, err := f.Obey(o)
		require.ErrorIs(t, err, freeze.ErrSuperseded)
	}
	obey(t, f, order(initbox.Keep, 8)) // it may come after the order to archive
	require.True(t, f.Asleep())
	obey(t, f, order(initbox.Thaw, 9))
	require.False(t, f.Asleep())
}
