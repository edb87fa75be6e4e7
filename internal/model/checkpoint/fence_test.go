package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/base/must"
)

// A hooked is a directory of the operating system that may be of another host. A call fails with the error of its hook.
type hooked struct {
	store
	remote bool
	hook   func(call string) error
	paused time.Duration
}

func (h *hooked) do(call string, f func() error) error {
	if err := h.hook(call); err != nil {
		return &fs.PathError{Op: call, Path: h.Name(), Err: err}
	}
	return f()
}

func (h *hooked) Refresh() error { return h.do("refresh", h.store.Refresh) }
func (h *hooked) Sync() error    { return h.do("sync", h.store.Sync) }
func (h *hooked) Remote() bool   { return h.remote }

func (h *hooked) List() (all []fs.DirEntry, err error) {
	err = h.do("list", func() error { all, err = h.store.List(); return err })
	return all, err
}

func (h *hooked) Open(name string) (f file, err error) {
	err = h.do("open", func() error { f, err = h.store.Open(name); return err })
	return f, err
}

func (h *hooked) Exclusive(name string, data []byte) error {
	return h.do("create", func() error { return h.store.Exclusive(name, data) })
}

func (h *hooked) RemoveAll(name string) error {
	return h.do("remove", func() error { return h.store.RemoveAll(name) })
}

func (h *hooked) Rename(from, to string) error {
	if err := h.store.Rename(from, to); err != nil {
		return err
	}
	return h.do("renamed", func() error { return nil })
}

func (h *hooked) Pause(_ context.Context, d time.Duration) {
	h.paused += d
	_ = h.hook("pause")
}

// fenceIn returns the fence of generation 6 of a job that begins with 5, in a directory with these records.
func fenceIn(t *testing.T, generations ...int64) (*fence, *hooked) {
	t.Helper()
	d := must.Have(diskOf(rooted(t.TempDir()), nil))
	t.Cleanup(func() { d.Close() })
	h := &hooked{store: d, hook: func(string) error { return nil }}
	f := newFence(h, Start{Job: "j", First: 5, Generation: 6})
	for _, n := range generations {
		record(t, h, n)
	}
	return &f, h
}

// record records a decision of the job.
func record(t *testing.T, h *hooked, n int64) {
	t.Helper()
	o := newOrigin()
	o.Job, o.Decision = "j", fmt.Append(nil, n)
	must.Do(t, h.store.Exclusive(generationName(n), encode(o)))
}

// Each call of the fence that fails is an error of its own, and not a sign of a newer start.
func TestFenceReturnsFaults(t *testing.T) {
	for name, call := range map[string]func(f *fence) error{
		"a decision": func(f *fence) error { _, err := f.decide(t.Context(), []byte("6")); return err },
		"a question": func(f *fence) error { _, err := f.decide(t.Context(), nil); return err },
		"a check":    func(f *fence) error { f.start.Generation = 5; return f.check() },
		"removals":   (*fence).removeOlder,
	} {
		for at := 1; ; at++ {
			f, h := fenceIn(t, 4, 5)
			calls, failed := 0, ""
			h.hook = func(call string) error {
				if calls++; calls == at {
					failed = call
					return syscall.EIO
				}
				return nil
			}
			err := call(f)
			if failed == "" {
				if err != nil || at < 3 {
					t.Errorf("%s: %v after %d faults", name, err, at-1)
				}
				break
			}
			if !errors.Is(err, syscall.EIO) || errors.Is(err, ErrSuperseded) {
				t.Errorf("%s: %s fails: error %v", name, failed, err)
			}
			want := map[string]string{"list": "starts of this run: ", "remove": "records of earlier starts: ",
				"create": "record of this start: "}[failed]
			if !strings.Contains(fmt.Sprint(err), want) {
				t.Errorf("%s: %s fails: error %v, want %q", name, failed, err, want)
			}
		}
	}
}

