package config

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/cprun/cprun/internal/model/hf"
)

// Document is another YAML file under the rules of train.yaml: no aliases, anchors, tags or second documents, and every
// fault with its line.
type Document struct {
	Root *yaml.Node // its mapping; nil is a fault
	src  *source
	name string
}

// ReadDocument parses the text of a file. For errors, least describes the missing contents of an empty file, and want
// the expected ones.
func ReadDocument(name string, text []byte, least, want string) *Document {
	src := newSource(newFaults(&positions{file: name, keys: map[string]position{}}))
	d := &Document{src: src, name: name}
	d.Root = src.parse(name, text, least, want)
	return d
}

// Faultf adds a fault at the line of a node; nil is the first line.
func (d *Document) Faultf(n *yaml.Node, key, format string, args ...any) {
	line := 1
	if n != nil {
		line = max(n.Line, 1)
	}
	d.src.addAt(position{d.name, line}, key, format, args...)
}

// Full reports whether there are more faults than Err returns, so that the caller can stop.
func (d *Document) Full() bool { return len(d.src.list) > maxFaults }

// Add adds faults that are not listed yet.
func (d *Document) Add(list Errors) {
	for _, f := range list {
		if !d.Full() && !slices.Contains(d.src.list, f) {
			d.src.list = append(d.src.list, f)
		}
	}
}

// Locate returns the faults of a config loaded with flags from this file. A fault of a flag gets the line of the flag.
func (d *Document) Locate(err error, lineOf func(key string) int) Errors {
	var list Errors
	if !errors.As(err, &list) {
		return Errors{{File: d.name, Line: 1, Msg: err.Error()}}
	}
	list = slices.Clone(list)
	for i := range list {
		flag, ok := strings.CutPrefix(list[i].File, "--set ")
		if !ok || list[i].Line > 0 {
			continue
		}
		path, _, _ := strings.Cut(flag, "=")
		if line := lineOf(path); line > 0 {
			list[i].File, list[i].Line = d.name, line
		}
	}
	return list
}

// Err returns the faults sorted by line, as Errors, or nil.
func (d *Document) Err() error { return d.src.err() }

// IsSection reports whether a path names a section of train.yaml.
func IsSection(path string) bool { return isSection[path] }

// UnknownKey returns the message for a path that train.yaml lacks, with the nearest key; "" for a known path.
func UnknownKey(path string) string {
	if keyAt[path] != nil {
		return ""
	}
	if isSection[path] {
		return "it is a section; its keys are " + strings.Join(childrenOf[path], ", ")
	}
	section, name := split(path)
	msg, _ := unknownKey(section, name)
	return msg
}

// ReadValue reads a value of one key of train.yaml. It returns the value for JSON and the value for --set. The error
// names the value found and the one wanted.
func ReadValue(path string, n *yaml.Node) (value any, flag string, err error) {
	k := keyAt[path]
	if k == nil {
		return nil, "", errors.New(UnknownKey(path))
	}
	c := blankConfig()
	if err := k.decode(n, c); err != nil {
		return nil, "", err
	}
	value = k.value(c)
	if text, ok := value.(string); ok {
		if flag = path + "=" + text; text == "null" { // the flag would read this text as null
			return nil, "", fmt.Errorf("found the text %s; want another", quoted(text))
		}
		return value, flag, nil
	}
	text, err := yaml.Marshal(valueNode(value)) // on one line
	return value, path + "=" + strings.TrimSpace(string(text)), err
}

// Default returns the default of a key, as JSON has it; ok is false for a key that must be given.
func Default(path string) (value any, ok bool) {
	k, n := keyAt[path], yaml.Node{}
	if k == nil || k.def == "" || yaml.Unmarshal([]byte(k.def), &n) != nil {
		return nil, false
	}
	value, _, err := ReadValue(path, n.Content[0])
	return value, err == nil
}

// Difference is a key with different values in two configs, as YAML writes them; "null" for an absent one.
type Difference struct{ Key, Old, New string }

