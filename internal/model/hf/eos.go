package hf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
)

// Bounds of tokenizer.json, in bytes and in values: the largest known have 40 MB and a million
// words and merges.
const (
	maxTokenizer       = 256 << 20
	maxTokenizerValues = 16 << 20
)

// EOS returns the id of the token that ends a text of the model in a directory: eos_token_id of
// config.json, else of generation_config.json, the first of several, else the id of
// the eos_token of tokenizer_config.json. It is -1 if none of them has it.
func EOS(path string) (int, error) {
	d, err := openDir(path)
	if err != nil {
		return -1, err
	}
	defer d.Close()
	for _, name := range []string{"config.json", "generation_config.json"} {
		if ids, err := d.ends(name); err != nil {
			return -1, err
		} else if len(ids) > 0 {
			return ids[0], nil
		}
	}
	return d.eosOfTokenizer()
}

// Ends returns the ids at each of which a model in a directory stops to write, as generate of
// transformers takes them: all of eos_token_id in generation_config.json, else of config.json, else the
// eos_token of tokenizer_config.json. There may be none.
func Ends(path string) ([]int, error) {
	d, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	for _, name := range []string{"generation_config.json", "config.json"} {
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

// ends returns eos_token_id of a file, if it is there.
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

// decode reads a JSON file, if it is there.
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

// tokenIDs returns an id, or a list of them; none of null and nothing.
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

// eosOfTokenizer looks the eos_token of tokenizer_config.json up among the added tokens of
// tokenizer.json.
func (d *dir) eosOfTokenizer() (int, error) {
	var c struct {
		Token json.RawMessage `json:"eos_token"`
	}
	if ok, err := d.decode("tokenizer_config.json", maxConfig, maxConfigValues, &c); !ok || err != nil {
		return -1, err
	}
	var text string
	if json.Unmarshal(c.Token, &text) != nil {
		var o struct {
			Content string `json:"content"`
		}
		if json.Unmarshal(c.Token, &o) != nil {
			return -1, nil
		}
		text = o.Content
	}
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
