package backends

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

func TestPacks(t *testing.T) {
	for _, c := range []struct {
		arch  int
		cudnn Version
		packs bool
	}{
		{90, V(9, 19, 0), true}, {90, V(9, 6, 0), true}, {90, V(9, 5, 2), false}, {100, V(9, 19, 0), true},
		{120, V(9, 19, 0), false}, {121, V(9, 19, 0), false},
	} {
		if got := Packs(c.arch, c.cudnn); got != c.packs {
			t.Errorf("sm%d, cuDNN %s: packs %t", c.arch, c.cudnn, got)
		}
	}
}

func TestKeepsMatrix(t *testing.T) {
	for _, c := range []struct {
		arch  int
		cudnn Version
		keeps bool
	}{{90, V(9, 24, 9), true}, {90, V(9, 25, 0), false}, {100, V(9, 19, 0), false}, {80, V(9, 19, 0), false}} {
		if got := KeepsMatrix(c.arch, c.cudnn); got != c.keeps {
			t.Errorf("sm%d, cuDNN %s: keeps the matrix %t", c.arch, c.cudnn, got)
		}
	}
}

// literal matches a version literal in Go source, and a comparison of versions.
var literal = regexp.MustCompile(`\bV\([0-9]+, *[0-9]+, *[0-9]+\)|\b(?:CUDNN|cudnn)\b *[<>]=? *[0-9]`)

// TestVersionsStandInTheRulesAlone finds cuDNN versions in code outside this package. Tests may have them;
// machine.BuiltFlash is ours.
func TestVersionsStandInTheRulesAlone(t *testing.T) {
	const root = "../../.."
	files := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := filepath.ToSlash(strings.TrimPrefix(path, root+string(filepath.Separator)))
		if d.IsDir() {
			if name == "internal/model/backends" || strings.HasPrefix(d.Name(), ".") && path != root {
				return fs.SkipDir
			}
			return nil
		}
		if !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			return nil
		}
		files++
		text, err := os.ReadFile(path)
		for i, line := range strings.Split(string(text), "\n") {
			if literal.MatchString(line) && !strings.HasPrefix(line, "var BuiltFlash = ") {
				t.Errorf("%s:%d knows a version of a library, which is for internal/model/backends to know: %s",
					name, i+1, strings.TrimSpace(line))
			}
		}
		return err
	})
	if err != nil || files < 100 {
		t.Errorf("read %d files: %v", files, err)
	}
}
