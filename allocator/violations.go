package allocator

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.uber.org/zap"
	"google.golang.org/protobuf/proto"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/guard"
	"github.com/berth-sandbox/berth/allocator/journal"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

// A leader that is about to violate an assertion of package guard ends its term instead: the next leader recovers
// from what is durable. When violatedTerms terms have ended so within violatedWithin, another end would help no more.
// The next leader then withholds only the effects that violate an assertion, for as long as its term lasts.
const (
	violatedTerms  = 3
	violatedWithin = 10 * time.Minute
	// violationsKey is the key of the record of such ends.
	violationsKey = "violations"
)

// readViolations returns when terms ended because of a violation, according to their record.
func readViolations(r journal.Record) (ended []time.Time, err error) {
	var m journalv1.Record
	if err := proto.Unmarshal(r.Raw, &m); err != nil {
		return nil, fmt.Errorf("journal record %s: %w", r.Key, err)
	}
	for _, at := range m.GetViolations().GetEndedAt() {
		ended = append(ended, moment(at))
	}
	return ended, nil
}

// recent returns those of the ends that lie within violatedWithin.
func recent(ended []time.Time, now time.Time) (all []time.Time) {
	for _, at := range ended {
		if now.Sub(at) < violatedWithin {
			all = append(all, at)
		}
	}
	return all
}

// violated acts on the violations of one step. It returns false if the term ends.
func (t *term) violated(all []guard.Violation) bool {
	if !t.withholds {
		t.logViolation("an assertion is violated: the violating effect is not carried out, and the term ends, see docs/operations.md", all[0])
		close(t.journal.violated)
		return false
	}
	for _, v := range all {
		if key := v.Assertion + v.Subject; !t.withheld[key] {
			t.withheld[key] = true
			if v.Pool == (core.PoolKey{}) {
				v.Pool = t.loop.core.View().PoolOf(v.Pod)
			}
			t.a.metrics.withheld.WithLabelValues(v.Assertion).Inc()
			t.a.watches.pools.Withhold(v.Pool, v.Subject+": "+v.What)
			t.logViolation("an assertion is violated: the violating effect is not carried out, and everything else is served, see docs/operations.md", v)
		}
	}
	return true
}

func (t *term) logViolation(message string, v guard.Violation) {
	t.log.Error(message, zap.String("assertion", v.Assertion), zap.String("subject", v.Subject), zap.String("pool", v.Pool.Name),
		zap.String("violation", v.What), zap.String("dump", v.Dump))
}

// endViolated records the end of a term because of a violation, and returns the error that ends it.
func (w *journalWriter) endViolated(ctx context.Context) error {
	ended := &journalv1.Violations{}
	for _, at := range append(w.ended, w.wall()) {
		ended.EndedAt = append(ended.EndedAt, micros(at))
	}
	m := &journalv1.Record{Key: violationsKey, Term: w.log.Term(), State: &journalv1.Record_Violations{Violations: ended}}
	raw, err := proto.Marshal(m)
	if err == nil {
		err = w.log.Commit(ctx, []journal.Record{{Key: m.GetKey(), Term: m.GetTerm(), Raw: raw}})
	}
	return errors.Join(errViolated, err)
}

// awaitEnd waits for the record of the end of a term that was violated, whose loop has ended.
func awaitEnd(ctx context.Context, failed <-chan error) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	case <-time.After(endWait): // the lease must not be kept for a journal that does not answer
		return errViolated
	}
}
