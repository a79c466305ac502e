//go:build !race

package allocator

import (
	"context"
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"net/netip"
	"runtime/debug"
	runtimemetrics "runtime/metrics"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap"
	"golang.org/x/sync/errgroup"
	utilrand "k8s.io/apimachinery/pkg/util/rand"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/devcluster"
	"github.com/berth-sandbox/berth/internal/bootclock"
)

// peak samples the memory that the Go runtime holds, until the function that it
// returns is called, which says what the highest sample was.
func peak() func() uint64 {
	stop, result := make(chan struct{}), make(chan uint64)
	go func() {
		samples := []runtimemetrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
		ticker := time.NewTicker(time.Millisecond)
		defer ticker.Stop()
		most := uint64(0)
		for {
			runtimemetrics.Read(samples)
			most = max(most, samples[0].Value.Uint64()-samples[1].Value.Uint64())
			select {
			case <-stop:
				result <- most
				return
			case <-ticker.C:
			}
		}
	}()
	return func() uint64 {
		close(stop)
		return <-result
	}
}

// The container of the chart has 512 MiB. The journal of this test is as large as the
// slots allow, and holds as much that no Sandbox object shows as is allowed before new
// claims are refused. "make test" runs this test without the race detector.
func TestFullJournalTakeoverNeedsHalfTheMemory(t *testing.T) {
	const most = 256 << 20
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	a := &Allocator{limits: &teamLimits{}, lock: &timedLock{duration: time.Hour}}
	a.lock.renewed.Store(int64(bootclock.Now()))
	a.o.Clients, a.o.Namespace, a.o.Log = clients, "default", zap.NewNop()
	a.watches = newTestWatches(t, a)
	fillJournal(t, a)

	defer debug.SetMemoryLimit(debug.SetMemoryLimit(512_000_000)) // as the chart does
	debug.FreeOSMemory()
	stop := peak()
	log, facts, err := a.openJournal(t.Context())
	used := stop()
	require.NoError(t, err)
	t.Logf("%d facts, %d bytes unsettled; peak %d MiB", len(facts), log.Stats().UnsettledBytes, used>>20)
	require.Greater(t, log.Stats().UnsettledBytes, maxUnsettled)
	require.Less(t, used, uint64(most))
}

// filled is the journal.Store in memory in which the slots are made. To commit all of their
// batches, one after the other, to a real API server takes minutes in a race build.
type filled map[int]journal.Slot

func (m filled) List(_ context.Context, f func(journal.Slot) error) error {
	for _, s := range m {
		if err := f(s); err != nil {
			return err
		}
	}
	return nil
}

func (m filled) Versions(context.Context) (map[int]string, error) {
	return nil, errors.New("not asked for")
}

func (m filled) Read(_ context.Context, index int) (journal.Slot, error) { return m[index], nil }

func (m filled) Write(_ context.Context, s journal.Slot) (string, error) {
	m[s.Index] = s
	return s.Version, nil
}

func (m filled) Create(ctx context.Context, s journal.Slot) (string, error) { return m.Write(ctx, s) }

// fillJournal fills every slot. Each sandbox is in several of them.
func fillJournal(t *testing.T, a *Allocator) {
	t.Helper()
	slots := filled{}
	log, _, err := journal.Open(t.Context(), journal.Options{
		Store: slots, Valid: a.lock.valid, Begin: func(context.Context) error { return nil },
		Nonce: func() string { return utilrand.String(12) }, Log: zap.NewNop(),
	})
	require.NoError(t, err)
	var pattern [32]byte
	random := rand.NewChaCha8(pattern)
	text := func(n int) string {
		b := make([]byte, n)
		_, _ = random.Read(b) // it never fails
		return hex.EncodeToString(b)
	}
	var records []journal.Record
	bytes := 0
	for n := 0; bytes <= maxUnsettled; n++ {
		s := core.Sandbox{
			Binding: core.Binding{ID: text(10), ClaimedAt: time.Unix(1, 0), EndAt: time.Unix(300, 0), Metadata: map[string]string{"job": text(60), "owner": text(60)}, Team: "team", IdempotencyKey: text(8)},
			Pool:    core.PoolKey{Name: "python"}, Pod: core.PodKey{Name: "python-" + text(3), UID: text(16)},
			IP: netip.AddrFrom4([4]byte{10, byte(n >> 16), byte(n >> 8), byte(n)}), DefaultPort: 8080, Phase: core.Running,
		}
		r, err := toRecord(core.Fact{Revision: core.Revision{Term: 1, Counter: uint64(n + 1)}, Subject: &core.SandboxFact{Sandbox: s}})
		require.NoError(t, err)
		records = append(records, r)
		bytes += len(r.Raw)
	}
	require.NoError(t, log.Commit(t.Context(), records))
	// What follows is all of it again, until every slot was written.
	for round, last := log.Stats().Batches, log.Position(); last < journal.Slots; {
		last++
		s := slots[int((last-round)%journal.Slots)]
		s.Position, s.Index = last, int(last%journal.Slots)
		slots[s.Index] = s
	}
	store := &journal.Objects{Client: a.o.Clients.Berth, Namespace: a.o.Namespace}
	var group errgroup.Group
	group.SetLimit(8)
	for _, s := range slots {
		group.Go(func() error {
			_, err := store.Create(t.Context(), s)
			return err
		})
	}
	require.NoError(t, group.Wait())
}
