package snapshots

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"slices"

	"gocloud.dev/blob"
)

// Write makes a snapshot with the name, tag, team, pool, sandbox ID and expiry of snapshot. write writes the archive,
// of at most maxSize bytes, and says what it has. The context that it gets ends when the archive has failed or has
// taken too long, and write has to return then. Write replaces an earlier snapshot of the name and tag. It returns the
// snapshot, or ErrInvalid, ErrBusy, ErrFull, ErrTooLarge, ErrTimeout, or an error of write.
func (s *Store) Write(
	ctx context.Context, snapshot Snapshot, maxSize int64,
	write func(ctx context.Context, w io.Writer) (Contents, error),
) (Snapshot, error) {
	if err := checkRef(snapshot.Name, snapshot.Tag); err != nil {
		return Snapshot{}, err
	}
	dir, err := directory(snapshot.Team)
	if err != nil {
		return Snapshot{}, err
	}
	if maxSize <= 0 {
		return Snapshot{}, fmt.Errorf("size of the archive %d: %w: must be positive", maxSize, ErrInvalid)
	}
	key, err := keyOf(snapshot.Team, snapshot.Ref())
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.Archive = newArchive(dir)
	return s.put(ctx, &attempt{team: snapshot.Team, key: key, reserved: min(maxSize, maxArchive)}, snapshot, write)
}

// put writes the archive of a snapshot to its key, and then the manifest.
func (s *Store) put(
	ctx context.Context, a *attempt, snapshot Snapshot, write func(ctx context.Context, w io.Writer) (Contents, error),
) (Snapshot, error) {
	others, err := s.begin(a)
	if err != nil {
		return Snapshot{}, err
	}
	defer s.end(a)
	room, replaced, err := s.room(ctx, a, others)
	if err != nil {
		return Snapshot{}, err
	}
	snapshot.CreatedAt, snapshot.ExpiresAt = s.now().UTC(), snapshot.ExpiresAt.UTC()
	if err := s.upload(ctx, &snapshot, a.reserved, room, write); err != nil {
		return Snapshot{}, err
	}
	if err := s.verify(ctx, &snapshot); err != nil {
		return Snapshot{}, err
	}
	raw, err := encode(snapshot)
	if err != nil {
		return Snapshot{}, err
	}
	err = s.change(ctx, "writing the manifest", func(ctx context.Context) error {
		return s.bucket.WriteAll(ctx, a.key, raw, &blob.WriterOptions{ContentType: "application/json"})
	})
	if err == nil && replaced != "" {
		s.discard(ctx, replaced)
	}
	return snapshot, err
}

// others are what other attempts of a team have. snapshots are those of them that make a snapshot.
type others struct {
	count, snapshots int
	bytes            int64
}

// begin gives an attempt a place, and returns what the others of its team have.
func (s *Store) begin(a *attempt) (o others, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.writing {
		if b.key == a.key {
			return others{}, ErrBusy
		}
		if b.team == a.team {
			o.count++
			o.bytes += b.reserved
			if b.sandbox == "" {
				o.snapshots++
			}
		}
	}
	if o.count >= places-len(s.writing) {
		return others{}, ErrBusy
	}
	s.writing = append(s.writing, a)
	return o, nil
}

func (s *Store) end(a *attempt) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.writing = slices.DeleteFunc(s.writing, func(b *attempt) bool { return a == b })
}

