package snapshots

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/berth-sandbox/berth/api/sandboxid"
)

// DefaultTag is the tag of a reference that has none.
const DefaultTag = "default"

// Keys begin with these, and with the directory of the team.
const (
	manifests = "snapshots/"
	archives  = "archives/"
	stopped   = "stopped/"
)

const (
	version     = 1
	maxManifest = 64 << 10
	// noTeam is the directory of sandboxes without a team. It is no name of a team.
	noTeam = "_"
)

// Contents say what an archive has.
type Contents struct {
	Entries int `json:"entries"`
	// Bytes are those of the contents of its files.
	Bytes int64 `json:"bytes"`
	// LeftOut counts what is not in the archive, by reason.
	LeftOut map[string]int `json:"leftOut,omitempty"`
	Paths   []string       `json:"paths"`
}

// Snapshot is a snapshot of files of a sandbox.
type Snapshot struct {
	Name string `json:"name"`
	Tag  string `json:"tag"`
	// Team is empty for a sandbox without a team.
	Team      string `json:"team,omitempty"`
	Pool      string `json:"pool"`
	SandboxID string `json:"sandboxID"`
	// CreatedAt is set by Write.
	CreatedAt time.Time `json:"createdAt"`
	// ExpiresAt is zero for a snapshot that does not expire.
	ExpiresAt time.Time `json:"expiresAt,omitzero"`

	// Archive is the key of the archive, and Size and SHA256 (hexadecimal) are those of its bytes. Write sets them.
	Archive string `json:"archive"`
	Size    int64  `json:"size"`
	SHA256  string `json:"sha256"`

	Contents
}

// Ref returns the name and the tag: "name:tag".
func (s Snapshot) Ref() string { return s.Name + ":" + s.Tag }

func (s Snapshot) expired(now time.Time) bool {
	return !s.ExpiresAt.IsZero() && !now.Before(s.ExpiresAt)
}

// manifest is the form of a Snapshot in the store.
type manifest struct {
	Version int `json:"version"`
	Snapshot
}

var (
	word        = regexp.MustCompile(`^[a-z0-9][a-z0-9_.-]{0,62}$`)
	archiveKey  = regexp.MustCompile(`^archives/[a-z0-9_-]+/[a-z2-7]{26}$`)
	manifestKey = regexp.MustCompile(`^snapshots/([a-z0-9_-]+)/([^/:]+):([^/:]+)\.json$`)
)

// ParseRef returns the name and the tag that a team means by a text: "name", "name:tag", "team/name" or
// "team/name:tag". It returns ErrNotFound if that is another team, and ErrInvalid if the text has no such form.
func ParseRef(team, text string) (name, tag string, err error) {
	name = text
	if other, rest, found := strings.Cut(text, "/"); found {
		if other != team || team == "" {
			return "", "", ErrNotFound
		}
		name = rest
	}
	name, tag, found := strings.Cut(name, ":")
	if !found {
		tag = DefaultTag
	}
	return name, tag, checkRef(name, tag)
}

func checkRef(name, tag string) error {
	for field, text := range map[string]string{"name": name, "tag": tag} {
		if !word.MatchString(text) {
			return fmt.Errorf("%s %.100q: %w: must be 1 to 63 of a-z, 0-9, _, . and -, and begin with a letter or a digit",
				field, text, ErrInvalid)
		}
	}
	return nil
}

// NewName returns a random name.
func NewName() string { return sandboxid.New() }

// directory returns the directory of a team.
func directory(team string) (string, error) {
	if team == "" {
		return noTeam, nil
	}
	if len(validation.IsDNS1123Label(team)) > 0 {
		return "", fmt.Errorf("team %.100q: %w: must be 1 to 63 lower-case letters, digits and -", team, ErrInvalid)
	}
	return team, nil
}

// keyOf returns the key of the manifest that a team means by a reference.
func keyOf(team, ref string) (string, error) {
	name, tag, err := ParseRef(team, ref)
	if err != nil {
		return "", err
	}
	dir, err := directory(team)
	return manifests + dir + "/" + name + ":" + tag + ".json", err
}

// newArchive returns a key for an archive of a team.
func newArchive(dir string) string { return archives + dir + "/" + strings.ToLower(rand.Text()) }

func encode(s Snapshot) ([]byte, error) {
	raw, err := json.Marshal(manifest{version, s})
	if err == nil && len(raw) > maxManifest {
		err = fmt.Errorf("paths and what was left out: %w: the manifest has %d bytes and may have %d: give fewer paths, or "+
			"shorter ones", ErrInvalid, len(raw), maxManifest)
	}
	return raw, err
}

// decode reads the manifest with a key. It returns ErrDamaged, with the key, if that is not a manifest of this place.
func decode(key string, raw []byte) (Snapshot, error) {
	var m manifest
	in := json.NewDecoder(bytes.NewReader(raw))
	in.DisallowUnknownFields()
	err := in.Decode(&m)
	sum, notHex := hex.DecodeString(m.SHA256)
	at, isStopped := manifestKey.FindStringSubmatch(key), false
	if at == nil && strings.HasSuffix(key, ".json") {
		at, isStopped = stoppedKey.FindStringSubmatch(key), true
	}
	switch {
	case at == nil:
		err = fmt.Errorf("the key is not that of a manifest")
	case len(raw) > maxManifest:
		err = fmt.Errorf("it has more than %d bytes", maxManifest)
	case err != nil:
	case in.More():
		err = fmt.Errorf("data follows the manifest")
	case m.Version != version:
		err = fmt.Errorf("version %d: this program reads version %d", m.Version, version)
	case cmp.Or(m.Team, noTeam) != at[1] || m.Name != at[2] || m.Tag != at[3] || checkRef(m.Name, m.Tag) != nil:
		err = fmt.Errorf("it is the manifest of %.100q of the team %.100q", m.Ref(), m.Team)
	case isStopped && m.Archive+".json" != key, !isStopped && !ownArchive(at[1], m.Archive):
		err = fmt.Errorf("archive %.100q: not a key of the team", m.Archive)
	case notHex != nil || len(sum) != 32:
		err = fmt.Errorf("sha256 %.100q: must have 64 hexadecimal digits", m.SHA256)
	case m.Size < 0 || m.Size > maxArchive || m.Entries < 0 || m.Bytes < 0 || m.CreatedAt.IsZero():
		err = fmt.Errorf("size, entries, bytes or createdAt is missing or out of range")
	}
	if err != nil {
		return Snapshot{}, fmt.Errorf("object %.300q: %w: %w. Delete this object, or write it again", key, ErrDamaged, err)
	}
	return m.Snapshot, nil
}

// ownArchive reports whether key is that of an archive in a directory.
func ownArchive(dir, key string) bool {
	return archiveKey.MatchString(key) && strings.HasPrefix(key, archives+dir+"/")
}
