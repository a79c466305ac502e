package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"
)

// input is the standard input or the terminal of a process.
type input struct {
	// turn is held by the one that writes or closes. It has room for one.
	turn chan struct{}
	// file is nil if the process has no input.
	file *os.File
	// shared: file is the terminal, which is closed with the output.
	shared bool
	closed bool // by the holder of turn
	// alive ends when the process has ended: end calls it.
	alive context.Context
	end   context.CancelFunc
}

var (
	errNoInput     = errors.New("the process was started without standard input")
	errInputClosed = errors.New("the standard input of the process is closed")
)

func newInput(file *os.File, shared bool) *input {
	in := &input{turn: make(chan struct{}, 1), file: file, shared: shared}
	in.alive, in.end = context.WithCancel(context.Background())
	return in
}

// write returns when all of data is written. When ctx ends first, a part may be written.
func (in *input) write(ctx context.Context, data []byte) error {
	if in.file == nil {
		return errNoInput
	}
	if err := in.take(ctx); err != nil {
		return err
	}
	defer in.leave()
	if in.closed {
		return errInputClosed
	}
	// A deadline in the past wakes a writer that waits for the process.
	wake := func() { _ = in.file.SetWriteDeadline(time.Unix(1, 0)) }
	defer context.AfterFunc(ctx, wake)()
	defer context.AfterFunc(in.alive, wake)()
	for written := 0; ; {
		// An error means that the file is closed. Write says so too.
		_ = in.file.SetWriteDeadline(time.Time{})
		var n int
		var err error
		if ctx.Err() == nil && in.alive.Err() == nil {
			n, err = in.file.Write(data[written:])
		}
		written += n
		switch {
		case written == len(data):
			return nil
		case in.alive.Err() != nil:
			return errInputClosed
		case ctx.Err() != nil:
			return fmt.Errorf("the process has taken %d of %d bytes: %w", written, len(data), context.Cause(ctx))
		case errors.Is(err, os.ErrDeadlineExceeded): // of the wake for an earlier writer
		case errors.Is(err, os.ErrClosed), errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.EIO):
			return errInputClosed
		case err != nil:
			return err
		}
	}
}

// close closes the input after what is being written. It does nothing the second time.
func (in *input) close(ctx context.Context) error {
	if in.file == nil {
		return errNoInput
	}
	if err := in.take(ctx); err != nil {
		return err
	}
	defer in.leave()
	if !in.closed && !in.shared {
		_ = in.file.Close()
	}
	in.closed = true
	return nil
}

// abandon is close for a process that has ended. What is being written fails.
func (in *input) abandon() {
	in.end()
	_ = in.close(context.Background()) // without input there is nothing to close
}

func (in *input) take(ctx context.Context) error {
	select {
	case in.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (in *input) leave() { <-in.turn }
