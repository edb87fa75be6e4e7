package hf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// companions are the files of a model directory that training does not change: the tokenizer in
// its several forms, and how text is generated.
var companions = []string{
	"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
	"added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
}

// Companions lists the tokenizer's files and generation_config.json of a model directory. The
// error is about the directory, or about those in it that cannot be read.
func Companions(path string) (names []string, err error) {
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var errs []error
	for _, name := range append(slices.Clone(companions), d.templates()...) {
		if !d.exists(name) {
			continue
		}
		f, err := d.companion(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		f.Close()
		names = append(names, name)
	}
	return names, errors.Join(errs...)
}

// templatesDir is the one directory among the companions: more chat templates, each under its name.
const templatesDir = "additional_chat_templates"

const maxTemplates = 100

// templates lists the files of templatesDir, if there is one.
func (d *dir) templates() (names []string) {
	f, err := d.root.Open(filepath.Join(d.sub, templatesDir))
	if err != nil {
		return nil
	}
	defer f.Close()
	entries, _ := f.ReadDir(maxTemplates) // of a file: none
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".jinja" {
			names = append(names, templatesDir+"/"+e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// maxCompanion is more than any of these files has, in bytes.
const maxCompanion = 256 << 20

func (d *dir) companion(name string) (*os.File, error) {
	f, err := d.open(name)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() > maxCompanion {
		err = fmt.Errorf("%s: %d bytes; at most %d are copied", filepath.Join(d.path, name), st.Size(), maxCompanion)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// bring copies the companions that m names into the directory to.
func (m Model) bring(to *os.Root) error {
	if len(m.Companions) == 0 {
		return nil
	}
	d, err := openDir(m.From)
	if err != nil {
		return err
	}
	defer d.Close()
	for _, name := range m.Companions {
		if err := d.copy(name, to); err != nil {
			return fmt.Errorf("copy of %s: %w", terminal.Name(filepath.Join(m.From, name)), err)
		}
	}
	return nil
}

func (d *dir) copy(name string, to *os.Root) error {
	src, err := d.companion(name)
	if err != nil {
		return err
	}
	defer src.Close()
	if dir := filepath.Dir(name); dir != "." {
		if to, err = files.Sub(to, dir); err != nil {
			return err
		}
		defer to.Close()
	}
	return files.Write(to, filepath.Base(name), func(f *files.Draft) error {
		_, err := io.Copy(f, io.LimitReader(src, maxCompanion))
		return errors.Join(err, f.Sync())
	})
}
