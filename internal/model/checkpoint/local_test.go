package checkpoint

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sync/errgroup"
)

// localFleet returns two ranks with a local directory.
func localFleet(t *testing.T, dir, local string, async bool) *fleet {
	t.Helper()
	params, ranges := small(2)
	f, err := newFleet(params, ranges, Options{Dir: rooted(dir), RunID: "run", Local: local, Async: async})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.close() })
	return f
}

func (f *fleet) wait() error {
	return f.each(func(_ int, s *Saver) error { return s.Wait() })
}

// inLocal lists the files of all ranks in a local directory, without the locks.
func inLocal(t *testing.T, local string) (all []string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(local, localPrefix+"*", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range paths {
		if filepath.Base(p) != lockName {
			all = append(all, filepath.Base(p))
		}
	}
	return all
}

// With a local directory Save returns once the shards are there. The checkpoint is complete once they are copied, and
// then they are removed.
func TestLocal(t *testing.T) {
	for _, async := range []bool{false, true} {
		dir, local := t.TempDir(), t.TempDir()
		f := localFleet(t, dir, local, async)
		hold, here := make(chan struct{}), make(chan struct{}, 2)
		for _, s := range f.savers {
			s.at = func(p string) error {
				if p == "uploaded" {
					here <- struct{}{}
					<-hold
				}
				return nil
			}
		}
		if err := f.save(t, 1); err != nil {
			t.Fatal(err)
		}
		<-here
		<-here
		if got := inLocal(t, local); len(got) != 2 {
			t.Errorf("async %v: while a checkpoint is copied there are %q", async, got)
		}
		if _, _, err := Latest(t.Context(), dir); !errors.Is(err, ErrNone) {
			t.Errorf("async %v: while a checkpoint is copied: %v, want none", async, err)
		}
		close(hold)
		if err := f.wait(); err != nil {
			t.Fatal(err)
		}
		if step, reasons := latestStep(t, dir, f.params); step != 1 || len(reasons) > 0 {
			t.Errorf("async %v: latest step is %d, %q", async, step, reasons)
		}
		if got := inLocal(t, local); len(got) > 0 {
			t.Errorf("async %v: after the copy %q are left", async, got)
		}
		if err := f.close(); err != nil {
			t.Fatal(err)
		}
		if left, err := os.ReadDir(local); err != nil || len(left) > 0 {
			t.Errorf("async %v: after the run there are %v, %v", async, left, err)
		}
	}
}

// A failure of the node's disk or of the copy ends the save, and the previous checkpoint stays.
func TestLocalFaults(t *testing.T) {
	for _, c := range []struct {
		name  string
		fault func(t *testing.T, f *fleet, local string)
		want  string
	}{
		{"the node's disk is full", func(_ *testing.T, f *fleet, _ string) {
			f.savers[1].wrap = func(w io.Writer) io.Writer { return &short{w, 100, syscall.ENOSPC} }
		}, "free space there"},
		{"the file server fails", func(_ *testing.T, f *fleet, _ string) {
			n := 0
			f.savers[1].wrap = func(w io.Writer) io.Writer {
				if n++; n == 1 {
					return w
				}
				return &short{w, 100, syscall.EIO}
			}
		}, "the disk or the file server failed"},
		{"the node's disk changes a bit", func(t *testing.T, f *fleet, local string) {
			f.savers[1].at = func(p string) error {
				if p == "shard synced" {
					paths, _ := filepath.Glob(filepath.Join(local, "*", shard1))
					edit(t, paths[0], func(b []byte) []byte { b[len(b)-3] ^= 4; return b })
				}
				return nil
			}
		}, "returns other bytes than were written"},
	} {
		dir, local := t.TempDir(), t.TempDir()
		f := localFleet(t, dir, local, false)
		if err := errors.Join(f.save(t, 1), f.wait()); err != nil {
			t.Fatal(err)
		}
		c.fault(t, f, local)
		err := errors.Join(f.save(t, 2), f.wait())
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), "rank 1: ") ||
			!strings.Contains(err.Error(), shard1) {
			t.Errorf("%s: %v, want %q of rank 1", c.name, err, c.want)
		}
		if got := names(t, dir); !slices.Equal(got, []string{"latest", "step-00000001"}) {
			t.Errorf("%s: the directory holds %q", c.name, got)
		}
		if got := inLocal(t, local); len(got) > 0 {
			t.Errorf("%s: %q are left", c.name, got)
		}
	}
}

// Processes that start at the same time do not remove each other's directories.
func TestLocalAtOnce(t *testing.T) {
	local := t.TempDir()
	var g errgroup.Group
	for i := range 64 {
		g.Go(func() error {
			l, err := openLocal(local, fmt.Sprint(i))
			if err != nil {
				return err
			}
			d, err := l.dir.Create("x.tmp", "x")
			if err == nil {
				err = d.Commit()
			}
			return errors.Join(err, l.close())
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if left := names(t, local); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

// The next start on the node removes the directory of a killed process. Directories of running processes stay, and so
// do all other files.
func TestLocalSweep(t *testing.T) {
	local := t.TempDir()
	root := rooted(local)
	dead, err := openLocal(local, "dead")
	if err != nil {
		t.Fatal(err)
	}
	dead.lock.Close()
	alive, err := openLocal(local, "alive") // sweeps
	if err != nil {
		t.Fatal(err)
	}
	for name, mode := range map[string]os.FileMode{localPrefix + "foreign": 0o777, "data": 0o700} {
		if err := errors.Join(root.Mkdir(name, mode), root.Chmod(name, mode)); err != nil {
			t.Fatal(err)
		}
	}
	next, err := openLocal(local, "next")
	if err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, local), []string{localPrefix + "alive", localPrefix + "foreign", localPrefix + "next",
		"data"}; !slices.Equal(got, want) {
		t.Errorf("there are %q, want %q", got, want)
	}
	if _, err := openLocal(local, "foreign"); err == nil || !strings.Contains(err.Error(), "checkpoint.local") {
		t.Errorf("a directory that others may write to was taken: %v", err)
	}
	if err := errors.Join(alive.close(), next.close()); err != nil {
		t.Error(err)
	}
	if err := dead.dir.Close(); err != nil {
		t.Error(err)
	}
	dead.parent.Close()
}
