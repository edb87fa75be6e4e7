// Package checkpointtest makes checkpoints that no run writes, for tests.
package checkpointtest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"strings"
)

// Summed puts the right checksum into the text of a manifest that was changed, as anybody can, and returns it.
// A text without room for one stays as it is.
func Summed(text []byte) []byte {
	const digits, key = 2 * sha256.Size, `"sha256": "`
	at := bytes.LastIndex(text, []byte(key))
	if at < 0 || at+len(key)+digits > len(text) {
		return text
	}
	at += len(key)
	copy(text[at:], strings.Repeat("0", digits))
	copy(text[at:], fmt.Sprintf("%x", sha256.Sum256(text)))
	return text
}
