package history

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestLogIsReadBackAsItWasWritten(t *testing.T) {
	want := good()
	log, err := Create(filepath.Join(t.TempDir(), "history.jsonl"), want[0])
	require.NoError(t, err)
	for _, e := range want[1:] {
		log.Add(e)
	}
	require.Equal(t, want, log.All())
	require.NoError(t, log.Close())
	h, err := Open(log.Name())
	require.NoError(t, err)
	require.Equal(t, want, h.Events)
	require.Equal(t, *settings, h.Settings)
}

func TestFileThatIsNoHistoryIsRefused(t *testing.T) {
	for name, text := range map[string]string{
		"empty": "", "no run first": `{"kind":"claim"}`, "no settings": `{"kind":"run"}`,
		"no JSON": `{"kind":"run","settings":{}}` + "\nx",
	} {
		_, err := ParseEvents(strings.NewReader(text))
		require.Error(t, err, name)
	}
}
