package checkpoint

import (
	"context"
	"errors"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/must"
)

// A counting store is a remote store that counts open files and pauses, and makes handles stale.
type counting struct {
	store
	opened, closed int
	age            int // handles of a lower age are stale
	pauses         []time.Duration
}

func (c *counting) Remote() bool { return true }

func (c *counting) Pause(_ context.Context, d time.Duration) { c.pauses = append(c.pauses, d) }

func (c *counting) Open(name string) (file, error) {
	f, err := c.store.Open(name)
	if err != nil {
		return nil, err
	}
	c.opened++
	return &counted{f, c, c.age}, nil
}

type counted struct {
	file
	store *counting
	age   int
}

func (f *counted) ReadAt(b []byte, at int64) (int, error) {
	if f.age < f.store.age {
		return 0, syscall.ESTALE
	}
	return f.file.ReadAt(b, at)
}

func (f *counted) Close() error {
	f.store.closed++
	return f.file.Close()
}

// A load opens each shard once, reopens it if its handle is stale, and closes all files.
func TestLoadOpensStaleShardsAgain(t *testing.T) {
	dir, params := saved(t, Options{}, 1)
	c := must.Have(Open(filepath.Join(dir, dirName(1))))
	count := &counting{store: c.root}
	c.root = count
	const shards = 2
	for age, opened := range []int{shards, 2 * shards} {
		count.age = age
		for range 2 {
			checkContent(t, c, params)
			if count.opened != opened {
				t.Errorf("age %d: %d files were opened, want %d", age, count.opened, opened)
			}
		}
	}
	if err := c.Close(); err != nil || count.closed != count.opened {
		t.Errorf("%v; %d of %d files were closed", err, count.closed, count.opened)
	}
}

// checkSize opens a file of unexpected size, which makes an NFS client ask the server, and closes it.
func TestSizedLeavesNoFileOpen(t *testing.T) {
	dir, _ := saved(t, Options{}, 1)
	root := must.Have(diskOf(files.OpenDir(filepath.Join(dir, dirName(1)))))
	defer root.Close()
	count := &counting{store: root}
	err := checkSize(count, FileInfo{Name: manifestName, Bytes: 1})
	if err == nil || count.opened != 1 || count.closed != 1 {
		t.Errorf("sized = %v; %d files were opened and %d closed", err, count.opened, count.closed)
	}
}

// A busy file is retried after growing pauses, a stale one at once.
func TestAgainPausesWhereAFileIsBusy(t *testing.T) {
	for _, c := range []struct {
		err    error
		pauses int
	}{{syscall.EBUSY, tries - 1}, {syscall.ESTALE, 0}} {
		root := must.Have(diskOf(files.OpenDir(t.TempDir())))
		count, calls := &counting{store: root}, 0
		err := retry(count, func() error { calls++; return c.err })
		if !errors.Is(err, c.err) || calls != tries || len(count.pauses) != c.pauses {
			t.Errorf("%v: %v after %d calls and pauses of %v; want %d calls and %d pauses",
				c.err, err, calls, count.pauses, tries, c.pauses)
		}
		for i := 1; i < len(count.pauses); i++ {
			if count.pauses[i] <= count.pauses[i-1] {
				t.Errorf("pauses of %v do not grow", count.pauses)
			}
		}
		root.Close()
	}
}

// A directory with a stale handle is reopened by its path.
func TestRefreshOpensADirectoryAgain(t *testing.T) {
	d := must.Have(diskOf(files.OpenDir(t.TempDir())))
	d.Close()
	must.Do(t, d.Refresh())
	must.Have(d.List())
	d.Close()
}

// NewSaver fails if the directory cannot be reopened.
func TestSaverOfAClosedDirectory(t *testing.T) {
	root := rooted(t.TempDir())
	root.Close()
	if s, err := NewSaver(world(1)[0], Options{Dir: root, RunID: "a"}); err == nil {
		t.Errorf("NewSaver = %v", s)
	}
}

// An error of the rank's own work ends its wait at once, and Together returns it.
func TestOnAllRanksReturnsTheOwnError(t *testing.T) {
	own := errors.New("own")
	// The other rank never answers.
	if err := OnAllRanks(t.Context(), world(2)[0], time.Hour, 0, func() error { return own }); !errors.Is(err, own) {
		t.Errorf("Together = %v, want %v", err, own)
	}
}
