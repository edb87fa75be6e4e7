package hf

import (
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
)

// Bounds of tokenizer.json, in bytes and in values: the largest known have 40 MB and a million
// words and merges.
const (
	maxTokenizer       = 256 << 20
	maxTokenizerValues = 16 << 20
)

// EOS returns the id of the token that ends a text of the model in a directory: eos_token_id of
// config.json, else of generation_config.json, the first where they list several, else the id of
// the eos_token of tokenizer_config.json. It is -1 where none of them says.
func EOS(path string) (int, error) {
	d, err := openDir(path)
	if err != nil {
		return -1, err
	}
	defer d.Close()
	for _, name := range []string{"config.json", "generation_config.json"} {
		var c struct {
			EOS json.RawMessage `json:"eos_token_id"`
		}
		if ok, err := d.decode(name, maxConfig, maxConfigValues, &c); err != nil {
			return -1, err
		} else if !ok {
			continue
		}
		if id, err := firstID(c.EOS); err != nil {
			return -1, fmt.Errorf("%s: eos_token_id: %w", filepath.Join(path, name), err)
		} else if id >= 0 {
			return id, nil
		}
	}
	return d.eosOfTokenizer()
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

// firstID is an id, or the first of a list of them; -1 for null and nothing.
func firstID(raw json.RawMessage) (int, error) {
	if len(raw) == 0 || string(raw) == "null" {
		return -1, nil
	}
	ids := make([]int, 1)
	var err error
	if bytes.HasPrefix(raw, []byte("[")) {
		err = json.Unmarshal(raw, &ids)
	} else {
		err = json.Unmarshal(raw, &ids[0])
	}
	if err != nil || len(ids) > 0 && ids[0] < 0 {
		return -1, fmt.Errorf("%s is neither an id nor a list of them", clip(raw))
	}
	if len(ids) == 0 {
		return -1, nil
	}
	return ids[0], nil
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
