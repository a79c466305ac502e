package allocator

import (
	"context"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/snapshots"
)

func TestRestoreWaitsForAPlaceToRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tm := leading(t)
		tries := 0
		values := &agents.Values{Restore: &agents.Restore{}, Open: func(context.Context) (io.ReadCloser, error) {
			if tries++; tries < 5 {
				return nil, snapshots.ErrBusy
			}
			return nil, snapshots.ErrNotFound
		}}
		require.ErrorIs(t, tm.restore(t.Context(), starting("p", "a"), values), snapshots.ErrNotFound)
		require.Equal(t, 5, tries)

		values.Open = func(context.Context) (io.ReadCloser, error) { return nil, snapshots.ErrBusy }
		began := time.Now()
		require.ErrorIs(t, tm.restore(t.Context(), starting("p", "a"), values), snapshots.ErrBusy)
		require.Equal(t, agents.RestoreFor, time.Since(began))
	})
}
