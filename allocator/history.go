package allocator

import (
	"context"
	"net/http"
	"time"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/history"
	"github.com/berth-sandbox/berth/api/apierror"
	"github.com/berth-sandbox/berth/api/metric"
)

// tallies are the metrics that a point of the history is made from.
type tallies struct{ claims, batches, results, releases, podFailures, claimed, acknowledged history.Series }

func (m *metrics) tallies() tallies {
	return tallies{
		claims: history.Read(m.claims), batches: history.Read(m.batches), results: history.Read(m.pools.total), releases: history.Read(m.releases),
		podFailures: history.Read(m.podFailures), claimed: history.Read(m.claimed), acknowledged: history.Read(m.acknowledged),
	}
}

// since returns what happened between two readings.
func (now tallies) since(before tallies) (p history.Point) {
	answered := func(outcome string, n uint32) {
		switch {
		case outcome == metric.OutcomeClaimed:
			p.Claimed += n
		case outcome == outcomeCanceled:
		case apierror.KindOf(apierror.Reason(outcome)).Code >= http.StatusInternalServerError:
			p.Failed += n
		default:
			p.Refused += n
		}
	}
	now.claims.Increases(before.claims, "outcome", answered)
	now.batches.Increases(before.batches, "outcome", answered)
	now.results.Increases(before.results, "result", func(result string, n uint32) {
		switch result {
		case metric.ResultWarm:
			p.Warm += n
		case metric.ResultWaited:
			p.Waited += n
		case metric.ResultRefused:
			p.Empty += n
		}
	})
	now.releases.Increases(before.releases, "reason", func(reason string, n uint32) {
		switch reason {
		case fact.ReasonKilled:
			p.Called += n
		case fact.ReasonIdleTimeout:
			p.Idle += n
		default:
			p.Other += n
		}
	})
	now.podFailures.Increases(before.podFailures, "reason", func(_ string, n uint32) { p.PodsFailed += n })
	p.ClaimP50, p.ClaimP99 = now.claimed.Quantile(before.claimed, .5), now.claimed.Quantile(before.claimed, .99)
	p.AcknowledgedP99 = now.acknowledged.Quantile(before.acknowledged, .99)
	return p
}

// keepHistory adds a point to the history of the term at the end of each step, until ctx ends.
func (t *term) keepHistory(ctx context.Context) {
	began, before := time.Now(), t.a.metrics.tallies()
	step := time.NewTicker(history.Step)
	defer step.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-step.C:
		}
		now := t.a.metrics.tallies()
		p := now.since(before)
		live, _, err := ask(ctx, t, func(c core.View) (int, bool) { return c.CountLive(), true })
		if p.Live = live; err != nil {
			p.Live = -1
		}
		// The number of whole steps, of which the last one ends now.
		t.history.Put(int(time.Since(began)/history.Step)-1, p)
		before = now
	}
}

// History implements rest.Allocator.
func (a *Allocator) History() (*history.Ring, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	return t.history, nil
}
