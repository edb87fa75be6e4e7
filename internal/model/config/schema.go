package config

import (
	"maps"
	"strings"
	"time"

	"github.com/cprun/cprun/internal/model/hf"
)

// A schema is a JSON schema, or a part of one.
type schema = map[string]any

// Schema returns a JSON schema (draft 2020-12) of train.yaml from the table of keys. It checks each value by itself:
// Load also checks combinations.
func Schema() map[string]any {
	root := object("a run of cprun; see docs/config.md")
	at := map[string]schema{"": root}
	for _, s := range sections {
		at[s.path] = object(s.doc)
	}
	put := func(path string, s schema) {
		section, name := split(path)
		at[section]["properties"].(schema)[name] = s
	}
	for i := range keys {
		put(keys[i].path, keys[i].schema())
	}
	for _, s := range sections {
		at[s.path]["type"] = []string{"object", "null"}
		put(s.path, at[s.path])
	}
	find := func(path string) any {
		section, name := split(path)
		return at[section]["properties"].(schema)[name]
	}
	for other, path := range renames {
		put(other, find(path).(schema))
	}
	for other, path := range renamed {
		old := maps.Clone(find(path).(schema))
		old["deprecated"] = true
		put(other, old)
	}
	for path := range retired {
		put(path, schema{"deprecated": true})
	}
	at["data"]["required"], at["data"]["type"] = []string{"path"}, "object"
	root["$schema"], root["title"] = "https://json-schema.org/draft/2020-12/schema", "train.yaml"
	root["required"] = []string{"data", "model"}
	return root
}

func object(doc string) schema {
	return schema{"type": "object", "description": doc, "properties": schema{}, "additionalProperties": false}
}

// schema returns the schema of a key's values.
func (k *key) schema() schema {
	var forms []schema
	switch k.at(blankConfig()).(type) {
	case *int, *int64:
		forms = k.integers()
	case *[]int:
		forms = []schema{list(schema{"anyOf": k.integers()})}
	case *float64, **float64:
		forms = []schema{k.interval()}
	case *[]float64:
		forms = []schema{list(k.interval())}
	case *[2]float64:
		forms = []schema{{"type": "array", "items": k.interval(), "minItems": 2, "maxItems": 2}}
	case *bool, **bool:
		forms = []schema{{"type": "boolean"}}
	case *time.Duration:
		forms = []schema{{"const": 0}, {"type": "string", "pattern": `^([0-9.]+(ns|us|ms|s|m|h))+$|^0$`}}
	case *[]string:
		forms = []schema{list(k.words())}
	case *hf.Modules:
		forms = []schema{{"type": "string"}, list(schema{"type": "string"})}
	case *hf.Patterns:
		forms = []schema{{"type": "object", "additionalProperties": schema{"type": "number"}}}
	case *Files:
		entry := object("a source of a mixture")
		entry["required"] = []string{"path"}
		entry["properties"] = schema{"path": schema{"type": "string"}, "weight": schema{"type": "number"}}
		forms = []schema{{"type": "string"}, list(schema{"anyOf": []schema{{"type": "string"}, entry}})}
	default: // text
		forms = []schema{k.words()}
	}
	if strings.HasPrefix(k.path, "lora.layers_") { // PEFT takes one by itself
		forms = append(forms, forms[0]["items"].(schema))
	}
	switch k.word {
	case "auto":
		forms = append(forms, schema{"const": "auto"})
	case "null":
		forms = append(forms, schema{"type": "null"})
	}
	s := schema{"anyOf": forms}
	if len(forms) == 1 {
		s = forms[0]
	}
	s["description"] = k.doc
	if n, err := parseValue(k.def); err == nil && k.def != "" {
		var def any
		if n.Decode(&def) == nil {
			s["default"] = def
		}
	}
	return s
}

func list(of schema) schema { return schema{"type": "array", "items": of} }

func (k *key) words() schema {
	if len(k.allowed()) > 0 {
		return schema{"enum": k.allowed()}
	}
	return schema{"type": "string"}
}

// integers returns the forms of an integer: as it is, and with a suffix.
func (k *key) integers() []schema {
	return []schema{{"type": "integer", "minimum": k.min, "maximum": k.max},
		{"type": "string", "pattern": "^[0-9]+(_[0-9]+)*[KMGT]$|^[0-9]+(_[0-9]+)+$"}}
}

func (k *key) interval() schema {
	s := schema{"type": "number"}
	lo, hi, ok := strings.Cut(k.within, ", ")
	for word, bound := range map[string]string{"inimum": lo, "aximum": hi} {
		v, err := ParseFloat(strings.Trim(bound, "[()]"))
		if !ok || err != nil { // inf
			continue
		}
		if strings.ContainsAny(bound, "[]") {
			s["m"+word] = v
		} else {
			s["exclusiveM"+word] = v
		}
	}
	return s
}
