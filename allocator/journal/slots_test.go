package journal_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap/zaptest"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/berth-sandbox/berth/allocator/journal"
	"github.com/berth-sandbox/berth/allocator/kube"
	"github.com/berth-sandbox/berth/api/crd"
	"github.com/berth-sandbox/berth/devcluster"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Invariant: I9
func TestJournalOnARealAPIServer(t *testing.T) {
	cluster := devcluster.Start(t, devcluster.Options{CRDs: crd.All()})
	clients, err := kube.NewClients(cluster.RestConfig(), 0, 0)
	require.NoError(t, err)
	ctx := t.Context()
	store := &journal.Objects{Client: clients.Berth, Namespace: "default"}
	open := func() (*journal.Log, []journal.Record) {
		nonce := 0
		l, records, err := journal.Open(ctx, journal.Options{
			Store: store, Valid: func() bool { return true }, Begin: func(context.Context) error { return nil },
			Nonce: func() string { nonce++; return strconv.Itoa(nonce) }, Log: zaptest.NewLogger(t),
		})
		require.NoError(t, err)
		return l, records
	}
	record := func(term, counter uint64) journal.Record {
		return journal.Record{Key: "k", Term: term, Counter: counter, Raw: []byte("\n\x01k\x10" + string(rune(term)) + "\x18" + string(rune(counter)))}
	}

	first, records := open()
	require.Empty(t, records)
	require.NoError(t, first.Commit(ctx, []journal.Record{record(1, 1)}))
	require.NoError(t, first.Commit(ctx, []journal.Record{record(1, 2)}))
	var slots []journal.Slot
	require.NoError(t, store.List(ctx, func(s journal.Slot) error { slots = append(slots, s); return nil }))
	require.Len(t, slots, journal.Slots, "over all pages of the list")

	second, records := open()
	require.Equal(t, uint64(2), second.Term())
	require.Equal(t, []journal.Record{record(1, 2)}, records)

	err = first.Commit(ctx, []journal.Record{record(1, 3)})
	require.ErrorIs(t, err, journal.ErrDeposed)
	require.NoError(t, second.Commit(ctx, []journal.Record{record(2, 1)}))

	batches, err := journal.Dump(ctx, store)
	require.NoError(t, err)
	require.Len(t, batches, journal.Slots)
	last := batches[len(batches)-1]
	require.Equal(t, uint64(2), last.Term)
	require.Equal(t, uint64(5), last.Position, "two term records, three batches")
	require.Len(t, last.Records, 1)
	require.Equal(t, "k", last.Records[0].GetKey())

	stale := slots[0]
	stale.Nonce = "another"
	_, err = store.Write(ctx, stale)
	require.NoError(t, err)
	_, err = store.Write(ctx, stale)
	require.True(t, apierrors.IsConflict(err), "%v", err)

	require.NoError(t, clients.Berth.Delete().Namespace("default").Resource("journalslots").Name("berth-100").Do(ctx).Error())
	_, err = store.Read(ctx, 100)
	require.ErrorIs(t, err, journal.ErrMissing)
	_, _, err = journal.Open(ctx, journal.Options{
		Store: store, Valid: func() bool { return true }, Begin: func(context.Context) error { return nil },
		Nonce: func() string { return "n" }, Log: zaptest.NewLogger(t),
	})
	require.ErrorIs(t, err, journal.ErrMissing)
	require.ErrorContains(t, err, "slot 100 of 256")
	batches, err = journal.Dump(ctx, store)
	require.ErrorIs(t, err, journal.ErrMissing)
	require.Len(t, batches, journal.Slots-1, "what is there is shown all the same")
}
