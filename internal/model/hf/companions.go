package hf

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/terminal"
)

// companions lists the files of a model directory that training does not change: the tokenizer in its forms, and
// generation settings.
var companions = []string{
	"generation_config.json", "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
	"added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json",
}

// Companions lists the tokenizer's files and generation_config.json of a model directory. The error reports the
// directory or unreadable files in it.
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

// templatesDir is the directory with additional chat templates.
const templatesDir = "additional_chat_templates"

const maxTemplates = 100

// templates lists the files of templatesDir, if it exists.
func (d *dir) templates() (names []string) {
	f, err := d.root.Open(filepath.Join(d.sub, templatesDir))
	if err != nil {
		return nil
	}
	defer f.Close()
	entries, _ := f.ReadDir(maxTemplates) // none for a file
	for _, e := range entries {
		if filepath.Ext(e.Name()) == ".jinja" {
			names = append(names, templatesDir+"/"+e.Name())
		}
	}
	slices.Sort(names)
	return names
}

// maxCompanion bounds each of these files in bytes.
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

func (m Model) copyCompanions(to *os.Root) error {
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
	return files.Write(to, filepath.Base(name), func(w io.Writer) error {
		_, err := io.Copy(w, io.LimitReader(src, maxCompanion))
		return err
	})
}

// These bounds of tokenizer.json are its bytes and its values. The largest known have 40 MB and a million words and
// merges.
const (
	maxTokenizer       = 256 << 20
	maxTokenizerValues = 16 << 20
)

// EOS returns the id of the token that ends a text of the model in a directory: eos_token_id of config.json, else of
// generation_config.json (the first of several), else the eos_token of tokenizer_config.json; -1 without any.
func EOS(path string) (int, error) {
	ids, err := endIDs(path, "config.json", "generation_config.json")
	if err != nil || len(ids) == 0 {
		return -1, err
	}
	return ids[0], nil
}

// Ends returns the ids at which the model in a directory stops to generate, as in transformers: all of eos_token_id in
// generation_config.json, else of config.json, else the eos_token of tokenizer_config.json. There may be none.
func Ends(path string) ([]int, error) { return endIDs(path, "generation_config.json", "config.json") }

// endIDs returns eos_token_id of the first file that has one, else the eos_token of the tokenizer.
func endIDs(path string, files ...string) ([]int, error) {
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, name := range files {
		if ids, err := d.ends(name); err != nil || len(ids) > 0 {
			return ids, err
		}
	}
	id, err := d.eosOfTokenizer()
	if err != nil || id < 0 {
		return nil, err
	}
	return []int{id}, nil
}

// ends returns eos_token_id of a file, if present.
func (d *dir) ends(name string) ([]int, error) {
	var c struct {
		EOS json.RawMessage `json:"eos_token_id"`
	}
	if ok, err := d.decode(name, maxConfig, maxConfigValues, &c); !ok || err != nil {
		return nil, err
	}
	ids, err := tokenIDs(c.EOS)
	if err != nil {
		return nil, fmt.Errorf("%s: eos_token_id: %w", filepath.Join(d.path, name), err)
	}
	return ids, nil
}

// decode reads a JSON file, if present.
func (d *dir) decode(name string, limit int64, values int, v any) (bool, error) {
	if !d.exists(name) {
		return false, nil
	}
	raw, err := d.readJSON(name, limit, values)
	if err != nil {
		return false, err
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return false, fmt.Errorf("%s: %w", filepath.Join(d.path, name), err)
	}
	return true, nil
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

// eosOfTokenizer finds the id of the eos_token in tokenizer_config.json among the added tokens of tokenizer.json.
func (d *dir) eosOfTokenizer() (int, error) {
	var c struct {
		Token json.RawMessage `json:"eos_token"`
	}
	if ok, err := d.decode("tokenizer_config.json", maxConfig, maxConfigValues, &c); !ok || err != nil {
		return -1, err
	}
	text := tokenText(c.Token)
	var t struct {
		Added []struct {
			ID      int    `json:"id"`
			Content string `json:"content"`
		} `json:"added_tokens"`
	}
	if ok, err := d.decode("tokenizer.json", maxTokenizer, maxTokenizerValues, &t); !ok || err != nil {
		return -1, err
	}
	for _, a := range t.Added {
		if text != "" && a.Content == text && a.ID >= 0 {
			return a.ID, nil
		}
	}
	return -1, nil
}
