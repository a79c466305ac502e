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

// Bounds of a key, in bytes.
const (
	minKey = 16
	maxKey = 1024
)

// keysEvery is how old what was read of the directory may be.
const keysEvery = 5 * time.Second

// Keys are the API keys of a directory: a mounted Secret, whose entries are
// files. A file's name is the name of the key, its content, without white space
// around it, the key itself.
//
// The directory is read again when a request comes and the last reading is 5 s
// old or older. A directory that cannot be used then is logged and changes
// nothing. Methods may be called concurrently.
type Keys struct {
	dir string
	now func() time.Time
	log *zap.Logger

	mu    sync.Mutex
	read  time.Time
	names map[[sha256.Size]byte]string // by the key's hash, so that comparing tells nothing about the key
}

// NewKeys reads a directory. It is an error if there is no key in it.
func NewKeys(dir string, now func() time.Time, log *zap.Logger) (*Keys, error) {
	k := &Keys{dir: dir, now: now, log: log, read: now()}
	var err error
	if k.names, err = readKeys(dir); err != nil {
		return nil, err
	}
	return k, nil
}

// Name returns the name of a key, or false if it is none.
func (k *Keys) Name(key string) (string, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if now := k.now(); now.Sub(k.read) >= keysEvery {
		k.read = now
		if names, err := readKeys(k.dir); err != nil {
			k.log.Error("API keys cannot be read again; those read before stay good", zap.Error(err))
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
		if strings.HasPrefix(e.Name(), ".") { // how a Secret's volume keeps its versions
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

// presented returns the key that a request shows: X-API-Key, as the E2B SDKs
// send it, or a bearer token (RFC 6750).
func presented(r *http.Request) string {
	if key := r.Header.Get("X-API-Key"); key != "" {
		return key
	}
	scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
