// Package cprun_test checks rules of the whole tree: imports, comments, files and docs.
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

// wings lists the folders of internal/ from the bottom up. A package imports its own wing and earlier wings of the list.
// Change the list with the design, never to make a build pass.
var wings = []string{"base", "launch", "text", "model", "foresee", "run", "lab"}

// separate lists wings that do not import each other in either direction.
var separate = map[string]string{"text": "launch", "model": "launch", "foresee": "launch"}

// engine maps each package outside internal/ to its imports of this module. Imports after the bar need the build tag
// cuda. Commands and scripts may import any package.
var engine = map[string]string{
	"partition":                 "",
	"tensor":                    "",
	"attention":                 "internal/base/half partition tensor",
	"attention/attentiontest":   "attention internal/base/near internal/base/safetensors partition tensor",
	"attention/delta":           "attention internal/base/near partition tensor",
	"attention/delta/deltatest": "attention attention/delta internal/base/near tensor",
	"comm": "comm/internal/blame comm/internal/check comm/internal/link comm/internal/local" +
		" comm/internal/shm comm/internal/wire tensor",
	"comm/internal/blame": "",
	"comm/internal/check": "tensor",
	"comm/internal/link":  "comm/internal/blame",
	"comm/internal/local": "comm/internal/blame comm/internal/link",
	"comm/internal/pace":  "",
	"comm/internal/shm":   "",
	"comm/internal/wire": "comm/internal/blame comm/internal/link comm/internal/pace comm/internal/shm" +
		" internal/base/admission",
	"comm/internal/worldtest": "comm comm/internal/link comm/internal/local tensor",
	"comm/commtest":           "comm tensor",
	"comm/copyengine": "comm comm/internal/blame comm/internal/check comm/internal/pace tensor |" +
		" internal/base/cuda",
	"comm/device": "comm comm/internal/blame comm/internal/check comm/internal/pace tensor |" +
		" comm/copyengine internal/base/cuda internal/base/nccl",
	"ring":                   "attention comm partition tensor",
	"ring/scan":              "attention/delta comm partition ring tensor",
	"kernels":                "tensor",
	"kernels/internal/shape": "kernels partition tensor",
	"kernels/cpu": "attention attention/delta internal/base/half kernels kernels/cpu/internal/simd" +
		" kernels/internal/shape partition tensor",
	"kernels/cpu/internal/simd": "internal/base/half tensor",
	"kernels/gpu": "| attention attention/delta internal/base/cuda internal/base/cuda/blas internal/base/cuda/dnn" +
		" internal/base/cuda/nvrtc kernels kernels/gpu/internal/call kernels/gpu/internal/source" +
		" kernels/internal/shape partition tensor",
	"kernels/gpu/internal/call": "attention attention/delta internal/base/heap kernels kernels/gpu/internal/source" +
		" partition tensor",
	"kernels/gpu/internal/source": "",
}

// callsC lists the packages that may contain C, under the tag cuda.
var callsC = []string{"internal/base/cuda", "internal/base/cuda/blas", "internal/base/cuda/dnn", "internal/base/cuda/driver", "internal/base/cuda/nvrtc", "internal/base/nccl"}

type pkg struct {
	ImportPath string
	Imports    []string
	Doc        string
	GoFiles    []string
	CgoFiles   []string
}

// list returns the packages of the module under a build tag; "" is none. It reads imports from the sources, so it needs no
// toolkit.
func list(t *testing.T, tag string) []pkg {
	t.Helper()
	c := exec.Command("go", "list", "-e", "-tags="+tag, "-json=ImportPath,Imports,Doc,GoFiles,CgoFiles", "./...")
	if tag != "" {
		c.Env = append(c.Environ(), "CGO_ENABLED=1")
	}
	out, err := c.Output()
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
	followed := map[string]bool{}
	for _, tag := range []string{"", "cuda"} {
		for _, p := range list(t, tag) {
			name := strings.TrimPrefix(p.ImportPath, module)
			if strings.HasPrefix(name, "cmd/") || strings.HasPrefix(name, "scripts/") || len(p.GoFiles)+len(p.CgoFiles) == 0 {
				continue
			}
			for _, imp := range p.Imports {
				dep, ours := strings.CutPrefix(imp, module)
				if imp == "C" && (tag == "" || !slices.Contains(callsC, name)) {
					t.Errorf("tag %q: %s imports C; only %v do, under the tag cuda", tag, name, callsC)
				}
				if ours && !allowed(name, dep, tag) {
					t.Errorf("tag %q: %s must not import %s", tag, name, dep)
				}
				followed[name+" -> "+dep] = true
			}
			if _, ruled := engine[name]; !ruled && wing(name) < 0 {
				t.Errorf("%s is in no wing of internal/ and has no row in the table of the engine", name)
			}
		}
	}
	for name, row := range engine {
		for dep := range strings.FieldsSeq(row) {
			if dep != "|" && !followed[name+" -> "+dep] {
				t.Errorf("nothing follows %s -> %s any more; take it out of the table", name, dep)
			}
		}
	}
}

// allowed reports whether a package may import another of this module.
func allowed(name, dep, tag string) bool {
	if from := wing(name); from >= 0 { // the engine is below all wings
		to := wing(dep)
		return to <= from && (to < 0 || separate[wings[from]] != wings[to])
	}
	plain, cuda, _ := strings.Cut(engine[name], "|")
	if tag == "cuda" {
		plain += cuda
	}
	return slices.Contains(strings.Fields(plain), dep)
}

// wing returns the index of a package's wing, or -1 for a package outside internal/.
func wing(name string) int {
	rest, ok := strings.CutPrefix(name, "internal/")
	if !ok {
		return -1
	}
	first, _, _ := strings.Cut(rest, "/")
	return slices.Index(wings, first)
}

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	for _, p := range list(t, "cuda") {
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

// A config does not show environment variables, so only one package reads them.
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
