// Package sandboxid makes and checks sandbox IDs. An ID is random and never used twice. Every client
// that has it can reach the sandbox, so it is a credential.
package sandboxid

import "crypto/rand"

const (
	// Len is the length of the IDs that Berth makes: 103 bits.
	Len = 20
	// MaxLen is the longest valid ID: with "65535-" before it, it fills a DNS label of 63 octets
	// (RFC 1035, section 2.3.4).
	MaxLen = 57
	// MaxKeyLen is the longest ID that a sandbox can have, because it must fit into a Key.
	MaxKeyLen = 2 * wordLen

	// Reserved is no sandbox ID: Reserved.<domain> is the host of the API.
	Reserved = "api"

	alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
)

// New makes an ID.
func New() string {
	id := make([]byte, 0, Len)
	var buffer [2 * Len]byte
	for len(id) < Len {
		_, _ = rand.Read(buffer[:]) // never fails, see crypto/rand
		for _, b := range buffer {
			// 252 is the largest multiple of 36 in a byte: no character is likelier.
			if b < 252 && len(id) < Len {
				id = append(id, alphabet[int(b)%len(alphabet)])
			}
		}
	}
	return string(id)
}

// Valid reports whether id has the form of a sandbox ID: 1 to MaxLen characters of a-z and 0-9, and not
// Reserved. It does not keep id.
func Valid[T string | []byte](id T) bool {
	if len(id) == 0 || len(id) > MaxLen || string(id) == Reserved {
		return false
	}
	for i := range len(id) {
		if digits[id[i]] == 0 {
			return false
		}
	}
	return true
}

// Short is an ID as it may appear in logs.
func Short(id string) string {
	if len(id) <= 5 {
		return id
	}
	return id[:5] + "..."
}
