package bootclock

import (
	"time"

	"golang.org/x/sys/unix"
)

// Now returns the time since boot, including suspended time (CLOCK_BOOTTIME, see
// clock_gettime(2)). It may be called concurrently.
func Now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic("bootclock: " + err.Error()) // Linux has had this clock since 2.6.39
	}
	return time.Duration(ts.Nano())
}
