//go:build cuda

package source

import (
	"bytes"
	"crypto/sha256"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
)

// littleShared is the oldest architecture with SmallShared.
const littleShared = "sm_86"

// archs returns the architectures for which this test compiles a program. Shapes that only GPUs with little shared
// memory use (TestFlashSmallShapes) have one such architecture.
func archs(p Program) (list []string) {
	if smallOnly(p) {
		return []string{littleShared}
	}
	for _, arch := range Archs {
		if p.Archs == nil || slices.Contains(p.Archs, arch) {
			list = append(list, arch)
		}
	}
	return list
}

// smallOnly reports whether all shapes of a program follow another shape for the same head dims.
func smallOnly(p Program) bool {
	small := false
	for i, s := range FlashShapes {
		if !slices.ContainsFunc(
			[]Program{s.Forward(), s.Backward(), s.DQ()},
			func(q Program) bool { return q.Name == p.Name },
		) {
			continue
		}
		before := FlashShapes[max(i-1, 0)]
		if i == 0 || before.Float32 != s.Float32 || before.QK != s.QK || before.V != s.V {
			return false
		}
		small = true
	}
	return small
}

var update = flag.Bool("update", false, "write testdata/compiled.txt anew, of a run that leaves out no test")

var cubins = flag.String("cubins", "", "the folder for the machine code of the compiled programs; see docs/hopper.md")

const compiledFile = "testdata/compiled.txt"

// compiled returns the programs that passed this test before: a line each, of digest, name and architecture.
func compiled(t *testing.T) map[string]bool {
	text, err := os.ReadFile(compiledFile)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]bool{}
	for line := range strings.Lines(string(text)) {
		all[strings.TrimSpace(line)] = true
	}
	return all
}

// line returns a program's line in testdata/compiled.txt. The digest covers the compiler's inputs, its version, and the
// exceptions of the test.
func line(version string, p Program, code []byte, headers map[string][]byte, arch string) string {
	key := nvrtc.Key(version, p.File, code, headers, p.Options(arch))
	return fmt.Sprintf("%.16x %s %s", sha256.Sum256(fmt.Append([]byte(key), p.Entries)), p.Name, arch)
}

// The log reports a kernel with an array in local memory.
func TestUsageSeesLocalMemory(t *testing.T) {
	compiler, err := nvrtc.Open("../../../../.cuda/lib")
	if err != nil {
		t.Fatal(err)
	}
	_, log, err := compiler.Compile("local.cu", []byte(`
extern "C" __global__ void local(int *x, const int *at) {
  int a[64];
  for (int i = 0; i < 64; i++) a[at[i] & 63] = i;
  for (int i = 0; i < 64; i++) x[i] = a[i];
}`), nil, []string{"--gpu-architecture=sm_90a", "--ptxas-options=-v"})
	if err != nil {
		t.Fatal(err)
	}
	if u := parseUsage(log); len(u) != 1 || u[0].Stack < 256 {
		t.Errorf("usage %+v of the log %q", u, log)
	}
}

// sample: with -short, every sample-th program is compiled again though it passed before.
const sample = 16

// TestEveryKernelCompiles compiles every program for each of its architectures. There must be no warnings, no spills
// and no serialised wgmma instructions. -v lists the registers and the shared memory of each kernel. With -short, each
// program has one architecture, and those in testdata/compiled.txt, unchanged since they passed, are compiled again
// only as a sample.
func TestEveryKernelCompiles(t *testing.T) {
	compiler, err := nvrtc.Open("../../../../.cuda/lib") // where scripts/cuda-sdk puts it
	if err != nil {
		t.Fatal(err)
	}
	before, now := compiled(t), &lines{all: map[string]bool{}}
	t.Cleanup(func() { // after the parallel subtests
		if *update && !t.Failed() {
			now.write(t)
		}
	})
	for i, p := range Programs() {
		list := archs(p)
		turn := list[i%len(list)]
		code, headers, err := p.Source()
		if err != nil {
			t.Fatal(err)
		}
		for _, arch := range list {
			entry := line(compiler.Version(), p, code, headers, arch)
			if testing.Short() && (arch != turn || before[entry] && i%sample != 0) {
				if before[entry] {
					now.add(entry)
				}
				continue
			}
			t.Run(p.Name+"/"+arch, func(t *testing.T) {
				t.Parallel()
				cubin, log, err := compiler.Compile(p.File, code, headers, p.Options(arch))
				if err != nil {
					t.Fatal(err)
				}
				if *cubins != "" {
					if err := os.WriteFile(filepath.Join(*cubins, p.Name+"."+arch), cubin, 0o666); err != nil {
						t.Fatal(err)
					}
				}
				for _, w := range warnings(log) {
					t.Error(w)
				}
				for _, fault := range faults(p, parseUsage(log)) {
					t.Error(fault)
				}
				for _, u := range parseUsage(log) {
					t.Logf("%-40s %3d registers %6d bytes shared", u.Kernel, u.Registers, u.Shared)
				}
				now.add(entry)
			})
		}
	}
}

