package files

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// as runs f with the rights of an account. Everything in f that resolves a path belongs here; reading
// and writing an open file does not.
//
// The kernel checks paths against the file-system user of the calling thread, so f has a thread to
// itself. The thread ends with f: no thread that was somebody else goes on as the agent. It also loses
// all capabilities, because some (CAP_SYS_PTRACE for /proc) would count for f.
func as(account *accounts.Account, f func() error) error {
	if !account.Switched {
		return f()
	}
	type outcome struct {
		err      error
		panicked any
	}
	done := make(chan outcome, 1)
	go func() {
		// Never unlocked: the runtime ends the thread with this goroutine.
		runtime.LockOSThread()
		var o outcome
		defer func() {
			o.panicked = recover()
			done <- o
		}()
		if o.err = become(account); o.err == nil {
			o.err = f()
		}
	}()
	o := <-done
	if o.panicked != nil {
		panic(o.panicked)
	}
	return o.err
}

// become gives the calling thread, and no other, the rights of an account. The functions of package
// syscall of these names change every thread.
func become(account *accounts.Account) error {
	groups := append([]uint32{}, account.Groups...)
	var first unsafe.Pointer
	if len(groups) > 0 {
		first = unsafe.Pointer(&groups[0])
	}
	if _, _, e := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(first), 0); e != 0 {
		return fmt.Errorf("groups of user %q: %w", account.Name, e)
	}
	runtime.KeepAlive(groups)
	// These two report nothing. The value that a second call returns says whether the first one worked.
	for _, id := range []struct {
		call  uintptr
		value uint32
	}{{unix.SYS_SETFSGID, account.GID}, {unix.SYS_SETFSUID, account.UID}} {
		_, _, _ = unix.RawSyscall(id.call, uintptr(id.value), 0, 0)
		if now, _, _ := unix.RawSyscall(id.call, uintptr(id.value), 0, 0); uint32(now) != id.value {
			return fmt.Errorf("acting as user %q: %w", account.Name, unix.EPERM)
		}
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var none [2]unix.CapUserData
	if err := unix.Capset(&header, &none[0]); err != nil {
		return fmt.Errorf("giving up capabilities for user %q: %w", account.Name, err)
	}
	return nil
}
