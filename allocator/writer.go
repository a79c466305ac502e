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
	"github.com/berth-sandbox/berth/internal/wait"
)

const (
	// pacePerRecord and maxPace space the batches by the number of records in the previous one. A
	// single claim is not delayed; under load batches grow, which spares the API server.
	pacePerRecord = 250 * time.Microsecond
	maxPace       = 10 * time.Millisecond
	// slotOverhead is the size of a slot object in etcd without its data, in bytes.
	slotOverhead = 1 << 10
	// burstSeconds times the byte rate is the size of a burst that the rate limit allows.
	burstSeconds = 10
)

// journalWriter commits the core's facts, one core.Write at a time.
type journalWriter struct {
	log   *journal.Log
	facts chan []core.Fact // holds the facts of the one core.Write under way
	// restored holds one term: the highest one that was seen of a journal that was restored from a
	// backup.
	restored chan uint64
	// violated is closed when a violation ends the term. ended is when earlier terms have ended so a short while ago,
	// and wall the clock of such times.
	violated chan struct{}
	ended    []time.Time
	wall     func() time.Time
	// suspects holds one list of slots that another client may have written to.
	suspects chan []int
	// maxStale is the longest of the allocators and of all routers that this leader has found in the
	// journal or written to it.
	maxStale time.Duration
	submit   func(core.Event)
	// durable gets the facts of each commit.
	durable func([]core.Fact)
	// bytes limits the rate of writes, because etcd keeps every version of a slot until its
	// compaction.
	bytes   *rate.Limiter
	metrics *metrics
	logger  *zap.Logger
}

func newJournalWriter(log *journal.Log, bytesPerSecond int, submit func(core.Event), m *metrics, logger *zap.Logger) *journalWriter {
	return &journalWriter{
		log: log, facts: make(chan []core.Fact, 1), restored: make(chan uint64, 1), suspects: make(chan []int, 1), violated: make(chan struct{}), submit: submit, metrics: m, logger: logger,
		bytes: rate.NewLimiter(rate.Limit(bytesPerSecond), burstSeconds*bytesPerSecond),
	}
}

// run commits until ctx ends and then returns nil. Any error means that this replica is deposed or
// that the journal is damaged.
func (w *journalWriter) run(ctx context.Context) error {
	for {
		var facts []core.Fact
		select {
		case <-ctx.Done():
			return nil
		case term := <-w.restored:
			return w.renew(ctx, term)
		case <-w.violated:
			return w.endViolated(ctx)
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
			w.maxStale = max(w.maxStale, f.MaxStale())
		}
		began, before := time.Now(), w.log.Stats()
		if err := w.log.Commit(ctx, records); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
		w.metrics.commits.Observe(time.Since(began).Seconds())
		w.durable(facts) // before the core can let an object go
		w.submit(core.Written{At: bootclock.Now()})
		after := w.log.Stats()
		if !w.pause(ctx, began, len(records), int(after.Bytes-before.Bytes)+slotOverhead*int(after.Batches-before.Batches)) {
			return nil
		}
		w.submit(core.WriterReady{})
	}
}

// renew begins the journal anew, which ends the term. term is the highest term that routers or
// Sandbox objects have seen.
func (w *journalWriter) renew(ctx context.Context, term uint64) error {
	first, err := earlierRecord(w.log.Stamp().Journal, w.log.Term(), w.maxStale)
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

// earlierRecord returns the record that stands for all routers of an earlier journal, with the longest
// max-stale that one may have.
func earlierRecord(earlier string, term uint64, maxStale time.Duration) (journal.Record, error) {
	return toRecord(core.Fact{
		Revision: core.Revision{Term: term},
		Subject:  &core.SessionFact{ID: core.EarlierSession(earlier), From: core.EarlierFrom, Earlier: true, MaxStale: maxStale},
	})
}

// repair restores slots that another client has written to. If they show that the journal was
// restored from a backup, it begins the journal anew, and the term ends.
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

// wrong reports the damage of the journal, nil for none.
func (w *journalWriter) wrong(err error) {
	w.metrics.journalWrong.Set(0)
	if err != nil {
		w.metrics.journalWrong.Set(1)
		w.logger.Error("the journal is damaged and was not repaired; while it is damaged no other leader can open it, see docs/backup.md", zap.Error(err))
	}
}

// slotsEvery is the pause between checks of the slots.
const slotsEvery = 30 * time.Second

// audit checks the slots every slotsEvery until ctx ends. Otherwise only the next leader would find
// a missing slot, and could not lead.
func (w *journalWriter) audit(ctx context.Context) {
	for wait.Sleep(ctx, slotsEvery) {
		suspects, err := w.log.Suspects(ctx)
		switch {
		case ctx.Err() != nil:
			return
		case errors.Is(err, journal.ErrDamaged):
			w.wrong(err)
			continue
		case err != nil:
			w.logger.Warn("the slots of the journal were not checked", zap.Error(err))
			continue
		}
		select { // an empty list too: an earlier damage may be gone
		case w.suspects <- suspects:
		case <-ctx.Done():
			return
		}
	}
}

// pause waits until the next batch may be written. It returns false when ctx has ended.
func (w *journalWriter) pause(ctx context.Context, began time.Time, records, bytes int) bool {
	pause := min(time.Duration(records-1)*pacePerRecord, maxPace) - time.Since(began)
	reservation := w.bytes.ReserveN(time.Now(), min(bytes, w.bytes.Burst()))
	if held := reservation.Delay(); held > pause {
		w.metrics.heldBack.Add((held - max(pause, 0)).Seconds())
		pause = held
	}
	return pause <= 0 || wait.Sleep(ctx, pause)
}
