package rest

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"go.uber.org/zap"
)

// Bounds of the length of a key, in bytes.
const (
	minKey = 16
	maxKey = 1024
)

// keysEvery is the maximum age of the loaded keys.
const keysEvery = 5 * time.Second

// Keys are the API keys in a directory, such as a mounted Secret. Each file is one key: its name is
// the name of the key, its content without surrounding white space is the key.
//
// The directory is read again when a request comes 5 s or more after the last reading. If it cannot
// be read, the error is logged and the loaded keys stay valid. The methods may be called
// concurrently.
type Keys struct {
	dir string
	now func() time.Time
	log *zap.Logger

	mu    sync.Mutex
	read  time.Time
	names map[[sha256.Size]byte]string // by the key's hash, so that timing reveals nothing about a key
}

// NewKeys loads a directory. A directory without keys is an error.
func NewKeys(dir string, now func() time.Time, log *zap.Logger) (*Keys, error) {
	k := &Keys{dir: dir, now: now, log: log, read: now()}
	var err error
	if k.names, err = readKeys(dir); err != nil {
		return nil, err
	}
	return k, nil
}

// Name returns the name of a key, or false for an unknown key.
func (k *Keys) Name(key string) (string, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now := k.now(); now.Sub(k.read) >= keysEvery {
		k.read = now
		if names, err := readKeys(k.dir); err != nil {
			k.log.Error("API keys cannot be reloaded; the loaded keys stay valid", zap.Error(err))
		} else {
			k.names = names
		}
	}
	name, ok := k.names[sha256.Sum256([]byte(key))]
	return name, ok
}

func readKeys(dir string) (map[[sha256.Size]byte]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("API keys: %w", err)
	}
	names := map[[sha256.Size]byte]string{}
	var errs []error
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), ".") { // versions of a Secret's volume
			continue
		}
		path := filepath.Join(dir, e.Name())
		if !utf8.ValidString(e.Name()) {
			errs = append(errs, fmt.Errorf("%q: the name of a key must be UTF-8", path))
			continue
		}
		raw, err := os.ReadFile(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		key := strings.TrimSpace(string(raw))
		if len(key) < minKey || len(key) > maxKey || strings.ContainsFunc(key, func(r rune) bool { return r <= ' ' || r > '~' }) {
			errs = append(errs, fmt.Errorf("%s: must hold one key of %d to %d visible ASCII characters", path, minKey, maxKey))
			continue
		}
		hash := sha256.Sum256([]byte(key))
		if other, ok := names[hash]; ok {
			errs = append(errs, fmt.Errorf("%s: holds the same key as %s", path, other))
		}
		names[hash] = e.Name()
	}
	if err := errors.Join(errs...); err != nil {
		return nil, fmt.Errorf("API keys: %w", err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("API keys: %s: %w: put one file with a key into it", dir, fs.ErrNotExist)
	}
	return names, nil
}

// presentedKey returns the key of a request: X-API-Key, as the E2B SDKs send it, or a bearer token
// (RFC 6750).
func presentedKey(r *http.Request) string {
	if key := r.Header.Get("X-API-Key"); key != "" {
		return key
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
