package allocator

import "time"

const (
	// tickEvery is the interval of ticks, and so the precision of the core's deadlines.
	tickEvery = 50 * time.Millisecond
	// maxTickDelay is the delay of a tick that shows that this process was paused. Ticks are
	// then suspended for catchUp, so that queued messages are processed before the core
	// judges what is overdue.
	maxTickDelay = 500 * time.Millisecond
	catchUp      = time.Second
)

// ticks decides which ticks reach the core. A leader that was paused finds silent routers
// and unread messages in their sockets. If it looked at the time first, it would expire
// those routers and release the sandboxes in use through them.
type ticks struct {
	last        time.Duration // boot clock, of the last tick
	pausedSince time.Duration // boot clock, when ticks were suspended; 0: they are not
}

// count reports whether a tick at this time of the boot clock reaches the core.
func (t *ticks) count(now time.Duration) bool {
	if t.pausedSince == 0 && now-t.last > maxTickDelay {
		t.pausedSince = now
	}
	t.last = now
	if t.pausedSince != 0 && now-t.pausedSince < catchUp {
		return false
	}
	t.pausedSince = 0
	return true
}
