package snapshots

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strings"

	"gocloud.dev/gcerrors"
)

// The parts are the directory of the team, the sandbox, and the name of the archive.
var stoppedKey = regexp.MustCompile(`^stopped/([a-z0-9_-]+)/([a-z0-9]{1,57})/([a-z2-7]{26})(?:\.json)?$`)

// stoppedKeyOf returns the key of an archive of a stopped sandbox. That of its manifest has ".json" behind it.
func stoppedKeyOf(team, sandboxID, name string) (string, error) {
	dir, err := directory(team)
	if err != nil {
		return "", err
	}
	key := stopped + dir + "/" + sandboxID + "/" + name
	if at := stoppedKey.FindStringSubmatch(key); at == nil || at[2] != sandboxID || at[3] != name {
		return "", fmt.Errorf("archive %.100q of sandbox %.100q: %w", name, sandboxID, ErrInvalid)
	}
	return key, nil
}

// WriteStopped writes the archive of a sandbox that is to be stopped, for the team, pool and sandbox ID of of. write is
// as that of Write, and gets the name of the archive, which is the tag of what is returned: 26 characters of a-z and
// 0-9. The archive does not expire. The errors are as those of Write.
func (s *Store) WriteStopped(
	ctx context.Context, of Snapshot, maxSize int64,
	write func(ctx context.Context, name string, w io.Writer) (Contents, error),
) (Snapshot, error) {
	made := Snapshot{Name: of.SandboxID, Tag: strings.ToLower(rand.Text()), Team: of.Team, Pool: of.Pool, SandboxID: of.SandboxID}
	var err error
	if made.Archive, err = stoppedKeyOf(made.Team, made.SandboxID, made.Tag); err != nil {
		return Snapshot{}, err
	}
	if maxSize <= 0 {
		return Snapshot{}, fmt.Errorf("size of the archive %d: %w: must be positive", maxSize, ErrInvalid)
	}
	a := &attempt{team: made.Team, key: made.Archive + ".json", reserved: min(maxSize, maxArchive), sandbox: made.SandboxID}
	return s.put(ctx, a, made, func(ctx context.Context, w io.Writer) (Contents, error) { return write(ctx, made.Tag, w) })
}

// GetStopped returns what WriteStopped has written under a name, for Open. It returns ErrGone, ErrInvalid, ErrDamaged
// or an error of the store.
func (s *Store) GetStopped(ctx context.Context, team, sandboxID, name string) (Snapshot, error) {
	key, err := stoppedKeyOf(team, sandboxID, name)
	if err != nil {
		return Snapshot{}, err
	}
	found, err := s.read(ctx, key+".json")
	if errors.Is(err, ErrNotFound) {
		err = ErrGone
	}
	return found, err
}

// DropStopped deletes what WriteStopped has written under a name, if it is there. After an error a part may be left,
// which SweepStopped deletes.
func (s *Store) DropStopped(ctx context.Context, team, sandboxID, name string) error {
	key, err := stoppedKeyOf(team, sandboxID, name)
	if err != nil {
		return err
	}
	for _, object := range []string{key + ".json", key} {
		if _, err := s.remove(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

// remove deletes an object of a stopped sandbox, if it is there.
func (s *Store) remove(ctx context.Context, key string) (there bool, err error) {
	err = s.call(ctx, "deleting an archive of a stopped sandbox", func(ctx context.Context) error {
		return s.bucket.Delete(ctx, key)
	})
	if gcerrors.Code(err) == gcerrors.NotFound {
		return false, nil
	}
	return err == nil, err
}

// SweepStopped deletes archives of stopped sandboxes that are older than an hour and that their sandboxes do not name.
// named returns, by the ID of the sandbox, the archives that live sandboxes name. It is asked after the archives were
// listed, and must not answer for an earlier time: an archive of that age is named by then, or never. SweepStopped
// returns what it has done also if it fails. Only one process at a time may sweep.
func (s *Store) SweepStopped(
	ctx context.Context, named func(ctx context.Context, sandboxIDs []string) (map[string]string, error),
) (done Swept, err error) {
	listed, err := s.objects(ctx, stopped)
	if err != nil {
		return done, err
	}
	old := s.now().Add(-s.bounds.sweep)
	type object struct {
		key, sandboxID, name string
		size                 int64
	}
	var all []object
	var ids []string
	for _, o := range listed {
		at := stoppedKey.FindStringSubmatch(o.Key)
		if at == nil || o.ModTime.IsZero() || o.ModTime.After(old) {
			continue
		}
		if len(all) == 0 || all[len(all)-1].sandboxID != at[2] {
			ids = append(ids, at[2])
		}
		all = append(all, object{o.Key, at[2], at[3], o.Size})
	}
	if len(all) == 0 {
		return done, nil
	}
	names, err := named(ctx, ids)
	if err != nil {
		return done, fmt.Errorf("which archives stopped sandboxes have: %w", err)
	}
	for _, o := range all {
		if names[o.sandboxID] == o.name {
			continue
		}
		there, err := s.remove(ctx, o.key)
		if err != nil {
			return done, err
		}
		if there && !strings.HasSuffix(o.key, ".json") {
			done.Archives++
			done.Bytes += o.size
		}
	}
	return done, nil
}