// lines collects the lines of the programs that passed.
type lines struct {
	mu  sync.Mutex
	all map[string]bool
}

func (l *lines) add(entry string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[entry] = true
}

// write stores them by name and architecture.
func (l *lines) write(t *testing.T) {
	var b bytes.Buffer
	for _, entry := range slices.SortedFunc(maps.Keys(l.all),
		func(a, b string) int { return strings.Compare(a[32:], b[32:]) }) {
		fmt.Fprintln(&b, entry)
	}
	if err := os.WriteFile(compiledFile, b.Bytes(), 0o666); err != nil {
		t.Error(err)
	}
}

// TestLineTellsProgramsApart checks that every input of the test changes the digest.
func TestLineTellsProgramsApart(t *testing.T) {
	p := Program{Name: "p", File: "p.cu", Entries: []Entry{{Name: "k", Local: 8}}}
	code, headers := []byte("a"), map[string][]byte{"h.cuh": []byte("b")}
	one := line("13.0", p, code, headers, "sm_90a")
	define, entry := p, p
	define.Defines, entry.Entries = []string{"X"}, []Entry{{Name: "k", Local: 16}}
	for what, other := range map[string]string{
		"compiler": line("13.3", p, code, headers, "sm_90a"),
		"source":   line("13.0", p, []byte("c"), headers, "sm_90a"),
		"header":   line("13.0", p, code, map[string][]byte{"h.cuh": []byte("c")}, "sm_90a"),
		"define":   line("13.0", define, code, headers, "sm_90a"),
		"entry":    line("13.0", entry, code, headers, "sm_90a"),
	} {
		if other[:32] == one[:32] {
			t.Errorf("another %s has the same digest", what)
		}
	}
	if len(one) != 32+len(" p sm_90a") || one != line("13.0", p, code, headers, "sm_90a") {
		t.Errorf("%q", one)
	}
}

// faults returns the errors in the compiler's report about the kernels.
func faults(p Program, all []usage) (list []string) {
	if len(all) == 0 {
		list = append(list, "the log tells of no kernel")
	}
	for _, e := range p.Entries {
		if !slices.ContainsFunc(all, func(u usage) bool { return u.Kernel == e.Name }) {
			list = append(list, "there is no kernel "+e.Name)
		}
	}
	for _, u := range all {
		allowed := 0
		for _, e := range p.Entries {
			if e.Name == u.Kernel {
				allowed = e.Local
			}
		}
		if u.Stack > allowed || u.Spilled > 0 && allowed == 0 {
			list = append(
				list,
				fmt.Sprintf(
					"%s has %d bytes of local memory a thread, with %d bytes spilled; %d are allowed",
					u.Kernel,
					u.Stack,
					u.Spilled,
					allowed,
				),
			)
		}
	}
	return list
}

func TestFaults(t *testing.T) {
	p := Program{Entries: []Entry{{Name: "a", Local: 16, Why: "test"}, {Name: "gone"}}}
	got := faults(
		p,
		[]usage{
			{Kernel: "a", Stack: 16, Spilled: 4},
			{Kernel: "b", Spilled: 8},
			{Kernel: "c", Stack: 8},
			{Kernel: "d", Stack: 0},
		},
	)
	if len(got) != 3 {
		t.Errorf("faults %q, want those of gone, b and c", got)
	}
}
