package allocator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	"golang.org/x/time/rate"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

const (
	// paceRecord and paceMost space the writes of batches, by how many records were
	// in the last one. A claim alone is not kept waiting for the one before it;
	// under load batches grow, and the API server has less to do.
	paceRecord = 250 * time.Microsecond
	paceMost   = 10 * time.Millisecond
	// slotOverhead is what a slot object takes in etcd beside its data, in bytes.
	slotOverhead = 1 << 10
	// burstSeconds is for how long more may be written than the bound says.
	burstSeconds = 10
)

// journalWriter commits what the core hands over, one Write at a time.
type journalWriter struct {
	log   *journal.Log
	facts chan []core.Fact // has room for the one that is under way
	// restored has room for one: the term up to which the journal was seen that was
	// restored from a backup.
	restored chan uint64
	// suspects has room for one: slots that something else may have written to.
	suspects chan []int
	submit   func(core.Event)
	// bytes bounds what is written: etcd keeps every version of a slot until it is
	// compacted.
	bytes   *rate.Limiter
	metrics *metrics
	logger  *zap.Logger
}

func newJournalWriter(log *journal.Log, bytesPerSecond int, submit func(core.Event), m *metrics, logger *zap.Logger) *journalWriter {
	return &journalWriter{
		log: log, facts: make(chan []core.Fact, 1), restored: make(chan uint64, 1), suspects: make(chan []int, 1), submit: submit, metrics: m, logger: logger,
		bytes: rate.NewLimiter(rate.Limit(bytesPerSecond), burstSeconds*bytesPerSecond),
	}
}

// run commits until ctx ends, and returns nil then. Any other end means that this
// replica is deposed, or that the journal is damaged.
func (w *journalWriter) run(ctx context.Context) error {
	for {
		var facts []core.Fact
		select {
		case <-ctx.Done():
			return nil
		case term := <-w.restored:
			return w.renew(ctx, term)
		case slots := <-w.suspects:
			if err := w.repair(ctx, slots); err != nil {
				return err
			}
			continue
		case facts = <-w.facts:
		}
		records := make([]journal.Record, 0, len(facts))
		for _, f := range facts {
			r, err := toRecord(f)
			if err != nil {
				return err
			}
			records = append(records, r)
		}
		began, before := time.Now(), w.log.Stats()
		if err := w.log.Commit(ctx, records); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		w.metrics.commits.Observe(time.Since(began).Seconds())
		w.submit(core.Written{At: bootclock.Now()})
		after := w.log.Stats()
		if !w.pause(ctx, began, len(records), int(after.Bytes-before.Bytes)+slotOverhead*int(after.Batches-before.Batches)) {
			return nil
		}
		w.submit(core.WriterReady{})
	}
}

// errRestored ends a term: its leader has begun the journal anew.
var errRestored = errors.New("allocator: the journal was restored from a backup and has been begun anew; the next leader serves it, and hands out no pod until no router of before can send requests to its address, see docs/backup.md")

// renew begins the journal anew, which ends the term: what others were told is not in it,
// up to this term at least.
func (w *journalWriter) renew(ctx context.Context, term uint64) error {
	first, err := earlierRecord(w.log.Stamp().Journal, w.log.Term())
	if err != nil {
		return err
	}
	id, err := w.log.Renew(ctx, term, []journal.Record{first})
	switch {
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	return fmt.Errorf("%w: journal %s, after %s", errRestored, id, w.log.Stamp().Journal)
}

// earlierRecord is the record that stands for all routers of an earlier journal.
func earlierRecord(earlier string, term uint64) (journal.Record, error) {
	return toRecord(core.Fact{Revision: core.Revision{Term: term}, Session: core.EarlierSession(earlier), From: core.EarlierFrom, Earlier: true})
}

// repair puts slots right that something else has written to. If they show that the journal
// was restored from a backup, it is begun anew, and the term ends.
func (w *journalWriter) repair(ctx context.Context, slots []int) error {
	repaired, err := w.log.Repair(ctx, slots)
	w.metrics.slotsRepaired.Add(float64(repaired))
	switch {
	case errors.Is(err, journal.ErrDeposed):
		return err
	case ctx.Err() != nil:
		return nil
	case errors.Is(err, journal.ErrRestored):
		return w.renew(ctx, w.log.Term())
	}
	w.wrong(err)
	return nil
}

// wrong says what is wrong with the journal, if anything is.
func (w *journalWriter) wrong(err error) {
	w.metrics.journalWrong.Set(0)
	if err != nil {
		w.metrics.journalWrong.Set(1)
		w.logger.Error("the journal is not as this leader has written it, and was not repaired; if it stays so no other leader can open it, see docs/backup.md", zap.Error(err))
	}
}

// slotsEvery is the pause between looks at the slots.
const slotsEvery = 30 * time.Second

// audit looks at the slots now and then until ctx ends: one that is missing would be
// found out by the next leader only, which could not lead then.
func (w *journalWriter) audit(ctx context.Context) {
	for sleep(ctx, slotsEvery) {
		suspects, err := w.log.Suspects(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, journal.ErrDamaged):
			w.wrong(err)
			continue
		case err != nil:
			w.logger.Warn("the slots of the journal were not looked at", zap.Error(err))
			continue
		}
		select { // also if there are none: what was wrong may be right
		case w.suspects <- suspects:
		case <-ctx.Done():
			return
		}
	}
}

// pause waits until the next batch may be written. It is false when ctx ended.
func (w *journalWriter) pause(ctx context.Context, began time.Time, records, bytes int) bool {
	wait := min(time.Duration(records-1)*paceRecord, paceMost) - time.Since(began)
	reservation := w.bytes.ReserveN(time.Now(), min(bytes, w.bytes.Burst()))
	if held := reservation.Delay(); held > wait {
		w.metrics.heldBack.Add((held - max(wait, 0)).Seconds())
		wait = held
	}
	return wait <= 0 || sleep(ctx, wait)
}

// When new claims are refused because what was journaled is not settled, and when
// they are taken again.
const (
	lagMost, lagLow             = 30 * time.Second, 10 * time.Second
	unsettledMost, unsettledLow = 32 << 20, 8 << 20 // bytes
	pressureEvery               = 250 * time.Millisecond
)

// heldUp is what the pressure is judged by: for how long what is journaled has been
// waiting for its objects, and how many bytes are not settled.
func (t *term) heldUp() (lag time.Duration, unsettled int) {
	return t.objects.Backlog().Lag, t.journal.log.Stats().UnsettledBytes
}

// watchPressure tells the core when to refuse new claims, until ctx ends.
func (t *term) watchPressure(ctx context.Context, heldUp func() (lag time.Duration, unsettled int)) {
	ticker := time.NewTicker(pressureEvery)
	defer ticker.Stop()
	on := false
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		lag, unsettled := heldUp()
		if now := pressure(on, lag, unsettled); now != on {
			on = now
			t.log.Warn("new claims are refused: what is journaled reaches the Sandbox objects too slowly",
				zap.Bool("refused", on), zap.Duration("lag", lag), zap.Int("unsettledBytes", unsettled))
			t.Submit(core.Pressure{On: on})
		}
	}
}

// pressure reports whether new claims are to be refused. on: they were.
func pressure(on bool, lag time.Duration, unsettled int) bool {
	if on {
		return lag >= lagLow || unsettled >= unsettledLow
	}
	return lag > lagMost || unsettled > unsettledMost
}
