package chat

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
)

// Bounds of JSON files, in bytes and values.
const (
	maxConfig = 4 << 20
	maxValues = 1 << 18
)

// A Source is the text of the templates beside a tokenizer.
type Source struct {
	Templates map[string]string // Jinja by name; "default" for the only one
	Paths     map[string]string // their files, by name
	Tokens    map[string]string // special tokens, such as "bos_token"
}

// tokenNames lists the special tokens that a template may name.
var tokenNames = []string{"bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"}

// ReadSource reads the chat templates and special tokens beside a tokenizer.json. As in transformers,
// chat_template.jinja has precedence over tokenizer_config.json.
func ReadSource(path string) (*Source, error) {
	d, err := files.OpenRepo(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	c := &Source{map[string]string{}, map[string]string{}, map[string]string{}}
	for _, name := range []string{"special_tokens_map.json", "tokenizer_config.json"} {
		var keys map[string]json.RawMessage
		if _, err := d.Decode(name, maxConfig, maxValues, &keys); err != nil {
			return nil, err
		}
		for _, token := range tokenNames {
			if text := tokenText(keys[token]); text != "" {
				c.Tokens[token] = text
			}
		}
		if err := c.add(filepath.Join(path, name), keys["chat_template"]); err != nil {
			return nil, err
		}
	}
	for _, name := range append([]string{"chat_template.jinja"}, d.Templates()...) {
		if !d.Exists(name) {
			continue
		}
		raw, err := d.ReadJSON(name, MaxTemplate, MaxTemplate) // any text
		if err != nil {
			return nil, err
		}
		key := "default"
		if filepath.Dir(name) == files.TemplatesDir {
			key = strings.TrimSuffix(filepath.Base(name), ".jinja")
		}
		c.Templates[key], c.Paths[key] = string(raw), filepath.Join(path, name)
	}
	return c, nil
}

// add adds the value of chat_template: a template, or a list of them with names.
func (c *Source) add(path string, raw json.RawMessage) error {
	var only string
	if json.Unmarshal(raw, &only) == nil && only != "" {
		c.Templates["default"], c.Paths["default"] = only, path
		return nil
	}
	var named []struct{ Name, Template string }
	if raw == nil || string(raw) == "null" || only != "" {
		return nil
	}
	if err := json.Unmarshal(raw, &named); err != nil {
		return fmt.Errorf("%s: chat_template is neither a text nor a list of name and template", path)
	}
	for _, t := range named {
		c.Templates[t.Name], c.Paths[t.Name] = t.Template, path
	}
	return nil
}

// tokenText returns the text of a special token: a string, or an object with content.
func tokenText(raw json.RawMessage) string {
	var text string
	if json.Unmarshal(raw, &text) != nil {
		var o struct{ Content string }
		if json.Unmarshal(raw, &o) == nil {
			return o.Content
		}
	}
	return text
}
