package cprun_test

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// pages lists the pages of docs and the README.
func pages(t *testing.T) []string {
	t.Helper()
	top, err := filepath.Glob("docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	more, _ := filepath.Glob("docs/*/*.md")
	return append(append(top, more...), "README.md")
}

var (
	link    = regexp.MustCompile(`\]\(([^)#:]*)(#[^)]*)?\)`)
	heading = regexp.MustCompile(`(?m)^#+ (.*)$`)
	inSlug  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// hasAnchor reports whether the page has a heading with this anchor, as forges name it.
func hasAnchor(page, anchor string) bool {
	for _, m := range heading.FindAllStringSubmatch(page, -1) {
		slug := strings.ReplaceAll(inSlug.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")
		if "#"+slug == anchor {
			return true
		}
	}
	return false
}

// Links lead to existing files and headings.
func TestLinksOfTheDocsLead(t *testing.T) {
	for _, page := range pages(t) {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Error(err)
			continue
		}
		for _, m := range link.FindAllStringSubmatch(string(text), -1) {
			target := filepath.Join(filepath.Dir(page), m[1])
			if m[1] == "" {
				target = page
			}
			if m[2] == "" || !strings.HasSuffix(target, ".md") {
				if _, err := os.Stat(target); err != nil {
					t.Errorf("%s links to %s, which is missing", page, m[1])
				}
				continue
			}
			if other, err := os.ReadFile(target); err != nil || !hasAnchor(string(other), m[2]) {
				t.Errorf("%s links to %s%s, which is missing", page, m[1], m[2])
			}
		}
	}
}

// The README stays short.
func TestReadme(t *testing.T) {
	text, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	if lines, words := strings.Count(string(text), "\n"), len(strings.Fields(string(text))); lines > 140 || words > 1100 {
		t.Errorf("README.md has %d lines and %d words, more than 140 and 1,100", lines, words)
	}
}

var sourceFile = regexp.MustCompile("`((?:cmd|internal|kernels|comm|ring|attention|partition|tensor|scripts|examples)/" +
	"[\\w./*-]+\\.(?:go|cuh?|txt|py|ya?ml))`")

// Every file that a page names as code exists. NAME stands for a file to write.
func TestNamedFilesExist(t *testing.T) {
	found := 0
	for _, page := range pages(t) {
		if page == "docs/log.md" { // which may name what there was
			continue
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range sourceFile.FindAllStringSubmatch(string(text), -1) {
			if strings.Contains(m[1], "NAME") {
				continue
			}
			found++
			if files, err := filepath.Glob(m[1]); err != nil || len(files) == 0 {
				t.Errorf("%s names %s, which is not there", page, m[1])
			}
		}
	}
	if found < 20 {
		t.Errorf("only %d files found", found)
	}
}

var testCommand = regexp.MustCompile("`go test [^`]*-(?:run|bench) '?([A-Z]\\w*)[^`]* \\./(\\S+)`")

// A figure counts only with a command that reproduces it, so the named tests and benchmarks must exist.
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

var (
	makeTarget = regexp.MustCompile(`(?m)^([a-z][a-z-]*):`)
	makeInCode = regexp.MustCompile(`(?:^|[;&|] *)make((?: [a-z][a-z-]*| [A-Z]\w*=\S*)+)`)
	makeInline = regexp.MustCompile("`make((?: [a-z][a-z-]*| [A-Z]\\w*=\\S*)+)")
	makeHyphen = regexp.MustCompile(`\bmake( [a-z]+(?:-[a-z]+)+)\b`) // in comments: two words would be English
)

// Every make target in a page or a comment is in the Makefile.
func TestNamedTargetsOfMakeExist(t *testing.T) {
	file, err := os.ReadFile("Makefile")
	if err != nil {
		t.Fatal(err)
	}
	targets := map[string]bool{}
	for _, m := range makeTarget.FindAllSubmatch(file, -1) {
		targets[string(m[1])] = true
	}
	found := 0
	check := func(path, text string, names *regexp.Regexp) {
		for _, m := range names.FindAllStringSubmatch(text, -1) {
			for _, word := range strings.Fields(m[1]) {
				if strings.Contains(word, "=") {
					continue
				}
				if found++; !targets[word] {
					t.Errorf("%s: make %s: the Makefile has no such target", path, word)
				}
			}
		}
	}
	for _, page := range pages(t) {
		if page == "docs/log.md" { // which may name what there was
			continue
		}
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for i, part := range strings.Split(string(text), "```") {
			if i%2 == 0 {
				check(page, part, makeInline)
				continue
			}
			for line := range strings.Lines(part) {
				check(page, line, makeInCode)
			}
		}
	}
	walk(t, func(path string, src []byte) { check(path, string(src), makeHyphen) })
	if found < 20 {
		t.Errorf("only %d targets found", found)
	}
}

// The package map of the architecture page names every package or one of its parents.
func TestArchitectureNamesThePackages(t *testing.T) {
	page, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, code, _ := strings.Cut(string(page), "## Packages\n\n```\n")
	code, _, ok := strings.Cut(code, "\n```")
	if !ok {
		t.Fatal("docs/architecture.md has no map of packages")
	}
	named, wing := map[string]bool{}, ""
	for line := range strings.Lines(code) {
		names, _, _ := strings.Cut(strings.TrimSpace(line), "  ")
		for name := range strings.SplitSeq(names, ", ") {
			if strings.HasPrefix(line, " ") {
				name = wing + "/" + name
			} else {
				wing = name
			}
			named[name] = true
		}
	}
	for _, p := range list(t, "cuda") {
		name, ours := strings.CutPrefix(p.ImportPath, module)
		if !ours || strings.HasPrefix(name, "scripts/") || strings.HasPrefix(name, "examples/") {
			continue
		}
		for at := name; !named[at]; at = path.Dir(at) {
			if at == "." {
				t.Errorf("docs/architecture.md does not name %s", name)
				break
			}
		}
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
