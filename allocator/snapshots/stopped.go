package snapshots

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"regexp"
	"strconv"
	"strings"

	"gocloud.dev/gcerrors"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// maxIncarnation is more than how often a sandbox is stopped.
const maxIncarnation = 999_999_999

// The parts are the directory of the team, the sandbox, the name of the archive and its incarnation.
var stoppedKey = regexp.MustCompile(`^stopped/([a-z0-9_-]+)/([a-z0-9]+)/((0|[1-9][0-9]{0,8})-[a-z2-7]{26})(?:\.json)?$`)

func stoppedArchive(dir, sandboxID, name string) string {
	return stopped + dir + "/" + sandboxID + "/" + name
}

// stoppedDirectory returns the directory of a team that has a sandbox with this ID.
func stoppedDirectory(team, sandboxID string) (dir string, err error) {
	if !sandboxid.Valid(sandboxID) {
		return "", fmt.Errorf("sandbox ID %.100q: %w", sandboxID, ErrInvalid)
	}
	return directory(team)
}

// WriteStopped writes the archive of a sandbox that is to be stopped, for the team, pool and sandbox ID of of.
// incarnation is how often the sandbox was stopped before. write is as that of Write, and gets the name of the archive,
// which is the tag of what is returned: 2 to 36 characters of a-z, 0-9 and "-". It has no other expiry than
// DropStopped and SweepStopped. The errors are as those of Write.
func (s *Store) WriteStopped(
	ctx context.Context, of Snapshot, incarnation int, maxSize int64,
	write func(ctx context.Context, name string, w io.Writer) (Contents, error),
) (Snapshot, error) {
	dir, err := stoppedDirectory(of.Team, of.SandboxID)
	if err != nil {
		return Snapshot{}, err
	}
	if maxSize <= 0 || incarnation < 0 || incarnation > maxIncarnation {
		return Snapshot{}, fmt.Errorf("size of the archive %d, incarnation %d: %w: must be positive", maxSize, incarnation, ErrInvalid)
	}
	made := Snapshot{Name: of.SandboxID, Tag: fmt.Sprintf("%d-%s", incarnation, strings.ToLower(rand.Text())), Team: of.Team,
		Pool: of.Pool, SandboxID: of.SandboxID}
	made.Archive = stoppedArchive(dir, made.Name, made.Tag)
	a := &attempt{team: made.Team, key: made.Archive + ".json", reserved: min(maxSize, maxArchive), sandbox: made.SandboxID}
	return s.put(ctx, a, made, func(ctx context.Context, w io.Writer) (Contents, error) { return write(ctx, made.Tag, w) })
}

// GetStopped returns what WriteStopped has written under a name, for Open. It returns ErrGone, ErrInvalid, ErrDamaged or an
// error of the store.
func (s *Store) GetStopped(ctx context.Context, team, sandboxID, name string) (Snapshot, error) {
	dir, err := stoppedDirectory(team, sandboxID)
	if err != nil {
		return Snapshot{}, err
	}
	key := stoppedArchive(dir, sandboxID, name)
	if at := stoppedKey.FindStringSubmatch(key); at == nil || at[3] != name {
		return Snapshot{}, fmt.Errorf("archive %.100q: %w", name, ErrInvalid)
	}
	found, err := s.read(ctx, key+".json")
	if errors.Is(err, ErrNotFound) {
		err = ErrGone
	}
	return found, err
}

// DropStopped deletes archives of a stopped sandbox. keep, the name of an archive, is kept, and so are those of higher
// incarnations: a late call must not delete what was written since. Empty: all are deleted. After an error some may be
// left, which SweepStopped deletes.
func (s *Store) DropStopped(ctx context.Context, team, sandboxID, keep string) error {
	dir, err := stoppedDirectory(team, sandboxID)
	if err != nil {
		return err
	}
	prefix := stoppedArchive(dir, sandboxID, "")
	kept := stoppedKey.FindStringSubmatch(prefix + keep)
	if keep != "" && (kept == nil || kept[3] != keep) {
		return fmt.Errorf("archive %.100q: %w", keep, ErrInvalid)
	}
	listed, err := s.objects(ctx, prefix)
	if err != nil {
		return err
	}
	for _, o := range listed {
		at := stoppedKey.FindStringSubmatch(o.Key)
		if at == nil || kept != nil && (at[3] == keep || number(at[4]) > number(kept[4])) {
			continue
		}
		if _, err := s.remove(ctx, o.Key); err != nil {
			return err
		}
	}
	return nil
}

// number returns the number that stoppedKey has found.
func number(text string) int {
	n, _ := strconv.Atoi(text) // it has nine digits at most
	return n
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
// named returns, by the ID of the sandbox, the archives that live sandboxes name. It is asked after the archives were listed,
// and must not answer for an earlier time: an archive of that age is named by then, or never. SweepStopped returns what it
// has done also if it fails. Only one process at a time may sweep.
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
