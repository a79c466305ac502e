package history

import (
	"testing"
	"time"
)

func TestClocksThatCannotBeTrustedAreFound(t *testing.T) {
	cases{
		"the machine's clock was set": {used(Event{Kind: Clock, Began: step(9),
			Wall: wall.Add(9*time.Second + 21*time.Millisecond)}), []string{"clock"}},
		"a clock that no one has": {with(itsRecord, reapedAt(8, tenMin+time.Minute, "a")), []string{"never reaped"}},
		"before its claim by all": {with(itsRecord, reapedAt(-1, -tenMin, "a")), []string{"clock"}},
	}.judge(t)
}
