package initbox

import (
	"encoding/json"
	"errors"
	"fmt"
)

// SealSize is the length of the key of SealConfig in bytes.
const SealSize = 32

// SealConfig returns the configuration of a sandbox that is stopped, sealed with a key of SealSize bytes. The key seals
// for one archive of that sandbox. What is returned has MaxSealed bytes at most.
func SealConfig(key []byte, c *Config) ([]byte, error) {
	if len(key) != SealSize {
		return nil, errors.New("initbox: the key of a configuration has a wrong length")
	}
	if err := c.Check(); err != nil {
		return nil, err
	}
	text, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("initbox: %w", err)
	}
	return seal(text, (*[SealSize]byte)(key)), nil
}

// OpenConfig returns the configuration that SealConfig has sealed. The error is ErrVersion, ErrSealed, or says what is
// wrong with the configuration.
func OpenConfig(key, sealed []byte) (*Config, error) {
	if len(key) != SealSize {
		return nil, ErrSealed
	}
	c := new(Config)
	if err := open(sealed, MaxSealed, (*[SealSize]byte)(key), "configuration", c); err != nil {
		return nil, err
	}
	return c, nil
}
