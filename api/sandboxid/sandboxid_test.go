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
