package initbox

import (
	"cmp"
	"encoding/hex"
	"errors"
	"fmt"
)

const (
	// ArchivePath is that of the call of the agent that takes a FilesOrder to archive.
	ArchivePath = "/archive"
	// RestorePath is that of the call that takes one to restore.
	RestorePath = "/restore"
	// SummaryTrailer is the trailer behind a whole archive: a Summary as JSON.
	SummaryTrailer = "Berth-Summary"
	// FailureTrailer is the one behind an archive that is not whole: a Reason.
	FailureTrailer = "Berth-Error"
	// MaxSummary bounds a Summary as JSON, in bytes.
	MaxSummary = 8 << 10
	// MaxExample bounds LeftOut.Example, in bytes.
	MaxExample = 120

	maxPaths     = 16
	maxFilesPath = 512
	// maxReasons and maxReason bound Summary.LeftOut.
	maxReasons = 9
	maxReason  = 20
)

// The kinds of a FilesOrder.
const (
	// Archive has an agent write an archive of files while the processes are stopped.
	Archive Kind = "archive"
	// Restore has an agent that is not configured yet restore one.
	Restore Kind = "restore"
)

// FilesOrder has an agent archive the files below some paths, or restore them. Package agent/archive says what MaxBytes
// and MaxFiles bound.
type FilesOrder struct {
	// SandboxID is the sandbox that the agent was configured for, or is going to be.
	SandboxID string `json:"sandboxID"`
	Kind      Kind   `json:"kind"`
	// Term and Counter are as those of an Order. Of Archive.
	Term    uint64 `json:"term,omitempty"`
	Counter uint64 `json:"counter,omitempty"`
	// Paths are absolute. Empty: the home of the default user.
	Paths    []string `json:"paths,omitempty"`
	MaxBytes int64    `json:"maxBytes"`
	MaxFiles int      `json:"maxFiles"`
	// SHA256, in hexadecimal digits, and Size, in bytes, are those of the stream that follows. Of Restore.
	SHA256 string `json:"sha256,omitempty"`
	Size   int64  `json:"size,omitempty"`
	// Seal is for a sandbox that is stopped: the key of SealConfig. The configuration is in front of the archive then.
	// Empty: the stream has none.
	Seal []byte `json:"seal,omitempty"`
}

// Check returns an error that names the first field that no agent accepts.
func (o *FilesOrder) Check() error {
	sum, err := hex.DecodeString(o.SHA256)
	switch {
	case o.SandboxID == "":
		return errors.New("sandboxID: must be set")
	case o.Kind != Archive && o.Kind != Restore:
		return errors.New("kind: must be archive or restore")
	case o.Kind == Archive && o.Term == 0:
		return errors.New("term: must be set")
	case o.Kind == Archive && (o.SHA256 != "" || o.Size != 0):
		return errors.New("sha256 and size: must not be set for an archive")
	case o.Kind == Restore && (o.Term != 0 || o.Counter != 0):
		return errors.New("term and counter: must not be set for a restore")
	case o.Kind == Restore && (err != nil || len(sum) != 32):
		return errors.New("sha256: must have 64 hexadecimal digits")
	case o.Kind == Restore && o.Size <= 0:
		return errors.New("size: must be at least 1")
	case o.MaxBytes <= 0 || o.MaxFiles <= 0:
		return errors.New("maxBytes and maxFiles: must be at least 1")
	case len(o.Seal) != 0 && len(o.Seal) != SealSize:
		return fmt.Errorf("seal: %d bytes, must have %d or none", len(o.Seal), SealSize)
	case len(o.Paths) > maxPaths:
		return fmt.Errorf("paths: %d, at most %d", len(o.Paths), maxPaths)
	}
	for i, p := range o.Paths {
		field := fmt.Sprintf("paths[%d]", i)
		if p == "" {
			return fmt.Errorf("%s: must not be empty", field)
		}
		if err := text(field, p, maxFilesPath); err != nil {
			return err
		}
	}
	return text("sandboxID", o.SandboxID, maxID)
}

// SealFilesOrder returns the box of o. The error is that of o.Check.
func (p *Peer) SealFilesOrder(o *FilesOrder) ([]byte, error) { return p.sealOrder(o) }

