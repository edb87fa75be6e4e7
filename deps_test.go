// Package cprun_test holds the rules that concern the whole tree.
package cprun_test

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/cprun/cprun/"

// allowed says which packages of ours a package may import. It is the design in one table:
// a row changes when the design does, never to make a build pass. An empty list is a leaf.
var allowed = map[string][]string{
	"internal/tensor":      {},
	"partition":            {},
	"internal/safetensors": {"internal/tensor"},
	"attention":            {"internal/tensor", "partition"},
	"comm":                 {"internal/tensor"},
	"kernels":              {"attention", "internal/tensor", "partition"},
	"kernels/source":       {},
	"internal/cuda/blas":   {"internal/tensor"},
	"internal/cuda/nvrtc":  {},
	"internal/cuda/dnn":    {"internal/tensor", "partition"},
	"ring":                 {"attention", "comm", "internal/tensor", "partition"},
	"internal/hf":          {"internal/safetensors", "internal/tensor"},
	"internal/config":      {"internal/hf", "partition"},
	"internal/data":        {"partition"},
	"internal/model":       {"attention", "internal/hf", "internal/tensor"},
	"internal/optim":       {"internal/tensor"},
	"internal/metrics":     {"internal/tensor"},
	"internal/checkpoint":  {"internal/safetensors", "internal/tensor"},
	"internal/launch":      {},
	"internal/bench":       {"attention", "comm", "internal/device", "internal/metrics", "internal/model", "internal/optim", "internal/tensor", "kernels", "partition", "ring"},
	"internal/backend":     {"attention", "internal/config", "internal/tensor", "partition"},
	"internal/plan":        {"attention", "comm", "internal/backend", "internal/config", "internal/model", "internal/tensor", "kernels", "partition", "ring"},
	"internal/device":      {"attention", "internal/backend", "internal/model", "internal/optim", "internal/tensor", "kernels"},
}

type pkg struct {
	ImportPath string
	Imports    []string
	Doc        string
	GoFiles    []string
	CgoFiles   []string
}

func list(t *testing.T) []pkg {
	t.Helper()
	out, err := exec.Command("go", "list", "-json=ImportPath,Imports,Doc,GoFiles,CgoFiles", "./...").Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var pkgs []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); dec.More(); {
		var p pkg
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	return pkgs
}

func TestImportsFollowTheDesign(t *testing.T) {
	for _, p := range list(t) {
		name := strings.TrimPrefix(p.ImportPath, module)
		may, ruled := allowed[name]
		for _, imp := range p.Imports {
			dep, ours := strings.CutPrefix(imp, module)
			if imp == "C" {
				t.Errorf("%s imports C; without the tag cuda nothing does", name)
			}
			if ours && ruled && !slices.Contains(may, dep) {
				t.Errorf("%s imports %s; allowed are %v", name, dep, may)
			}
			if ours && strings.HasPrefix(dep, "cmd/") {
				t.Errorf("%s imports the command %s", name, dep)
			}
		}
	}
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range list(t) {
		if len(p.GoFiles) > 0 && p.Doc == "" {
			t.Errorf("%s has no package comment", p.ImportPath)
		}
	}
}

// sizeExceptions are files that may be longer than 600 lines, with the reason.
var sizeExceptions = map[string]string{}

func TestFilesStaySmall(t *testing.T) {
	walk(t, func(path string, src []byte) {
		if n := bytes.Count(src, []byte("\n")); n > 600 && sizeExceptions[path] == "" {
			t.Errorf("%s has %d lines; split it, or name the reason in sizeExceptions", path, n)
		}
	})
}

var getenv = regexp.MustCompile(`\bos\.(Getenv|LookupEnv|Environ)\(`)

// Behaviour through the environment cannot be seen in a config, so one package reads it.
func TestOnlyTheLauncherReadsTheEnvironment(t *testing.T) {
	walk(t, func(path string, src []byte) {
		if getenv.Match(src) && !strings.HasPrefix(path, "internal/launch/") && !strings.HasSuffix(path, "_test.go") {
			t.Errorf("%s reads the environment; internal/launch does that and lists it in cprun doctor", path)
		}
	})
}

func walk(t *testing.T, f func(path string, src []byte)) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != "." || d.Name() == "testdata" || d.Name() == "bin") {
			return filepath.SkipDir
		}
		if !strings.HasSuffix(path, ".go") {
			return nil
		}
		src, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		f(filepath.ToSlash(path), src)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}
