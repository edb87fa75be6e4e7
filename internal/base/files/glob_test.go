package files

import (
	"errors"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

func TestGlob(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"b.txt", "a.txt", "A/0.txt", ".hidden.txt", "in/c.txt", "in/deep/d.txt", "in/.git/e.txt",
		"in/.f.txt", "g{1}.txt", "h.bin"} {
		at := filepath.Join(dir, name)
		must.Do(t, errors.Join(os.MkdirAll(filepath.Dir(at), 0o777), os.WriteFile(at, nil, 0o666)))
	}
	must.Do(t, errors.Join(os.Symlink("..", filepath.Join(dir, "in", "loop")),
		os.Symlink("in", filepath.Join(dir, "link"))))
	for pattern, want := range map[string]string{
		"*.txt":         "a.txt b.txt g{1}.txt",
		"**/*.txt":      "A/0.txt a.txt b.txt g{1}.txt in/c.txt in/deep/d.txt",
		"in/**/d.txt":   "in/deep/d.txt",
		"in/**/c.txt":   "in/c.txt",
		"*/c.txt":       "in/c.txt link/c.txt",
		"{a,b,a*,h}.*":  "a.txt b.txt h.bin",
		`g\{1\}.txt`:    "g{1}.txt",
		".*.txt":        ".hidden.txt",
		"in/.git/*.txt": "in/.git/e.txt",
		"none/*":        "",
	} {
		var want = strings.Fields(want)
		for i := range want {
			want[i] = filepath.Join(dir, want[i])
		}
		if got, err := Glob(filepath.Join(dir, pattern)); err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: %v, %v, want %v", pattern, got, err, want)
		}
	}
	if _, err := Glob(filepath.Join(dir, "[a")); !errors.Is(err, path.ErrBadPattern) {
		t.Errorf("a malformed pattern: %v", err)
	}
	if _, err := Glob(filepath.Join(dir, "a.txt", "*")); err == nil {
		t.Error("a file was read as a directory")
	}
}
