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

// allowed says which packages of ours a package may import, with the tag cuda and without. It is the
// design in one table: a row changes when the design does, never to make a build pass. A package
// without a row fails. An arrow behind the bar is there under the tag cuda alone.
var allowed = map[string]string{
	"partition": "",
	"tensor":    "",

	"attention":               "internal/half partition tensor",
	"attention/attentiontest": "attention internal/near internal/safetensors partition tensor",
	"comm":                    "comm/internal/blame comm/internal/check comm/internal/link comm/internal/local comm/internal/shm comm/internal/wire tensor",
	"comm/internal/blame":     "",
	"comm/internal/check":     "tensor",
	"comm/internal/link":      "comm/internal/blame",
	"comm/internal/local":     "comm/internal/blame comm/internal/link",
	"comm/internal/wire":      "comm/internal/blame comm/internal/link comm/internal/pace comm/internal/shm internal/admission",
	"comm/internal/shm":       "",
	"comm/internal/pace":      "",
	"comm/copyengine":         "comm comm/internal/blame comm/internal/check comm/internal/pace tensor | internal/cuda",
	"comm/device":             "comm comm/internal/blame comm/internal/check comm/internal/pace tensor | comm/copyengine internal/cuda internal/nccl",
	"comm/commtest":           "comm tensor",
	"comm/internal/worldtest": "comm comm/internal/link comm/internal/local tensor",
	"ring":                    "attention comm partition tensor",

	"kernels":                   "",
	"internal/gpu/call":         "attention internal/gpu/source internal/heap partition tensor",
	"internal/shape":            "tensor",
	"internal/gpu/source":       "",
	"kernels/cpu":               "attention internal/half kernels kernels/cpu/internal/simd internal/shape partition tensor",
	"kernels/cpu/internal/simd": "internal/half tensor",
	"internal/gpu": "| attention internal/cuda internal/cuda/blas internal/cuda/dnn internal/cuda/nvrtc kernels" +
		" internal/gpu/call internal/shape internal/gpu/source partition tensor",

	"internal/cuda":        "| internal/cuda/driver tensor",
	"internal/cuda/driver": "",
	"internal/cuda/nvrtc":  "| internal/files",
	"internal/cuda/blas":   "tensor | internal/cuda",
	"internal/cuda/dnn":    "partition tensor | internal/cuda",
	"internal/nccl":        "| internal/cuda tensor",

	"internal/safetensors":               "internal/files internal/half internal/terminal tensor",
	"internal/hf":                        "internal/files internal/safetensors internal/terminal",
	"internal/config":                    "internal/files internal/hf internal/terminal partition ring",
	"internal/tokenizer":                 "",
	"internal/data":                      "internal/files internal/tokenizer partition",
	"internal/metrics":                   "internal/files tensor",
	"internal/checkpoint":                "comm internal/files internal/safetensors internal/terminal tensor",
	"internal/checkpoint/checkpointtest": "",
	"internal/optim":                     "kernels tensor",
	"internal/optim/optimtest":           "internal/optim tensor",
	"internal/model":                     "attention internal/hf tensor",
	"internal/model/opstest":             "internal/model internal/near tensor",
	"internal/half":                      "",
	"internal/heap":                      "tensor",
	"internal/near":                      "",
	"internal/generate":                  "attention internal/device internal/hf internal/model partition tensor",

	"internal/cost":     "internal/files internal/planner kernels partition tensor",
	"internal/qkv":      "tensor",
	"internal/backends": "partition tensor",
	"internal/machine": "internal/backends internal/config internal/cuda/driver internal/files" +
		" | internal/cuda internal/cuda/blas internal/cuda/dnn internal/cuda/nvrtc internal/nccl",
	"internal/backend": "internal/backends internal/config internal/machine partition ring tensor",
	"internal/device": "attention internal/backends internal/files internal/machine internal/model internal/optim kernels/cpu tensor" +
		" | internal/cuda internal/cuda/blas internal/cuda/dnn internal/gpu internal/heap internal/nccl",
	"internal/state":   "internal/model internal/optim tensor",
	"internal/planner": "attention internal/backends comm partition ring tensor",
	"internal/plan": "attention internal/backends internal/backend internal/config internal/cost internal/machine internal/model internal/planner" +
		" internal/state internal/readable internal/terminal kernels/cpu internal/gpu partition ring tensor",
	"internal/train": "attention comm internal/checkpoint internal/config internal/data internal/device internal/files internal/hf internal/metrics" +
		" internal/model internal/optim internal/planner internal/state partition ring tensor",
	"internal/attend": "attention internal/backends internal/qkv comm internal/config internal/device internal/files internal/machine" +
		" internal/safetensors internal/terminal partition ring tensor",
	"internal/report": "internal/experiment internal/files internal/machine internal/metrics internal/readable internal/terminal",
	"internal/bench": "attention internal/backends comm internal/cost internal/device internal/files internal/metrics internal/model internal/optim internal/planner internal/readable internal/terminal" +
		" internal/gpu partition ring tensor",

	"internal/experiment": "internal/bench internal/config internal/files internal/terminal",

	"internal/launch":          "internal/files internal/launch/standing internal/place internal/terminal",
	"internal/launch/standing": "internal/terminal",
	"internal/launch/status":   "internal/files internal/launch/standing internal/terminal",
	"internal/lan":             "",
	"internal/launch/progress": "internal/readable internal/terminal",
	"internal/cluster":         "internal/cluster/gossip internal/cluster/wire internal/launch",
	"internal/cluster/wire":    "internal/admission",
	"internal/admission":       "",
	"internal/cluster/gossip":  "internal/admission",
	"internal/cluster/netsim":  "",
	"internal/files":           "internal/terminal",
	"internal/place":           "internal/terminal",
	"internal/place/key":       "internal/files internal/terminal",
	"internal/readable":        "",
	"internal/terminal":        "",
	"internal/hostile":         "",
	"internal/ulimit":          "",
	"internal/top": "internal/config internal/files internal/launch internal/launch/progress internal/launch/standing internal/launch/status" +
		" internal/metrics internal/readable internal/terminal",
	"internal/job": "internal/backends internal/bench internal/cost internal/machine",
	"internal/worker": "comm/device internal/backends comm internal/attend internal/backend internal/bench internal/config internal/cost internal/device" +
		" internal/job internal/launch internal/launch/progress internal/launch/standing internal/machine internal/plan internal/train tensor | internal/cuda",
	"internal/command": "internal/backends comm internal/attend internal/backend internal/bench internal/checkpoint internal/cluster internal/cost internal/device internal/experiment internal/files internal/generate internal/readable internal/terminal" +
		" internal/config internal/data internal/hf internal/job internal/launch internal/launch/progress internal/launch/standing internal/launch/status internal/machine internal/model" +
		" internal/place internal/place/key internal/plan internal/planner internal/report internal/safetensors internal/tokenizer internal/top internal/train kernels/cpu ring tensor",
	"cmd/cprun": "internal/backends internal/attend internal/bench internal/command internal/config internal/job internal/machine internal/terminal internal/ulimit internal/worker partition ring",

	"scripts/mutate":        "internal/backends",
	"scripts/tokenizer-ids": "internal/files internal/tokenizer",
}

