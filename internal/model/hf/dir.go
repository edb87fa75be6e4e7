package hf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// dir opens files of a model directory by their base name. Symbolic links may not lead out
// of it: an index of foreign origin must not name files elsewhere. The download cache of
// huggingface_hub is made of such links, from <repo>/snapshots/<revision> to <repo>/blobs,
// so there the bound is <repo>.
type dir struct {
	path string // as the user gave it, for errors
	root *os.Root
	sub  string // of the directory inside root
}

func openDir(path string) (*dir, error) {
	abs, err := filepath.Abs(path)
	if err != nil {
		return nil, fmt.Errorf("model directory %s: %w", terminal.Name(path), err)
	}
	top, sub := abs, "."
	if snapshots := filepath.Dir(abs); filepath.Base(snapshots) == "snapshots" {
		repo := filepath.Dir(snapshots)
		if st, err := os.Stat(filepath.Join(repo, "blobs")); err == nil && st.IsDir() {
			top, sub = repo, filepath.Join("snapshots", filepath.Base(abs))
		}
	}
	root, err := files.OpenDir(top)
	if err != nil {
		return nil, fmt.Errorf("model directory %s: %w", terminal.Name(path), err)
	}
	return &dir{terminal.Name(path), root, sub}, nil
}

func (d *dir) Close() error { return d.root.Close() }

// open opens a regular file.
func (d *dir) open(name string) (*os.File, error) {
	base := strings.TrimPrefix(name, templatesDir+"/")
	if base == "" || base == "." || base == ".." || filepath.Base(base) != base {
		return nil, fmt.Errorf("model directory %s: %.255q is not a plain file name", d.path, name)
	}
	f, err := files.OpenIn(d.root, filepath.Join(d.sub, name))
	if err != nil {
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			err = pe.Err // its path is that of the root
		}
		return nil, fmt.Errorf("%s: %w", terminal.Name(filepath.Join(d.path, name)), err)
	}
	return f, nil
}

// exists reports whether there is anything of that name.
func (d *dir) exists(name string) bool {
	_, err := d.root.Lstat(filepath.Join(d.sub, name))
	return err == nil
}
