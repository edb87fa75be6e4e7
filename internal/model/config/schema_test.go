package config

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// invalid returns a place at which a value breaks a schema, or "". It fails for unknown keywords.
func invalid(t *testing.T, s map[string]any, v any, at string) string {
	t.Helper()
	number, isNumber := v.(float64)
	text, isText := v.(string)
	list, isList := v.([]any)
	object, isObject := v.(map[string]any)
	is := map[string]bool{"null": v == nil, "number": isNumber, "integer": isNumber && number == math.Trunc(number),
		"string": isText, "array": isList, "object": isObject, "boolean": reflect.ValueOf(v).Kind() == reflect.Bool}
	for word, want := range s {
		good := true
		bound, _ := want.(float64)
		switch word {
		case "$schema", "title", "description", "default", "deprecated", "properties":
		case "type":
			if one, ok := want.(string); ok {
				want = []any{one}
			}
			good = slices.ContainsFunc(want.([]any), func(w any) bool { return is[w.(string)] })
		case "const":
			good = reflect.DeepEqual(v, want)
		case "enum":
			good = slices.Contains(want.([]any), v)
		case "anyOf":
			good = slices.ContainsFunc(want.([]any), func(w any) bool {
				return invalid(t, w.(map[string]any), v, at) == ""
			})
		case "minimum":
			good = !isNumber || number >= bound
		case "maximum":
			good = !isNumber || number <= bound
		case "exclusiveMinimum":
			good = !isNumber || number > bound
		case "exclusiveMaximum":
			good = !isNumber || number < bound
		case "minItems":
			good = !isList || len(list) >= int(bound)
		case "maxItems":
			good = !isList || len(list) <= int(bound)
		case "pattern":
			good = !isText || regexp.MustCompile(want.(string)).MatchString(text)
		case "required":
			for _, name := range want.([]any) {
				_, has := object[name.(string)]
				good = good && (!isObject || has)
			}
		case "items":
			for i, e := range list {
				if where := invalid(t, want.(map[string]any), e, fmt.Sprintf("%s[%d]", at, i)); where != "" {
					return where
				}
			}
		case "additionalProperties":
			known, _ := s["properties"].(map[string]any)
			for name, value := range object {
				of, ok := known[name].(map[string]any)
				if rest, isSchema := want.(map[string]any); !ok && isSchema {
					of, ok = rest, true
				}
				if !ok {
					return at + "." + name + ": additionalProperties"
				}
				if where := invalid(t, of, value, at+"."+name); where != "" {
					return where
				}
			}
		default:
			t.Fatalf("%s: the test does not know %s", at, word)
		}
		if !good {
			return at + ": " + word
		}
	}
	return ""
}

