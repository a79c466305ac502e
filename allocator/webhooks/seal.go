package webhooks

import (
	"crypto/cipher"
	"crypto/sha256"
	"encoding/base64"
	"errors"

	"github.com/berth-sandbox/berth/api/sandboxaccess"
)

// sealer seals the secrets of signatures.
type sealer struct{ aead cipher.AEAD }

func newSealer(key *sandboxaccess.Key) *sealer { return &sealer{key.AEAD("webhook secrets 1")} }

// of binds a sealed secret to its webhook.
func of(id, team string) []byte { return []byte(id + "/" + team) }

func (s *sealer) seal(secret, id, team string) []byte {
	return s.aead.Seal(nil, nil, []byte(secret), of(id, team))
}

var errSealed = errors.New("its secret was sealed with another key of the cluster; set signatureSecret again")

func (s *sealer) open(sealed []byte, id, team string) (string, error) {
	secret, err := s.aead.Open(nil, nil, sealed, of(id, team))
	if err != nil {
		return "", errSealed
	}
	return string(secret), nil
}

// signature is that of E2B's version v1.
func signature(secret string, body []byte) string {
	sum := sha256.Sum256(append([]byte(secret), body...))
	return base64.RawURLEncoding.EncodeToString(sum[:])
}
