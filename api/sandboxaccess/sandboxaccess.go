package sandboxaccess

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"
)

// Names of credentials in requests, in lower case.
const (
	// TokenHeader carries the token. AgentHeader carries the agent token.
	TokenHeader = "e2b-traffic-access-token"
	AgentHeader = "x-access-token"
	// CookieName has the prefix with which browsers accept a cookie only from this host itself, and
	// only with Secure.
	CookieName = "__Host-berth-access"
	// KeyHeader carries an API key, which opens the sandboxes of its team. Every API key contains
	// KeyPrefix.
	KeyHeader = "x-api-key"
	KeyPrefix = "e2b_"
	// LinkPath is the path of links at the hosts of sandboxes that are not public.
	LinkPath = "/.berth/access"
)

// AgentPort is the port of E2B's agent.
const AgentPort = 49983

// AgentExposedHeaders are the headers that a page of any origin may read in answers of AgentPort, in the form of
// Access-Control-Expose-Headers: those of Connect, and those that E2B's agent adds.
const AgentExposedHeaders = "Grpc-Status, Grpc-Message, Grpc-Status-Details-Bin, Location, Cache-Control, X-Content-Type-Options"

// minKey is the least length of a cluster key, in bytes.
const minKey = 32

// Key is the cluster's key.
type Key struct{ secret []byte }

// ReadKey reads a key from a file: 32 bytes or more of any text. White space around it does not
// count.
func ReadKey(file string) (*Key, error) {
	raw, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	k, err := NewKey(bytes.TrimSpace(raw))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	return k, nil
}

// NewKey returns the key of this text, which it copies.
func NewKey(text []byte) (*Key, error) {
	if len(text) < minKey {
		return nil, fmt.Errorf("%d bytes: a key has at least %d; openssl rand -hex 32 makes one", len(text), minKey)
	}
	return &Key{bytes.Clone(text)}, nil
}

// Derive returns 32 bytes that only a holder of the key can compute. They say nothing of the key, or of
// what is derived for another label.
func (k *Key) Derive(label string) (derived [32]byte) {
	raw, err := hkdf.Key(sha256.New, k.secret, nil, "berth "+label, len(derived))
	if err != nil {
		panic(fmt.Sprintf("derive a key: %v", err)) // only a length above 8,160 bytes is an error
	}
	return [32]byte(raw)
}

// AEAD returns AES-GCM with random nonces and a key that is derived for a label.
func (k *Key) AEAD(label string) cipher.AEAD {
	derived := k.Derive(label)
	block, err := aes.NewCipher(derived[:])
	if err != nil {
		panic(fmt.Sprintf("derive a cipher: %v", err)) // only another length of the key is an error
	}
	aead, err := cipher.NewGCMWithRandomNonce(block)
	if err != nil {
		panic(fmt.Sprintf("derive a cipher: %v", err)) // only another cipher is an error
	}
	return aead
}

// Token returns the token of a sandbox.
func (k *Key) Token(id string) string { return hex.EncodeToString(mac(k.secret, "token", id, 0, 0)) }

// EgressToken returns the token with which an incarnation of a sandbox asks the egress gateway. It opens nothing else.
func (k *Key) EgressToken(id string, incarnation int) string {
	return hex.EncodeToString(mac(k.secret, "egress", id, 0, int64(incarnation)))
}

// Secret returns the secret of a sandbox.
func (k *Key) Secret(id string) Secret { return sha256.Sum256([]byte(k.Token(id))) }

// Secret verifies the credentials of one sandbox.
type Secret [sha256.Size]byte

// IsToken reports whether token is that of the sandbox.
func (s Secret) IsToken(token string) bool {
	sum := sha256.Sum256([]byte(token))
	return s != Secret{} && subtle.ConstantTimeCompare(sum[:], s[:]) == 1
}

// AgentToken returns the agent token of the sandbox.
func (s Secret) AgentToken(id string) string {
	return hex.EncodeToString(mac(s[:], "agent", id, AgentPort, 0))
}

// IsAgentToken reports whether token is the agent token of the sandbox.
func (s Secret) IsAgentToken(id, token string) bool {
	return s != Secret{} && subtle.ConstantTimeCompare([]byte(token), []byte(s.AgentToken(id))) == 1
}

