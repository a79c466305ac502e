package snapshots

import (
	"context"
	"errors"

	"gocloud.dev/gcerrors"
)

// Delete deletes the snapshot that a team means by a reference, also a damaged one. It returns ErrNotFound, ErrInvalid
// or an error of the store. The archive is deleted too. If that fails, Sweep does it.
func (s *Store) Delete(ctx context.Context, team, ref string) error {
	key, err := keyOf(team, ref)
	if err != nil {
		return err
	}
	var found Snapshot
	err = s.change(ctx, "deleting a manifest", func(ctx context.Context) (err error) {
		found, err = s.read(ctx, key)
		switch {
		case err != nil && !errors.Is(err, ErrDamaged):
			return err
		case found.expired(s.now()):
			return ErrNotFound
		}
		return missing(s.bucket.Delete(ctx, key))
	})
	if err == nil && found.Archive != "" {
		s.discard(ctx, found.Archive)
	}
	return err
}

// discard deletes an archive that no manifest names any more. If that fails, Sweep does it.
func (s *Store) discard(ctx context.Context, archive string) {
	_ = s.call(ctx, "", func(ctx context.Context) error { return s.bucket.Delete(ctx, archive) })
}

// Swept is what a Sweep has done.
type Swept struct {
	// Snapshots counts expired snapshots that were deleted, and Archives archives, of Bytes bytes.
	Snapshots, Archives int
	Bytes               int64
	// Damaged has an ErrDamaged for each damaged manifest. While there are any, no archive is deleted, because each
	// archive could be one that they name.
	Damaged []error
}

// Sweep reads every manifest. It deletes expired snapshots, and archives that no manifest names and that are older than
// an hour. It returns what it has done also if it fails. Only one process at a time may sweep.
func (s *Store) Sweep(ctx context.Context) (done Swept, err error) {
	// Archives first: one that is listed and is to be in a manifest is in it an hour after its making at the latest.
	listed, err := s.objects(ctx, archives)
	if err != nil {
		return done, err
	}
	old := s.now().Add(-s.bounds.sweep)
	var expired []string
	named, now := map[string]bool{}, s.now()
	err = s.scan(ctx, manifests, func(key string, found Snapshot, damaged error) {
		switch {
		case damaged != nil:
			done.Damaged = append(done.Damaged, damaged)
		case found.expired(now):
			expired = append(expired, key)
		}
		named[found.Archive] = true
	})
	if err != nil {
		return done, err
	}
	for _, key := range expired {
		archive, err := s.expire(ctx, key)
		if err != nil {
			return done, err
		}
		if archive != "" {
			done.Snapshots++
			delete(named, archive)
		}
	}
	if len(done.Damaged) > 0 {
		return done, nil
	}
	for _, a := range listed {
		if named[a.Key] || a.ModTime.IsZero() || a.ModTime.After(old) {
			continue
		}
		err := s.call(ctx, "deleting an archive", func(ctx context.Context) error { return s.bucket.Delete(ctx, a.Key) })
		if gcerrors.Code(err) == gcerrors.NotFound {
			continue
		}
		if err != nil {
			return done, err
		}
		done.Archives++
		done.Bytes += a.Size
	}
	return done, nil
}

// expire deletes the manifest with a key if it is expired, and returns the archive that it named. It returns "" if
// there is no such manifest any more.
func (s *Store) expire(ctx context.Context, key string) (archive string, err error) {
	err = s.change(ctx, "deleting an expired manifest", func(ctx context.Context) error {
		found, err := s.read(ctx, key) // it may have been replaced
		if err != nil || !found.expired(s.now()) {
			return err
		}
		archive = found.Archive
		return missing(s.bucket.Delete(ctx, key))
	})
	if errors.Is(err, ErrNotFound) || errors.Is(err, ErrDamaged) {
		return "", nil
	}
	return archive, err
}