// Differences lists the keys with other values in c than in old, in the table's order.
func (c *Config) Differences(old *Config) []Difference {
	was, is := old.texts(), c.texts()
	var out []Difference
	for i := range keys {
		k := keys[i].path
		if was[k] != is[k] {
			out = append(out, Difference{k, cmp.Or(was[k], "null"), cmp.Or(is[k], "null")})
		}
	}
	return out
}

// texts returns the values of all keys as YAML. Keys without a value are absent.
func (c *Config) texts() map[string]string {
	out := map[string]string{}
	c.visit(func(path string, value any) {
		if value == nil || value == (newSection{}) {
			return
		}
		text, err := yaml.Marshal(valueNode(value))
		if err != nil {
			panic("config: a plain value does not encode: " + err.Error())
		}
		out[path] = strings.TrimSpace(string(text))
	})
	return out
}

// YAML returns the config as a train.yaml with every key. Load reads it back as an equal Config.
func (c *Config) YAML() []byte {
	root := &yaml.Node{Kind: yaml.MappingNode}
	mappings := map[string]*yaml.Node{"": root}
	c.visit(func(path string, value any) {
		section, name := split(path)
		node := valueNode(value)
		if value == (newSection{}) {
			node = &yaml.Node{Kind: yaml.MappingNode}
			mappings[path] = node
		}
		in := mappings[section]
		in.Content = append(in.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name}, node)
	})
	var b bytes.Buffer
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(root); err != nil {
		panic("config: a tree of plain values does not encode: " + err.Error())
	}
	return b.Bytes()
}

// Map returns the config for JSON, with the keys of train.yaml.
func (c *Config) Map() map[string]any {
	root := map[string]any{}
	mappings := map[string]map[string]any{"": root}
	c.visit(func(path string, value any) {
		section, name := split(path)
		if value == (newSection{}) {
			mappings[path] = map[string]any{}
			value = mappings[path]
		}
		mappings[section][name] = value
	})
	return root
}

// In visit, newSection is the value of a section; its keys follow.
type newSection struct{}

// visit calls fn for every section and key in the table's order, a section before its keys.
func (c *Config) visit(fn func(path string, value any)) {
	opened := map[string]bool{"": true}
	var open func(section string)
	open = func(section string) {
		if opened[section] {
			return
		}
		opened[section] = true
		outer, _ := split(section)
		open(outer)
		fn(section, newSection{})
	}
	r := c.Model.RopeScaling
	for i := range keys {
		k := &keys[i]
		section, _ := split(k.path)
		if c.lacks(section) {
			if !opened[section] {
				opened[section] = true
				fn(section, nil)
			}
			continue
		}
		if section == ropeSection && !k.json.OfRope(r.Type) {
			continue
		}
		open(section)
		fn(k.path, k.value(c))
	}
}

// value returns a field for JSON; nil for the word null.
func (k *key) value(c *Config) any {
	field := k.at(c)
	if k.isUnset(field) {
		if k.word == "auto" {
			return "auto"
		}
		return nil
	}
	return k.kind(field).value(field)
}

func valueNode(value any) *yaml.Node {
	switch v := value.(type) {
	case int64:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.FormatInt(v, 10)}
	case float64:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!float", Value: formatFloat(v)}
	case bool:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!bool", Value: strconv.FormatBool(v)}
	case string:
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: v}
	case map[string]any: // of Files
		m := &yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}
		for _, name := range slices.Sorted(maps.Keys(v)) {
			m.Content = append(m.Content, &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: name},
				valueNode(v[name]))
		}
		return m
	case hf.Patterns: // JSON is YAML, and keeps the order
		text, err := v.MarshalJSON()
		n, notYAML := parseValue(string(text))
		if err != nil || notYAML != nil {
			panic("config: patterns do not encode")
		}
		return n
	case []any:
		list := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for _, e := range v {
			list.Content = append(list.Content, valueNode(e))
		}
		return list
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null"}
}
