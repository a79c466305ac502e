package initbox

import (
	"bytes"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"golang.org/x/crypto/curve25519"
	"golang.org/x/crypto/nacl/box"
)

const (
	// Version is that of the box. Both sides have the same one: an agent is installed by the allocator
	// that configures it, or by one of a neighbouring release.
	Version = 1
	// Path is that of the calls of the agent.
	Path = "/init"
	// PublicKeyEnv names the environment variable of the agent that has the allocator's public key, as
	// PublicKey's text.
	PublicKeyEnv = "BERTH_ALLOCATOR_KEY"
	// MaxSealed bounds a box in bytes: a Config of MaxValues, as JSON. Of such a Config, escaping makes
	// six bytes of one at most.
	MaxSealed = 6*MaxValues + 64<<10

	nonceSize = 24
	header    = 1 + nonceSize
)

// Hello is the JSON body of the answer to GET /init.
type Hello struct {
	Version   int       `json:"version"`
	PublicKey PublicKey `json:"publicKey"`
	// Sandbox is the SandboxDigest of the sandbox that the agent was configured for, empty if it was not.
	Sandbox string `json:"sandbox,omitempty"`
}

// SandboxDigest names a sandbox to those who know its ID. Everyone who reaches an agent can ask it, and the
// ID opens a public sandbox.
func SandboxDigest(id string) string {
	digest := sha256.Sum256([]byte(id))
	return hex.EncodeToString(digest[:])
}

// PublicKey is the public half of a key pair. Its text is standard base64.
type PublicKey [32]byte

// MarshalText implements encoding.TextMarshaler.
func (k PublicKey) MarshalText() ([]byte, error) {
	return base64.StdEncoding.AppendEncode(nil, k[:]), nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (k *PublicKey) UnmarshalText(text []byte) error {
	raw, err := base64.StdEncoding.AppendDecode(nil, text)
	if err != nil || len(raw) != len(k) {
		return fmt.Errorf("not a public key: %d bytes in base64 are wanted", len(k))
	}
	copy(k[:], raw)
	return nil
}

// String returns the text of the key.
func (k PublicKey) String() string { return base64.StdEncoding.EncodeToString(k[:]) }

// Errors of Open.
var (
	ErrVersion = errors.New("the box has another version than this agent")
	ErrSealed  = errors.New("the box was not sealed by the allocator for this agent, or was changed")
)

// Sealer is the allocator's side. Its methods may be called concurrently.
type Sealer struct {
	private [32]byte
	public  PublicKey
}

// NewSealer returns the Sealer with this private key, 32 uniformly distributed bytes.
func NewSealer(private [32]byte) (*Sealer, error) {
	public, err := curve25519.X25519(private[:], curve25519.Basepoint)
	if err != nil {
		return nil, fmt.Errorf("initbox: %w", err)
	}
	return &Sealer{private, PublicKey(public)}, nil
}

// PublicKey returns the key that agents need to open boxes of s.
func (s *Sealer) PublicKey() PublicKey { return s.public }

// Seal returns the box of c for the agent with this public key. The error is that of c.Check.
func (s *Sealer) Seal(c *Config, agent PublicKey) ([]byte, error) { return s.For(agent).Seal(c) }

// Peer seals for one agent. Its methods may be called concurrently.
type Peer struct{ configs, orders [32]byte }

// For returns the Peer that seals for the agent with this public key. Most of what a box costs is done here.
func (s *Sealer) For(agent PublicKey) *Peer {
	p, peer := new(Peer), [32]byte(agent)
	box.Precompute(&p.configs, &peer, &s.private)
	p.orders = orderKey(&p.configs)
	return p
}

// orderKey derives the key of orders from that of configurations, so that no box of one kind opens as the other.
func orderKey(configs *[32]byte) [32]byte {
	key, err := hkdf.Expand(sha256.New, configs[:], "agent orders 1", 32)
	if err != nil {
		panic("initbox: " + err.Error()) // only for more bytes than SHA-256 can make
	}
	return [32]byte(key)
}

// Seal returns the box of c. The error is that of c.Check.
func (p *Peer) Seal(c *Config) ([]byte, error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("initbox: %w", err)
	}
	return seal(text, &p.configs), nil
}

func seal(text []byte, key *[32]byte) []byte {
	out := make([]byte, header, header+len(text)+box.Overhead)
	out[0] = Version
	_, _ = rand.Read(out[1:]) // never fails, see crypto/rand
	nonce := [nonceSize]byte(out[1:header])
	return box.SealAfterPrecomputation(out, text, &nonce, key)
}

// Keys is the agent's side: its key pair, and the allocator's public key. Its methods may be called
// concurrently.
type Keys struct {
	public          PublicKey
	configs, orders [32]byte
}

// NewKeys makes a key pair that opens boxes of this allocator.
func NewKeys(allocator PublicKey) (*Keys, error) {
	public, private, err := box.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("initbox: %w", err)
	}
	// A key of low order would make a shared key that everyone can compute.
	if _, err := curve25519.X25519(private[:], allocator[:]); err != nil {
		return nil, fmt.Errorf("initbox: public key of the allocator: %w", err)
	}
	k, peer := &Keys{public: PublicKey(*public)}, [32]byte(allocator)
	box.Precompute(&k.configs, &peer, private)
	k.orders = orderKey(&k.configs)
	return k, nil
}

// PublicKey returns the key that the allocator needs to seal boxes for k.
func (k *Keys) PublicKey() PublicKey { return k.public }

// Open returns the configuration in a box. The error is ErrVersion, ErrSealed, or says what is wrong
// with the configuration.
func (k *Keys) Open(sealed []byte) (*Config, error) {
	c := new(Config)
	if err := open(sealed, MaxSealed, &k.configs, "configuration", c); err != nil {
		return nil, err
	}
	return c, nil
}

// open opens a box and reads what is in it.
func open(sealed []byte, most int, key *[32]byte, name string, into interface{ Check() error }) error {
	switch {
	case len(sealed) > 0 && sealed[0] != Version:
		return ErrVersion
	case len(sealed) < header+box.Overhead || len(sealed) > most:
		return ErrSealed
	}
	nonce := [nonceSize]byte(sealed[1:header])
	text, ok := box.OpenAfterPrecomputation(nil, sealed[header:], &nonce, key)
	if !ok {
		return ErrSealed
	}
	return decode(text, name, into)
}

// decode reads what was in a box. A field that it does not know is an error: the caller would believe that the
// field was honoured. The errors of package json can quote values, so they are not passed on.
func decode(text []byte, name string, into interface{ Check() error }) error {
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if d.Decode(into) != nil {
		return fmt.Errorf("the %s is not readable: the allocator has another version than this agent", name)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return fmt.Errorf("the %s has something after its end", name)
	}
	return into.Check()
}
