package config

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/terminal"
)

// TestReference compares docs/config.md with the table of keys.
func TestReference(t *testing.T) {
	const file, begin, end = "../../../docs/config.md",
		"<!-- keys: written by go test ./internal/model/config -update -->\n\n", "<!-- end of keys -->"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, ok := strings.Cut(string(text), begin)
	got, after, ended := strings.Cut(rest, end)
	if !ok || !ended {
		t.Fatalf("%s has no lines %q and %q", file, begin, end)
	}
	if *update {
		if err := os.WriteFile(file, []byte(before+begin+reference()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got != reference() {
		t.Errorf("%s is not what the table of keys says; run go test ./internal/model/config -update", file)
	}
}

// reference returns the generated part of docs/config.md: the keys by section with default, other values and meaning.
// The schema describes the keys of config.json that only some families have.
func reference() string {
	wrap := func(text string) string { return strings.ReplaceAll(terminal.Wrap(text, 120, 1), "\n ", "\n") }
	page := regexp.MustCompile(`docs/(\w+)\.md`)
	var b strings.Builder
	for _, s := range sections {
		fmt.Fprintf(&b, "### %s\n\n%s\n\n", s.path, wrap(s.doc))
		if s.path == ropeSection {
			b.WriteString(ropes())
			continue
		}
		more := false
		b.WriteString("| key | other values | meaning |\n|---|---|---|\n")
		for i := range keys {
			k := &keys[i]
			section, _ := split(k.path)
			switch {
			case section != s.path:
			case k.json != nil && k.json.OfSome():
				more = true
			default:
				fmt.Fprintf(&b, "| %s | %s | %s |\n", k.defaulted(), k.others(), page.ReplaceAllString(k.doc, "[$1]($1.md)"))
			}
		}
		if more {
			b.WriteString("\nSome families have more keys, as in transformers; `cprun config --schema` describes them.\n")
		}
		b.WriteString("\n")
	}
	return b.String()
}

// ropes returns the keys of each type of rope scaling.
func ropes() string {
	var b strings.Builder
	b.WriteString("| `rope_type` | needed keys | optional keys |\n|---|---|---|\n")
	for _, kind := range keyAt[ropeSection+".rope_type"].allowed() {
		var needed, optional []string
		for i := range keys {
			k := &keys[i]
			if section, name := split(k.path); section != ropeSection || name == "rope_type" {
				continue
			}
			if k.json.NeededBy(kind) {
				needed = append(needed, k.defaulted())
			} else if k.json.OfRope(kind) {
				optional = append(optional, k.defaulted())
			}
		}
		fmt.Fprintf(&b, "| %s | %s | %s |\n", kind, strings.Join(needed, ", "), strings.Join(optional, ", "))
	}
	return b.String() + "\n"
}

// others returns the values of a key besides its default, with their bounds.
func (k *key) others() string {
	if words := k.allowed(); len(words) > 0 && k.json == nil {
		return strings.Join(slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == k.def }), ", ")
	}
	kind := strings.TrimPrefix(strings.TrimPrefix(k.wanted(), "an "), "a ")
	word := ""
	if k.word != "" {
		kind = strings.TrimSuffix(strings.TrimSuffix(kind, " or "+k.word), ",")
		if k.word != k.def {
			word = ", " + k.word
		}
	}
	switch k.at(blankConfig()).(type) {
	case *bool, **bool:
		return strings.Join(slices.DeleteFunc([]string{"true", "false"}, func(w string) bool { return w == k.def }), ", ")
	case *float64, **float64, *[2]float64:
		return kind + " in " + k.within + word
	case *int, *int64:
		if k.max < maxHeads {
			return fmt.Sprintf("%s, %d to %d", kind, k.min, k.max) + word
		}
		return fmt.Sprintf("%s ≥ %d", kind, k.min) + word
	}
	return kind + word
}

// defaulted returns the name of a key with its default.
func (k *key) defaulted() string {
	_, name := split(k.path)
	if k.def == "" {
		return "`" + name + "`"
	}
	return "`" + name + ": " + k.def + "`"
}
