// Package bootclock reads the clock that is monotonic and goes on while the
// machine is suspended. Leases and fences need it: time.Since stands still in a
// suspended machine while the rest of the cluster moves on.
package bootclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since boot, suspended time included (CLOCK_BOOTTIME, see
// clock_gettime(2)).
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("bootclock: " + err.Error()) // Linux has had this clock since 2.6.39
	}
	return time.Duration(ts.Nano())
}
