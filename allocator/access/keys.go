package access

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"

	"go.uber.org/zap"
	"k8s.io/client-go/kubernetes"

	"github.com/berth-sandbox/berth/internal/options"
	"github.com/berth-sandbox/berth/internal/secretwatch"
)

// The errors of Keys.
var (
	// ErrUnknownKey: no Secret holds the key.
	ErrUnknownKey = errors.New("unknown key")
	// ErrNotLoaded: the Secrets have not been read since the start of the process.
	ErrNotLoaded = errors.New("the API keys have not been read yet")
)

// Options configure Keys. All are required.
type Options struct {
	Client kubernetes.Interface
	// Namespace is that of the Secrets.
	Namespace string
	Log       *zap.Logger
}

// Keys are the API keys in the Secrets of a namespace. The methods may be called concurrently.
type Keys struct {
	o       Options
	secrets *secretwatch.Secrets
	valid   atomic.Pointer[set]
}

// set is the valid keys at one time. It is never changed.
type set struct {
	callers map[hashed]Caller // nil: not loaded
	valid   context.Context   // ends when another set is valid
	end     context.CancelFunc
}

func newSet(callers map[hashed]Caller) *set {
	valid, end := context.WithCancel(context.Background())
	return &set{callers, valid, end}
}

// NewKeys returns keys that are loaded by Run.
func NewKeys(o Options) (*Keys, error) {
	if err := options.Require(o, "Client", "Namespace", "Log"); err != nil {
		return nil, err
	}
	secrets, err := secretwatch.New(o.Client, o.Namespace, SecretType)
	if err != nil {
		return nil, err
	}
	k := &Keys{o: o, secrets: secrets}
	k.valid.Store(newSet(nil))
	return k, nil
}

// Run keeps the keys up to date until ctx ends.
func (k *Keys) Run(ctx context.Context) {
	refused := map[string]string{}
	k.secrets.Run(ctx, func() { refused = k.load(refused) })
}

// Caller returns the caller that presents a key, ErrUnknownKey or ErrNotLoaded. The time that it
// takes depends on the hash of the key only, which a client cannot choose.
func (k *Keys) Caller(key string) (Caller, error) {
	valid := k.valid.Load().callers
	switch {
	case valid == nil:
		return Caller{}, ErrNotLoaded
	case !keyShape.MatchString(key):
		return Caller{}, ErrUnknownKey
	}
	c, ok := valid[sha256.Sum256([]byte(key))]
	if !ok {
		return Caller{}, ErrUnknownKey
	}
	return c, nil
}

// Ready returns ErrNotLoaded until the keys have been read.
func (k *Keys) Ready() error {
	if k.valid.Load().callers == nil {
		return ErrNotLoaded
	}
	return nil
}

// ByTeam returns the SHA-256 of each valid key by team, and a channel that is closed when that has
// changed. The map is nil until the keys have been read.
func (k *Keys) ByTeam() (map[string][][sha256.Size]byte, <-chan struct{}) {
	valid := k.valid.Load()
	if valid.callers == nil {
		return nil, valid.valid.Done()
	}
	byTeam := map[string][][sha256.Size]byte{}
	for hash, c := range valid.callers {
		byTeam[c.Team] = append(byTeam[c.Team], hash)
	}
	return byTeam, valid.valid.Done()
}

// Current returns a context that ends when a key is made, changed or revoked.
func (k *Keys) Current() context.Context { return k.valid.Load().valid }

// Callers returns the callers of all valid keys, by team and name.
func (k *Keys) Callers() []Caller {
	all := slices.Collect(maps.Values(k.valid.Load().callers))
	slices.SortFunc(all, func(a, b Caller) int {
		return cmp.Or(strings.Compare(a.Team, b.Team), strings.Compare(a.Key, b.Key))
	})
	return all
}

// replace makes these the valid keys. Equal keys stay, so that routers are not sent them again.
func (k *Keys) replace(callers map[hashed]Caller) {
	before := k.valid.Load()
	if before.callers != nil && maps.Equal(before.callers, callers) {
		return
	}
	k.valid.Store(newSet(callers))
	before.end()
}

// load replaces the valid keys by those of the watched Secrets. It logs each Secret that it refuses
// and that was not refused for the same reason before, and returns all refused ones.
func (k *Keys) load(before map[string]string) (refused map[string]string) {
	refused = map[string]string{}
	valid, holders := map[hashed]Caller{}, map[hashed][]string{}
	for _, s := range k.secrets.List() {
		hash, c, err := parse(s)
		if err != nil {
			refused[s.Name] = strings.ReplaceAll(err.Error(), "\n", "; ")
			continue
		}
		valid[hash], holders[hash] = c, append(holders[hash], s.Name)
	}
	for hash, names := range holders { // which of them counts must not depend on the order
		if slices.Sort(names); len(names) > 1 {
			delete(valid, hash)
			for _, name := range names {
				refused[name] = "several Secrets hold the same key: " + strings.Join(names, ", ")
			}
		}
	}
	first := k.valid.Load().callers == nil
	k.replace(valid)
	for _, name := range slices.Sorted(maps.Keys(refused)) {
		if before[name] != refused[name] {
			k.o.Log.Error("the Secret of an API key is refused; it opens nothing", zap.String("secret", name), zap.String("why", refused[name]))
		}
	}
	if first && len(valid) == 0 {
		k.o.Log.Warn("there are no API keys, so every call is refused: make one with berth keys create", zap.String("namespace", k.o.Namespace))
	}
	return refused
}
