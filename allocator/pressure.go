package allocator

import (
	"context"
	"time"

	"go.uber.org/zap"

	"github.com/berth-sandbox/berth/allocator/core"
)

// Admission control. New claims are refused while the Sandbox objects lag behind the
// journal by more than maxLag, or while the journal holds more than maxUnsettled bytes that
// no object shows. They are accepted again below lowLag and lowUnsettled.
const (
	maxLag, lowLag             = 30 * time.Second, 10 * time.Second
	maxUnsettled, lowUnsettled = 32 << 20, 8 << 20 // bytes
	pressureEvery              = 250 * time.Millisecond
)

// journalBacklog returns the inputs of pressure: the age of the oldest journaled state that
// waits for its Sandbox object, and the unsettled bytes of the journal. Without the CRD no wait helps.
func (t *term) journalBacklog() (lag time.Duration, unsettled int) {
	b := t.objects.Backlog()
	if t.noCRD.Store(b.NoCRD); b.NoCRD {
		b.Lag = max(b.Lag, maxLag+1)
	}
	return b.Lag, t.journal.log.Stats().UnsettledBytes
}

// watchPressure submits core.Pressure whenever the pressure changes, until ctx ends.
func (t *term) watchPressure(ctx context.Context, backlog func() (lag time.Duration, unsettled int)) {
	ticker := time.NewTicker(pressureEvery)
	defer ticker.Stop()
	on := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		lag, unsettled := backlog()
		if now := pressure(on, lag, unsettled); now != on {
			on = now
			t.log.Warn("new claims are refused or accepted again: the lag of the Sandbox objects behind the journal crossed a limit",
				zap.Bool("refused", on), zap.Duration("lag", lag), zap.Int("unsettledBytes", unsettled))
			t.Submit(core.Pressure{On: on})
		}
	}
}

// pressure reports whether new claims must be refused. on is the previous answer.
func pressure(on bool, lag time.Duration, unsettled int) bool {
	if on {
		return lag >= lowLag || unsettled >= lowUnsettled
	}
	return lag > maxLag || unsettled > maxUnsettled
}
