package config

import (
	"strings"

	"go.yaml.in/yaml/v3"
)

// Difference is a key of which two configs have different values, as YAML has them; "null"
// where a config has no such key.
type Difference struct{ Key, Old, New string }

// Differences lists the keys that have other values in c than in old, in the table's order.
func (c *Config) Differences(old *Config) []Difference {
	was, is := old.texts(), c.texts()
	var out []Difference
	for i := range keys {
		k := keys[i].path
		if was[k] != is[k] {
			out = append(out, Difference{k, orNull(was[k]), orNull(is[k])})
		}
	}
	return out
}

func orNull(text string) string {
	if text == "" {
		return "null"
	}
	return text
}

// texts returns the values of all keys, as YAML has them. A key without a value is absent.
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
