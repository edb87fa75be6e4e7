package backend

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/cprun/cprun/attention/backends"
)

var update = flag.Bool("update", false, "rewrite the tables of docs/backends.md")

// TestDocument holds docs/backends.md to the table of rules.
func TestDocument(t *testing.T) {
	const file = "../../docs/backends.md"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	doc := string(text)
	for name, table := range map[string]func() string{
		"matrix": Matrix, "order": OrderTable, "rates": RateTable, "remedies": RemedyTable, "peaks": PeakTable,
		"fused":     func() string { return RuleTable(backends.Fused) },
		"flash":     func() string { return RuleTable(backends.Flash) },
		"unfused":   func() string { return RuleTable(backends.Unfused) },
		"reference": func() string { return RuleTable(backends.Reference) },
	} {
		begin, end := "<!-- "+name+": written by go generate ./internal/backend -->\n\n", "\n<!-- end of "+name+" -->"
		before, rest, ok := strings.Cut(doc, begin)
		got, after, ended := strings.Cut(rest, end)
		if !ok || !ended {
			t.Fatalf("%s has no lines %q and %q", file, begin, end)
		}
		if got != table() && !*update {
			t.Errorf("%s, %s, is not what the rules say; run go generate ./internal/backend", file, name)
		}
		doc = before + begin + table() + end + after
	}
	if *update {
		if err := os.WriteFile(file, []byte(doc), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// Every link of the matrix leads to a row of a table of rules.
func TestLinksOfTheDocument(t *testing.T) {
	text, err := os.ReadFile("../../docs/backends.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(string(text), "](#")[1:] {
		id, _, _ := strings.Cut(part, ")")
		if !strings.Contains(string(text), `<a id="`+id+`"></a>`) && !strings.Contains(strings.ToLower(string(text)), "\n## "+strings.ReplaceAll(id, "-", " ")) {
			t.Errorf("docs/backends.md links to #%s, which is not there", id)
		}
	}
}
