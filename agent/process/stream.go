package process

import (
	"context"
	"errors"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/berth-sandbox/berth/agent/agentpb/process"
)

// attached is a stream at a process.
type attached struct {
	*reader
	p      *running
	unread []chunk
}

// attach adds a stream. Output from now on waits for it, until it leaves.
func (p *running) attach() *attached {
	r, unread := p.output.attach()
	return &attached{r, p, unread}
}

func (a *attached) leave() { a.p.output.detach(a.reader) }

// stream sends the events of the process, from start to end, until the client's ctx ends or expired is closed.
func (a *attached) stream(
	ctx context.Context, expired <-chan struct{}, keepalive time.Duration, send func(*processpb.ProcessEvent) error,
) error {
	start := &processpb.ProcessEvent_StartEvent{Pid: uint32(a.p.child.PID)}
	if err := send(&processpb.ProcessEvent{Event: &processpb.ProcessEvent_Start{Start: start}}); err != nil {
		return err
	}
	for _, c := range a.unread {
		if err := send(c.event()); err != nil {
			return err
		}
	}
	a.unread = nil
	silence := time.NewTimer(keepalive)
	defer silence.Stop()
	for {
		select {
		case c := <-a.chunks:
			err := send(c.event())
			a.taken <- err == nil
			if err != nil {
				return err
			}
		case <-silence.C:
			if a.p.asleep() {
				break
			}
			alive := &processpb.ProcessEvent_Keepalive{Keepalive: &processpb.ProcessEvent_KeepAlive{}}
			if err := send(&processpb.ProcessEvent{Event: alive}); err != nil {
				return err
			}
		case <-a.p.drained:
			select {
			case <-expired: // it was killed for that
				return errExpired()
			default:
				return send(a.p.end())
			}
		case <-expired:
			return errExpired()
		case <-ctx.Done():
			return connect.NewError(connect.CodeCanceled, ctx.Err())
		}
		silence.Reset(keepalive)
	}
}

func errExpired() error {
	return connect.NewError(connect.CodeDeadlineExceeded, errors.New("Connect-Timeout-Ms has passed"))
}

// signal sends a signal to the process's group.
func (p *running) signal(s syscall.Signal) error {
	if s == syscall.SIGKILL {
		return p.kill()
	}
	return p.child.SignalGroup(s)
}

// send writes input to a process. Its error is a *connect.Error.
func (p *running) send(ctx context.Context, in *processpb.ProcessInput) error {
	var data []byte
	switch i := in.GetInput().(type) {
	case *processpb.ProcessInput_Stdin:
		if p.terminal != nil {
			return connect.NewError(connect.CodeFailedPrecondition,
				errors.New("the process has a terminal: send the input as pty"))
		}
		data = i.Stdin
	case *processpb.ProcessInput_Pty:
		if p.terminal == nil {
			return connect.NewError(connect.CodeFailedPrecondition,
				errors.New("the process was started without a terminal: send the input as stdin"))
		}
		data = i.Pty
	default:
		return connect.NewError(connect.CodeInvalidArgument, errors.New("input: must have stdin or pty"))
	}
	if err := p.input.write(ctx, data); err != nil {
		return inputError(err)
	}
	return nil
}

func inputError(err error) error {
	switch {
	case errors.Is(err, errNoInput), errors.Is(err, errInputClosed):
		return connect.NewError(connect.CodeFailedPrecondition, err)
	case errors.Is(err, context.DeadlineExceeded):
		return connect.NewError(connect.CodeDeadlineExceeded, err)
	case errors.Is(err, context.Canceled):
		return connect.NewError(connect.CodeCanceled, err)
	}
	return connect.NewError(connect.CodeInternal, err)
}
