package config

import (
	"os"
	"strings"
	"testing"
)

// TestReference holds docs/config.md to the table of keys.
func TestReference(t *testing.T) {
	const file, begin, end = "../../docs/config.md", "<!-- keys: written by go test ./internal/config -update -->\n\n", "<!-- end of keys -->"
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
		if err := os.WriteFile(file, []byte(before+begin+Reference()+end+after), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if got != Reference() {
		t.Errorf("%s is not what the table of keys says; run go test ./internal/config -update", file)
	}
}
