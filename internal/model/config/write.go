package config

import (
	"bytes"
	"maps"
	"slices"
	"strconv"

	"go.yaml.in/yaml/v3"
)

// YAML returns the config as a train.yaml with every key, which Load reads back as an equal Config.
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

// Map returns the config as JSON has it, with the keys of train.yaml.
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

// newSection stands, in visit, for a mapping whose keys follow.
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
		if section == ropeSection {
			if r == nil {
				if !opened[section] {
					opened[section] = true
					fn(section, nil)
				}
				continue
			}
			if !of(k.rope, r.Type) {
				continue
			}
		}
		open(section)
		fn(k.path, k.value(c))
	}
}

// value returns a field as JSON has it; nil for the word null.
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
	case []any:
		list := &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle}
		for _, e := range v {
			list.Content = append(list.Content, valueNode(e))
		}
		return list
	}
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!null", Value: "null"}
}
