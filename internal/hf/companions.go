package hf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
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
	for _, name := range companions {
		if !d.exists(name) {
			continue
		}
		f, err := d.open(name)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		f.Close()
		names = append(names, name)
	}
	return names, errors.Join(errs...)
}

// bring copies the companions that m names into the directory to.
func (m Model) bring(to string) error {
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
			return fmt.Errorf("copy of %s: %w", filepath.Join(m.From, name), err)
		}
	}
	return nil
}

func (d *dir) copy(name, to string) error {
	src, err := d.open(name)
	if err != nil {
		return err
	}
	defer src.Close()
	dst, err := os.OpenFile(filepath.Join(to, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(dst, src)
	return errors.Join(err, dst.Sync(), dst.Close())
}
