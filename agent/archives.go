package agent

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode/utf16"

	"golang.org/x/sys/unix"

	"github.com/berth-sandbox/berth/agent/archive"
	"github.com/berth-sandbox/berth/agent/freeze"
	"github.com/berth-sandbox/berth/agent/initbox"
)

const (
	// filesWait bounds the time of an archive or a restore, streamWait that in which its stream does not move.
	filesWait  = time.Hour
	streamWait = 30 * time.Second
	// workingEvery is how often a restore says that it goes on. Files without contents take much time and few bytes.
	workingEvery = 10 * time.Second
	// storeWait is how long a whole archive of a stop may take to reach the store, and the fact of the stop to become
	// durable. The end of the agent ends the pod: its network goes, and a sandbox that is not stopped yet ends.
	storeWait = 10 * time.Second
)

// restored is what came of the files that an agent was given.
type restored int

const (
	nothing restored = iota
	// part: they are being restored, or the restore has failed.
	part
	whole
)

// archive takes the box with an order to archive files, and answers with the archive. The processes are stopped until
// it ends.
func (a *Agent) archive(w http.ResponseWriter, r *http.Request, sealed []byte) error {
	o, err := a.o.Keys.OpenFilesOrder(sealed, initbox.Archive)
	if err != nil || !a.holds(w, o.SandboxID) {
		return err
	}
	control := http.NewResponseController(w)
	_ = control.SetReadDeadline(time.Time{}) // that of the box would end the request
	ctx, cancel := context.WithTimeout(r.Context(), filesWait)
	defer cancel()
	ctx, release, err := a.o.Freezer.Hold(ctx, o.Term, o.Counter)
	if err != nil {
		refuseFiles(w, http.StatusConflict, err)
		return nil
	}
	defer release()
	ended := a.stops(o)
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Connection", "close") // the deadline for writing would stay
	h.Set("Trailer", initbox.SummaryTrailer+", "+initbox.FailureTrailer)
	to := &sent{w, control}
	to.move()
	w.WriteHeader(http.StatusOK)
	sum, err := a.write(ctx, to, o)
	to.move()
	ended(err == nil)
	if err != nil {
		a.o.Log.Warn("the files were not archived", "error", err)
		h.Set(initbox.FailureTrailer, string(reasonOf(err)))
		return nil
	}
	h.Set(initbox.SummaryTrailer, ascii(summaryOf(sum)))
	return nil
}

// Stop is an archive of a sandbox that is to be stopped: it goes on in another pod.
type Stop struct {
	// Awake is closed when the processes have been continued since.
	Awake <-chan struct{}
	// Ended gets one value: true when the archive has been whole for storeWait, and false when it has ended as a part.
	Ended <-chan bool
}

// Stopping returns the newest archive of a stop that was begun since the processes are stopped, nil if none was. Ended
// is for one caller.
func (a *Agent) Stopping() *Stop {
	s := a.stop.Load()
	if s == nil {
		return nil
	}
	select {
	case <-s.Awake:
		return nil
	default:
		return s
	}
}

// stops notes that an archive begins, if it is one of a stop. Those alone have the configuration. The caller calls
// ended when it has ended.
func (a *Agent) stops(o *initbox.FilesOrder) (ended func(whole bool)) {
	if len(o.Seal) == 0 {
		return func(bool) {}
	}
	outcome := make(chan bool, 1)
	a.stop.Store(&Stop{a.o.Freezer.Awake(), outcome})
	return func(whole bool) {
		if !whole {
			outcome <- false
			return
		}
		time.AfterFunc(storeWait, func() { outcome <- true })
	}
}

func (a *Agent) write(ctx context.Context, to io.Writer, o *initbox.FilesOrder) (archive.Summary, error) {
	options, err := a.archiveOptions(o)
	if err == nil && len(o.Seal) > 0 {
		err = a.writeConfig(to, o.Seal)
	}
	if err != nil {
		return archive.Summary{}, err
	}
	sum, err := archive.Write(ctx, to, options)
	if err != nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return sum, err
}

// writeConfig writes the configuration behind its length, sealed for a sandbox that is stopped.
func (a *Agent) writeConfig(to io.Writer, key []byte) error {
	c := *a.Config()
	c.Proxy = "" // its credential is that of this pod
	sealed, err := initbox.SealConfig(key, &c)
	if err != nil {
		return err
	}
	_, err = to.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(sealed))), sealed...))
	return err
}

