// Package key provides the agents of a job with one secret that other users cannot read.
//
// Shared returns the key in a file of the run directory, which all agents of a job share; the first agent creates it.
// File reads a key made by the user, such as a mounted Secret of Kubernetes. Both accept only files that no other user
// can read. The key is in no argument, environment variable or log.
//
//	k, err := key.Shared(ctx, filepath.Join(runDir, ".key"))
package key

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// Size is the number of bytes of a key.
const Size = 32

// Key is the secret of a job. It prints as "(a key)", so that no message shows it.
type Key [Size]byte

// Format hides the key for every verb.
func (k Key) Format(f fmt.State, _ rune) { fmt.Fprint(f, "(a key)") }

// Bounds of the text of a key: 32 bytes hold 16 random bytes in hexadecimal digits.
const (
	minSecret   = 32
	maxSecret   = 4096
	minDistinct = 8 // different bytes: a file of zeros is not a secret
)

// Fix explains how to make a key, for messages.
const Fix = "make one with (umask 077; openssl rand -hex 32 >cprun.key), have the same file on every node, and set " +
	"CPRUN_KEY_FILE to its path"

// File reads a key from a file that no other user can read; the path - is stdin.
func File(path string, stdin io.Reader) (Key, error) {
	secret, err := readSecret(path, stdin)
	var k Key
	if err == nil {
		k, err = fromSecret(secret)
	}
	if err != nil {
		return Key{}, fmt.Errorf("CPRUN_KEY_FILE=%s: %w; %s", terminal.Name(path), cause(err), Fix)
	}
	return k, nil
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
	if err == nil {
		err = private(st, os.Geteuid())
	}
	if err != nil {
		return nil, err
	}
	return files.All(f, maxSecret)
}

// private refuses a file that other users can read or write. A file of root may be readable for a group: Kubernetes
// mounts secrets so for pods without root.
func private(st fs.FileInfo, uid int) error {
	mode, open := st.Mode().Perm(), fs.FileMode(0o077)
	switch owner := ownerOf(st); {
	case owner == uid:
	case owner == 0:
		open = 0o027
	default:
		return fmt.Errorf("it belongs to user %d, and this is user %d: change its owner", owner, uid)
	}
	if mode&open != 0 {
		return fmt.Errorf("its mode is %#o, so that others have access: chmod 600", mode)
	}
	return nil
}

func ownerOf(st fs.FileInfo) int { return int(st.Sys().(*syscall.Stat_t).Uid) }

// fromSecret derives a key from the text of a file, in any format. It ignores a final line break, since editors add
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
		return Key{}, fmt.Errorf("it has only %d different bytes, so it is not random", len(seen))
	}
	return sha256.Sum256(append([]byte("cprun key file 1\n"), secret...)), nil
}

const (
	madeSize  = 2*Size + 1             // of a file made by cprun: a line of hexadecimal digits
	pause     = 100 * time.Millisecond // between two looks for a file that this host does not see yet
	draftMark = ".tmp-"                // between the name of a key and the random part of a draft's name
)

// Shared returns the key in the file at path, which all agents of a job pass. The first agent makes the file and its
// directory; an existing file is used again. Until ctx ends, it waits for a file made by another host.
func Shared(ctx context.Context, path string) (Key, error) {
	for {
		k, err := try(filepath.Dir(path), filepath.Base(path))
		if err == nil {
			return k, nil
		}
		if ctx.Err() != nil || !errors.Is(err, fs.ErrNotExist) {
			return Key{}, fmt.Errorf("key of the job %s: %w; all nodes must share this directory, and the user of the "+
				"job must own the file: remove it and start again, name another --run-dir, or set CPRUN_KEY_FILE",
				terminal.Name(path), cause(err))
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
		}
	}
}

// try reads the key, and makes it if there is none. It opens the directory by its path, since a network file system
// then asks its server; it answers lookups in an open directory from its cache.
func try(dir, name string) (k Key, err error) {
	root, err := files.Make(dir)
	if err != nil {
		return k, err
	}
	defer root.Close()
	if k, err = read(root, name); errors.Is(err, fs.ErrNotExist) {
		temp, failed := draft(root, name)
		if failed == nil {
			failed = publish(root, temp, name)
		}
		// A server that gets a request twice reports a failure of the second. So the file decides, not the error.
		if k, err = read(root, name); errors.Is(err, fs.ErrNotExist) {
			err = cmp.Or(failed, err)
		}
	}
	if err == nil { // drafts of killed agents go; an agent whose draft is removed uses the published key
		drafts, _ := fs.Glob(root.FS(), name+draftMark+"*")
		for _, draft := range drafts {
			_ = root.Remove(draft)
		}
	}
	return k, err
}

// draft writes a new key to a file with a random name, and syncs it.
func draft(root *os.Root, name string) (temp string, err error) {
	temp = name + draftMark + rand.Text()
	secret := make([]byte, Size)
	rand.Read(secret)
	return temp, files.Secret(root, temp, append(hex.AppendEncode(nil, secret), '\n'))
}

// publish links a draft to its name, unless that exists. With O_EXCL alone, other agents could read an empty file.
func publish(root *os.Root, temp, name string) error {
	err := root.Link(temp, name)
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, root.Remove(temp))
}

// read reads a published key. It refuses a symbolic link, which another user may have made.
func read(root *os.Root, name string) (k Key, err error) {
	if st, err := root.Lstat(name); err != nil {
		return k, err
	} else if !st.Mode().IsRegular() {
		return k, files.ErrIrregular
	}
	f, err := files.OpenIn(root, name)
	if err != nil {
		return k, err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return k, err
	}
	switch owner, mode := ownerOf(st), st.Mode().Perm(); {
	case owner != os.Geteuid():
		return k, fmt.Errorf("it belongs to user %d, and this is user %d", owner, os.Geteuid())
	case mode != 0o600:
		return k, fmt.Errorf("its mode is %#o, not 0600", mode)
	}
	text, err := files.All(f, madeSize)
	if err != nil {
		return k, err
	}
	if _, err := hex.DecodeString(strings.TrimSuffix(string(text), "\n")); err != nil || len(text) != madeSize {
		return k, fmt.Errorf("its %d bytes are no key that cprun has made", len(text))
	}
	return fromSecret(text)
}

func cause(err error) error {
	if le := (*os.LinkError)(nil); errors.As(err, &le) {
		return le.Err
	}
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
