package printable_test

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/berth-sandbox/berth/internal/printable"
)

func TestOnlyUnprintableCharactersAreEscaped(t *testing.T) {
	for text, want := range map[string]string{
		"": "", "a b": "a b", "Grüße, 世界": "Grüße, 世界",
		"👩\u200d💻 می\u200cخواهم ❤️": "👩\u200d💻 می\u200cخواهم ❤️", // joiners and a variation selector
		"a\x00b\x1b[2J": `a\u0000b\u001b[2J`, "a\x7fb": `a\u007fb`, "a\u009bb": `a\u009bb`, "a\u0085b": `a\u0085b`,
		"\u202eabc": `\u202eabc`, "\u2066x\u2069": `\u2066x\u2069`, "\ufeffx": `\ufeffx`, "a\u00adb": `a\u00adb`,
		"a\u2028b\u2029": `a\u2028b\u2029`, "\ufffe\uffff": `\ufffe\uffff`, "\ufdd0": `\ufdd0`, "\U0001fffe": `\ud83f\udffe`,
		"\U000e0041": `\udb40\udc41`, "\ufffd": "\ufffd", "a\xffb\xc2": `a\u00ffb\u00c2`,
		"a\nb\tc\r": `a\u000ab\u0009c\u000d`,
	} {
		require.Equal(t, want, printable.Line(text))
		inText := strings.NewReplacer(`\u000a`, "\n", `\u0009`, "\t").Replace(want)
		require.Equal(t, inText, printable.Text(text))
		var out bytes.Buffer
		n, err := printable.Writer(&out).Write([]byte(text))
		require.NoError(t, err)
		require.Equal(t, len(text), n)
		require.Equal(t, inText, out.String())
		if at, r := printable.Unprintable(text); at >= 0 {
			require.False(t, printable.Is(r))
			require.Equal(t, text[:at], printable.Line(text[:at]))
		} else if utf8.ValidString(text) {
			require.Equal(t, text, want)
		}
	}
}

// A JSON text keeps its value, and what is written has no character that a terminal obeys.
func FuzzEscapedTextIsPrintableAndJSONKeepsItsValue(f *testing.F) {
	for _, seed := range []string{"a\u009bb", "\u202e\U000e0001", "x\xff\xfe", "👩\u200d💻", "\ufffe\\u009b", "\"\\\n\t"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		for _, shown := range []string{printable.Line(text), printable.Text(text)} {
			if !utf8.ValidString(shown) || printable.Line(shown) != strings.NewReplacer("\n", `\u000a`, "\t", `\u0009`).Replace(shown) {
				t.Fatalf("%q became %q", text, shown)
			}
			for _, r := range shown {
				if unicode.Is(unicode.Cc, r) && r != '\n' && r != '\t' || unicode.Is(unicode.Bidi_Control, r) {
					t.Fatalf("%q became %q", text, shown)
				}
			}
		}
		raw, err := json.Marshal(map[string]string{text: text})
		if err != nil {
			t.Fatal(err)
		}
		var before, after map[string]string
		if json.Unmarshal(raw, &before) != nil || json.Unmarshal(printable.JSON(raw), &after) != nil {
			t.Fatalf("%q is no JSON any more", raw)
		}
		for k, v := range before {
			if after[k] != v || len(after) != 1 {
				t.Fatalf("%q became %q", before, after)
			}
		}
	})
}
