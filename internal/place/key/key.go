package key

import (
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
)

// Size is the number of bytes of a key.
const Size = 32

// Key is the secret of a job. It prints as a word, so that no message can show it.
type Key [Size]byte

// New makes a random key.
func New() Key {
	var k Key
	rand.Read(k[:])
	return k
}

// For derives the key for one use, so that what is known of that one tells nothing of the others.
func (k Key) For(purpose string) Key {
	out, err := hkdf.Key(sha256.New, k[:], nil, "cprun "+purpose, Size)
	if err != nil { // a length that no hash can make, and 32 is none
		panic(err)
	}
	return Key(out)
}

func (k Key) String() string { return "(a key)" }

// Format keeps a key out of messages, whatever the verb.
func (k Key) Format(f fmt.State, _ rune) { f.Write([]byte(k.String())) }
