package allocator

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/core/fact"
)

// A client that deletes the object of a sandbox releases the sandbox, and the object goes with the write of its end.
//
// Invariant: P20
func TestObjectsStayUntilTheirEventsAreStored(t *testing.T) {
	api := newMemoryAPI()
	api.unserved = "eventsegments"
	tm, stop, done := start(t, newReplica(t, api))
	s := core.Sandbox{Binding: core.Binding{ID: "a1"}, Phase: core.Ended, Revision: core.Revision{Term: tm.number, Counter: 1 << 30}}
	tm.tellEvents([]core.Fact{{Revision: s.Revision, Subject: &core.SandboxFact{Sandbox: s}}})
	require.False(t, tm.eventLog.Stored("a1"))
	deleted := make(chan struct{})
	tm.write(core.WriteObject{Sandbox: s})
	tm.write(core.DeleteObject{ID: "a1"})
	tm.other.add("after both", func(context.Context) error { close(deleted); return nil })
	<-deleted
	require.Zero(t, tm.objects.Backlog().Objects, "its end is not shown")
	require.Equal(t, 2, tm.other.waiting(), "both are tried again")
	api.mu.Lock()
	api.unserved = ""
	api.mu.Unlock()
	require.Eventually(t, func() bool { return tm.other.waiting() == 0 }, time.Minute, 10*time.Millisecond)
	require.True(t, tm.eventLog.Stored("a1"))
	stop()
	<-done
}

// Invariant: P20
func TestRecoveryTellsTheLatestStateOfEach(t *testing.T) {
	state := func(id string, counter uint64, phase core.Phase) core.Sandbox {
		return core.Sandbox{Binding: core.Binding{ID: id}, Phase: phase, Revision: core.Revision{Term: 1, Counter: counter}}
	}
	journaled := func(s core.Sandbox) core.Fact {
		return core.Fact{Revision: s.Revision, Subject: &core.SandboxFact{Sandbox: s}}
	}
	latest := map[string]core.Phase{}
	for _, s := range latestStates(core.State{
		Objects: []core.Sandbox{state("shown", 5, core.Ended), state("behind", 2, core.Running)},
		Facts: []core.Fact{
			journaled(state("shown", 4, core.Released)), journaled(state("behind", 3, core.Released)), journaled(state("journal only", 6, core.Running)),
			{Subject: &core.RetirementFact{}},
		},
	}) {
		latest[s.ID] = s.Phase
	}
	require.Equal(t, map[string]fact.Phase{"shown": core.Ended, "behind": core.Released, "journal only": core.Running}, latest)
}