// sent is the stream to a client that takes some of it in streamWait.
type sent struct {
	w       http.ResponseWriter
	control *http.ResponseController
}

// Write flushes, so that the allocator sees that the archive goes on.
func (s *sent) Write(p []byte) (int, error) {
	s.move()
	n, err := s.w.Write(p)
	if err == nil {
		err = s.control.Flush()
	}
	return n, err
}

func (s *sent) move() {
	_ = s.control.SetWriteDeadline(time.Now().Add(streamWait)) // fails only without a connection, in tests
}

// first reads the box of an order behind its length, and leaves what follows.
func first(r io.Reader) ([]byte, error) { return framed(r, initbox.MaxSealedOrder) }

// framed reads at most so many bytes behind their length.
func framed(r io.Reader, most uint32) ([]byte, error) {
	var length [4]byte
	if _, err := io.ReadFull(r, length[:]); err != nil {
		return nil, fmt.Errorf("its length: %w", err)
	}
	n := binary.BigEndian.Uint32(length[:])
	if n > most {
		return nil, fmt.Errorf("%d bytes, at most %d", n, most)
	}
	sealed := make([]byte, n)
	_, err := io.ReadFull(r, sealed)
	return sealed, err
}

// restore takes the box with an order to restore files, and the archive behind it. An agent does that once. If it
// fails, the agent is never configured, because a part of the files is there.
func (a *Agent) restore(w http.ResponseWriter, r *http.Request, sealed []byte) error {
	o, err := a.o.Keys.OpenFilesOrder(sealed, initbox.Restore)
	if err != nil {
		return err
	}
	w.Header().Set("Connection", "close") // the deadline for writing would stay, or the archive is still on the way
	if !a.beginRestore(o.SandboxID) {
		refuseFiles(w, http.StatusConflict, errNotFresh)
		return nil
	}
	sum, was, err := a.read(w, r, o)
	if err != nil {
		a.o.Log.Error("the files were not restored, so this agent cannot be used", "error", err)
		refuseFiles(w, http.StatusUnprocessableEntity, err)
		return nil
	}
	a.configuring.Lock()
	a.restored, a.earlier = whole, was
	a.configuring.Unlock()
	writeJSON(w, http.StatusOK, summaryOf(sum))
	return nil
}

// errNotFresh is the error of a restore that comes too late.
var errNotFresh = errors.New("the agent is configured, or has restored files before")

func (a *Agent) beginRestore(id string) bool {
	a.configuring.Lock()
	defer a.configuring.Unlock()
	if a.Config() != nil || a.restored != nothing {
		return false
	}
	a.restored, a.restoredFor = part, id
	return true
}

// read restores files, and the configuration in front of them if the order asks for it.
func (a *Agent) read(w http.ResponseWriter, r *http.Request, o *initbox.FilesOrder) (
	sum archive.Summary, was *earlier, err error,
) {
	options, err := a.archiveOptions(o)
	if err != nil {
		return sum, nil, err
	}
	ctx, cancel := context.WithTimeout(r.Context(), filesWait)
	defer cancel()
	defer working(w)()
	from := &received{r: r.Body, control: http.NewResponseController(w), hash: sha256.New()}
	stream := io.LimitReader(from, o.Size)
	if len(o.Seal) > 0 {
		c, err := readConfig(stream, o)
		if err != nil {
			return sum, nil, err
		}
		was = &earlier{restored: c}
	}
	if sum, err = archive.Restore(ctx, stream, options); err != nil {
		return sum, nil, err
	}
	if got := hex.EncodeToString(from.hash.Sum(nil)); from.n != o.Size || !strings.EqualFold(got, o.SHA256) {
		return sum, nil, fmt.Errorf("%w: %d bytes with the hash %s, and not %d with %s",
			archive.ErrCorrupt, from.n, got, o.Size, o.SHA256)
	}
	if was != nil {
		was.paths = sum.Paths // those of the order may have become more since
	}
	return sum, was, nil
}

// errNotOpened is the error of a configuration in front of an archive that is not that of the sandbox.
var errNotOpened = errors.New("the configuration in the archive cannot be opened")

