package sandboxid

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestNewIDsAreValidAndDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 10_000 {
		id := New()
		require.Len(t, id, Len)
		require.True(t, Valid(id), id)
		require.False(t, seen[id], "the same ID twice: %s", id)
		seen[id] = true
	}
}

func TestValid(t *testing.T) {
	for _, id := range []string{"a", "0", strings.Repeat("z", MaxLen)} {
		require.True(t, Valid(id), id)
	}
	for _, id := range []string{"", Reserved, "A", "a-b", "a.b", "ä", "a b", strings.Repeat("z", MaxLen+1)} {
		require.False(t, Valid(id), id)
	}
}

func TestShortHidesMostOfAnID(t *testing.T) {
	require.Equal(t, "abcde...", Short("abcdefghijklmnopqrst"))
	require.Equal(t, "abc", Short("abc"))
}

func TestKeyStandsForExactlyOneID(t *testing.T) {
	ids := []string{"a", "b", "9", "aa", "aaa", "a9", "9a", strings.Repeat("9", MaxKeyLen), strings.Repeat("a", MaxKeyLen)}
	for n := 1; n <= MaxKeyLen; n++ {
		ids = append(ids, strings.Repeat("z", n), strings.Repeat("0", n))
	}
	for range 1000 {
		ids = append(ids, New())
	}
	seen := map[Key]string{}
	for _, id := range ids {
		k, ok := KeyOf(id)
		require.True(t, ok, id)
		require.Equal(t, id, k.String())
		require.Empty(t, seen[k], "%s has the key of another ID", id)
		seen[k] = id
		again, _ := KeyOf([]byte(id))
		require.Equal(t, k, again)
	}
	require.Empty(t, Key{}.String())
	require.NotContains(t, seen, Key{})
}

func FuzzKey(f *testing.F) {
	for _, seed := range []string{"", "a", "api", "A", "a-b", "abcdefghijklmnopqrst", "abcdefghijkl", "abcdefghijklm", "\x00a"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, id string) {
		k, ok := KeyOf(id)
		valid := Valid(id) && len(id) <= MaxKeyLen
		if ok != valid || ok && k.String() != id || !ok && k != (Key{}) {
			t.Fatalf("%q has the key %v, %q, %v", id, k, k, ok)
		}
	})
}
