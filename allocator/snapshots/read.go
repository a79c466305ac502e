package snapshots

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"
	"golang.org/x/sync/errgroup"
)

// Get returns the snapshot that a team means by a reference (see ParseRef). It returns ErrNotFound, ErrInvalid,
// ErrDamaged, or an error of the store.
func (s *Store) Get(ctx context.Context, team, ref string) (Snapshot, error) {
	key, err := keyOf(team, ref)
	if err != nil {
		return Snapshot{}, err
	}
	found, err := s.read(ctx, key)
	if err == nil && found.expired(s.now()) {
		err = ErrNotFound
	}
	if err != nil {
		return Snapshot{}, err
	}
	return found, nil
}

// read returns what the manifest with a key says, also if that is expired.
func (s *Store) read(ctx context.Context, key string) (found Snapshot, err error) {
	err = s.call(ctx, "reading a manifest", func(ctx context.Context) error {
		in, err := s.bucket.NewReader(ctx, key, nil)
		if err != nil {
			return missing(err)
		}
		defer in.Close()
		raw, err := io.ReadAll(io.LimitReader(in, maxManifest+1))
		if err == nil {
			found, err = decode(key, raw)
		}
		return err
	})
	return found, err
}

// Open returns the bytes of the archive of a snapshot, which the caller closes. It returns ErrNotFound if the snapshot
// was deleted meanwhile, ErrBusy if as many archives are open as may be, and ErrDamaged if the archive has another size.
// The caller compares the bytes with the SHA-256. Reading ends after 15 minutes, and when the store sends nothing for 60 s.
func (s *Store) Open(ctx context.Context, snapshot Snapshot) (io.ReadCloser, error) {
	dir, err := directory(snapshot.Team)
	if err != nil {
		return nil, err
	}
	if at := stoppedKey.FindStringSubmatch(snapshot.Archive); !ownArchive(dir, snapshot.Archive) && (at == nil || at[1] != dir) {
		return nil, fmt.Errorf("archive %.100q: %w: not a key of the team", snapshot.Archive, ErrInvalid)
	}
	leave, ok := s.enter(snapshot.Team)
	if !ok {
		return nil, ErrBusy
	}
	ctx, w, stop := s.watch(ctx)
	w.begin()
	in, err := s.bucket.NewReader(ctx, snapshot.Archive, nil)
	w.end()
	if err == nil && in.Size() != snapshot.Size {
		in.Close()
		err = fmt.Errorf("object %q: %w: it has %d bytes, and its manifest says %d", snapshot.Archive, ErrDamaged, in.Size(),
			snapshot.Size)
	}
	if err != nil {
		err = failed(ctx, "reading the archive", missing(err))
		stop(nil)
		leave()
		return nil, err
	}
	return &download{ctx, in, w, stop, leave}, nil
}

// enter takes a place to read an archive for a team, if it gets one. leave gives it back.
func (s *Store) enter(team string) (leave func(), ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.reading[team] >= readPlaces-s.open {
		return nil, false
	}
	s.open++
	s.reading[team]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.open--
		if s.reading[team]--; s.reading[team] == 0 {
			delete(s.reading, team)
		}
	}), true
}

// download is an archive that is being read.
type download struct {
	ctx   context.Context
	in    *blob.Reader
	watch *watch
	stop  context.CancelCauseFunc
	leave func()
}

func (d *download) Read(p []byte) (int, error) {
	d.watch.begin() // the time that the reader of the archive takes in between does not count
	n, err := d.in.Read(p)
	d.watch.end()
	if !errors.Is(err, io.EOF) {
		err = failed(d.ctx, "reading the archive", err)
	}
	return n, err
}

func (d *download) Close() error {
	defer d.leave()
	d.stop(nil)
	return d.in.Close()
}

// Filter says which snapshots of a team are listed. Empty fields allow all.
type Filter struct {
	SandboxID, Name, Tag string
}

// Page is a part of a list.
type Page struct {
	Snapshots []Snapshot
	// Next is given as after for the following part. It is empty for the last one.
	Next string
	// Damaged has an ErrDamaged for each damaged manifest of the team.
	Damaged []error
}

// List returns snapshots of a team in the order of their references, and at most limit of them, beginning behind the
// reference after.
func (s *Store) List(ctx context.Context, team string, f Filter, after string, limit int) (p Page, err error) {
	dir, err := directory(team)
	if err != nil {
		return Page{}, err
	}
	if limit <= 0 {
		return Page{}, fmt.Errorf("limit %d: %w: must be positive", limit, ErrInvalid)
	}
	now := s.now()
	err = s.scan(ctx, manifests+dir+"/", func(_ string, found Snapshot, damaged error) {
		switch {
		case damaged != nil:
			p.Damaged = append(p.Damaged, damaged)
		case found.expired(now) || found.Ref() <= after:
		case f.SandboxID != "" && f.SandboxID != found.SandboxID, f.Name != "" && f.Name != found.Name, f.Tag != "" && f.Tag != found.Tag:
		default:
			p.Snapshots = append(p.Snapshots, found)
		}
	})
	if err != nil {
		return Page{}, err
	}
	slices.SortFunc(p.Snapshots, func(a, b Snapshot) int { return strings.Compare(a.Ref(), b.Ref()) })
	if len(p.Snapshots) > limit {
		p.Snapshots = p.Snapshots[:limit]
		p.Next = p.Snapshots[limit-1].Ref()
	}
	return p, nil
}

// scan reads all manifests below a prefix, in any order. It calls visit for one after the other, with its key and with
// what it says or with ErrDamaged. It returns the first other error.
func (s *Store) scan(
	ctx context.Context, prefix string, visit func(key string, found Snapshot, damaged error),
) error {
	objects, err := s.objects(ctx, prefix)
	if err != nil {
		return err
	}
	var visiting sync.Mutex
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(readers)
	for _, o := range objects {
		if !manifestKey.MatchString(o.Key) {
			continue // no call reads it
		}
		all.Go(func() error {
			found, err := s.read(ctx, o.Key)
			switch {
			case errors.Is(err, ErrNotFound):
				return nil // deleted meanwhile
			case err != nil && !errors.Is(err, ErrDamaged):
				return err
			}
			visiting.Lock()
			defer visiting.Unlock()
			visit(o.Key, found, err)
			return nil
		})
	}
	return all.Wait()
}

// objects lists what is below a prefix.
func (s *Store) objects(ctx context.Context, prefix string) (all []*blob.ListObject, err error) {
	next, missed := blob.FirstPageToken, 0
	for next != nil {
		err := s.call(ctx, "listing "+prefix, func(ctx context.Context) error {
			page, after, err := s.bucket.ListPage(ctx, next, 1000, &blob.ListOptions{Prefix: prefix})
			if gcerrors.Code(err) == gcerrors.NotFound && missed < 10 {
				missed++ // a directory answers so if a file of it goes away meanwhile
				return nil
			}
			all, next = append(all, page...), after
			return err
		})
		if err != nil {
			return nil, err
		}
		if len(all) > maxObjects {
			return nil, fmt.Errorf("listing %s: there are more than %d objects", prefix, maxObjects)
		}
	}
	return all, nil
}
