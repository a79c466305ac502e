// Package printable keeps characters that no reader sees out of names and out of output. A terminal obeys
// control characters, a bidirectional override shows a text in another order, and YAML refuses some of both.
//
// # Guarantees
//
//   - What Text, Line, JSON and Writer return has printable characters only, but for the line breaks and tabs
//     that Text, JSON and Writer leave.
//   - A text with printable characters only stays as it is.
//   - JSON keeps the value of a JSON text.
package printable
