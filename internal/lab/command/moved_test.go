package command

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
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
		root := must.Have(os.OpenRoot(path))
		t.Cleanup(func() { root.Close() })
		if got := movedTo(root); got != "" {
			t.Errorf("%s, which was not moved, is at %q", path, got)
		}
		return root
	}
	root := open(dir)
	open(link)
	must.Do(t, os.Rename(dir, other))
	if got := movedTo(root); got != other {
		t.Errorf("moved to %q, want %q", got, other)
	}
	must.Do(t, os.Mkdir(dir, 0o777))
	if got := movedTo(root); got != other {
		t.Errorf("with another directory in its place: %q, want %q", got, other)
	}
}