// OpenFilesOrder returns the order of one kind in a box. The errors are as those of OpenOrder.
func (k *Keys) OpenFilesOrder(sealed []byte, kind Kind) (*FilesOrder, error) {
	o := new(FilesOrder)
	if err := open(sealed, MaxSealedOrder, &k.orders, "order", o); err != nil {
		return nil, err
	}
	if o.Kind != kind {
		return nil, fmt.Errorf("kind: must be %s", kind)
	}
	return o, nil
}

// Summary is what was archived or restored. What runs in a sandbox can choose what is in it.
type Summary struct {
	// Entries is the number of files, directories, links and FIFOs.
	Entries int `json:"entries"`
	// Bytes is the length of all contents, Size that of the archive before compression.
	Bytes int64 `json:"bytes"`
	Size  int64 `json:"size"`
	// LeftOut is what was left out, by the reasons of package agent/archive.
	LeftOut map[string]LeftOut `json:"leftOut,omitempty"`
}

// LeftOut is how often something was left out for one reason.
type LeftOut struct {
	Count int `json:"count"`
	// Example is the begin of the first path.
	Example string `json:"example"`
}

// Check returns an error if no agent makes s under these bounds.
func (s *Summary) Check(maxBytes int64, maxFiles int) error {
	good := s.Entries >= 0 && s.Entries <= maxFiles && s.Bytes >= 0 && s.Bytes <= s.Size && s.Size <= maxBytes &&
		len(s.LeftOut) <= maxReasons
	for reason, left := range s.LeftOut {
		good = good && len(reason) <= maxReason && left.Count > 0 && len(left.Example) <= MaxExample
	}
	if !good {
		return errors.New("the summary is impossible")
	}
	return nil
}

// Reasons why files were not archived or not restored.
const (
	// NotFrozen: the processes run, or the container was continued meanwhile.
	NotFrozen Reason = "not_frozen"
	// Superseded: a newer order was obeyed.
	Superseded Reason = "superseded"
	// Busy: another archive is being written.
	Busy Reason = "busy"
	// NotFresh: the agent is configured, or has restored files before.
	NotFresh     Reason = "not_fresh"
	TooLarge     Reason = "too_large"
	TooManyFiles Reason = "too_many_files"
	Changed      Reason = "changed"
	NotAllowed   Reason = "not_allowed"
	Damaged      Reason = "damaged"
	NoSpace      Reason = "no_space"
	// NotOpened: the configuration in front of the archive.
	NotOpened    Reason = "not_opened"
	OtherVersion Reason = "other_version"
	// Failed is every other one. It has no sentence.
	Failed Reason = "failed"
)

// FilesRefusal is why an agent has not archived or not restored files. It is in the JSON body of the answer.
type FilesRefusal struct {
	Reason Reason `json:"reason"`
}

// Known reports whether r has a reason that has a sentence.
func (r *FilesRefusal) Known() bool { return r.known() != "" }

// Error is for people. It has nothing in it that the sandbox has chosen.
func (r *FilesRefusal) Error() string {
	return cmp.Or(r.known(), "the agent could not archive or restore the files: its log says why")
}

func (r *FilesRefusal) known() string {
	switch r.Reason {
	case NotFrozen:
		return "the processes of the sandbox run: files are archived only while all of them are stopped"
	case Superseded:
		return "a newer order was obeyed"
	case Busy:
		return "another archive of the sandbox is being written"
	case NotFresh:
		return "the agent has a sandbox or files already: files are restored once, before it is configured"
	case TooLarge:
		return "the files need an archive of more than maxBytes: delete some, or raise it"
	case TooManyFiles:
		return "there are more files than maxFiles: delete some, or raise it"
	case Changed:
		return "a file has changed while it was archived, so a process runs that cannot be stopped"
	case NotAllowed:
		return "a path may not be archived or restored: name absolute paths without symbolic links that are not /, " +
			"and not in /dev, /proc or /sys"
	case Damaged:
		return "the archive is not the one that was written"
	case NotOpened:
		return "the configuration in the archive cannot be opened: it was sealed with another access key, for another " +
			"sandbox or by an agent of a later release, or it was changed"
	case OtherVersion:
		return "the archive has a version that the agent does not know: use an agent of the release that has written it"
	case NoSpace:
		return "the file system of the pod is full"
	}
	return ""
}
