package cprun_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// openers lists the calls that open or create a file by its path. Only internal/base/files calls them: it refuses pipes
// and devices without waiting, limits the bytes it reads, and follows no link out of a run directory.
var openers = map[string][]string{
	"os":      {"Open", "OpenFile", "OpenInRoot", "ReadFile", "Create", "WriteFile", "DirFS", "Truncate", "OpenRoot"},
	"ioutil":  {"ReadFile", "WriteFile", "TempFile"},
	"syscall": {"Open", "Openat", "Creat"},
	"unix":    {"Open", "Openat", "Openat2", "Creat"},
}

// rootOpeners lists the opening methods of os.Root that embed.FS lacks.
var rootOpeners = []string{"OpenFile", "WriteFile", "OpenRoot"}

// openExceptions lists the files that may open others themselves, with their calls and the reason.
var openExceptions = map[string]struct{ calls, why string }{
	"internal/base/files/read.go":           {"os.OpenFile root.OpenFile", "reads for all packages"},
	"scripts/mutate/source.go":              {"os.ReadFile os.WriteFile", "reads sources and writes changed copies into a private directory"},
	"kernels/cpu/internal/simd/gen/main.go": {"os.WriteFile", "writes the assembly of package simd, next to it"},
	"internal/base/files/dir.go":            {"os.OpenRoot root.OpenFile root.OpenRoot", "writes, opens directories, and creates files that another host may also create"},
	"internal/launch/jobdir.go":             {"os.Open os.WriteFile", "locks private directories of its user, and marks a new one"},
	"internal/base/cuda/nvrtc/cache.go":     {"os.OpenFile", "locks a file in the user's own cache"},
	"internal/text/data/parquet.go":         {"root.OpenFile", "parquet.OpenFile takes a file that is open already"},
	"internal/lab/verify/values.go":         {"root.OpenFile", "parquet.OpenFile takes a file that is open already"},
	"comm/copyengine/setup.go":              {"os.OpenFile", "maps a file in /dev/shm that rank 0 created and named over the authenticated mesh"},
}

func TestFilesAreOpenedInOnePlace(t *testing.T) {
	used := map[string]map[string]bool{}
	walk(t, func(path string, src []byte) {
		if strings.HasSuffix(path, "_test.go") {
			return
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			sel, ok := n.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			if call := opens(sel); call != "" {
				if used[path] == nil {
					used[path] = map[string]bool{}
				}
				used[path][call] = true
			}
			return true
		})
	})
	for path, calls := range used {
		got := strings.Join(slices.Sorted(maps.Keys(calls)), " ")
		if want := openExceptions[path]; got != want.calls {
			t.Errorf("%s calls %s itself; internal/base/files opens and makes files (allowed here: %q)", path, got, want.calls)
		}
	}
	for path := range openExceptions {
		if used[path] == nil {
			t.Errorf("%s opens no file any more; take it out of the table", filepath.ToSlash(path))
		}
	}
}

// opens returns the opening call of a selector, or "".
func opens(sel *ast.SelectorExpr) string {
	if pkg, ok := sel.X.(*ast.Ident); ok && slices.Contains(openers[pkg.Name], sel.Sel.Name) {
		return pkg.Name + "." + sel.Sel.Name
	}
	if _, pkg := sel.X.(*ast.Ident); pkg && sel.X.(*ast.Ident).Name == "safetensors" {
		return "" // its WriteFile goes through internal/base/files
	}
	if slices.Contains(rootOpeners, sel.Sel.Name) {
		return "root." + sel.Sel.Name
	}
	return ""
}
