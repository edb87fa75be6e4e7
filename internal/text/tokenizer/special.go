package tokenizer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// maxBeside bounds each file beside a tokenizer.json in bytes.
const maxBeside = 16 << 20

// Beside lists the files that transformers reads with a tokenizer.json. Some may be absent.
func Beside(path string) (paths []string) {
	if filepath.Base(path) == "tokenizer.json" { // a file with another name stands alone
		for _, name := range []string{"tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"} {
			paths = append(paths, filepath.Join(filepath.Dir(path), name))
		}
	}
	return paths
}

// named lists the special tokens that transformers knows, in its order.
var named = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

const (
	decoderKey = "added_tokens_decoder"
	extraKey   = "extra_special_tokens"
	olderExtra = "additional_special_tokens"
	splitKey   = "split_special_tokens"
)

// Settings are the tokens that the files beside a tokenizer.json add to it.
type Settings struct {
	added []addedToken      // to add, in this order
	extra []addedToken      // to add after those if they are new
	named map[string]string // text by name, such as "eos_token"
	split bool              // special tokens inside a text are not parsed
}

// ReadSettings reads the files beside a tokenizer.json as transformers 5 does. If tokenizer_config.json has
// added_tokens_decoder, it replaces the others.
func ReadSettings(path string) (*Settings, error) {
	var all object
	s := &Settings{named: map[string]string{}}
	for _, path := range Beside(path) {
		raw, err := files.Read(path, maxBeside)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = s.read(filepath.Base(path), raw, &all)
		}
		if pe := (*fs.PathError)(nil); errors.As(err, &pe) {
			err = pe.Err
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		if all.values[decoderKey] != nil {
			break
		}
	}
	return s, nil
}

// read adds a file to all keys, and reads these again.
func (s *Settings) read(name string, raw []byte, all *object) (err error) {
	if name == "added_tokens.json" {
		return s.readAdded(raw)
	}
	if err = all.read(raw); err != nil {
		return err
	}
	*s = Settings{named: map[string]string{}}
	extra, others := all.values[extraKey], named
	if slices.Contains([]string{"", "[]", "{}"}, string(extra)) {
		extra = all.values[olderExtra]
	}
	for _, key := range all.keys {
		if strings.HasSuffix(key, "_token") && !slices.Contains(others, key) && all.values[key][0] == '"' {
			others = append(slices.Clip(others), key) // a model's own
		}
	}
	for _, key := range others {
		s.take(&err, key, all.values[key])
	}
	if len(extra) > 0 && extra[0] == '{' {
		var list object
		err = errors.Join(err, list.read(extra))
		for _, key := range list.keys {
			s.take(&err, key, list.values[key])
		}
	} else if len(extra) > 0 {
		var list []json.RawMessage
		err = errors.Join(err, json.Unmarshal(extra, &list))
		for _, raw := range list {
			s.take(&err, "", raw)
		}
	}
	if raw := all.values[splitKey]; raw != nil {
		err = errors.Join(err, json.Unmarshal(raw, &s.split))
	}
	if raw := all.values[decoderKey]; raw != nil {
		err = errors.Join(err, s.readDecoder(raw))
	}
	return err
}

// take adds a special token with or without a name.
func (s *Settings) take(err *error, name string, raw json.RawMessage) {
	if len(raw) == 0 || string(raw) == "null" {
		return
	}
	var t addedToken
	if json.Unmarshal(raw, &t.Content) == nil {
		t.Special = true
	} else if e := json.Unmarshal(raw, &t); e != nil || t.Content == "" {
		*err = errors.Join(*err, fmt.Errorf("%s: %.60s is neither a text nor an object with content", name, raw))
	} else {
		t.Special = t.Special || name != "" || !bytes.Contains(raw, []byte(`"__type"`))
	}
	if name != "" {
		s.named[name] = t.Content
	}
	s.extra = append(s.extra, t)
}