// callsC are the packages that may have C in them, under the tag cuda.
var callsC = []string{"internal/cuda", "internal/cuda/blas", "internal/cuda/dnn", "internal/cuda/driver", "internal/cuda/nvrtc", "internal/nccl"}

type pkg struct {
	ImportPath string
	Imports    []string
	Doc        string
	GoFiles    []string
	CgoFiles   []string
}

// list returns the packages of the module under that build tag; "" is none. Imports are read from
// the sources, so that no toolkit is needed.
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
	unused := map[string]bool{} // arrows of the table that no import follows
	for name, row := range allowed {
		for _, dep := range strings.Fields(row) {
			unused[name+" -> "+dep] = dep != "|"
		}
	}
	for _, tag := range []string{"", "cuda"} {
		for _, p := range list(t, tag) {
			name := strings.TrimPrefix(p.ImportPath, module)
			row, ruled := allowed[name]
			if !ruled && len(p.GoFiles)+len(p.CgoFiles) > 0 {
				t.Errorf("%s has no row in the table of imports", name)
				continue
			}
			plain, cuda, _ := strings.Cut(row, "|")
			may := strings.Fields(plain)
			if tag == "cuda" {
				may = append(may, strings.Fields(cuda)...)
			}
			for _, imp := range p.Imports {
				dep, ours := strings.CutPrefix(imp, module)
				unused[name+" -> "+dep] = false
				if imp == "C" && (tag == "" || !slices.Contains(callsC, name)) {
					t.Errorf("tag %q: %s imports C; only %v do, under the tag cuda", tag, name, callsC)
				}
				if ours && !slices.Contains(may, dep) {
					t.Errorf("tag %q: %s imports %s; allowed are %v", tag, name, dep, may)
				}
			}
		}
	}
	for arrow, is := range unused {
		if is {
			t.Errorf("nothing follows %s any more; take it out of the table", arrow)
		}
	}
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
