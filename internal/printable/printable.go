package printable

import (
	"fmt"
	"io"
	"strings"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// The joiners are parts of words in several scripts, and of emoji.
const zeroWidthNonJoiner, zeroWidthJoiner = '\u200c', '\u200d'

// Is reports whether a name may have a character: every one but control and format characters, separators of
// lines and paragraphs, and noncharacters. The two zero-width joiners, which are format characters, are printable.
func Is(r rune) bool {
	switch {
	case r < utf8.RuneSelf:
		return r >= ' ' && r != 0x7f
	case r == zeroWidthNonJoiner, r == zeroWidthJoiner:
		return true
	case r&0xfffe == 0xfffe, r >= 0xfdd0 && r <= 0xfdef: // the noncharacters, which are in no table of Go
		return false
	}
	return !unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp)
}

// Unprintable returns the first character of a text that Is refuses, and where it is; -1 for none.
func Unprintable(text string) (at int, r rune) {
	at = strings.IndexFunc(text, func(r rune) bool { return !Is(r) })
	if at >= 0 {
		r, _ = utf8.DecodeRuneInString(text[at:])
	}
	return at, r
}

// Line returns a text for one line, with every unprintable character and every invalid byte escaped as in JSON.
func Line(text string) string { return escaped(text, Is) }

// Text is Line for a text of several lines: line breaks and tabs stay.
func Text(text string) string { return escaped(text, inText) }

// JSON is Text for a JSON text in UTF-8. Its value stays the same.
func JSON(raw []byte) []byte {
	if unchanged(raw) {
		return raw
	}
	return []byte(Text(string(raw)))
}

func inText(r rune) bool { return Is(r) || r == '\n' || r == '\t' }

// unchanged reports whether Text surely changes nothing.
func unchanged(raw []byte) bool {
	for i := 0; i < len(raw); {
		if c := raw[i]; c >= ' ' && c < 0x7f { // most of nearly every text
			i++
			continue
		}
		r, size := utf8.DecodeRune(raw[i:])
		if r == utf8.RuneError || !inText(r) {
			return false
		}
		i += size
	}
	return true
}

func escaped(text string, keep func(rune) bool) string {
	if utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !keep(r) }) < 0 {
		return text
	}
	var out strings.Builder
	for i, r := range text {
		switch _, size := utf8.DecodeRuneInString(text[i:]); {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&out, `\u%04x`, text[i]) // as the character of this number: Latin-1
		case keep(r):
			out.WriteRune(r)
		case r >= 0x10000:
			high, low := utf16.EncodeRune(r)
			fmt.Fprintf(&out, `\u%04x\u%04x`, high, low)
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.String()
}

// Writer returns a writer that writes Text to w. Each call of Write has whole characters.
func Writer(w io.Writer) io.Writer { return writer{w} }

type writer struct{ io.Writer }

func (w writer) Write(b []byte) (int, error) {
	if _, err := w.Writer.Write(JSON(b)); err != nil {
		return 0, err
	}
	return len(b), nil
}
