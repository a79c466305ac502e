package credentials

import (
	"crypto/cipher"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

// Header is a header that the gateway sets on requests to one host.
type Header struct {
	Host  string `json:"h"`
	Port  uint16 `json:"p"`
	Name  string `json:"n"`
	Value string `json:"v"`
}

// String hides the value.
func (h Header) String() string { return h.Host + ": " + h.Name }

// Sealer seals the headers of sandboxes. Its methods may be called concurrently.
type Sealer struct{ aead cipher.AEAD }

// NewSealer returns a Sealer with a key that is derived from that of the cluster.
func NewSealer(key *sandboxaccess.Key) *Sealer { return &Sealer{key.AEAD("egress headers 1")} }

// Seal seals headers for the sandbox with an ID. Without headers it returns nil.
func (s *Sealer) Seal(id string, headers []Header) []byte {
	if len(headers) == 0 {
		return nil
	}
	text, err := json.Marshal(headers)
	if err != nil {
		panic(fmt.Sprintf("credentials: %v", err)) // strings always encode
	}
	return s.aead.Seal(nil, nil, text, []byte(id))
}

var errSealed = errors.New("the headers were sealed for another sandbox, or with another key of the cluster; set the rules again")

// Open returns the headers that were sealed for a sandbox.
func (s *Sealer) Open(id string, sealed []byte) ([]Header, error) {
	if len(sealed) == 0 {
		return nil, nil
	}
	if s == nil {
		return nil, errSealed // the key is gone
	}
	text, err := s.aead.Open(nil, nil, sealed, []byte(id))
	if err != nil {
		return nil, errSealed
	}
	var headers []Header
	if json.Unmarshal(text, &headers) != nil {
		return nil, errors.New("the headers are in a form of a later version") // the error of JSON would have a part of them
	}
	return headers, nil
}
