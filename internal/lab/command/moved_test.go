package command

import (
	"os"
	"path/filepath"
	"testing"
)

// The files of a run whose directory was moved are reported where they are.
func TestMovedRunDirectoriesAreFound(t *testing.T) {
	base, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	dir, link, other := filepath.Join(base, "run"), filepath.Join(base, "link"), filepath.Join(base, "other")
	if err = os.Mkdir(dir, 0o777); err == nil {
		err = os.Symlink(dir, link)
	}
	if err != nil {
		t.Fatal(err)
	}
	open := func(path string) *os.Root {
		root, err := os.OpenRoot(path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { root.Close() })
		if got := movedTo(root); got != "" {
			t.Errorf("%s, which was not moved, is at %q", path, got)
		}
		return root
	}
	root := open(dir)
	open(link)
	if err := os.Rename(dir, other); err != nil {
		t.Fatal(err)
	}
	if got := movedTo(root); got != other {
		t.Errorf("moved to %q, want %q", got, other)
	}
	if err := os.Mkdir(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	if got := movedTo(root); got != other {
		t.Errorf("with another directory in its place: %q, want %q", got, other)
	}
}
