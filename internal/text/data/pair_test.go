package data

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// entries lists the names in a directory.
func entries(t testing.TB, dir string) (names []string) {
	t.Helper()
	list := must.Have(os.ReadDir(dir))
	for _, e := range list {
		names = append(names, e.Name())
	}
	return names
}

func TestPairsReadAsTheyWereWritten(t *testing.T) {
	docs := [][]int32{{1, 2, 3}, {}, {4}, {65499, 0}}
	for _, vocab := range []int{65499, 65500, 70000} {
		dir := t.TempDir()
		p := must.Have(NewPair(filepath.Join(dir, "out.bin"), vocab))
		var want []int32
		for _, d := range docs {
			must.Do(t, p.Add(d))
			want = append(want, d...)
		}
		if n, tokens := p.Counts(); n != 4 || tokens != 6 {
			t.Errorf("%d documents, %d tokens", n, tokens)
		}
		must.Do(t, p.Close())
		if got := entries(t, dir); !slices.Equal(got, []string{"out.bin", "out.idx"}) {
			t.Errorf("left are %v", got)
		}
		d := must.Have(Open(Source{Paths: []string{filepath.Join(dir, "out.bin")}, EOS: -1, Vocab: 70000}))
		if got := all(t, d); !slices.Equal(got, want) {
			t.Errorf("vocabulary %d: %v, want %v", vocab, got, want)
		}
		if ends, _, err := d.documents(); err != nil || !slices.Equal(ends, []int64{3, 4, 6}) {
			t.Errorf("documents end at %v, %v", ends, err)
		}
		st, err := os.Stat(filepath.Join(dir, "out.bin"))
		if small := vocab < 65500; err != nil || small && st.Size() != 12 || !small && st.Size() != 24 ||
			st.Mode().Perm() != 0o644 {
			t.Errorf("%v, %v", st, err)
		}
	}
}

func TestPairsLeaveNothingBehind(t *testing.T) {
	dir := t.TempDir()
	p := must.Have(NewPair(filepath.Join(dir, "out"), 10))
	must.Do(t, p.Add([]int32{1}))
	p.Remove()
	if got := entries(t, dir); len(got) > 0 {
		t.Errorf("left are %v", got)
	}
	// A directory takes the name of the .bin in the meantime, and no file can replace it.
	p = must.Have(NewPair(filepath.Join(dir, "out"), 10))
	must.Do(t, os.MkdirAll(filepath.Join(dir, "out.bin", "x"), 0o777))
	if err := p.Close(); err == nil {
		t.Error("a directory was replaced")
	}
	if got := entries(t, dir); !slices.Equal(got, []string{"out.bin"}) {
		t.Errorf("left are %v", got)
	}
	if _, err := NewPair(filepath.Join(dir, "out"), 10); !errors.Is(err, ErrExists) ||
		!strings.Contains(err.Error(), "name another, or remove it") {
		t.Error(err)
	}
	if _, err := NewPair(filepath.Join(dir, "none", "out"), 10); err == nil {
		t.Error("a directory that is not there was written to")
	}
}
