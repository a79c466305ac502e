package process

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
	"github.com/berth-sandbox/berth/agent/agentpb/process"
)

// openTerminal is open for a process with a terminal.
func (p *running) openTerminal(r *processpb.PTY, account accounts.Account) ([]*os.File, error) {
	ours, theirs, err := terminalPair()
	if err != nil {
		return nil, fmt.Errorf("terminal: %w", err)
	}
	p.terminal, p.sources, p.input = ours, []*os.File{ours}, newInput(ours, true)
	files := []*os.File{theirs, theirs, theirs}
	if account.Switched {
		// Programs open their terminal by its name.
		if err := theirs.Chown(int(account.UID), -1); err != nil {
			return files, err
		}
	}
	ws, err := size(r.GetSize())
	if err != nil {
		return files, err
	}
	return files, p.resize(ws)
}

// terminalPair opens both sides of a new terminal, as pty(7) says. Ours does not block a thread.
func terminalPair() (ours, theirs *os.File, err error) {
	fd, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, &os.PathError{Op: "open", Path: "/dev/ptmx", Err: err}
	}
	ours = os.NewFile(uintptr(fd), "/dev/ptmx")
	if err := unix.IoctlSetPointerInt(fd, unix.TIOCSPTLCK, 0); err != nil {
		ours.Close()
		return nil, nil, os.NewSyscallError("ioctl TIOCSPTLCK", err)
	}
	number, err := unix.IoctlGetInt(fd, unix.TIOCGPTN)
	if err != nil {
		ours.Close()
		return nil, nil, os.NewSyscallError("ioctl TIOCGPTN", err)
	}
	name := fmt.Sprintf("/dev/pts/%d", number)
	peer, err := unix.Open(name, unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		ours.Close()
		return nil, nil, &os.PathError{Op: "open", Path: name, Err: err}
	}
	return ours, os.NewFile(uintptr(peer), name), nil
}

// size converts the size of a terminal. Absent, it is 80 columns and 24 rows. 0 is a size that is not known, as it
// is for the kernel and for E2B's agent: programs choose their own then.
func size(s *processpb.PTY_Size) (*unix.Winsize, error) {
	if s == nil {
		return &unix.Winsize{Row: 24, Col: 80}, nil
	}
	const most = 1<<16 - 1
	if s.GetCols() > most || s.GetRows() > most {
		return nil, fmt.Errorf("pty.size: %d columns and %d rows, at most %d", s.GetCols(), s.GetRows(), most)
	}
	return &unix.Winsize{Row: uint16(s.GetRows()), Col: uint16(s.GetCols())}, nil
}

// resize sets the size of the process's terminal, and thereby sends SIGWINCH.
func (p *running) resize(ws *unix.Winsize) error {
	raw, err := p.terminal.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	err = raw.Control(func(fd uintptr) { failed = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, ws) })
	if err == nil {
		err = os.NewSyscallError("ioctl TIOCSWINSZ", failed)
	}
	return err
}
