package allocator

import (
	"context"
	"fmt"
	"io"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
	"github.com/berth-sandbox/berth/allocator/agents"
	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/snapshots"
	"github.com/berth-sandbox/berth/api/apierror"
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

func TestRestoreThatCanSucceedNowhereIsHopeless(t *testing.T) {
	for err, want := range map[error]bool{
		nil: false, snapshots.ErrNotFound: true, snapshots.ErrDamaged: true, snapshots.ErrBusy: false, snapshots.ErrTimeout: false,
		&agents.RefusedError{Reason: initbox.Damaged}: true, &agents.RefusedError{Reason: initbox.NoSpace}: false,
		&agents.RefusedError{}: false, agents.ErrDeposed: false, &agents.RefusedError{Reason: initbox.NotOpened}: true,
		snapshots.ErrGone: true, snapshots.ErrInvalid: true, snapshots.ErrStore: false, errNoStore: true,
	} {
		if err != nil {
			err = fmt.Errorf("restore the files: %w", err)
		}
		require.Equal(t, want, hopeless(err), "%v", err)
	}
	e := refused("python", core.Claim{Configuring: agents.RestoreFor}, core.ClaimRefused{Why: core.NotConfigured, Problem: "it is gone"})
	require.Equal(t, apierror.SnapshotFailed, e.Reason)
	require.Contains(t, e.Message, "(it is gone)")
}
