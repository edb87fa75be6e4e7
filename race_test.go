package cprun_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// concurrent lists methods, here or in the standard library, that run a function concurrently with the caller.
var concurrent = []string{"Go", "Do", "DoDetailed", "OnFail", "AfterFunc"}

// isConcurrent reports whether a file starts a goroutine, queues work on a stream, or uses package sync.
func isConcurrent(file *ast.File) (found bool) {
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = true
		case *ast.ImportSpec:
			found = found || n.Path.Value == `"sync"` || n.Path.Value == `"sync/atomic"`
		case *ast.CallExpr:
			sel, ok := n.Fun.(*ast.SelectorExpr)
			found = found || ok && slices.Contains(concurrent, sel.Sel.Name)
		}
		return !found
	})
	return found
}

// testedFiles returns the Go files of each package with tests in this build, by directory.
func testedFiles(t *testing.T) map[string][]string {
	t.Helper()
	const format = `{{if or .TestGoFiles .XTestGoFiles}}{{.Dir}}{{range .GoFiles}} {{.}}{{end}}{{range .TestGoFiles}} {{.}}{{end}}{{range .XTestGoFiles}} {{.}}{{end}}{{end}}`
	out, err := exec.Command("go", "list", "-f", format, "./...").Output()
	if err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs(".")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		if fields := strings.Fields(line); len(fields) > 1 {
			dir, err := filepath.Rel(root, fields[0])
			if err != nil {
				t.Fatal(err)
			}
			all[dir] = fields[1:]
		}
	}
	return all
}

// The race detector runs every package with concurrent code.
func TestRaceRunsAllThatIsConcurrent(t *testing.T) {
	var want []string
	for dir, files := range testedFiles(t) {
		if slices.ContainsFunc(files, func(name string) bool {
			file, err := parser.ParseFile(token.NewFileSet(), path.Join(dir, name), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			return isConcurrent(file)
		}) {
			want = append(want, "./"+dir)
		}
	}
	out, err := exec.Command("scripts/race-packages").Output()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Fields(string(out))
	slices.Sort(got)
	slices.Sort(want)
	if len(want) < 30 || !slices.Equal(got, want) {
		t.Errorf("scripts/race-packages names\n%s\nand goroutines are in\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// A skipped name is a test of its package and of no other: -skip applies to all packages.
func TestRaceLeavesOutWhatIsNamed(t *testing.T) {
	text, err := os.ReadFile("scripts/race-without")
	if err != nil {
		t.Fatal(err)
	}
	all, seen := functionsOf(t, "Test"), map[string]bool{}
	for dir, fuzzers := range functionsOf(t, "Fuzz") {
		all[dir] = append(all[dir], fuzzers...)
	}
	for line := range strings.Lines(string(text)) {
		if strings.HasPrefix(line, "#") {
			continue
		}
		fields := strings.Fields(line)
		for _, name := range fields[1:] {
			var in []string
			for dir, tests := range all {
				if slices.Contains(tests, name) {
					in = append(in, dir)
				}
			}
			if !slices.Equal(in, fields[:1]) || seen[name] {
				t.Errorf("%s of %s is left out under the race detector; there are tests of that name in %q", name, fields[0], in)
			}
			seen[name] = true
		}
	}
	if len(seen) == 0 {
		t.Error("scripts/race-without names no test")
	}
}
