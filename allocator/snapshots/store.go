package snapshots

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"sync"
	"time"

	"gocloud.dev/blob"
	"gocloud.dev/gcerrors"

	"github.com/berth-sandbox/berth/internal/options"
)

const (
	places           = 4  // archives that are written at one time
	readPlaces       = 64 // archives that are read at one time
	readers          = 8  // manifests that are read at one time, for one list
	maxObjects       = 100_000
	partSize         = 8 << 20
	maxArchive int64 = 64 << 30 // S3 has at most 10,000 parts
)

// Options configure a Store. All are required.
type Options struct {
	// MaxPerTeam is how many snapshots a team may have.
	MaxPerTeam int
	// MaxBytesPerTeam bounds the archives of all of them and of the stopped sandboxes of a team together, in bytes.
	MaxBytesPerTeam int64
}

// bounds are times that tests shorten.
type bounds struct {
	call    time.Duration // of a request
	idle    time.Duration // of an archive, without progress
	archive time.Duration // of an archive
	sweep   time.Duration // the age of an archive that Sweep may delete
}

// Store has the snapshots in an object store. Its methods may be called concurrently.
type Store struct {
	o      Options
	bucket *blob.Bucket
	bounds bounds
	now    func() time.Time
	// changing holds a value while a manifest is being written or deleted.
	changing chan struct{}

	mu      sync.Mutex
	writing []*attempt
	open    int            // archives that are being read
	reading map[string]int // the same, by team
}

// attempt is a Write or a WriteStopped that has a place.
type attempt struct {
	team, key string // key is that of the manifest
	reserved  int64  // bytes
	sandbox   string // that is stopped; empty: a snapshot is made
}

// Open opens the store at an address. The program has to import package drivers. Open does not ask the store anything: a
// wrong name of a bucket shows in the first call.
//
//	s3://BUCKET?region=REGION            also endpoint=URL and use_path_style=true, for other stores with that protocol
//	gs://BUCKET
//	azblob://CONTAINER
//	file:///DIRECTORY                    for development: it is made if it is missing
//
// The parameter prefix, which ends with "/", goes before all keys. Credentials are those that the SDK of the cloud
// finds in the environment.
func Open(ctx context.Context, address string, o Options) (*Store, error) {
	if err := options.Require(o, "MaxPerTeam", "MaxBytesPerTeam"); err != nil {
		return nil, err
	}
	bucket, err := openBucket(ctx, address)
	if err != nil {
		return nil, fmt.Errorf("the store of snapshots: %w", err)
	}
	return &Store{
		o: o, bucket: bucket, now: time.Now, changing: make(chan struct{}, 1), reading: map[string]int{},
		bounds: bounds{call: 30 * time.Second, idle: time.Minute, archive: 15 * time.Minute, sweep: time.Hour},
	}, nil
}

func openBucket(ctx context.Context, address string) (*blob.Bucket, error) {
	at, err := url.Parse(address)
	if err != nil {
		return nil, err
	}
	query := at.Query()
	switch prefix := query.Get("prefix"); {
	case query.Has("key"):
		return nil, fmt.Errorf("%s: the parameter key is not allowed: use prefix", at.Redacted())
	case prefix != "" && prefix[len(prefix)-1] != '/':
		return nil, fmt.Errorf("%s: prefix %q: must end with /", at.Redacted(), prefix)
	}
	switch at.Scheme {
	case "s3", "gs", "azblob":
		if at.Host == "" || at.Path != "" {
			return nil, fmt.Errorf("%s: must be %s://BUCKET, and a directory in it ?prefix=DIRECTORY/", at.Redacted(), at.Scheme)
		}
	case "file":
		if at.Host != "" || len(at.Path) < 2 {
			return nil, fmt.Errorf("%s: must be file:///DIRECTORY", at.Redacted())
		}
		// Files are written beside their place, because a rename does not lead to another file system.
		for name, value := range map[string]string{
			"create_dir": "1", "dir_file_mode": fmt.Sprint(0o700), "no_tmp_dir": "1", "metadata": "skip",
		} {
			query.Set(name, value)
		}
		at.RawQuery = query.Encode()
	default:
		return nil, fmt.Errorf("%q: unknown scheme: must be s3://BUCKET, gs://BUCKET, azblob://CONTAINER or "+
			"file:///DIRECTORY", at.Redacted())
	}
	// The SDKs go on to use the context when they renew credentials.
	return blob.OpenBucket(context.WithoutCancel(ctx), at.String())
}

// Close releases what the store has open. No call may be under way.
func (s *Store) Close() error { return s.bucket.Close() }

// call makes one request to the store. what says what it is for.
func (s *Store) call(ctx context.Context, what string, request func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, s.bounds.call,
		ofStore(fmt.Errorf("it has not answered within %s: %w", s.bounds.call, ErrTimeout)))
	defer cancel()
	return failed(ctx, what, request(ctx))
}

// failed returns what has to be said of an error of the store in a call with this context, or nil if err is.
func failed(ctx context.Context, what string, err error) error {
	switch {
	case err == nil, errors.Is(err, ErrNotFound), errors.Is(err, ErrDamaged):
		return err
	case ctx.Err() != nil:
		err = context.Cause(ctx)
	case !errors.Is(err, ErrStore):
		err = ofStore(err)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// missing returns ErrNotFound for the error of the store that says that an object is missing, and other errors as they
// are.
func missing(err error) error {
	if gcerrors.Code(err) == gcerrors.NotFound {
		return ErrNotFound
	}
	return err
}

// change makes a request that writes or deletes a manifest, one after the other.
func (s *Store) change(ctx context.Context, what string, request func(ctx context.Context) error) error {
	return s.call(ctx, what, func(ctx context.Context) error {
		select {
		case s.changing <- struct{}{}:
			defer func() { <-s.changing }()
			return request(ctx)
		case <-ctx.Done():
			return ctx.Err()
		}
	})
}

// watch ends the context of an archive that makes no progress.
type watch struct {
	timer *time.Timer
	wait  time.Duration
}

// begin gives the next step the whole time.
func (w *watch) begin() { w.timer.Reset(w.wait) }

// end: no step is under way.
func (w *watch) end() { w.timer.Stop() }

// watch returns the context of an archive. stop ends it, with a cause, and has to be called.
func (s *Store) watch(ctx context.Context) (_ context.Context, w *watch, stop context.CancelCauseFunc) {
	ctx, expire := context.WithTimeoutCause(ctx, s.bounds.archive,
		fmt.Errorf("the archive has taken more than %s: %w", s.bounds.archive, ErrTimeout))
	ctx, cancel := context.WithCancelCause(ctx)
	timer := time.AfterFunc(s.bounds.idle, func() {
		cancel(fmt.Errorf("the archive has made no progress for %s: %w", s.bounds.idle, ErrTimeout))
	})
	return ctx, &watch{timer, s.bounds.idle}, func(cause error) {
		timer.Stop()
		cancel(cause)
		expire()
	}
}
