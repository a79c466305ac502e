package devcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/util/wait"
)

// lockPoll is the time between two tries for a lock.
const lockPoll = 50 * time.Millisecond

// tryLock takes the lock of the file at path, or returns EAGAIN. Closing the
// file frees the lock, and so does the holder's death. The file must never be
// removed, because two holders could then lock two files of one name.
//
// The lock belongs to the open file description, not to the process. So it also
// excludes goroutines of one process.
func tryLock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open lock file: %w", err)
	}
	err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", path, err), f.Close())
	}
	return f, nil
}

// awaitLock takes the lock of the file at path; it calls waiting once if it has
// to wait.
func awaitLock(ctx context.Context, path string, waiting func()) (*os.File, error) {
	f, err := tryLock(path)
	if !errors.Is(err, unix.EAGAIN) {
		return f, err
	}
	waiting()
	err = wait.PollUntilContextCancel(ctx, lockPoll, false, func(context.Context) (bool, error) {
		var err error
		if f, err = tryLock(path); errors.Is(err, unix.EAGAIN) {
			return false, nil
		}
		return true, err
	})
	if err != nil {
		return nil, fmt.Errorf("wait for the lock of %s: %w", path, err)
	}
	return f, nil
}
