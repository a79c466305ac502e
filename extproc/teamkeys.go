package extproc

import (
	"crypto/sha256"
	"crypto/subtle"
	"sync/atomic"
)

// TeamKeys are the hashes of the API keys with which teams open their sandboxes. The zero value has
// not been read. All methods may be called concurrently.
type TeamKeys struct {
	byTeam atomic.Pointer[map[string][][sha256.Size]byte]
}

// Replace replaces all keys. The caller must not change them later. nil: the allocator has not read
// them.
func (k *TeamKeys) Replace(byTeam map[string][][sha256.Size]byte) {
	if byTeam == nil {
		k.byTeam.Store(nil)
		return
	}
	k.byTeam.Store(&byTeam)
}

// Opens reports whether key is a key of the team, and whether that is known: it is not while the keys
// have not been read. No key is one of the team "". The time depends on the number of the team's keys,
// and not on which of them is nearest.
func (k *TeamKeys) Opens(team, key string) (opens, known bool) {
	byTeam := k.byTeam.Load()
	if byTeam == nil {
		return false, false
	}
	if team == "" {
		return false, true
	}
	sum, equal := sha256.Sum256([]byte(key)), 0
	for _, hash := range (*byTeam)[team] {
		equal |= subtle.ConstantTimeCompare(sum[:], hash[:])
	}
	return equal == 1, true
}
