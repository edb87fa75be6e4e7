package config

import (
	"fmt"
	"os"
	"strings"
	"testing"
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

// reference returns the generated part of docs/config.md: every key with its type, default and meaning, by section.
func reference() string {
	var b strings.Builder
	for _, s := range sections {
		fmt.Fprintf(&b, "### %s\n\n%s\n\n| key | type | default | meaning |\n|---|---|---|---|\n", s.path, s.doc)
		for i := range keys {
			if section, name := split(keys[i].path); section == s.path {
				fmt.Fprintf(&b, "| `%s` | %s | %s | %s |\n", name, keys[i].described(), keys[i].defaulted(),
					keys[i].doc)
			}
		}
		b.WriteString("\n")
	}
	return b.String()
}

// described returns the type of a key with its bounds.
func (k *key) described() string {
	wanted := strings.TrimPrefix(strings.TrimPrefix(k.wanted(), "an "), "a ")
	kind, word, _ := strings.Cut(wanted, " or ")
	if word != "" {
		word = " or " + word
	}
	switch k.at(blankConfig()).(type) {
	case *float64, **float64, *[2]float64:
		return kind + " in " + k.within + word
	case *int, *int64:
		if k.max < maxHeads {
			return fmt.Sprintf("%s, %d to %d", kind, k.min, k.max) + word
		}
		return fmt.Sprintf("%s ≥ %d", kind, k.min) + word
	}
	return wanted
}

// defaulted returns the default of a key.
func (k *key) defaulted() string {
	switch {
	case k.json != nil && k.json.Needs != "":
		return "*needed* by " + strings.ReplaceAll(k.json.Needs, " ", ", ")
	case k.def == "":
		return "*needed*"
	}
	return "`" + k.def + "`"
}
