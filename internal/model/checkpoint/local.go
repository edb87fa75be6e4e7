package checkpoint

import (
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

// A localDir takes the shards of a rank first: a directory of its own on its node, locked as long
// as its process lives.
type localDir struct {
	dir    store
	parent store
	name   string
	lock   io.Closer // nil in tests
}

// localPrefix begins the names of such directories, in one that may hold other things.
const localPrefix = "cprun-checkpoint-"

// openLocal makes a directory of a rank in another, which it makes if absent, and removes directories of processes
// that have ended.
func openLocal(path, name string) (*localDir, error) {
	root, err := files.Make(path)
	if err != nil {
		return nil, fmt.Errorf("checkpoint.local: %w", err)
	}
	defer root.Close()
	sweep(root)
	l := &localDir{name: localPrefix + name}
	for range localTries {
		if err = l.open(root); !errors.Is(err, errSwept) {
			break
		}
		time.Sleep(localPause)
	}
	if err != nil {
		return nil, fmt.Errorf("checkpoint.local: %w", err)
	}
	if l.parent, err = reopen(root); err != nil {
		return nil, errors.Join(err, l.close())
	}
	return l, nil
}

// Each process that begins to use such a directory may take one that is not locked yet away from another
// that begins. It holds the lock for a moment then.
const (
	localTries = 256
	localPause = 10 * time.Millisecond
)

// errSwept reports that another process removed a directory as a dead one's before it was
// locked.
var errSwept = errors.New("removed by another process that cleans up")

func (l *localDir) open(root *os.Root) error {
	dir, err := files.Own(root, l.name)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.Join(errSwept, err)
	}
	if err != nil {
		return err
	}
	defer dir.Close()
	lock, err := files.Lockable(dir, lockName)
	if err != nil {
		return errors.Join(errSwept, err)
	}
	if err := lockIn(root, l.name, lock); err != nil {
		return errors.Join(errSwept, err, lock.Close())
	}
	if l.dir, err = reopen(dir); err != nil {
		return errors.Join(err, lock.Close())
	}
	l.lock = lock
	return nil
}

// lockIn locks the lock of a directory, and checks that the name still means this directory: the lock
// keeps others from renaming it.
func lockIn(root *os.Root, name string, lock *os.File) error {
	if err := lockFile(lock, syscall.LOCK_EX); err != nil {
		return err
	}
	mine, err := lock.Stat()
	if err != nil {
		return err
	}
	there, err := root.Lstat(filepath.Join(name, lockName))
	if err == nil && !os.SameFile(mine, there) {
		err = fs.ErrNotExist
	}
	return err
}

// sweep removes the directories of processes of this user that have ended. What it cannot remove is
// left: others may write here as well.
func sweep(root *os.Root) {
	d, err := reopen(root)
	if err != nil {
		return
	}
	defer d.Close()
	entries, _ := d.List()
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), localPrefix) && e.IsDir() {
			_ = removeEnded(root, d, e.Name())
		}
	}
}

// unlockedFor bounds the time between the making of a directory and of its lock: a process makes one
// after the other.
const unlockedFor = time.Minute

// removeEnded removes a directory if its process has ended. It holds the lock meanwhile: a process that
// was about to take it finds that it has none.
func removeEnded(root *os.Root, d store, name string) error {
	dir, err := files.Owned(root, name)
	if err != nil {
		return err
	}
	defer dir.Close()
	lock, err := files.Update(dir, lockName)
	if errors.Is(err, fs.ErrNotExist) {
		if st, err := dir.Stat("."); err != nil || time.Since(st.ModTime()) < unlockedFor {
			return err
		}
		return d.RemoveAll(name)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := lockIn(root, name, lock); err != nil {
		return err
	}
	gone := localPrefix + rand.Text() // a process that has it open makes nothing under its name any more
	if err := d.Rename(name, gone); err != nil {
		return err
	}
	return d.RemoveAll(gone)
}

// clear removes the shards, after a save that was committed or given up.
func (l *localDir) clear() error {
	entries, err := l.dir.List()
	for _, e := range entries {
		if e.Name() != lockName {
			err = errors.Join(err, l.dir.RemoveAll(e.Name()))
		}
	}
	return err
}

// close removes the directory. A nil one is none.
func (l *localDir) close() error {
	if l == nil {
		return nil
	}
	var errs []error
	if l.parent != nil {
		errs = append(errs, l.parent.RemoveAll(l.name), l.parent.Close())
	}
	if l.lock != nil {
		errs = append(errs, l.lock.Close())
	}
	return errors.Join(append(errs, l.dir.Close())...)
}

// Bytes of a copy in memory: of one read, and in the kernel before
// the disk has them.
const (
	copyBuffer = 4 << 20
	copyUnsent = 256 << 20
)

// upload copies the own shard to the run directory, and reads it there again.
func (s *Saver) upload(ctx context.Context, r report) report {
	if r.err != nil || r.File == nil {
		return r
	}
	err := s.inTemp(r.Step, func(tmp store) error {
		if err := s.copyShard(ctx, tmp, *r.File); err != nil {
			return err
		}
		return s.verifyUpload(ctx, tmp, *r.File)
	})
	if err == nil {
		err = s.at("uploaded")
	}
	if err != nil {
		err = fmt.Errorf("copy of shard %s from %s: %w", r.File.Name, terminal.Name(s.local.dir.Name()), err)
	}
	return r.failed(err)
}

// copyShard copies a shard that has the checksum it was written with.
func (s *Saver) copyShard(ctx context.Context, tmp store, info FileInfo) error {
	from, err := s.local.dir.Open(info.Name)
	if err != nil {
		return err
	}
	defer from.Close()
	f, err := tmp.Create(s.tempName(info.Name), info.Name)
	if err != nil {
		return err
	}
	hash := sha256.New()
	to := &contextWriter{ctx: ctx, w: io.MultiWriter(&syncedWriter{draft: f, w: s.wrap(f)}, hash)}
	_, err = io.CopyBuffer(to, struct{ io.Reader }{from}, make([]byte, min(copyBuffer, max(1, info.Bytes))))
	if got := hex.EncodeToString(hash.Sum(nil)); err == nil && got != info.SHA256 {
		err = fmt.Errorf("the disk of this node returns other bytes than were written: checksum %.12s…, not %.12s…; "+
			"look at that disk, or unset checkpoint.local", got, info.SHA256)
	}
	if err != nil {
		return errors.Join(err, f.Discard())
	}
	return f.Commit()
}

func (s *Saver) verifyUpload(ctx context.Context, tmp store, info FileInfo) error {
	f, err := tmp.Open(info.Name)
	if err != nil {
		return err
	}
	defer f.Close()
	if of, ok := f.(*os.File); ok {
		files.Uncache(of)
	}
	return verify(ctx, f, info)
}

// syncedWriter syncs a file at intervals, so that few bytes wait in memory.
type syncedWriter struct {
	draft
	w io.Writer
	n int64 // since the last time
}

// Write writes to w.
func (p *syncedWriter) Write(data []byte) (int, error) {
	n, err := p.w.Write(data)
	if p.n += int64(n); err == nil && p.n >= copyUnsent {
		p.n, err = 0, p.draft.Sync()
	}
	return n, err
}
