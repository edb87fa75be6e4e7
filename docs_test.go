package cprun_test

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// The architecture page shows the ring whole. This keeps the two the same.
func TestArchitectureShowsTheRing(t *testing.T) {
	page, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	src, err := os.ReadFile("ring/ring.go")
	if err != nil {
		t.Fatal(err)
	}
	_, code, ok := strings.Cut(string(page), "```go\n")
	code, _, ok2 := strings.Cut(code, "\n```")
	if !ok || !ok2 || !strings.Contains(string(src), code) {
		t.Error("the code in docs/architecture.md is not that of ring/ring.go; copy Forward, Backward and beside there")
	}
	for _, f := range []string{"func (r *Ring) Forward", "func (r *Ring) Backward", "func (r *Ring) beside"} {
		if !strings.Contains(code, f) {
			t.Errorf("docs/architecture.md does not show %s", f)
		}
	}
}

var link = regexp.MustCompile(`\]\(([^)#:]+)(#[^)]*)?\)`)

func TestLinksOfTheDocsLead(t *testing.T) {
	pages, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, _ := filepath.Glob("docs/*/*.md")
	for _, page := range append(append(pages, more...), "README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			if _, err := os.Stat(filepath.Join(filepath.Dir(page), m[1])); err != nil {
				t.Errorf("%s links to %s, which is not there", page, m[1])
			}
		}
	}
}