// room returns how many bytes the team of an attempt has left, and the archive of the snapshot that it replaces, or
// ErrFull. What began before counts with all that it has reserved: it may be there already, or not yet. Archives of
// stopped sandboxes count with their bytes only, and not those that an attempt for the same sandbox is to replace.
func (s *Store) room(ctx context.Context, a *attempt, o others) (left int64, replaced string, err error) {
	dir, err := directory(a.team)
	if err != nil {
		return 0, "", err
	}
	count, left, now := o.snapshots, s.o.MaxBytesPerTeam-o.bytes, s.now()
	err = s.scan(ctx, manifests+dir+"/", func(key string, found Snapshot, damaged error) {
		switch {
		case key == a.key:
			replaced = found.Archive
		case damaged != nil || !found.expired(now):
			count++
			left -= found.Size
		}
	})
	if err != nil {
		return 0, "", err
	}
	listed, err := s.objects(ctx, stopped+dir+"/")
	for _, o := range listed {
		if at := stoppedKey.FindStringSubmatch(o.Key); at == nil || at[2] != a.sandbox {
			left -= o.Size
		}
	}
	switch {
	case err != nil:
		return 0, "", err
	case a.sandbox == "" && count >= s.o.MaxPerTeam:
		return 0, "", fmt.Errorf("%w: it has %d, and may have %d", ErrFull, count, s.o.MaxPerTeam)
	case left <= 0:
		return 0, "", fmt.Errorf("%w: its snapshots and stopped sandboxes have the %d bytes that they may have", ErrFull, s.o.MaxBytesPerTeam)
	}
	return left, replaced, nil
}

// upload writes the archive of a snapshot, and sets what is known of it then. The archive may have size bytes, and the
// team has room for so many.
func (s *Store) upload(
	ctx context.Context, snapshot *Snapshot, size, room int64,
	write func(ctx context.Context, w io.Writer) (Contents, error),
) error {
	ctx, w, stop := s.watch(ctx)
	defer stop(nil)
	out, err := s.bucket.NewWriter(ctx, snapshot.Archive, &blob.WriterOptions{
		IfNotExist: true, BufferSize: partSize, MaxConcurrency: 2, ContentType: "application/zstd",
	})
	if err != nil {
		return failed(ctx, "writing the archive", err)
	}
	in := &upload{out: out, sum: sha256.New(), watch: w, limit: size, over: ErrTooLarge}
	if room < size {
		in.limit, in.over = room, fmt.Errorf("%w: its snapshots and stopped sandboxes may have %d bytes, and %d are left", ErrFull,
			s.o.MaxBytesPerTeam, room)
	}
	w.begin()
	snapshot.Contents, err = write(ctx, in)
	if in.err != nil {
		err = in.err // write may have passed over it
	}
	if err == nil && in.n == 0 {
		err = fmt.Errorf("the archive: %w: it has no bytes", ErrInvalid)
	}
	if err != nil {
		stop(err) // so that Close leaves no object
	}
	w.begin()
	err = out.Close()
	if err == nil {
		err = ctx.Err()
	}
	snapshot.Size, snapshot.SHA256 = in.n, hex.EncodeToString(in.sum.Sum(nil))
	return failed(ctx, "writing the archive", err)
}

// upload is what an archive is written to.
type upload struct {
	out   io.Writer
	sum   hash.Hash
	watch *watch
	n     int64
	limit int64
	over  error // of more than limit
	err   error // the first one
}

func (u *upload) Write(p []byte) (n int, err error) {
	switch {
	case u.err != nil:
	case int64(len(p)) > u.limit-u.n:
		u.err = u.over
	default:
		if n, u.err = u.out.Write(p); u.err != nil {
			u.err = ofStore(u.err)
		}
		u.n += int64(n)
		u.sum.Write(p[:n])
		u.watch.begin()
	}
	return n, u.err
}

// verify asks the store for the size of the archive.
func (s *Store) verify(ctx context.Context, snapshot *Snapshot) error {
	return s.call(ctx, "verifying the archive", func(ctx context.Context) error {
		there, err := s.bucket.Attributes(ctx, snapshot.Archive)
		if err == nil && there.Size != snapshot.Size {
			err = fmt.Errorf("object %q: %w: it has %d bytes, and %d were written", snapshot.Archive, ErrDamaged, there.Size,
				snapshot.Size)
		}
		return err
	})
}
