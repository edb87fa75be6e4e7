package key

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Bounds of the text of a key: 32 bytes are 16 random ones as hexadecimal digits.
const (
	minSecret   = 32
	maxSecret   = 4096
	minDistinct = 8 // different bytes: a file of zeros is no secret
)

// Fix says how to make a key, for messages.
const Fix = "make one with (umask 077; openssl rand -hex 32 >cprun.key), have the same file on every node, and set " +
	"CPRUN_KEY_FILE to its path"

// File reads a key from a file that no other user can read; the path - is stdin.
func File(path string, stdin io.Reader) (Key, error) {
	secret, err := readSecret(path, stdin)
	if err == nil {
		var k Key
		if k, err = fromSecret(secret); err == nil {
			return k, nil
		}
	}
	name := "CPRUN_KEY_FILE=" + terminal.Name(path)
	return Key{}, fmt.Errorf("%s: %w; %s", name, cause(err), Fix)
}

func readSecret(path string, stdin io.Reader) ([]byte, error) {
	if path == "-" {
		secret, err := io.ReadAll(io.LimitReader(stdin, maxSecret+1))
		if len(secret) > maxSecret {
			return nil, fmt.Errorf("stdin has more than %d bytes", maxSecret)
		}
		return secret, err
	}
	f, err := files.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if err := private(st, os.Geteuid()); err != nil {
		return nil, err
	}
	return files.All(f, maxSecret)
}

// private refuses a file that others could read or have written. One of root may be for a group:
// Kubernetes gives a secret to a pod without root in that way.
func private(st fs.FileInfo, uid int) error {
	owner := st.Sys().(*syscall.Stat_t).Uid
	mode, open := st.Mode().Perm(), fs.FileMode(0o077)
	switch {
	case int(owner) == uid:
	case owner == 0:
		open = 0o027
	default:
		return fmt.Errorf("it belongs to user %d, and this is user %d: have it belong to this one", owner, uid)
	}
	if mode&open != 0 {
		return fmt.Errorf("its mode is %#o, so that others have access: chmod 600", mode)
	}
	return nil
}

// fromSecret makes a key of the text of a file, in any form. A line break at the end does not count, since editors add
// one.
func fromSecret(secret []byte) (Key, error) {
	secret = bytes.TrimRight(secret, "\r\n")
	if len(secret) < minSecret {
		return Key{}, fmt.Errorf("it has %d bytes; at least %d are needed", len(secret), minSecret)
	}
	seen := map[byte]bool{}
	for _, b := range secret {
		seen[b] = true
	}
	if len(seen) < minDistinct {
		return Key{}, fmt.Errorf("it has only %d different bytes, and is not random", len(seen))
	}
	return sha256.Sum256(append([]byte("cprun key file 1\n"), secret...)), nil
}