// readConfig reads the configuration in front of an archive.
func readConfig(stream io.Reader, o *initbox.FilesOrder) (*initbox.Config, error) {
	sealed, err := framed(stream, initbox.MaxSealed)
	if err != nil {
		return nil, fmt.Errorf("%w: the configuration: %w", archive.ErrCorrupt, err)
	}
	c, err := initbox.OpenConfig(o.Seal, sealed)
	if err == nil && c.SandboxID != o.SandboxID {
		err = errors.New("it is that of another sandbox")
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errNotOpened, err)
	}
	return c, nil
}

// received is the stream from a client that sends some of it in streamWait.
type received struct {
	r       io.Reader
	control *http.ResponseController
	hash    hash.Hash
	n       int64
}

func (s *received) Read(p []byte) (int, error) {
	_ = s.control.SetReadDeadline(time.Now().Add(streamWait)) // fails only without a connection, in tests
	n, err := s.r.Read(p)
	_ = s.control.SetReadDeadline(time.Time{}) // one that passes later would end the request
	s.hash.Write(p[:n])
	s.n += int64(n)
	return n, err
}

// working tells the client that the agent works, until stop is called.
func working(w http.ResponseWriter) (stop func()) {
	ended, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		tick := time.NewTicker(workingEvery)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				(&sent{w, http.NewResponseController(w)}).move()
				w.WriteHeader(http.StatusProcessing)
			case <-ended:
				return
			}
		}
	}()
	return func() { close(ended); <-stopped }
}

func (a *Agent) archiveOptions(o *initbox.FilesOrder) (archive.Options, error) {
	paths := o.Paths
	if len(paths) == 0 {
		account, err := a.o.Accounts.Lookup(a.o.Accounts.Default())
		if err != nil {
			return archive.Options{}, err
		}
		paths = []string{account.Home}
	}
	return archive.Options{Paths: paths, MaxBytes: o.MaxBytes, MaxFiles: o.MaxFiles}, nil
}

// refuseFiles answers why files are not archived or restored. The error stays in the log.
func refuseFiles(w http.ResponseWriter, status int, err error) {
	refusal := &initbox.FilesRefusal{Reason: reasonOf(err)}
	writeJSON(w, status, struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
		*initbox.FilesRefusal
	}{status, refusal.Error(), refusal})
}

func reasonOf(err error) initbox.Reason {
	for known, reason := range map[error]initbox.Reason{
		freeze.ErrAwake: initbox.NotFrozen, freeze.ErrSuperseded: initbox.Superseded, freeze.ErrHeld: initbox.Busy,
		errNotFresh: initbox.NotFresh, errNotOpened: initbox.NotOpened, archive.ErrTooLarge: initbox.TooLarge,
		archive.ErrTooManyFiles: initbox.TooManyFiles, archive.ErrChanged: initbox.Changed,
		archive.ErrNotAllowed: initbox.NotAllowed, archive.ErrCorrupt: initbox.Damaged,
		archive.ErrVersion: initbox.OtherVersion, unix.ENOSPC: initbox.NoSpace, unix.EDQUOT: initbox.NoSpace,
	} {
		if errors.Is(err, known) {
			return reason
		}
	}
	return initbox.Failed
}

func summaryOf(s archive.Summary) *initbox.Summary {
	out := &initbox.Summary{Entries: s.Entries, Bytes: s.Bytes, Size: s.Size, LeftOut: map[string]initbox.LeftOut{}}
	for reason, left := range s.LeftOut {
		example := strings.ToValidUTF8(left.Example[:min(len(left.Example), initbox.MaxExample)], "?")
		out.LeftOut[string(reason)] = initbox.LeftOut{Count: left.Count, Example: example}
	}
	return out
}

// ascii returns a value as JSON that a header can have.
func ascii(value any) string {
	text, _ := json.Marshal(value) // it has nothing that JSON has not
	var b strings.Builder
	for _, r := range string(text) {
		if r <= '~' {
			b.WriteRune(r)
			continue
		}
		for _, unit := range utf16.AppendRune(nil, r) {
			fmt.Fprintf(&b, `\u%04x`, unit)
		}
	}
	return b.String()
}
