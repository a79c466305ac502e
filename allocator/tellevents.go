package allocator

import (
	"errors"
	"net"
	"net/netip"
	"slices"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
	"github.com/berth-sandbox/berth/allocator/eventlog"
	"github.com/berth-sandbox/berth/allocator/webhooks"
)

// errUntold is why the object of a sandbox must stay: the next leader would derive its events from it.
var errUntold = errors.New("the events of the sandbox are not in the log of events yet")

// newEvents makes the log of events of the term, and the webhooks that read it.
func (t *term) newEvents(term uint64) error {
	a, k := t.a, t.a.o.Clients
	var errs [2]error
	t.eventLog, errs[0] = eventlog.New(eventlog.Options{
		Store: &eventlog.Objects{Client: k.Berth, Namespace: a.o.Namespace}, Term: term, Valid: a.lock.valid, Yield: t.headStart.wait,
		Build: func(pool string) string {
			if p, ok := a.watches.pools.Seen(a.poolOf(pool)); ok {
				return string(p.UID)
			}
			return ""
		},
		Wall: a.o.WallClock, Log: t.log.Named("eventlog"),
	})
	t.journal.durable = func(facts []core.Fact) {
		t.tellEvents(facts)
		a.traces.durable(facts)
	}
	t.webhooks, errs[1] = webhooks.New(webhooks.Options{
		Store: &webhooks.Objects{Client: k.Berth, Namespace: a.o.Namespace}, Log: t.eventLog, Key: a.o.AccessKey, Guard: a.o.webhookGuard(),
		Valid: a.lock.valid, Logger: t.log.Named("webhooks"),
	})
	return errors.Join(errs[:]...)
}

// tellEvents passes the states of durable facts to the log of events.
func (t *term) tellEvents(facts []core.Fact) {
	states := make([]*fact.Sandbox, 0, len(facts))
	for _, f := range facts {
		if s, ok := f.Subject.(*core.SandboxFact); ok {
			states = append(states, &s.Sandbox)
		}
	}
	t.eventLog.Tell(states...)
}

// latestStates returns the latest state of each sandbox that is on record.
func latestStates(st core.State) []*fact.Sandbox {
	latest := make(map[string]*fact.Sandbox, len(st.Objects))
	for i := range st.Objects {
		latest[st.Objects[i].ID] = &st.Objects[i]
	}
	for _, f := range st.Facts {
		s, ok := f.Subject.(*core.SandboxFact)
		if !ok {
			continue
		}
		if shown := latest[s.ID]; shown == nil || shown.Revision.Less(s.Revision) {
			latest[s.ID] = &s.Sandbox
		}
	}
	all := make([]*fact.Sandbox, 0, len(latest))
	for _, s := range latest {
		all = append(all, s)
	}
	return all
}

// webhookGuard says where webhooks may lead. The addresses of this replica are refused even where they are public.
func (o *Options) webhookGuard() *webhooks.Guard {
	g := o.Webhooks
	for _, address := range []string{o.ControlAddress, o.APIAddress, o.Clients.Host} {
		if host, _, err := net.SplitHostPort(address); err == nil {
			address = host
		}
		if at, err := netip.ParseAddr(address); err == nil {
			g.Denied = append(slices.Clone(g.Denied), netip.PrefixFrom(at.Unmap(), at.Unmap().BitLen()))
		}
	}
	return &g
}

// Webhooks implements rest.Allocator.
func (a *Allocator) Webhooks() (*webhooks.Manager, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	return t.webhooks, nil
}

// EventLog implements rest.Allocator.
func (a *Allocator) EventLog() (*eventlog.Log, error) {
	t, err := a.leadingTerm()
	if err != nil {
		return nil, notLeading(err)
	}
	return t.eventLog, nil
}
