package files

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/base/must"
)

// Refresh does not accept another directory at the path of an open one. A directory that was renamed remains usable.
func TestRefresh(t *testing.T) {
	path := filepath.Join(t.TempDir(), "run")
	root := root(t, path)
	made := must.Have(root.Stat("."))
	for _, change := range []func() error{
		func() error { return nil },
		func() error { return os.Rename(path, path+".moved") },
		func() error { return os.Mkdir(path, 0o755) },
	} {
		must.Do(t, change())
		got, err := Refresh(root, made)
		if err != nil || got != root {
			t.Fatalf("Refresh = %v, %v, want the root itself", got, err)
		}
		if st, err := got.Stat("."); err != nil || !os.SameFile(st, made) {
			t.Fatalf("the root is another directory now: %v", err)
		}
	}
}

func TestExclusive(t *testing.T) {
	root := root(t, t.TempDir())
	for name, create := range map[string]func(*os.Root, string, []byte) error{
		"exclusive": Exclusive, "secret": Secret, "published": Publish,
	} {
		must.Do(t, create(root, name, []byte("first")))
		if err := create(root, name, []byte("second")); !errors.Is(err, fs.ErrExist) {
			t.Errorf("%s: a second file of that name: %v", name, err)
		}
		if data, err := ReadIn(root, name, 100); err != nil || string(data) != "first" {
			t.Errorf("%s: it holds %q, %v", name, data, err)
		}
	}
	if all, err := fs.ReadDir(root.FS(), "."); err != nil || len(all) != 3 {
		t.Errorf("the directory has %v, %v", all, err)
	}
}

// If a request was sent twice, the second reply is that the old name is missing.
func TestRenameSentTwice(t *testing.T) {
	root := root(t, t.TempDir())
	must.Do(t, root.Mkdir("a", 0o755))
	made := must.Have(root.Lstat("a"))
	must.Do(t, Rename(root, "a", "b"))
	if err := rename(root, "a", "b", made); err != nil {
		t.Errorf("the same request again: %v", err)
	}
	if err := Rename(root, "a", "b"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("another request: %v, want that there is none", err)
	}
}

// Remote describes the nearest existing parent directory.
func TestRemote(t *testing.T) {
	dir := t.TempDir()
	if Remote(dir) != Remote(filepath.Join(dir, "not", "there")) {
		t.Error("a directory that is not there is on another file system than the one above it")
	}
}
