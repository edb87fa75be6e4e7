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

// A localDir is a directory on the node for the shards of one rank, locked while its process lives.
type localDir struct {
	dir    store
	parent store
	name   string
	lock   io.Closer // nil in tests
}

// localPrefix begins the names of these directories in a shared one.
const localPrefix = "cprun-checkpoint-"

// openLocal creates the directory of a rank in path, and removes those of ended processes.
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

// Starting processes may take an unlocked directory from each other, each holding its lock for a moment.
const (
	localTries = 256
	localPause = 10 * time.Millisecond
)

// errSwept reports that another process removed the directory before it was locked.
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

// lockIn takes the lock of a directory and checks that the name still refers to it. The lock prevents a rename.
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

// sweep removes the directories of ended processes of this user. It skips directories that it cannot remove.
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

// unlockedFor bounds the time between the creation of a directory and of its lock.
const unlockedFor = time.Minute

// removeEnded removes a directory if its process has ended. It holds the lock meanwhile, so that another process fails
// to take the directory.
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
	gone := localPrefix + rand.Text() // processes with it open can create nothing under the old name
	if err := d.Rename(name, gone); err != nil {
		return err
	}
	return d.RemoveAll(gone)
}

// clear removes the shards after a committed or abandoned save.
func (l *localDir) clear() error {
	entries, err := l.dir.List()
	for _, e := range entries {
		if e.Name() != lockName {
			err = errors.Join(err, l.dir.RemoveAll(e.Name()))
		}
	}
	return err
}

// close removes the directory. l may be nil.
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

// These are the bytes of one read, and of the unsynced part of a copy.
const (
	copyBuffer = 4 << 20
	copyUnsent = 256 << 20
)

// upload copies the rank's shard to the run directory and verifies the copy.
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

// copyShard copies a shard and compares it with its original checksum.
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

// A syncedWriter syncs a file at intervals, so that few bytes wait in memory.
type syncedWriter struct {
	draft
	w io.Writer
	n int64 // since the last sync
}

// Write writes to w.
func (p *syncedWriter) Write(data []byte) (int, error) {
	n, err := p.w.Write(data)
	if p.n += int64(n); err == nil && p.n >= copyUnsent {
		p.n, err = 0, p.draft.Sync()
	}
	return n, err
}