// A record of another host is awaited while it may be in a cache, and no longer.
func TestFenceAwaitsRecords(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	half := []byte(`{"job":"j","deci`)
	for name, c := range map[string]struct {
		ctx    context.Context
		local  bool
		record []byte // present at first; nil: the whole one
		faults int    // of the first opens; -1: of each one
		fault  error
		want   error
		paused time.Duration // at least, and less than twice; 0: none
	}{
		"incomplete":              {record: half, paused: firstPause},
		"incomplete and local":    {record: half, local: true, want: errStale},
		"not visible yet":         {faults: 3, fault: fs.ErrNotExist, paused: 7 * firstPause},
		"never visible":           {faults: -1, fault: fs.ErrNotExist, want: fs.ErrNotExist, paused: longWait},
		"absent and local":        {faults: -1, fault: fs.ErrNotExist, local: true, want: fs.ErrNotExist},
		"a caller that has ended": {ctx: gone, faults: -1, fault: fs.ErrNotExist, want: fs.ErrNotExist},
		"stale handles":           {faults: tries * tries, fault: syscall.ESTALE, paused: firstPause},
		"stale and local":         {faults: tries*tries - 1, fault: syscall.ESTALE, local: true},
		"a broken disk":           {faults: -1, fault: syscall.EIO, want: syscall.EIO},
	} {
		f, h := fenceIn(t, 6)
		h.remote = !c.local
		path := filepath.Join(h.Name(), generationName(6))
		whole := must.Have(os.ReadFile(path))
		if c.record != nil {
			must.Do(t, os.WriteFile(path, c.record, 0o600))
		}
		opens := 0
		h.hook = func(call string) error {
			if call == "pause" {
				return os.WriteFile(path, whole, 0o600)
			}
			if call == "open" {
				if opens++; c.faults < 0 || opens <= c.faults {
					return c.fault
				}
			}
			return nil
		}
		if c.ctx == nil {
			c.ctx = t.Context()
		}
		newest, err := f.decide(c.ctx, nil)
		if !errors.Is(err, c.want) || (err == nil) != (string(newest) == "6") || errors.Is(err, ErrSuperseded) {
			t.Errorf("%s: decision %s, error %v, want %v", name, newest, err, c.want)
		}
		if h.paused < c.paused || h.paused > 2*c.paused {
			t.Errorf("%s: waits %v, want %v", name, h.paused, c.paused)
		}
	}
}

// An error of an outdated view ends with a fresh one.
func TestRetryRefreshes(t *testing.T) {
	for _, fault := range []error{syscall.ESTALE, fs.ErrNotExist} {
		f, h := fenceIn(t, 6)
		fresh := true
		h.remote = fault == fs.ErrNotExist
		h.hook = func(call string) error {
			switch {
			case call == "refresh":
				fresh = true
			case call == "list":
				fresh = false // another host has replaced the file
			case call == "open" && !fresh:
				return fault
			}
			return nil
		}
		if newest, err := f.decide(t.Context(), nil); string(newest) != "6" {
			t.Errorf("%v: decision %s, error %v", fault, newest, err)
		}
	}
}

// A record that is made, or replaced by a newer one, during a question is the answer.
func TestFenceFollowsTheNewestRecord(t *testing.T) {
	for name, removed := range map[string]bool{"a newer record": false, "in place of the first": true} {
		f, h := fenceIn(t, 6)
		done := false
		h.hook = func(call string) error {
			if call == "open" && !done {
				done = true
				record(t, h, 7)
				if removed {
					return h.store.RemoveAll(generationName(6))
				}
			}
			return nil
		}
		if newest, err := f.decide(t.Context(), nil); string(newest) != "7" || err != nil {
			t.Errorf("%s: decision %s, error %v", name, newest, err)
		}
	}
}

// A start with a file is the newest, even if the file server's reply was lost.
func TestFenceKnowsItsOwnRecord(t *testing.T) {
	f, h := fenceIn(t, 5)
	lost := false
	h.hook = func(call string) error {
		if call != "create" || lost {
			return nil
		}
		lost = true
		if err := h.store.Exclusive(generationName(6), encode(f.own)); err != nil {
			t.Error(err)
		}
		return syscall.ESTALE
	}
	if err := f.claim([]byte("6")); err != nil {
		t.Errorf("error %v", err)
	}
}

// Numbers of more digits are newer. No file stays open, and a closed directory is an error.
func TestClaimFiles(t *testing.T) {
	_, h := fenceIn(t, 99999999, 100000000)
	dir := rooted(h.Name())
	open := func() int { return len(must.Have(os.ReadDir("/dev/fd"))) }
	before := open()
	for range 3 {
		if n, err := NextGeneration(dir); n != 100000001 || err != nil {
			t.Errorf("the next number is %d, %v", n, err)
		}
		newest, err := Claim(t.Context(), dir, Start{Job: "j", First: 5, Generation: 6}, []byte("6"))
		if string(newest) != "100000000" || err != nil {
			t.Errorf("decision %s, error %v", newest, err)
		}
	}
	if n := open(); n != before {
		t.Errorf("%d files are open, before %d", n, before)
	}
	dir.Close()
	if _, err := NextGeneration(dir); err == nil {
		t.Error("a number in a closed directory")
	}
	if _, err := Claim(t.Context(), dir, Start{Generation: 6}, nil); err == nil {
		t.Error("a decision in a closed directory")
	}
}
