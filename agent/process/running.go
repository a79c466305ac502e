package process

import (
	"context"
	"errors"
	"io"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
	"github.com/berth-sandbox/berth/agent/children"
)

// linger is how long the output of a process that has ended is read on, if a descendant holds it open.
const linger = time.Second

// buffers are for one read each: a process that writes nothing has none.
var buffers = sync.Pool{New: func() any { return new([chunkSize]byte) }}

// running is a process from its start until its end was read.
type running struct {
	config *processpb.ProcessConfig
	tag    *string
	order  uint64 // of the start
	child  *children.Child
	output output
	// terminal is nil if the process has pipes.
	terminal *os.File
	sources  []*os.File

	input *input

	// asleep reports whether it is stopped.
	asleep func() bool
	// drained is closed when all output has been handed over.
	drained chan struct{}
}

// run reads the output to its end and calls ended before drained is closed. It returns when no descendant
// can write any more.
func (p *running) run(ended func()) {
	var live, whole sync.WaitGroup
	for i, f := range p.sources {
		kind := source(i)
		if p.terminal != nil {
			kind = terminal
		}
		live.Add(1)
		whole.Go(func() {
			defer f.Close()
			open := p.pump(kind, f)
			live.Done()
			if open {
				drop(f)
			}
		})
	}
	<-p.child.Done()
	deadline := time.Now().Add(linger)
	for _, f := range p.sources {
		_ = f.SetReadDeadline(deadline) // fails if it is closed already
	}
	live.Wait()
	p.input.abandon()
	ended()
	close(p.drained)
	whole.Wait()
}

// pump hands what a process writes to the streams. It returns true if the process has ended and others
// may still write.
func (p *running) pump(kind source, f *os.File) bool {
	raw, err := f.SyscallConn()
	if err != nil {
		return false
	}
	for {
		err := p.read(raw, chunkSize, kind)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err != nil {
			return false
		}
	}
	// What has been written before the deadline is the process's output too.
	_ = f.SetReadDeadline(time.Time{})
	rest := 0
	if err := raw.Control(func(fd uintptr) { rest, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) }); err != nil {
		return false
	}
	for rest > 0 {
		n := min(rest, chunkSize)
		if err := p.read(raw, n, kind); err != nil {
			return false
		}
		rest -= n
	}
	return true
}

// read waits for output, reads at most this much of it, and hands it over. The error is io.EOF at the end.
func (p *running) read(raw syscall.RawConn, most int, kind source) error {
	var buffer *[chunkSize]byte
	var n int
	var failed error
	err := raw.Read(func(fd uintptr) bool {
		if buffer == nil {
			buffer = buffers.Get().(*[chunkSize]byte)
		}
		for {
			n, failed = unix.Read(int(fd), buffer[:most])
			if !errors.Is(failed, syscall.EINTR) {
				break
			}
		}
		if errors.Is(failed, syscall.EAGAIN) {
			buffers.Put(buffer)
			buffer = nil
			return false
		}
		return true
	})
	if buffer != nil {
		defer buffers.Put(buffer)
	}
	switch {
	case err != nil:
		return err
	case failed != nil: // EIO: the last one has closed the terminal
		return failed
	case n <= 0:
		return io.EOF
	}
	p.output.publish(chunk{kind, buffer[:n]})
	return nil
}

// closeSources ends the reading of the output.
func (p *running) closeSources() {
	for _, f := range p.sources {
		f.Close()
	}
}

// drop reads to the end.
func drop(f *os.File) {
	_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{f}, make([]byte, 1<<10))
}

// end returns the last event of the process, after drained is closed.
func (p *running) end() *processpb.ProcessEvent {
	status := p.child.Status()
	e := &processpb.ProcessEvent_EndEvent{ExitCode: int32(status.ExitStatus()), Exited: status.Exited()}
	if status.Signaled() {
		e.Status = "signal: " + status.Signal().String()
		if status.CoreDump() {
			e.Status += " (core dumped)"
		}
	} else {
		e.Status = "exit status " + strconv.Itoa(status.ExitStatus())
	}
	if !status.Exited() || status.ExitStatus() != 0 {
		e.Error = proto.String(e.Status)
	}
	return &processpb.ProcessEvent{Event: &processpb.ProcessEvent_End{End: e}}
}

// kill sends SIGKILL to the process's group, and for a terminal to all groups of its session: a shell
// gives each job a group of its own.
func (p *running) kill() error {
	err := p.child.SignalGroup(syscall.SIGKILL)
	if p.terminal == nil || err != nil {
		return err
	}
	for _, pid := range session(p.child.PID) {
		_ = syscall.Kill(pid, syscall.SIGKILL) // ended meanwhile
	}
	return nil
}

// awaitEnd returns when the process has ended and is reaped, or after limit.
func (p *running) awaitEnd(ctx context.Context, limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.child.Done():
	case <-timer.C:
	case <-ctx.Done():
	}
}

// session returns the processes whose session this is.
func session(id int) (pids []int) {
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if sid, err := unix.Getsid(pid); err == nil && sid == id {
			pids = append(pids, pid)
		}
	}
	return pids
}
