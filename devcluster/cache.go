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

// CacheDir is where built and downloaded programs and the state of named
// clusters are kept: $BERTH_CACHE, else "berth" in the user's cache directory.
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
	// name is read by people; recipe is everything that decides the content.
	name   string
	recipe []string
	// make fills out. It may use scratch, which does not survive.
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

// get returns the artifact's directory. Of processes that want it at once, one
// makes it. A directory under its final name is complete.
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
	// What is there under our lock was left by a holder that died. The names
	// differ, since that holder's guard may be removing its own right now.
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
