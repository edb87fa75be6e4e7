package hf

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/text/tokenizer"
)

// tokenizerFiles lists the files of a tokenizer in its forms.
var tokenizerFiles = []string{
	"tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
	"vocab.json", "merges.txt", templateFile, "chat_template.json",
}

const (
	templateFile   = "chat_template.jinja"
	generationFile = "generation_config.json"
)

// A Companion is a file beside weights that training does not change.
type Companion struct {
	Path string // its source
	Name string // in the export
}

// Sources are the files of a run that go into an export; each may be "".
type Sources struct {
	Model     string // a directory with generation_config.json
	Tokenizer string // a tokenizer.json
	Template  string // a Jinja file in place of the tokenizer's own
}

// Companions lists the files to export. The error reports directories or files that cannot be read.
func (s Sources) Companions() (list []Companion, err error) {
	var errs []error
	add := func(dir, from, to string) {
		dir = filepath.Clean(dir)
		d, err := files.OpenRepo(dir)
		if err != nil {
			if len(errs) == 0 || errs[0].Error() != err.Error() {
				errs = append(errs, err)
			}
			return
		}
		defer d.Close()
		names := []string{from}
		if from == "" {
			names = append(slices.Clone(tokenizerFiles), d.Templates()...)
		}
		for _, name := range names {
			if !d.Exists(name) || s.Template != "" && name == templateFile && from == "" {
				continue
			}
			f, err := companion(d, name)
			if err != nil {
				errs = append(errs, err)
				continue
			}
			f.Close()
			list = append(list, Companion{filepath.Join(dir, name), cmp.Or(to, name)})
		}
	}
	if s.Model != "" {
		add(s.Model, generationFile, "")
	}
	if dir, name := filepath.Split(s.Tokenizer); name == tokenizerFiles[0] {
		add(dir, "", "")
	} else if name != "" {
		add(dir, name, tokenizerFiles[0])
	}
	if dir, name := filepath.Split(s.Template); name != "" {
		add(dir, name, templateFile)
	}
	return list, errors.Join(errs...)
}

// maxCompanion bounds each of these files in bytes.
const maxCompanion = 256 << 20

