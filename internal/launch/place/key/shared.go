package key

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// madeSize is the length of a file that cprun makes: a line of hexadecimal digits.
const madeSize = 2*Size + 1

// pause is the time between two looks at a file that another host has made and this one does not see yet.
const pause = 100 * time.Millisecond

// Shared returns the key in the file at path, which all agents of a job name. The first agent to come makes the file
// and its directory; an existing file is used again. It waits until ctx ends for a file that another host has made.
func Shared(ctx context.Context, path string) (Key, error) {
	for {
		k, err := try(filepath.Dir(path), filepath.Base(path))
		if err == nil {
			return k, nil
		}
		if errors.Is(err, fs.ErrNotExist) && sleep(ctx) {
			continue
		}
		return Key{},
			fmt.Errorf("key of the job %s: %w; all nodes must share this directory, and the user of the job must own "+
				"the file: remove it and start again, name another --run-dir, or set CPRUN_KEY_FILE",
				terminal.Name(path), cause(err))
	}
}

// sleep waits for a moment, and reports whether ctx has not ended.
func sleep(ctx context.Context) bool {
	select {
	case <-time.After(pause):
		return true
	case <-ctx.Done():
		return false
	}
}

// try reads the key, and makes it if there is none. It opens the directory by its path: a network file system asks its
// server then, and answers a look-up below an open directory from memory.
func try(dir, name string) (Key, error) {
	root, err := files.Make(dir)
	if err != nil {
		return Key{}, err
	}
	defer root.Close()
	k, err := read(root, name)
	if errors.Is(err, fs.ErrNotExist) {
		failed := create(root, name)
		// A server that got a request twice reports a failure of the second. So the file counts, not the answer.
		if k, err = read(root, name); errors.Is(err, fs.ErrNotExist) && failed != nil {
			err = failed
		}
	}
	if err == nil {
		sweep(root, name)
	}
	return k, err
}

// create makes a new key, unless another agent is faster.
func create(root *os.Root, name string) error {
	temp, err := draft(root, name)
	if err != nil {
		return err
	}
	return publish(root, temp, name)
}

// drafts returns the prefix of the names of unpublished files.
func drafts(name string) string { return name + ".tmp-" }

// draft writes a new key to a file with a random name, and waits until it is on the disk.
func draft(root *os.Root, name string) (temp string, err error) {
	temp = drafts(name) + rand.Text()
	secret := make([]byte, Size)
	rand.Read(secret)
	return temp, files.Secret(root, temp, append(hex.AppendEncode(nil, secret), '\n'))
}

// publish gives a draft its name, unless that name exists. After O_EXCL alone, other agents would see an empty file.
func publish(root *os.Root, temp, name string) error {
	err := root.Link(temp, name)
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, root.Remove(temp))
}

// sweep removes the drafts of killed agents. An agent that loses its draft to sweep finds the published key.
func sweep(root *os.Root, name string) {
	dir, err := root.Open(".")
	if err != nil {
		return
	}
	defer dir.Close()
	all, _ := dir.Readdirnames(-1)
	for _, other := range all {
		if strings.HasPrefix(other, drafts(name)) {
			_ = root.Remove(other)
		}
	}
}

// read reads a published key. It refuses a link, which another user may have put there.
func read(root *os.Root, name string) (k Key, err error) {
	st, err := root.Lstat(name)
	if err != nil {
		return k, err
	}
	if !st.Mode().IsRegular() {
		return k, files.ErrIrregular
	}
	f, err := files.OpenIn(root, name)
	if err != nil {
		return k, err
	}
	defer f.Close()
	if st, err = f.Stat(); err != nil {
		return k, err
	}
	if owner := st.Sys().(*syscall.Stat_t).Uid; int(owner) != os.Geteuid() {
		return k, fmt.Errorf("it belongs to user %d, and this is user %d", owner, os.Geteuid())
	}
	if mode := st.Mode().Perm(); mode != 0o600 {
		return k, fmt.Errorf("its mode is %#o, and not 0600", mode)
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

// cause takes the path out of an error.
func cause(err error) error {
	if le := (*os.LinkError)(nil); errors.As(err, &le) {
		return le.Err
	}
	if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
		return pe.Err
	}
	return err
}
