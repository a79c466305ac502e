package devcluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/berth-sandbox/berth/devcluster/proc"
)

// CacheDir returns the directory of built and downloaded programs and of the state
// of named clusters: $BERTH_CACHE, else "berth" in the user's cache directory.
func CacheDir() (string, error) {
	if dir := os.Getenv("BERTH_CACHE"); dir != "" {
		return filepath.Abs(dir)
	}
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", fmt.Errorf("find the cache directory: %w; set BERTH_CACHE to a directory", err)
	}
	return filepath.Join(dir, "berth"), nil
}

// artifact is a directory of files that is made once and never changed.
type artifact struct {
	// name is for people. recipe is all input that decides the content.
	name   string
	recipe []string
	// make fills the directory out. It may use scratch, which is removed later.
	make func(ctx context.Context, sup *proc.Supervisor, out, scratch string) error
}

func (a artifact) dir() (string, error) {
	cache, err := CacheDir()
	if err != nil {
		return "", err
	}
	h := sha256.New()
	for _, r := range a.recipe {
		fmt.Fprintf(h, "%d:%s\n", len(r), r)
	}
	return filepath.Join(cache, a.name+"-"+hex.EncodeToString(h.Sum(nil))[:12]), nil
}

// get returns the artifact's directory, and makes it first if it is missing. Of
// concurrent processes only one makes it. A directory with the final name is
// complete.
func (a artifact) get(ctx context.Context, progress io.Writer) (_ string, err error) {
	dir, err := a.dir()
	if err != nil || exists(dir) {
		return dir, err
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", fmt.Errorf("make the cache directory: %w; set BERTH_CACHE to a directory that can be written", err)
	}
	lock, err := awaitLock(ctx, dir+".lock", func() {
		fmt.Fprintf(progress, "devcluster: another process is making %s, waiting for it\n", a.name)
	})
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if exists(dir) {
		return dir, nil
	}
	// This process holds the lock, so partial directories are from a holder that
	// died. The guard of that holder may be removing its directory just now, so each
	// attempt has a name of its own.
	stale, _ := filepath.Glob(dir + ".partial-*")
	for _, s := range stale {
		_ = os.RemoveAll(s)
	}
	sup, err := proc.New()
	if err != nil {
		return "", err
	}
	defer func() { err = errors.Join(err, sup.Close()) }()
	partial, err := sup.TempDir(filepath.Dir(dir), filepath.Base(dir)+".partial-")
	if err != nil {
		return "", err
	}
	out, scratch := filepath.Join(partial, "out"), filepath.Join(partial, "scratch")
	for _, d := range []string{out, scratch} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return "", err
		}
	}
	if err := a.make(ctx, sup, out, scratch); err != nil {
		return "", err
	}
	if err := os.Rename(out, dir); err != nil {
		return "", fmt.Errorf("put %s into the cache: %w", a.name, err)
	}
	return dir, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