// readDecoder reads tokens by their ids, which only order them.
func (s *Settings) readDecoder(raw json.RawMessage) error {
	byID := map[int32]addedToken{}
	if err := json.Unmarshal(raw, &byID); err != nil {
		return fmt.Errorf("%s: %w", decoderKey, err)
	}
	for id, t := range byID {
		t.ID = id
		s.added = append(s.added, t)
	}
	return nil
}

// readAdded reads added_tokens.json: ids by token.
func (s *Settings) readAdded(raw []byte) error {
	ids := map[string]int32{}
	if err := json.Unmarshal(raw, &ids); err != nil {
		return err
	}
	for text, id := range ids {
		special := slices.ContainsFunc(s.extra, func(t addedToken) bool { return t.Content == text })
		s.added = append(s.added, addedToken{Content: text, ID: id, Special: special})
	}
	return nil
}

// Special returns the text of a special token by its name, such as "eos_token"; "" for none.
func (s *Settings) Special(name string) string { return s.named[name] }

// Extend adds the tokens of the settings. As in transformers new ones get the next free ids, whatever ids the files
// have. It must not run beside encoders.
func (t *Tokenizer) Extend(s *Settings) error {
	slices.SortFunc(s.added, func(a, b addedToken) int { return int(a.ID) - int(b.ID) })
	for _, a := range s.added {
		normalized := or(a.Normalized, !a.Special)
		a.Normalized = &normalized
		for _, text := range s.named {
			a.Special = a.Special || text == a.Content
		}
		t.add(a)
	}
	for _, a := range s.extra {
		if _, known := t.added[a.Content]; !known {
			t.add(a)
		}
	}
	t.raw.split, t.normal.split = s.split, s.split
	return t.index()
}

// An object is a JSON object whose keys keep their order.
type object struct {
	keys   []string
	values map[string]json.RawMessage
}

// read adds the keys of an object, or replaces their values. It drops null.
func (o *object) read(raw []byte) error {
	d := json.NewDecoder(bytes.NewReader(raw))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return errors.Join(errors.New("not a JSON object"), err)
	}
	if o.values == nil {
		o.values = map[string]json.RawMessage{}
	}
	for d.More() {
		key, err := d.Token()
		var value json.RawMessage
		if err == nil {
			err = d.Decode(&value)
		}
		if err != nil {
			return err
		}
		name := key.(string)
		if string(value) == "null" {
			continue
		}
		if o.values[name] == nil {
			o.keys = append(o.keys, name)
		}
		o.values[name] = value
	}
	return nil
}

// Load reads a tokenizer.json and the files beside it.
func Load(path string) (*Tokenizer, error) {
	raw, err := files.Read(path, MaxFile)
	if err == nil {
		err = files.Fetched(raw)
	}
	if err != nil {
		return nil, err
	}
	t, err := Parse(raw)
	if err != nil {
		return nil, err
	}
	s, err := ReadSettings(path)
	if err == nil {
		err = t.Extend(s)
	}
	return t, err
}

// EOS returns the eos_token beside a tokenizer.json and its id; -1 without one, or without a tokenizer.json that can be
// read. If the token is among the added tokens, EOS reads no more of the file than these.
func EOS(path string) (text string, id int, err error) {
	s, err := ReadSettings(path)
	if err != nil || s.Special("eos_token") == "" {
		return "", -1, err
	}
	text = s.Special("eos_token")
	for _, t := range addedOf(path) {
		if t.Content == text {
			return text, int(t.ID), nil
		}
	}
	t, err := Load(path)
	if err != nil {
		return "", -1, nil // reported when a text needs it
	}
	id, _ = t.ID(text)
	return text, id, nil
}

// addedOf returns the added tokens of a tokenizer.json; nil if they cannot be read.
func addedOf(path string) (list []addedToken) {
	f, err := files.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	d := json.NewDecoder(io.LimitReader(f, MaxFile))
	if begin, err := d.Token(); err != nil || begin != json.Delim('{') {
		return nil
	}
	for d.More() {
		key, err := d.Token()
		var other json.RawMessage
		if err == nil && key == "added_tokens" {
			err = d.Decode(&list)
		} else if err == nil {
			err = d.Decode(&other)
		}
		if err != nil || list != nil {
			return list
		}
	}
	return nil
}
