package files

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
)

// A Repo opens files of a model directory by name. Symbolic links must not lead out of it, since a foreign index must
// not name other files. In the download cache of huggingface_hub, links lead from <repo>/snapshots/<revision> to
// <repo>/blobs, so there the bound is <repo>.
type Repo struct {
	Path string // as given by the user, for errors
	root *os.Root
	sub  string // of the directory inside root
}

// OpenRepo opens a model directory.
func OpenRepo(path string) (*Repo, error) {
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
	root, err := OpenDir(top)
	if err != nil {
		return nil, fmt.Errorf("model directory %s: %w", terminal.Name(path), err)
	}
	return &Repo{terminal.Name(path), root, sub}, nil
}

// Close closes the directory.
func (d *Repo) Close() error { return d.root.Close() }

// Open opens a regular file.
func (d *Repo) Open(name string) (*os.File, error) {
	base := strings.TrimPrefix(name, TemplatesDir+"/")
	if base == "" || base == "." || base == ".." || filepath.Base(base) != base {
		return nil, fmt.Errorf("model directory %s: %.255q is not a plain file name", d.Path, name)
	}
	f, err := OpenIn(d.root, filepath.Join(d.sub, name))
	if err != nil {
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			err = pe.Err // its path is relative to the root
		}
		return nil, fmt.Errorf("%s: %w", terminal.Name(filepath.Join(d.Path, name)), err)
	}
	return f, nil
}

// Exists reports whether a file exists.
func (d *Repo) Exists(name string) bool {
	_, err := d.root.Lstat(filepath.Join(d.sub, name))
	return err == nil
}

// ReadJSON reads a file of at most so many bytes and JSON values.
func (d *Repo) ReadJSON(name string, most int64, values int) ([]byte, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	raw, err := All(f, most)
	if err == nil {
		err = cmp.Or(Fetched(raw), Modest(raw, values))
	}
	if err != nil {
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			err = pe.Err
		}
		return nil, fmt.Errorf("%s: %w", filepath.Join(d.Path, name), err)
	}
	return raw, nil
}

// Decode reads a JSON file, if present.
func (d *Repo) Decode(name string, limit int64, values int, v any) (bool, error) {
	if !d.Exists(name) {
		return false, nil
	}
	raw, err := d.ReadJSON(name, limit, values)
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("%s: %w", filepath.Join(d.Path, name), err)
	}
	return true, nil
}

// TemplatesDir is the directory with additional chat templates.
const TemplatesDir = "additional_chat_templates"

const maxTemplates = 100

// Templates lists the files of TemplatesDir, if it exists.
func (d *Repo) Templates() (names []string) {
	f, err := d.root.Open(filepath.Join(d.sub, TemplatesDir))
	if err != nil {
		return nil
	}
	defer f.Close()
	entries, _ := f.ReadDir(maxTemplates) // none for a file
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".jinja" {
			names = append(names, TemplatesDir+"/"+e.Name())
		}
	}
	slices.Sort(names)
	return names
}
