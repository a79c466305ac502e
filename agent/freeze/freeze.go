package freeze

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-sandbox/berth/agent/children"
	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/internal/bootclock"
	"github.com/berth-sandbox/berth/internal/options"
)

const (
	// hold is the default of Options.Hold.
	hold = 30 * time.Second
	// bound is the default of Options.Bound.
	bound = 5 * time.Second
	// holdLook is how often the boot clock is read for the end of Hold: the clock of Go's timers stands still while the
	// machine is suspended.
	holdLook = time.Second
)

var (
	// ErrSuperseded is the error of an order that is older than the newest one that was taken.
	ErrSuperseded = errors.New("a newer order was obeyed")
	// ErrAwake is the error of a Hold while the processes run, and the cause of its end when they are continued.
	ErrAwake = errors.New("the processes run")
	// ErrHeld is the error of a Hold during another one.
	ErrHeld = errors.New("the processes are held already")
)

// Options are what a Freezer is made of.
type Options struct {
	Children *children.Table
	// Hold is how long processes stay frozen that are not kept. Optional: 30 s.
	Hold time.Duration
	// Bound is how long a freeze may take. Optional: 5 s.
	Bound time.Duration
}

type state int

const (
	awake state = iota
	frozen
	kept
)

// Freezer stops and continues the processes of this sandbox. Its methods may be called concurrently.
type Freezer struct {
	o      Options
	ending atomic.Bool

	// obeying is held while processes are stopped or continued.
	obeying sync.Mutex
	state   state
	tree    tree
	// newest is the newest order that was taken, and answer what was answered. until is the end of the hold on the boot
	// clock, and thaw looks for it.
	newest initbox.Order
	// floor is the newest order of a Hold. Older ones are refused. One of the same revision is not, because the order to
	// keep the freeze may come after that to archive.
	floor  initbox.Order
	answer initbox.Obeyed
	until  time.Duration
	thaw   *time.Timer
	// held ends the context of a Hold that was not released. Else it is nil.
	held context.CancelCauseFunc

	mu sync.Mutex
	// awake is closed unless processes are being stopped, are stopped, or are being continued.
	awake  chan struct{}
	timers map[*timer]struct{}
}

// New returns a Freezer of descendants of this process that run.
func New(o Options) (*Freezer, error) {
	if err := options.Require(o, "Children"); err != nil {
		return nil, err
	}
	if o.Hold == 0 {
		o.Hold = hold
	}
	if o.Bound == 0 {
		o.Bound = bound
	}
	f := &Freezer{o: o, tree: tree{root: os.Getpid(), known: map[key]*stopped{}}, awake: make(chan struct{}),
		timers: map[*timer]struct{}{}}
	close(f.awake)
	return f, nil
}

// Awake is closed unless processes are being stopped, are stopped, or are being continued.
func (f *Freezer) Awake() <-chan struct{} {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.awake
}

// Asleep reports whether Awake is open.
func (f *Freezer) Asleep() bool {
	select {
	case <-f.Awake():
		return false
	default:
		return true
	}
}

// Obey carries out an order for this sandbox. The error is ErrSuperseded or an *initbox.Refusal.
func (f *Freezer) Obey(o initbox.Order) (initbox.Obeyed, error) {
	f.obeying.Lock()
	defer f.obeying.Unlock()
	again := o == f.newest
	if newer(f.floor, o) || !again && !newer(o, f.newest) {
		return initbox.Obeyed{}, ErrSuperseded
	}
	if again && (f.state == awake) == (o.Kind == initbox.Thaw) {
		return f.answer, nil
	}
	f.newest = o
	begun := time.Now()
	n := len(f.tree.order)
	switch {
	case o.Kind == initbox.Thaw:
		n = f.wake()
	case o.Kind == initbox.Keep && f.state == frozen:
	default:
		if why := f.freeze(); why != nil {
			return initbox.Obeyed{}, why
		}
		n = len(f.tree.order)
	}
	switch o.Kind {
	case initbox.Freeze:
		f.state, f.until = frozen, bootclock.Now()+f.o.Hold
		f.look()
	case initbox.Keep:
		f.state = kept
	}
	f.answer = initbox.Obeyed{Processes: n, TookMS: time.Since(begun).Milliseconds()}
	return f.answer, nil
}

// Hold keeps processes that are stopped from being continued at the end of Options.Hold, until release is called. Its
// order is as those of Obey: the error is ErrSuperseded, ErrAwake or ErrHeld. What else continues the processes, such
// as an order, does not wait for release. It ends the context before the first of them runs, with the cause ErrAwake.
func (f *Freezer) Hold(ctx context.Context, term, counter uint64) (held context.Context, release func(), err error) {
	f.obeying.Lock()
	defer f.obeying.Unlock()
	order := initbox.Order{Term: term, Counter: counter}
	switch {
	case newer(f.newest, order) || newer(f.floor, order):
		return nil, nil, ErrSuperseded
	case f.state == awake:
		return nil, nil, ErrAwake
	case f.held != nil:
		return nil, nil, ErrHeld
	}
	f.floor = order
	held, f.held = context.WithCancelCause(ctx)
	return held, f.release, nil
}

// release ends a Hold.
func (f *Freezer) release() {
	f.obeying.Lock()
	defer f.obeying.Unlock()
	f.held(nil)
	f.held = nil
	if f.state == frozen {
		f.until = bootclock.Now() + f.o.Hold
		f.look()
	}
}

// newer reports whether a is newer than b.
func newer(a, b initbox.Order) bool {
	return a.Term > b.Term || a.Term == b.Term && a.Counter > b.Counter
}

// Wake continues all processes.
func (f *Freezer) Wake() {
	f.obeying.Lock()
	defer f.obeying.Unlock()
	f.wake()
}

// End is Wake. No process is stopped afterwards.
func (f *Freezer) End() {
	f.ending.Store(true)
	f.Wake()
}

// freeze stops all processes. After an error they run. The caller holds obeying.
func (f *Freezer) freeze() *initbox.Refusal {
	f.close()
	f.o.Children.Pause()
	late := bootclock.Now() + f.o.Bound
	release := f.o.Children.Keep()
	why := f.tree.stop(func() *initbox.Refusal {
		switch {
		case f.ending.Load():
			return &initbox.Refusal{Reason: initbox.Ending}
		case bootclock.Now() > late:
			return &initbox.Refusal{Reason: initbox.TooFast}
		}
		return nil
	})
	release()
	if why == nil && f.ending.Load() {
		why = &initbox.Refusal{Reason: initbox.Ending}
	}
	if why != nil {
		f.state = frozen
		f.wake()
	}
	return why
}

// wake continues all processes and returns how many. The caller holds obeying.
func (f *Freezer) wake() (n int) {
	if f.state == awake {
		return 0
	}
	if f.held != nil {
		f.held(ErrAwake)
	}
	n = f.tree.resume()
	f.state = awake
	if f.thaw != nil {
		f.thaw.Stop()
	}
	f.o.Children.Resume()
	f.open()
	return n
}

// look continues the processes at the end of the hold. The caller holds obeying.
func (f *Freezer) look() {
	if f.thaw != nil {
		f.thaw.Stop()
	}
	f.thaw = time.AfterFunc(min(holdLook, max(0, f.until-bootclock.Now())), func() {
		f.obeying.Lock()
		defer f.obeying.Unlock()
		switch {
		case f.state != frozen || f.held != nil:
		case bootclock.Now() >= f.until:
			f.wake()
		default:
			f.look()
		}
	})
}
