package experiment

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

var header = Header{Version: Version, Identity: Identity{"grid": "a"}, Commit: "one"}

func open(t *testing.T, dir string, h Header, anew bool, share int) *Store {
	t.Helper()
	s := must.Have(Open(dir, h, anew, share))
	t.Cleanup(s.Close)
	return s
}

// ids lists the cells of the runs.
func ids(runs []Run) (list []string) {
	for _, r := range runs {
		list = append(list, r.Cell)
	}
	return list
}

// After a crash that leaves a part of the last line, all complete lines and all later ones are readable.
func TestTornLinesAreRepaired(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	s := open(t, dir, header, false, 0)
	for _, id := range []string{"a", "b"} {
		must.Do(t, s.Append(Run{Cell: id, Run: 1, Status: OK}))
	}
	s.Close()
	path := filepath.Join(dir, logName)
	whole := must.Have(os.ReadFile(path))
	headerEnd := strings.IndexByte(string(whole), '\n') + 1
	for n := range len(whole) + 1 {
		must.Do(t, os.WriteFile(path, whole[:n], 0o666))
		want := []string{"a", "b"}[:max(0, strings.Count(string(whole[:n]), "\n")-1)]
		if n >= headerEnd {
			runs, _ := Peek(dir, Identity{"grid": "a"})
			if got := ids(runs); !slices.Equal(got, want) {
				t.Fatalf("after %d bytes a look finds %v; want %v", n, got, want)
			}
		}
		s := open(t, dir, header, false, 0)
		if !slices.Equal(ids(s.Runs), want) {
			t.Fatalf("after %d bytes of %d there are %v; want %v", n, len(whole), ids(s.Runs), want)
		}
		must.Do(t, s.Append(Run{Cell: "c", Run: 1, Status: OK}))
		s.Close()
		s = open(t, dir, header, false, 0)
		if got := ids(s.Runs); !slices.Equal(got, append(slices.Clone(want), "c")) {
			t.Fatalf("after %d bytes and a line there are %v", n, got)
		}
		s.Close()
	}
}

func TestStoreRefusesAnotherExperiment(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	s := open(t, dir, header, false, 0)
	if _, _, err := s.Prepare("a", 1, []byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, s.Header, false, 0); err == nil || !strings.Contains(err.Error(), "cprun scale") {
		t.Errorf("a second start: %v", err)
	}
	s.Close()
	other := Header{Version: Version, Identity: Identity{"grid": "b", "repeat": "2"}}
	_, err := Open(dir, other, false, 0)
	if err == nil || !strings.Contains(err.Error(), "differs in grid, repeat;") {
		t.Errorf("another experiment: %v", err)
	}
	must.Do(t, os.WriteFile(filepath.Join(dir, "notes.txt"), nil, 0o666))
	anew := open(t, dir, other, true, 0)
	left, err := os.ReadDir(dir)
	if err != nil || len(anew.Runs) != 0 {
		t.Fatal(err, anew.Runs)
	}
	var names []string
	for _, e := range left {
		names = append(names, e.Name())
	}
	if want := []string{".lock", "cells.jsonl", "notes.txt"}; !slices.Equal(names, want) {
		t.Errorf("begun anew, there are %v; want %v", names, want)
	}
}

// Tasks of an array write at the same time. A later start of the experiment reads all their runs.
func TestShares(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "out")
	open(t, dir, header, false, 0).Close()
	one, two := open(t, dir, header, false, 1), open(t, dir, header, false, 2)
	for _, s := range []*Store{one, two} {
		must.Do(t, s.Append(Run{Cell: filepath.Base(s.log.Name()), Run: 1, Status: OK}))
	}
	if _, err := Open(dir, one.Header, false, 1); err == nil {
		t.Error("two tasks run one share")
	}
	if _, err := Open(dir, one.Header, false, 0); err == nil {
		t.Error("a start of the whole runs beside a task")
	}
	one.Close()
	two.Close()
	s := open(t, dir, header, false, 0)
	if got := ids(s.Runs); !slices.Equal(got, []string{"cells-0001.jsonl", "cells-0002.jsonl"}) {
		t.Errorf("the runs of the shares are %v", got)
	}
}

func TestUnfinished(t *testing.T) {
	base := t.TempDir()
	id := Identity{"grid": "a"}
	var dirs []string
	for _, name := range []string{"x-1", "x-2", "x-3"} {
		h := header
		if name == "x-3" {
			h.Identity = Identity{"grid": "b"}
		}
		dirs = append(dirs, filepath.Join(base, name))
		open(t, filepath.Join(base, name), h, false, 0).Close()
	}
	never := func([]Run) bool { return false }
	if got := Unfinished(dirs, id, never); got != filepath.Join(base, "x-2") {
		t.Errorf("the newest of the same is %q", got)
	}
	if got := Unfinished(dirs, id, func([]Run) bool { return true }); got != "" {
		t.Errorf("all are done, and %q is not", got)
	}
}
