package initbox_test

import (
	"encoding/json"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/agent/initbox"
)

func order() *initbox.Order {
	return &initbox.Order{SandboxID: "abc", Kind: initbox.Keep, Term: 3, Counter: math.MaxUint64}
}

// Invariant: P28
func TestOrderOpensForItsAgentOnly(t *testing.T) {
	s := sealer(t, 1)
	k := keys(t, s)
	sealed, err := s.For(k.PublicKey()).SealOrder(order())
	require.NoError(t, err)
	got, err := k.OpenOrder(sealed)
	require.NoError(t, err)
	require.Equal(t, order(), got)
	_, err = keys(t, s).OpenOrder(sealed)
	require.ErrorIs(t, err, initbox.ErrSealed, "another agent, or the same pod after a restart")
	foreign, err := sealer(t, 2).For(k.PublicKey()).SealOrder(order())
	require.NoError(t, err)
	_, err = k.OpenOrder(foreign)
	require.ErrorIs(t, err, initbox.ErrSealed, "not the allocator")
	for i := range sealed {
		changed := append([]byte(nil), sealed...)
		changed[i] ^= 1
		_, err := k.OpenOrder(changed)
		require.Error(t, err, i)
		_, err = k.OpenOrder(sealed[:i])
		require.Error(t, err, i)
	}
	_, err = k.OpenOrder(make([]byte, initbox.MaxSealedOrder+1))
	require.Error(t, err)
}

// Invariant: P28
func TestBoxOfOneKindNeverOpensAsTheOther(t *testing.T) {
	s := sealer(t, 1)
	k := keys(t, s)
	sealed, err := s.Seal(config(), k.PublicKey())
	require.NoError(t, err)
	_, err = k.OpenOrder(sealed)
	require.ErrorIs(t, err, initbox.ErrSealed)
	sealed, err = s.For(k.PublicKey()).SealOrder(order())
	require.NoError(t, err)
	_, err = k.Open(sealed)
	require.ErrorIs(t, err, initbox.ErrSealed)
}

func TestOrderCheckNamesTheField(t *testing.T) {
	for want, change := range map[string]func(*initbox.Order){
		"sandboxID: must be set":             func(o *initbox.Order) { o.SandboxID = "" },
		"sandboxID: 1025 bytes":              func(o *initbox.Order) { o.SandboxID = strings.Repeat("a", 1025) },
		"kind: must be freeze, keep or thaw": func(o *initbox.Order) { o.Kind = "canary" },
		"term: must be set":                  func(o *initbox.Order) { o.Term = 0 },
	} {
		o := order()
		change(o)
		require.ErrorContains(t, o.Check(), want)
		_, err := sealer(t, 1).For(keys(t, sealer(t, 1)).PublicKey()).SealOrder(o)
		require.ErrorContains(t, err, want)
		require.NotContains(t, err.Error(), "canary")
	}
	largest := &initbox.Order{SandboxID: strings.Repeat("\x01", 1024), Kind: initbox.Freeze, Term: math.MaxUint64,
		Counter: math.MaxUint64}
	k := keys(t, sealer(t, 1))
	sealed, err := sealer(t, 1).For(k.PublicKey()).SealOrder(largest)
	require.NoError(t, err)
	got, err := k.OpenOrder(sealed)
	require.NoError(t, err)
	require.Equal(t, largest, got)
}

func TestRefusalTellsWhatToDo(t *testing.T) {
	for reason, want := range map[initbox.Reason]string{
		initbox.NotPermitted: "process 7 of user 5 cannot be stopped", initbox.StillRuns: "process 7 of user 5 does not stop",
		initbox.TooFast: "faster than they can be stopped", initbox.Ending: "told to end", initbox.NotVisible: "/proc",
		"canary": "could not stop all processes",
	} {
		r := &initbox.Refusal{Reason: reason, PID: 7, UID: 5}
		require.ErrorContains(t, r, want)
		require.NotContains(t, r.Error(), "canary")
	}
}

func FuzzOpenOrder(f *testing.F) {
	s := sealer(f, 1)
	k := keys(f, s)
	sealed, err := s.For(k.PublicKey()).SealOrder(order())
	require.NoError(f, err)
	of, err := s.Seal(config(), k.PublicKey())
	require.NoError(f, err)
	f.Add(sealed)
	f.Add(of)
	f.Add([]byte{})
	f.Add([]byte{initbox.Version})
	files := map[string]initbox.Kind{}
	for _, o := range []*initbox.FilesOrder{archiveOrder(), restoreOrder()} {
		sealed, err := s.For(k.PublicKey()).SealFilesOrder(o)
		require.NoError(f, err)
		files[string(sealed)] = o.Kind
		f.Add(sealed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, err := k.OpenOrder(b); err == nil && string(b) != string(sealed) {
			t.Fatal("a box opens that was never sealed")
		}
		for _, kind := range []initbox.Kind{initbox.Archive, initbox.Restore} {
			if _, err := k.OpenFilesOrder(b, kind); err == nil && files[string(b)] != kind {
				t.Fatal("a box opens that was never sealed")
			}
		}
	})
}

// FuzzOpenOrderContents fuzzes what is in the box of an order.
func FuzzOpenOrderContents(f *testing.F) {
	raw, err := json.Marshal(order())
	require.NoError(f, err)
	f.Add(raw)
	f.Add([]byte(`{"sandboxID":"a","kind":"thaw","term":1,"new":1}`))
	for _, o := range []*initbox.FilesOrder{archiveOrder(), restoreOrder()} {
		raw, err := json.Marshal(o)
		require.NoError(f, err)
		f.Add(raw)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		s := sealer(t, 1)
		k := keys(t, s)
		for _, kind := range []initbox.Kind{initbox.Archive, initbox.Restore} {
			o, err := k.OpenFilesOrder(s.For(k.PublicKey()).SealRaw(b), kind)
			if err == nil {
				require.NoError(t, o.Check())
				require.Equal(t, kind, o.Kind)
				again, err := s.For(k.PublicKey()).SealFilesOrder(o)
				require.NoError(t, err)
				require.LessOrEqual(t, len(again), initbox.MaxSealedOrder)
			}
		}
		o, err := k.OpenOrder(s.For(k.PublicKey()).SealRaw(b))
		if err == nil {
			require.NoError(t, o.Check())
			again, err := s.For(k.PublicKey()).SealOrder(o)
			require.NoError(t, err)
			require.LessOrEqual(t, len(again), initbox.MaxSealedOrder)
		}
	})
}
