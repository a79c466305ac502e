package allocator

import (
	"net/netip"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"google.golang.org/protobuf/proto"
	"pgregory.net/rapid"

	"github.com/berth-sandbox/berth/allocator/core"
	"github.com/berth-sandbox/berth/allocator/journal"
	journalv1 "github.com/berth-sandbox/berth/api/journal/v1"
)

func TestFactsComeBackFromTheJournalAsTheyWere(t *testing.T) {
	text := rapid.String()
	at := rapid.Custom(func(t *rapid.T) time.Time {
		if rapid.Bool().Draw(t, "none") {
			return time.Time{}
		}
		return time.UnixMicro(rapid.Int64Range(1, 1<<52).Draw(t, "micros")).UTC()
	})
	addr := rapid.Custom(func(t *rapid.T) netip.Addr {
		if rapid.Bool().Draw(t, "v6") {
			return netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "ip")))
		}
		return netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "ip")))
	})
	rapid.Check(t, func(t *rapid.T) {
		revision := core.Revision{Term: rapid.Uint64().Draw(t, "term"), Counter: rapid.Uint64().Draw(t, "counter")}
		f := core.Fact{Revision: revision}
		if rapid.IntRange(0, 4).Draw(t, "kind") == 0 {
			f.Discard = core.PodKey{Namespace: "ns", Name: text.Draw(t, "pod"), UID: text.Draw(t, "uid")}
		} else {
			f.Sandbox = &core.Sandbox{
				Binding: core.Binding{
					ID: text.Draw(t, "id"), ClaimedAt: at.Draw(t, "claimed"), EndAt: at.Draw(t, "end"), Team: text.Draw(t, "team"), User: text.Draw(t, "user"),
					IdempotencyKey: text.Draw(t, "key"),
				},
				Pool: core.PoolKey{Namespace: "ns", Name: text.Draw(t, "pool")}, Pod: core.PodKey{Namespace: "ns", Name: text.Draw(t, "pod"), UID: text.Draw(t, "uid")},
				IP: addr.Draw(t, "ip"), DefaultPort: rapid.Uint16().Draw(t, "port"), Reason: text.Draw(t, "reason"), EndedAt: at.Draw(t, "ended"), Revision: revision,
				Phase: rapid.SampledFrom([]core.Phase{core.Starting, core.Running, core.Released}).Draw(t, "phase"),
			}
			if m := rapid.MapOf(text, text).Draw(t, "metadata"); len(m) > 0 {
				f.Sandbox.Metadata = m
			}
			if p := rapid.SliceOf(rapid.Uint16()).Draw(t, "ports"); len(p) > 0 {
				f.Sandbox.Ports = p
			}
			if f.Sandbox.IdempotencyKey != "" {
				f.Sandbox.RequestHash = [32]byte(rapid.SliceOfN(rapid.Byte(), 32, 32).Draw(t, "hash"))
			}
		}
		r, err := toRecord(f)
		require.NoError(t, err)
		back, known, err := fromRecord(r, "ns")
		require.NoError(t, err)
		require.True(t, known)
		require.Equal(t, f, back)
	})
}

// What a later version adds must not stop this one, and must not be lost.
func TestRecordsOfALaterVersionAreReadAsFarAsTheyAreKnown(t *testing.T) {
	f := core.Fact{Revision: core.Revision{Term: 1, Counter: 2}, Discard: core.PodKey{Namespace: "ns", Name: "pod", UID: "uid"}}
	r, err := toRecord(f)
	require.NoError(t, err)
	r.Raw = append(r.Raw, 0xfa, 0x07, 1, 'x') // field 127 of the record
	back, known, err := fromRecord(r, "ns")
	require.NoError(t, err)
	require.True(t, known)
	require.Equal(t, f, back)

	raw, err := proto.Marshal(&journalv1.Record{Key: "session/x", Term: 3, Counter: 4})
	require.NoError(t, err)
	_, known, err = fromRecord(journal.Record{Key: "session/x", Term: 3, Counter: 4, Raw: raw}, "ns")
	require.NoError(t, err)
	require.False(t, known, "a kind of record that this version does not know")
}

func TestRecordThatMakesNoSenseIsRefused(t *testing.T) {
	for name, s := range map[string]*journalv1.Sandbox{
		"no phase":      {PodIp: []byte{1, 2, 3, 4}},
		"unknown phase": {PodIp: []byte{1, 2, 3, 4}, Phase: 99},
		"no address":    {Phase: journalv1.Phase_PHASE_RUNNING},
	} {
		raw, err := proto.Marshal(&journalv1.Record{Key: "sandbox/x", State: &journalv1.Record_Sandbox{Sandbox: s}})
		require.NoError(t, err)
		_, _, err = fromRecord(journal.Record{Key: "sandbox/x", Raw: raw}, "ns")
		require.ErrorContains(t, err, "sandbox/x", name)
	}
}
