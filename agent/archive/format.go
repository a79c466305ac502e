package archive

import (
	"archive/tar"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"math"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const version = "1"

// Records of the first and the last entry, and of files with holes.
const (
	versionRecord = "BERTH.version"
	pathRecord    = "BERTH.path."
	entriesRecord = "BERTH.entries"
	bytesRecord   = "BERTH.bytes"
	sumRecord     = "BERTH.sha256"

	sizeRecord = "BERTH.size"
	dataRecord = "BERTH.data"

	attributeRecord = "SCHILY.xattr."
	holesOfOthers   = "GNU.sparse."
)

func head(paths []string) *tar.Header {
	records := map[string]string{versionRecord: version}
	for i, p := range paths {
		records[pathRecord+strconv.Itoa(i)] = p
	}
	return &tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: records}
}

// headPaths returns the paths that an archive says it has.
func headPaths(h *tar.Header) ([]string, error) {
	found, known := h.PAXRecords[versionRecord]
	switch {
	case h.Typeflag != tar.TypeXGlobalHeader || !known:
		return nil, fmt.Errorf("%w: its first entry is not that of an archive of a sandbox", ErrCorrupt)
	case found != version:
		return nil, fmt.Errorf("%w: it is %.20q, and this agent reads %s: use an agent of the release that has written it",
			ErrVersion, found, version)
	}
	var paths []string
	for {
		p, more := h.PAXRecords[pathRecord+strconv.Itoa(len(paths))]
		if !more {
			break
		}
		paths = append(paths, p)
	}
	if len(paths) == 0 || len(paths) > maxPaths || len(paths)+1 != len(h.PAXRecords) {
		return nil, fmt.Errorf("%w: its first entry has %d paths in %d records", ErrCorrupt, len(paths), len(h.PAXRecords))
	}
	return paths, nil
}

func tail(s Summary, sum []byte) *tar.Header {
	return &tar.Header{Typeflag: tar.TypeXGlobalHeader, PAXRecords: map[string]string{
		entriesRecord: strconv.Itoa(s.Entries),
		bytesRecord:   strconv.FormatInt(s.Bytes, 10),
		sumRecord:     hex.EncodeToString(sum),
	}}
}

func checkTail(h *tar.Header, s Summary, sum []byte) error {
	expected := tail(s, sum).PAXRecords
	if len(h.PAXRecords) != len(expected) {
		return fmt.Errorf("%w: its last entry has %d records", ErrCorrupt, len(h.PAXRecords))
	}
	for _, record := range []string{entriesRecord, bytesRecord, sumRecord} {
		if got := h.PAXRecords[record]; got != expected[record] {
			return fmt.Errorf("%w: %s is %.80q and should be %q", ErrCorrupt, record, got, expected[record])
		}
	}
	return nil
}

// piece is a part of a file that is no hole.
type piece struct{ offset, length int64 }

func piecesRecord(pieces []piece) string {
	var b strings.Builder
	for i, p := range pieces {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%d:%d", p.offset, p.length)
	}
	return b.String()
}

// contents returns the size of a file and its pieces. One without holes has one piece.
func contents(h *tar.Header) (int64, []piece, error) {
	text, sparse := h.PAXRecords[sizeRecord]
	if !sparse {
		return h.Size, []piece{{0, h.Size}}, nil
	}
	size, ok := number(text)
	var pieces []piece
	var end, length int64
	if list := h.PAXRecords[dataRecord]; list != "" {
		for text := range strings.SplitSeq(list, ",") {
			offset, l, _ := strings.Cut(text, ":")
			p := piece{}
			var ok1, ok2 bool
			p.offset, ok1 = number(offset)
			p.length, ok2 = number(l)
			if ok = ok && ok1 && ok2 && p.length > 0 && p.offset >= end && p.length <= size-p.offset &&
				len(pieces) < maxPieces; !ok {
				break
			}
			end, length = p.offset+p.length, length+p.length
			pieces = append(pieces, p)
		}
	}
	if !ok || length != h.Size {
		return 0, nil, fmt.Errorf("%w: the holes of %.300q make no sense", ErrCorrupt, h.Name)
	}
	return size, pieces, nil
}

func number(text string) (int64, bool) {
	n, err := strconv.ParseInt(text, 10, 64)
	return n, err == nil && n >= 0
}

// summed counts and hashes the bytes of the tar archive that pass, up to a limit.
type summed struct {
	ctx   context.Context
	r     io.Reader
	w     io.Writer
	hash  hash.Hash
	n     int64
	limit int64
	// mark is a position, sum the hash of what is before it once that has passed.
	mark int64
	sum  []byte
	// refused is why no more bytes may pass.
	refused error
}

func newSummed(ctx context.Context, limit int64) *summed {
	return &summed{ctx: ctx, hash: sha256.New(), limit: limit, mark: -1}
}

func (s *summed) Write(p []byte) (int, error) {
	if err := s.allow(len(p)); err != nil {
		return 0, err
	}
	n, err := s.w.Write(p)
	s.pass(p[:n])
	return n, err
}

func (s *summed) Read(p []byte) (int, error) {
	if err := s.allow(0); err != nil {
		return 0, err
	}
	n, err := s.r.Read(p)
	s.pass(p[:n])
	return n, cmp.Or(s.allow(0), err)
}

// allow returns why n more bytes may not pass, or nil.
func (s *summed) allow(n int) error {
	switch err := s.ctx.Err(); {
	case s.refused != nil:
	case int64(n) > s.limit-s.n:
		s.refused = ErrTooLarge
	case err != nil:
		s.refused = err
	}
	return s.refused
}

func (s *summed) pass(p []byte) {
	if at := s.mark - s.n; at >= 0 && at < int64(len(p)) {
		s.hash.Write(p[:at])
		s.sum = s.hash.Sum(s.sum[:0])
		s.hash.Write(p[at:])
	} else {
		s.hash.Write(p)
	}
	s.n += int64(len(p))
}

// markAfter marks the beginning of the entry behind one whose header has just passed.
func (s *summed) markAfter(size int64) { s.mark = (s.n + size + 511) &^ 511 }

// source bounds the compressed stream, and keeps its error apart from those of the decompressor. The decompressor may
// read much without giving any bytes.
type source struct {
	ctx context.Context
	r   io.Reader
	// n is how many bytes may still be read.
	n   int64
	err error
}

func (s *source) Read(p []byte) (int, error) {
	if s.err = cmp.Or(s.err, s.ctx.Err()); s.err != nil {
		return 0, s.err
	}
	if int64(len(p)) > s.n {
		p = p[:s.n]
	}
	if len(p) == 0 {
		s.err = ErrTooLarge
		return 0, s.err
	}
	n, err := s.r.Read(p)
	s.n -= int64(n)
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

// withTail returns the length of an archive with all that may follow its last file.
func withTail(n int64) int64 { return n + min(maxTail, math.MaxInt64-n) }

// maxCompressed is more than what an archive of n bytes is compressed to.
func maxCompressed(n int64) int64 {
	return min(n, math.MaxInt64/2) + min(n, math.MaxInt64/2)/64 + 1<<20
}

// retried makes a system call again that a signal has interrupted.
func retried(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if !errors.Is(err, unix.EINTR) {
			return n, err
		}
	}
}