// Link returns path and query of a link to a port. path is where the browser goes then; it must
// satisfy CheckPath. Fractions of a second of expires do not count.
func (s Secret) Link(id string, port uint16, expires time.Time, path string) string {
	query := url.Values{"expires": {strconv.FormatInt(expires.Unix(), 10)}, "signature": {s.sign("link", id, port, expires)}}
	if path != "/" {
		query.Set("to", path)
	}
	return LinkPath + "?" + query.Encode()
}

// ErrDenied is the error of a credential that is wrong or has expired.
var ErrDenied = errors.New("not a valid link")

// OpenLink checks the link in the target of a request, a path with query. It returns the path to go
// to and the moment at which the link expires. The error is ErrDenied, or that of CheckPath.
func (s Secret) OpenLink(id string, port uint16, target string, now time.Time) (path string, expires time.Time, err error) {
	_, raw, _ := strings.Cut(target, "?")
	query, err := url.ParseQuery(raw)
	if err != nil || len(query["expires"]) != 1 || len(query["signature"]) != 1 || len(query["to"]) > 1 {
		return "", expires, ErrDenied
	}
	expires, ok := s.valid("link", id, port, query.Get("expires"), query.Get("signature"), now)
	if !ok {
		return "", expires, ErrDenied
	}
	if path = query.Get("to"); path == "" {
		path = "/"
	}
	return path, expires, CheckPath(path)
}

// Cookie returns the value of the cookie that opens a port.
func (s Secret) Cookie(id string, port uint16, expires time.Time) string {
	return strconv.FormatInt(expires.Unix(), 10) + "." + s.sign("cookie", id, port, expires)
}

// IsCookie reports whether value is that of a cookie that opens the port now.
func (s Secret) IsCookie(id string, port uint16, value string, now time.Time) bool {
	expires, signature, _ := strings.Cut(value, ".")
	_, ok := s.valid("cookie", id, port, expires, signature, now)
	return ok
}

func (s Secret) sign(purpose, id string, port uint16, expires time.Time) string {
	return base64.RawURLEncoding.EncodeToString(mac(s[:], purpose, id, port, expires.Unix()))
}

func (s Secret) valid(purpose, id string, port uint16, expires, signature string, now time.Time) (time.Time, bool) {
	n, err := strconv.ParseInt(expires, 10, 64)
	if err != nil || s == (Secret{}) {
		return time.Time{}, false
	}
	at := time.Unix(n, 0)
	return at, subtle.ConstantTimeCompare([]byte(signature), []byte(s.sign(purpose, id, port, at))) == 1 && now.Before(at)
}

// mac computes the HMAC-SHA256 of a credential. No field can be mistaken for another: the numbers
// have a fixed length, and purposes and IDs have no zero byte.
func mac(key []byte, purpose, id string, port uint16, expires int64) []byte {
	h := hmac.New(sha256.New, key)
	text := append([]byte("berth sandbox access 1\x00"), purpose...)
	text = append(append(text, 0), id...)
	text = binary.BigEndian.AppendUint16(append(text, 0), port)
	_, _ = h.Write(binary.BigEndian.AppendUint64(text, uint64(expires))) // never fails, see hash.Hash
	return h.Sum(nil)
}

// maxPath is the longest path of a link, in bytes.
const maxPath = 2048

// CheckPath returns an error unless a browser takes path, in a redirection, for a path of the same
// host. A second slash or a backslash would begin another host, and browsers remove control
// characters before they look for them.
func CheckPath(path string) error {
	switch {
	case len(path) > maxPath:
		return fmt.Errorf("%d bytes: at most %d", len(path), maxPath)
	case !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//"):
		return errors.New("must begin with one slash")
	case strings.ContainsFunc(path, func(r rune) bool { return r <= ' ' || r > '~' || r == '\\' }):
		return errors.New(`must be printable ASCII without spaces and backslashes; percent-encode other characters`)
	}
	return nil
}

// PresentedKey returns the API key of a request: X-API-Key, as E2B's SDKs send it, or a bearer token (RFC 6750).
func PresentedKey(h http.Header) string {
	if key := h.Get(KeyHeader); key != "" {
		return key
	}
	scheme, token, _ := strings.Cut(h.Get("Authorization"), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(token)
}
