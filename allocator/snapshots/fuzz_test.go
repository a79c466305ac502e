package snapshots_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/allocator/snapshots"
)

// Invariant: P32
func FuzzManifestIsOfItsPlaceAndTeam(f *testing.F) {
	made := named("red", "a")
	made.CreatedAt, made.SHA256 = time.Unix(1, 0).UTC(), strings.Repeat("0", 64)
	made.Archive = "archives/red/" + strings.Repeat("a", 26)
	raw, err := snapshots.Encode(made)
	require.NoError(f, err)
	f.Add("snapshots/red/a:default.json", raw)
	f.Add("snapshots/_/a:default.json", []byte(strings.Replace(string(raw), `"team":"red"`, `"team":"_"`, 1)))
	f.Fuzz(func(t *testing.T, key string, raw []byte) {
		found, err := snapshots.Decode(key, raw)
		if err != nil {
			require.ErrorIs(t, err, snapshots.ErrDamaged)
			return
		}
		dir := found.Team
		if dir == "" {
			dir = "_"
		}
		require.Equal(t, "snapshots/"+dir+"/"+found.Ref()+".json", key)
		require.True(t, strings.HasPrefix(found.Archive, "archives/"+dir+"/"))
		again, err := snapshots.Encode(found)
		if err == nil { // it may have become longer than a manifest may be
			same, err := snapshots.Decode(key, again)
			require.NoError(t, err)
			require.Equal(t, found.Archive, same.Archive)
		}
	})
}
