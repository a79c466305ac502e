package freeze

import (
	"bytes"
	"cmp"
	"errors"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/initbox"
)

// key names a process also when its number is used again: start is in clock ticks since boot.
type key struct {
	pid   int
	start uint64
}

// process is what /proc/PID/stat says.
type process struct {
	key
	parent  int
	state   byte
	threads int
	memory  uint64 // size of its address space, 0 if it has ended
	level   int    // 0: no process that counts is above it
	// lent: its newest child has as much memory. A process that waits in vfork(2) has lent its own to that child.
	lent bool
}

// stopped is one that was stopped here. proven: all its threads were seen stopped, so that the first one speaks for
// all.
type stopped struct {
	key
	proven bool
}

// tree stops the processes below one.
type tree struct {
	root int
	// order has what was stopped, in that order. known finds it.
	order []*stopped
	known map[key]*stopped
}

// Processes that were told to stop are looked at so often, and then searched for again: one may have begun to wait for
// a child.
const (
	looks     = 50
	lookEvery = 200 * time.Microsecond
)

// stop returns nil when all processes are stopped, or the reason why they are not. Those that were stopped stay so.
// over is asked before each step: a reason ends it. No child of the root is reaped meanwhile.
func (t *tree) stop(over func() *initbox.Refusal) *initbox.Refusal {
	var before map[key]bool
	var slow *process
	for {
		if why := over(); why != nil {
			if why.Reason == initbox.TooFast && slow != nil {
				return &initbox.Refusal{Reason: initbox.StillRuns, PID: slow.pid, UID: owner(slow.pid)}
			}
			return why
		}
		all, whole, err := t.pass()
		if err != nil {
			return &initbox.Refusal{Reason: initbox.NotVisible}
		}
		level := t.runningLevel(all)
		if level == nil {
			seen := make(map[key]bool, len(all))
			for _, p := range all {
				seen[p.key] = true
			}
			// A process that ends as soon as it has started another one shows up as a difference: the agent reaps none
			// meanwhile. Outside of a container those that were not found are processes of the machine.
			if before != nil && maps.Equal(before, seen) && (whole || t.root != 1) {
				return nil
			}
			before = seen
			continue
		}
		before = nil
		var why *initbox.Refusal
		if slow, why = t.stopLevel(level); why != nil {
			return why
		}
	}
}

// runningLevel returns the processes that run on the uppermost level that has any.
func (t *tree) runningLevel(all []process) (level []process) {
	for _, p := range all { // by levels
		if len(level) > 0 && level[0].level != p.level {
			break
		}
		if !t.still(p) {
			level = append(level, p)
		}
	}
	return level
}

// still reports whether no thread of a process can run: it was stopped here, or by others before.
func (t *tree) still(p process) bool {
	if dead(p.state) && p.threads <= 1 {
		return true
	}
	mine := t.known[p.key]
	if mine != nil && mine.proven {
		return p.halted(p.state)
	}
	if mine == nil && p.state != 'T' && p.state != 't' || !threadsHalted(p) {
		return false
	}
	if mine != nil {
		mine.proven = true
	}
	return true
}

// dead reports whether a thread has ended.
func dead(state byte) bool { return state == 'Z' || state == 'X' || state == 'x' }

// halted reports whether a thread of a process that has got SIGSTOP starts nothing and runs no code of its program. A
// thread that waits in the kernel may be about to start a process, which has not got the signal. So such a thread
// counts only where it waits for a child that it has started.
func (p process) halted(state byte) bool {
	return state == 'T' || state == 't' || state == 'D' && p.lent || dead(state)
}

// threadsHalted reports whether all threads are. The kernel gives SIGSTOP to one of several threads first. The others
// have got it when one is stopped, so that those that wait in the kernel stop before they run code of the program.
func threadsHalted(p process) bool {
	if p.threads <= 1 {
		return p.halted(p.state)
	}
	begun := false
	tasks, err := names("/proc/" + strconv.Itoa(p.pid) + "/task")
	if err != nil {
		return false // it has ended meanwhile
	}
	for _, id := range tasks {
		thread, err := read("/proc/" + strconv.Itoa(p.pid) + "/task/" + id + "/stat")
		if err != nil || !p.halted(thread.state) {
			return false
		}
		begun = begun || thread.state == 'T' || thread.state == 't'
	}
	return begun
}

