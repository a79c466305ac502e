package events

import (
	"testing"

	"github.com/stretchr/testify/require"
)

func TestReadersGetEveryEventInOrder(t *testing.T) {
	r := New(7)
	var got []uint64
	at := uint64(0)
	for n := range 3 * Size {
		r.Publish(Event{Type: Created})
		if n%1000 != 999 {
			continue
		}
		for {
			next, lost, changed := r.After(at, 300)
			require.Zero(t, lost)
			if changed != nil {
				break
			}
			for _, e := range next {
				got, at = append(got, e.Number), e.Number
			}
		}
	}
	for i, n := range got {
		require.EqualValues(t, i+1, n)
	}
	require.Len(t, got, 3*Size/1000*1000)
}

func TestSlowReadersLearnHowManyEventsTheyLost(t *testing.T) {
	r := New(7)
	for range Size + 10 {
		r.Publish(Event{Type: Ready})
	}
	next, lost, _ := r.After(3, 2)
	require.EqualValues(t, 7, lost)
	require.EqualValues(t, []uint64{11, 12}, []uint64{next[0].Number, next[1].Number})
	next, lost, _ = r.After(10, Size)
	require.Zero(t, lost)
	require.Len(t, next, Size)
}

func TestWaitingReadersWakeAtTheNextEvent(t *testing.T) {
	r := New(7)
	_, _, one := r.After(0, 1)
	_, _, other := r.After(0, 1)
	select {
	case <-one:
		t.Fatal("there is no event")
	default:
	}
	r.Publish(Event{})
	<-one
	<-other
	r.Close()
	r.Close()
	<-r.Over()
}

func TestIDsOfOtherTermsAreGaps(t *testing.T) {
	r := New(7)
	for range 5 {
		r.Publish(Event{})
	}
	for id, want := range map[string]struct {
		number uint64
		ok     bool
	}{"": {5, true}, "7.5": {5, true}, "7.0": {0, true}, "7.6": {0, false}, "6.5": {0, false}, "8.1": {0, false}} {
		number, ok, err := r.Continue(id)
		require.NoError(t, err)
		require.Equal(t, want.number, number, id)
		require.Equal(t, want.ok, ok, id)
	}
	for _, id := range []string{"x", "7", "7.", ".7", "7.x", "7.1.2", "-7.1", "7.99999999999999999999"} {
		_, _, err := r.Continue(id)
		require.Error(t, err, id)
	}
	require.Equal(t, "7.5", r.ID(5))
}
