package cprun_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

// functionsOf returns the names of test functions with this prefix (Test, Fuzz) by directory, of all builds.
func functionsOf(t *testing.T, word string) map[string][]string {
	t.Helper()
	all := map[string][]string{}
	walk(t, func(file string, src []byte) {
		if !strings.HasSuffix(file, "_test.go") {
			return
		}
		tree, err := parser.ParseFile(token.NewFileSet(), file, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range tree.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil && strings.HasPrefix(f.Name.Name, word) {
				all[path.Dir(file)] = append(all[path.Dir(file)], f.Name.Name)
			}
		}
	})
	return all
}

// scripts/fuzz.sh runs every fuzzer.
func TestEveryFuzzerIsRun(t *testing.T) {
	var want []string
	for dir, names := range functionsOf(t, "Fuzz") {
		for _, name := range names {
			want = append(want, "./"+dir+" "+name)
		}
	}
	out, err := exec.Command("scripts/fuzz.sh", "--list").Output()
	if err != nil {
		t.Fatal(err)
	}
	got := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("scripts/fuzz.sh runs\n%s\nand there are\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}
