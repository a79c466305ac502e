package files

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/accounts"
)

// as runs f with the rights of an account. Everything in f that resolves a path belongs here; reading
// and writing an open file does not. If one of the paths leads into the agent's own process ([inAgent]), f
// does not run and the error is fs.ErrPermission.
//
// The kernel checks paths against the file-system user of the calling thread, so f has a thread to
// itself. The thread ends with f, so that the agent never goes on with the rights of a user. It also loses
// all capabilities, because some (CAP_SYS_PTRACE for /proc) would count for f.
func as(account *accounts.Account, f func() error, paths ...string) error {
	return withRights(account, 0, f, paths...)
}

// withRights is as with these capabilities (a set of bits), which the agent must have.
func withRights(account *accounts.Account, capabilities uint32, f func() error, paths ...string) error {
	guarded := func() error {
		for _, path := range paths {
			if inAgent(path) {
				return &fs.PathError{Op: "open", Path: path, Err: unix.EACCES}
			}
		}
		return f()
	}
	if !account.Switched {
		return guarded()
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
		if o.err = become(account, capabilities); o.err == nil {
			o.err = guarded()
		}
	}()
	o := <-done
	if o.panicked != nil {
		panic(o.panicked)
	}
	return o.err
}

// become gives the calling thread, and no other, the rights of an account and these capabilities. The functions of
// package syscall of these names change every thread.
func become(account *accounts.Account, capabilities uint32) error {
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
	kept := [2]unix.CapUserData{{Effective: capabilities, Permitted: capabilities}}
	switch err := unix.Capset(&header, &kept[0]); {
	case err != nil && capabilities != 0:
		return fmt.Errorf("the container lacks CAP_DAC_OVERRIDE, so the agent makes nothing in directories of root: %w", err)
	case err != nil:
		return fmt.Errorf("giving up capabilities for user %q: %w", account.Name, err)
	}
	return nil
}

// inAgent reports whether a path leads through what /proc has of the agent's own process: its memory map, its
// open files. The kernel lets each thread of a process see those, whatever the rights of the thread are. The
// mounts and the network belong to every process alike, so /proc/mounts and /proc/net lead there.
func inAgent(path string) bool {
	at, rest, links := "/", path, 0
	for rest != "" {
		var name string
		name, rest, _ = strings.Cut(rest, "/")
		// Not cleaned before: ".." after a symbolic link is the parent of where it leads.
		at = filepath.Join(at, name)
		if part := strings.SplitN(at, "/", 5); len(part) > 3 && part[1] == "proc" && part[3] != "mounts" && part[3] != "net" {
			// Not listed in /proc, but there: the agent's other threads.
			if _, err := os.Lstat("/proc/self/task/" + part[2]); err == nil {
				return true
			}
		}
		link, err := os.Readlink(at)
		if errors.Is(err, unix.EINVAL) {
			continue
		}
		if links++; err != nil || links > maxLinks {
			return false // it leads nowhere
		}
		if at = filepath.Dir(at); filepath.IsAbs(link) {
			at = "/"
		}
		rest = link + "/" + rest
	}
	return false
}
