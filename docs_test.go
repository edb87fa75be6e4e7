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
	for _, f := range []string{"func (r *Ring) Forward", "func (r *Ring) Backward", "func (m *keys) beside"} {
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

var testCommand = regexp.MustCompile("`go test [^`]*-(?:run|bench) '?([A-Z]\\w*)[^`]* \\./(\\S+)`")

// A figure counts only with a command that reproduces it, so what pages tell to run must be there.
func TestCommandsOfTheDocsRunSomething(t *testing.T) {
	pages, err := filepath.Glob("docs/benchmarks/*.md")
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, page := range append(pages, "README.md") {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range testCommand.FindAllStringSubmatch(string(text), -1) {
			found++
			files, err := filepath.Glob(filepath.Join(m[2], "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			runs := false
			declared := regexp.MustCompile(`(?m)^func (Test|Benchmark)?\w*` + m[1])
			for _, f := range files {
				src, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				runs = runs || declared.Match(src)
			}
			if !runs {
				t.Errorf("%s: %s runs nothing", page, m[0])
			}
		}
	}
	if found == 0 {
		t.Error("no command found in any page")
	}
}

// `make help` lists every target.
func TestEveryTargetHasHelp(t *testing.T) {
	text, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	_, targets, _ := strings.Cut(string(text), ".PHONY: all ")
	targets, _, _ = strings.Cut(targets, "\n")
	for _, target := range strings.Fields(targets) {
		if !regexp.MustCompile(`(?m)^` + target + `:[^#\n]*## .`).Match(text) {
			t.Errorf("make help does not list %s: its line needs \"## what it does\"", target)
		}
	}
}
