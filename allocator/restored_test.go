package allocator

import (
	"context"
	"encoding/json"
	"path"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/api/v1alpha1"
)

// slots are the JournalSlot objects, by path.
func (m *memoryAPI) slots(t *testing.T) map[string]v1alpha1.JournalSlot {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	all := map[string]v1alpha1.JournalSlot{}
	for at, object := range m.objects {
		if path.Base(path.Dir(at)) == "journalslots" {
			raw, err := json.Marshal(object)
			require.NoError(t, err)
			var s v1alpha1.JournalSlot
			require.NoError(t, json.Unmarshal(raw, &s))
			all[at] = s
		}
	}
	return all
}

// nextIsQuarantined requires that the next leader has a term above this one, and hands out
// no pod for at least so long.
func nextIsQuarantined(t *testing.T, api *memoryAPI, above uint64, least time.Duration) {
	t.Helper()
	next, stop, done := start(t, newReplica(t, api))
	require.Greater(t, next.number, above)
	require.Greater(t, next.quarantine(), least)
	stop()
	require.NoError(t, <-done)
}

func TestRestoredJournalIsRenewedByItsLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		api := newMemoryAPI()
		tm, _, done := start(t, newReplica(t, api))
		backup := api.slots(t)
		const longest = 5 * time.Hour // of any router: the backup does not have it
		for n := range uint64(5) {
			before := tm.Position()
			tm.Submit(core.SessionJoined{Session: "router-" + strconv.FormatUint(n, 10), Stream: n + 1, MaxStale: longest})
			for tm.Position() == before {
				time.Sleep(time.Millisecond)
			}
		}
		position, journal := tm.Position(), tm.Journal()
		for at, s := range backup {
			api.put(t, at, s)
		}
		select {
		case err := <-done:
			require.ErrorIs(t, err, errRestored)
		case <-time.After(3 * slotsEvery):
			t.Fatal("it goes on in the restored journal")
		}
		require.Equal(t, journal, tm.Journal())
		last := uint64(0)
		for _, s := range api.slots(t) {
			last = max(last, uint64(s.Spec.Position))
		}
		require.Equal(t, position+1, last)
		nextIsQuarantined(t, api, tm.number, longest)
	})
}

// Nothing but their terms shows that the journal is older than they are.
func TestObjectsOfALaterTermRevealARestoredJournal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			term     string
			restored bool
		}{
			"an earlier term":  {"1", false},
			"the term itself":  {"2", true},
			"a much later one": {"40", true},
		} {
			api := newMemoryAPI()
			tm, stop, done := start(t, newReplica(t, api))
			require.EqualValues(t, 1, tm.number, name)
			stop()
			require.NoError(t, <-done, name)
			api.put(t, "/apis/berth.sh/v1alpha1/namespaces/default/sandboxes/abcdefghijklmnopqrst", v1alpha1.Sandbox{
				Spec:   v1alpha1.SandboxSpec{Pool: "p", PodName: "p-1", PodUID: "u", PodIP: "10.0.0.1"},
				Status: v1alpha1.SandboxStatus{Phase: v1alpha1.SandboxEnded, Revision: c.term + ".1"},
			})
			if !c.restored {
				tm, stop, done := start(t, newReplica(t, api))
				require.Zero(t, tm.quarantine(), name)
				stop()
				require.NoError(t, <-done, name)
				continue
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			require.ErrorIs(t, newReplica(t, api).Run(ctx), errRestored, name)
			cancel()
			above, err := strconv.ParseUint(c.term, 10, 64)
			require.NoError(t, err)
			nextIsQuarantined(t, api, above, 0)
		}
	})
}
