package key

import "fmt"

// Size is the number of bytes of a key.
const Size = 32

// Key is the secret of a job. It prints as a word, so that no message can show it.
type Key [Size]byte

func (k Key) String() string { return "(a key)" }

// Format keeps a key out of messages, whatever the verb.
func (k Key) Format(f fmt.State, _ rune) { f.Write([]byte(k.String())) }