func companion(d *files.Repo, name string) (*os.File, error) {
	f, err := d.Open(name)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() > maxCompanion {
		err = fmt.Errorf("%s: %d bytes; at most %d are copied", filepath.Join(d.Path, name), st.Size(), maxCompanion)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (m Model) copyCompanions(to *os.Root) error {
	for _, c := range m.Companions {
		path, name := filepath.Split(c.Path)
		if dir := filepath.Base(filepath.Dir(c.Path)); dir == files.TemplatesDir {
			path, name = filepath.Dir(filepath.Dir(c.Path)), filepath.Join(dir, name)
		}
		d, err := files.OpenRepo(path)
		if err == nil {
			if c.Name == generationFile {
				err = copyGeneration(d, to, m.EOS)
			} else {
				err = copyFile(d, name, c.Name, to)
			}
			d.Close()
		}
		if err != nil {
			return fmt.Errorf("copy of %s: %w", terminal.Name(c.Path), err)
		}
	}
	return nil
}

// copyGeneration copies generation_config.json. As in the Trainer of transformers, the EOS of the run comes first.
func copyGeneration(d *files.Repo, to *os.Root, eos int) error {
	keys := map[string]json.RawMessage{}
	_, err := d.Decode(generationFile, maxConfig, maxConfigValues, &keys)
	ids, wrong := tokenIDs(keys["eos_token_id"])
	if err != nil || wrong != nil || eos < 0 || len(ids) == 0 || slices.Contains(ids, eos) {
		return copyFile(d, generationFile, generationFile, to)
	}
	if keys["eos_token_id"], err = json.Marshal(append([]int{eos}, ids...)); err != nil {
		return err
	}
	return writeJSON(to, generationFile, keys)
}

func copyFile(d *files.Repo, name, as string, to *os.Root) error {
	src, err := companion(d, name)
	if err != nil {
		return err
	}
	defer src.Close()
	if dir := filepath.Dir(as); dir != "." {
		if to, err = files.Sub(to, dir); err != nil {
			return err
		}
		defer to.Close()
	}
	return files.Write(to, filepath.Base(as), func(w io.Writer) error {
		_, err := io.Copy(w, io.LimitReader(src, maxCompanion))
		return err
	})
}

// An EOS is the token that ends a text.
type EOS struct {
	ID    int    // -1: none
	Text  string // in a tokenizer; "" if a model's config has the id
	model []int  // ids in the config
}

// FindEOS returns the eos_token beside a tokenizer.json, which TRL takes; else eos_token_id of config.json in the
// directory of the model, else of generation_config.json (the first of several). Both paths may be "".
func FindEOS(tokens, model string) (e EOS, err error) {
	e.ID = -1
	if tokens != "" {
		if e.Text, e.ID, err = tokenizer.EOS(tokens); err != nil {
			return e, err
		}
	}
	if model == "" {
		return e, nil
	}
	if e.model, err = endIDs(model, "config.json", "generation_config.json"); e.ID < 0 && len(e.model) > 0 {
		e.ID, e.Text = e.model[0], ""
	}
	return e, err
}

// Note returns a line if the tokenizer and the model's config have different tokens; "" if not.
func (e EOS) Note() string {
	if e.Text == "" || len(e.model) == 0 || slices.Contains(e.model, e.ID) {
		return ""
	}
	return fmt.Sprintf("texts end with the tokenizer's eos_token %.40q, id %d, as in TRL; eos_token_id of the model's "+
		"config.json is %d", e.Text, e.ID, e.model[0])
}

// Ends returns the ids at which the model in a directory stops to generate, as in transformers: all of eos_token_id in
// generation_config.json, else of config.json, else the eos_token of tokenizer_config.json. There may be none.
func Ends(path string) ([]int, error) {
	ids, err := endIDs(path, "generation_config.json", "config.json")
	if err != nil || len(ids) > 0 {
		return ids, err
	}
	_, id, err := tokenizer.EOS(filepath.Join(path, "tokenizer.json"))
	if err != nil || id < 0 {
		return nil, err
	}
	return []int{id}, nil
}

// endIDs returns eos_token_id of the first file that has one.
func endIDs(path string, names ...string) ([]int, error) {
	d, err := files.OpenRepo(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, name := range names {
		if ids, err := readEnds(d, name); err != nil || len(ids) > 0 {
			return ids, err
		}
	}
	return nil, nil
}

// readEnds returns eos_token_id of a file, if present.
func readEnds(d *files.Repo, name string) ([]int, error) {
	var c struct {
		EOS json.RawMessage `json:"eos_token_id"`
	}
	if ok, err := d.Decode(name, maxConfig, maxConfigValues, &c); !ok || err != nil {
		return nil, err
	}
	ids, err := tokenIDs(c.EOS)
	if err != nil {
		return nil, fmt.Errorf("%s: eos_token_id: %w", filepath.Join(d.Path, name), err)
	}
	return ids, nil
}

// tokenIDs returns an id or a list of ids; none for null or an absent value.
func tokenIDs(raw json.RawMessage) (ids []int, err error) {
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if bytes.HasPrefix(raw, []byte("[")) {
		err = json.Unmarshal(raw, &ids)
	} else {
		ids = make([]int, 1)
		err = json.Unmarshal(raw, &ids[0])
	}
	if err != nil || slices.ContainsFunc(ids, func(id int) bool { return id < 0 }) {
		return nil, fmt.Errorf("%s is neither an id nor a list of them", clip(raw))
	}
	return ids, nil
}

// SpecialIDs returns the ids of one of TokenIDs, such as "eos_token_id". There may be none.
func (c *Config) SpecialIDs(key string) ([]int, error) {
	ids, err := tokenIDs(c.TokenIDs[key])
	if err != nil {
		return nil, fmt.Errorf("%s: %w", key, err)
	}
	return ids, nil
}