// viaJSON returns a value in the types of encoding/json.
func viaJSON[T any](t *testing.T, v any) (out T) {
	t.Helper()
	text, err := json.Marshal(v)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func ofYAML(t *testing.T, text string) any {
	t.Helper()
	var v any
	if err := yaml.Unmarshal([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return viaJSON[any](t, v)
}

// The schema accepts the examples, the good cases of other tests, and resolved configs.
func TestConfigsObeyTheSchema(t *testing.T) {
	s := viaJSON[map[string]any](t, Schema())
	var files []string
	for _, glob := range []string{"testdata/*.good.yaml", "testdata/*.resolved.yaml", "../../../examples/*.yaml",
		"../../../examples/*/*.yaml"} {
		found, err := filepath.Glob(glob)
		if err != nil || len(found) < 2 {
			t.Fatal(glob, found, err)
		}
		files = append(files, found...)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains("\n"+string(text), "\nbase:") || strings.HasPrefix(filepath.Base(file), "flags") {
			continue // an experiment, or faults that flags replace
		}
		if where := invalid(t, s, ofYAML(t, string(text)), ""); where != "" {
			t.Errorf("%s: %s", file, where)
		}
	}
}

// The schema has every key and section with its help and a valid default, and no others.
func TestSchemaHasEveryKey(t *testing.T) {
	s := viaJSON[map[string]any](t, Schema())
	of := func(path string) map[string]any {
		node := s
		for name := range strings.SplitSeq(path, ".") {
			list, _ := node["properties"].(map[string]any)
			node, _ = list[name].(map[string]any)
		}
		return node
	}
	for i := range keys {
		k := &keys[i]
		node := of(k.path)
		if node == nil || node["description"] != k.doc {
			t.Errorf("%s: %v", k.path, node)
			continue
		}
		if def, has := node["default"]; has != (k.def != "") || has && invalid(t, node, def, k.path) != "" {
			t.Errorf("%s: the default %v of %v", k.path, def, node)
		}
		for _, word := range k.allowed() {
			where, inList := invalid(t, node, word, k.path), invalid(t, node, []any{word}, k.path)
			if where != "" && inList != "" {
				t.Error(where, inList)
			}
		}
	}
	for _, section := range sections {
		node := of(section.path)
		if node == nil || node["description"] != section.doc {
			t.Errorf("%s: %v", section.path, node)
			continue
		}
		for name := range node["properties"].(map[string]any) {
			path := join(section.path, name)
			if keyAt[path] == nil && !isSection[path] && cmp.Or(renames[path], renamed[path]) == "" && retired[path] == nil {
				t.Errorf("%s is no key", path)
			}
		}
	}
}

// The schema refuses faults that an editor should mark.
func TestSchemaRefuses(t *testing.T) {
	s := viaJSON[map[string]any](t, Schema())
	// whole adds the keys that every config needs.
	whole := func(text string) any {
		v := ofYAML(t, text).(map[string]any)
		if v["model"] == nil {
			v["model"] = map[string]any{"from": "hf"}
		}
		d, _ := v["data"].(map[string]any)
		v["data"] = map[string]any{"path": "a.txt"}
		maps.Copy(v["data"].(map[string]any), d)
		return v
	}
	for _, text := range []string{"data: {seq_len: 128K}", "data: {seq_len: 1_000_000}", "lora: null", "lora: {r: 8}",
		"lora: {layers_to_transform: 3}", "lora: {layers_pattern: h}", "train: {freeze: [a]}", "lora: {targets: all-linear}", "lora: {rank_pattern: {q_proj: 3}}",
		"optimizer: {betas: [0.9, 0.95]}", "checkpoint: {interval: 1h30m}", "checkpoint: {interval: 0, async: auto}",
		"memory: {reserve: 4G}", "parallel: {ulysses_degree: 2, inner: 2}", "train:",
		"data: {validation: {path: [a, {path: b, weight: 2}]}}"} {
		if where := invalid(t, s, whole(text), ""); where != "" {
			t.Errorf("%s: %s", text, where)
		}
	}
	for text, want := range map[string]string{
		"data: {seq_length: 4}":                   ".data.seq_length: additionalProperties",
		"data: {seq_len: 128k}":                   ".data.seq_len: anyOf",
		`data: {seq_len: "4096"}`:                 ".data.seq_len: anyOf",
		"train: {freeze: model.*}":                ".train.freeze: type",
		"data: {path: [{weight: 2}]}":             ".data.path: anyOf",
		"data: {seq_len: 0}":                      ".data.seq_len: anyOf",
		"data: {validation: {path: [{file: x}]}}": ".data.validation.path: anyOf",
		"trian: {}":                               ".trian: additionalProperties",
		"optimizer: {betas: [0.9]}":               ".optimizer.betas: minItems",
		"optimizer: {betas: [0.9, 1.0]}":          ".optimizer.betas[1]: exclusiveMaximum",
		"optimizer: {lr: -1.0}":                   ".optimizer.lr: minimum",
		"optimizer: {lr: high}":                   ".optimizer.lr: type",
		"parallel: {layout: spiral}":              ".parallel.layout: enum",
		"checkpoint: {interval: 15}":              ".checkpoint.interval: anyOf",
		"checkpoint: {best: yes please}":          ".checkpoint.best: type",
		"lora: {rank_pattern: {q: a}}":            ".lora.rank_pattern: anyOf",
		"model: {}":                               "",
		"train: [3]":                              ".train: type",
	} {
		if where := invalid(t, s, whole(text), ""); where != want {
			t.Errorf("%s: %q, want %q", text, where, want)
		}
	}
	for text, want := range map[string]string{"data: {path: x}": ": required", "model: {from: x}": ": required",
		"model: {from: x}\ndata: {seq_len: 3}": ".data: required"} {
		if where := invalid(t, s, ofYAML(t, text), ""); where != want {
			t.Errorf("%s: %q, want %q", text, where, want)
		}
	}
}