// stopLevel tells processes to stop, and waits some time for each. slow is the first one that was told before and
// still runs.
func (t *tree) stopLevel(level []process) (slow *process, why *initbox.Refusal) {
	for i, p := range level {
		switch err := unix.Kill(p.pid, unix.SIGSTOP); {
		case errors.Is(err, unix.EPERM):
			return nil, &initbox.Refusal{Reason: initbox.NotPermitted, PID: p.pid, UID: owner(p.pid)}
		case err != nil: // it has ended
		case t.known[p.key] == nil:
			s := &stopped{key: p.key}
			t.known[p.key] = s
			t.order = append(t.order, s)
		case slow == nil:
			slow = &level[i]
		}
	}
	for _, p := range level {
		for range looks {
			now, err := read("/proc/" + strconv.Itoa(p.pid) + "/stat")
			now.lent = p.lent
			if err != nil || now.key != p.key || t.still(now) {
				break
			}
			time.Sleep(lookEvery)
		}
	}
	return slow, nil
}

// resume continues what was stopped, children before their parents. It returns how many processes those were.
func (t *tree) resume() (n int) {
	for _, s := range slices.Backward(t.order) {
		now, err := read("/proc/" + strconv.Itoa(s.pid) + "/stat")
		if err == nil && now.key == s.key && unix.Kill(s.pid, unix.SIGCONT) == nil {
			n++
		}
	}
	t.order, t.known = nil, map[key]*stopped{}
	return n
}

// pass reads the processes below the root, those on upper levels first. whole is false if one has ended while it was
// looked for: what it has started may be missing.
func (t *tree) pass() (all []process, whole bool, err error) {
	entries, err := names("/proc")
	if err != nil {
		return nil, false, err
	}
	whole = true
	found := make(map[int]process, len(entries))
	for _, name := range entries {
		if name[0] < '0' || name[0] > '9' {
			continue
		}
		p, err := read("/proc/" + name + "/stat")
		switch {
		case errors.Is(err, os.ErrNotExist), errors.Is(err, syscall.ESRCH):
			whole = false
		case err != nil:
			return nil, false, err
		default:
			found[p.pid] = p
		}
	}
	newest := make(map[int]process, len(found)) // child by parent
	for _, p := range found {
		if last := newest[p.parent]; p.start > last.start || p.start == last.start && p.pid > last.pid {
			newest[p.parent] = p
		}
	}
	for _, p := range found {
		p.lent = p.memory > 0 && newest[p.pid].memory == p.memory
		level, known := t.level(found, p)
		if !known {
			whole = false
		}
		if p.level = level; level >= 0 {
			all = append(all, p)
		}
	}
	slices.SortFunc(all, func(a, b process) int {
		return cmp.Or(cmp.Compare(a.level, b.level), cmp.Compare(a.start, b.start), cmp.Compare(a.pid, b.pid))
	})
	return all, whole, nil
}

// level returns how many processes are between one and the root, -1 if it is not below the root. known is false if a
// parent was not found.
func (t *tree) level(found map[int]process, p process) (level int, known bool) {
	if p.pid == t.root {
		return -1, true
	}
	for level = 0; p.parent != t.root; level++ {
		if p.parent == 0 { // its parent is in another namespace, or it is process 1
			if t.root == 1 {
				return level, true
			}
			return -1, true
		}
		above, ok := found[p.parent]
		if !ok || level > len(found) { // parents change while they are read
			return -1, false
		}
		p = above
	}
	return level, true
}

// read reads a file in the form of proc_pid_stat(5).
func read(file string) (p process, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return p, err
	}
	// The name is in parentheses and can have any byte. The state is the third field.
	number, _, _ := bytes.Cut(text, []byte{' '})
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	const state, parent, threads, start, memory = 0, 1, 17, 19, 20 // from the state on
	if len(fields) <= memory {
		return p, errors.New(file + ": has too few fields")
	}
	p.state = fields[state][0]
	var errs [5]error
	p.pid, errs[0] = strconv.Atoi(string(number))
	p.parent, errs[1] = strconv.Atoi(fields[parent])
	p.threads, errs[2] = strconv.Atoi(fields[threads])
	p.start, errs[3] = strconv.ParseUint(fields[start], 10, 64)
	p.memory, errs[4] = strconv.ParseUint(fields[memory], 10, 64)
	return p, errors.Join(errs[:]...)
}

// names lists a directory.
func names(dir string) ([]string, error) {
	d, err := os.Open(dir)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	return d.Readdirnames(-1)
}

// owner returns the real user of a process, 0 if it has ended.
func owner(pid int) uint32 {
	text, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/status")
	for line := range strings.Lines(string(text)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "Uid:" {
			n, _ := strconv.ParseUint(f[1], 10, 32) // the kernel writes a number
			return uint32(n)
		}
	}
	return 0
}
