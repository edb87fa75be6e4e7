package gossip

import (
	"crypto/hkdf"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
)

const (
	minKey    = 16 // bytes of a job's key
	sealKey   = 32 // bytes of the key that seals gossip, for AES-256
	labelSize = 8  // bytes of a label, which is twice as long in hexadecimal
)

// derive returns the key and the label of a job's gossip. The label is seen by all on the network
// and tells them nothing about the key. Another job or another key has another label.
func derive(key []byte, job string) (seal []byte, label string, err error) {
	if len(key) < minKey {
		return nil, "", fmt.Errorf("gossip: the job's key has %d bytes; it needs %d", len(key), minKey)
	}
	seal, err = hkdf.Key(sha256.New, key, nil, "cprun gossip key\x00"+job, sealKey)
	if err != nil {
		return nil, "", fmt.Errorf("gossip: %w", err)
	}
	raw, err := hkdf.Key(sha256.New, key, nil, "cprun gossip label\x00"+job, labelSize)
	if err != nil {
		return nil, "", fmt.Errorf("gossip: %w", err)
	}
	return seal, hex.EncodeToString(raw), nil
}
