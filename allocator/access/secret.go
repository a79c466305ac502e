package access

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

// SecretType is the type of the Secrets that hold API keys, one each.
const SecretType corev1.SecretType = "berth.sh/api-key"

// The data of such a Secret. Its name is the name of the key.
const (
	hashField = "sha256" // of the key, 64 lower-case hexadecimal digits
	teamField = "team"   // a DNS label (RFC 1123)
	roleField = "role"   // a Role
)

// keyBytes is the number of random bytes of a new key. With 160 bits no key can be found by trying,
// so a plain hash protects it as well as a slow one.
const keyBytes = 20

// keyShape is the form of every key: that of the E2B SDKs, and too long for a password that a
// person made up.
var keyShape = regexp.MustCompile("^" + sandboxaccess.KeyPrefix + "[0-9a-f]{40,128}$")

// hashed is the hash of a key.
type hashed = [sha256.Size]byte

// NewKey returns a new random key.
func NewKey() string {
	var raw [keyBytes]byte
	_, _ = rand.Read(raw[:]) // never fails
	return sandboxaccess.KeyPrefix + hex.EncodeToString(raw[:])
}

// NewSecret returns the Secret of a key. Its caller's Key is the name of the Secret.
func NewSecret(key string, c Caller) (*corev1.Secret, error) {
	if !keyShape.MatchString(key) {
		return nil, errors.New("the key must be e2b_ and 40 to 128 lower-case hexadecimal digits")
	}
	hash := sha256.Sum256([]byte(key))
	s := &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: c.Key}, Type: SecretType,
		Data: map[string][]byte{
			hashField: []byte(hex.EncodeToString(hash[:])), teamField: []byte(c.Team), roleField: []byte(c.Role),
		},
	}
	_, _, err := parse(s)
	return s, err
}

// CallerOf returns the caller that a Secret describes, or an error that says what is wrong with it.
func CallerOf(s *corev1.Secret) (Caller, error) {
	_, c, err := parse(s)
	return c, err
}

// parse reads a Secret. Data that this version does not know is refused: it may restrict the key.
func parse(s *corev1.Secret) (hash hashed, c Caller, err error) {
	var errs []error
	if s.Type != SecretType {
		errs = append(errs, fmt.Errorf("type %q: must be %s", s.Type, SecretType))
	}
	for _, name := range slices.Sorted(maps.Keys(s.Data)) {
		if name != hashField && name != teamField && name != roleField {
			errs = append(errs, fmt.Errorf("data.%s: unknown", name))
		}
	}
	digits := string(s.Data[hashField])
	if raw, err := hex.DecodeString(digits); err != nil || len(raw) != len(hash) || strings.ToLower(digits) != digits {
		errs = append(errs, fmt.Errorf("data.%s: must be the SHA-256 of the key in %d lower-case hexadecimal digits", hashField, 2*len(hash)))
	} else {
		copy(hash[:], raw)
	}
	c = Caller{Key: s.Name, Team: string(s.Data[teamField])}
	if len(validation.IsDNS1123Label(c.Team)) > 0 {
		errs = append(errs, fmt.Errorf("data.%s: %q: must be 1 to 63 lower-case letters, digits and -", teamField, c.Team))
	}
	c.Role, err = ParseRole(string(s.Data[roleField]))
	if err != nil {
		errs = append(errs, fmt.Errorf("data.%s: %w", roleField, err))
	}
	return hash, c, errors.Join(errs...)
}
