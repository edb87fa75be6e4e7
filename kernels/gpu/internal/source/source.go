// Package source holds the CUDA C++ of the GPU kernels and the catalogue of programs. A Program is a file with its
// constants. NVRTC compiles it at run time for the installed GPU, and in CI, without a GPU, for every architecture:
//
//	p, err := source.Find("ops_norm")
//	code, headers, err := p.Source()
//
// NVRTC has no headers of the C or CUDA libraries, so all included files are in this directory.
//
// All files follow one style:
//
//   - A file begins with its computation and its blocks. A comment precedes its subject, and explains why if the code
//     does not.
//   - Two spaces. Types are WordCase, functions, variables and fields snake_case, constants, template values and macros
//     UPPER_CASE. The star is beside the type: const float* x.
//   - An integer that may exceed 2^31 is a long long.
//   - Kernels are extern "C" and named by their work and the element types, bf16, fp16, fp32 or fp64: rmsnorm_bf16,
//     copy_fp32_bf16. The rest of a name separates variants for other sizes or alignments. Macros at the end of a file
//     instantiate the types.
//   - A struct that is an argument has no gaps, and a twin in params.go with the same field names.
package source

import (
	"embed"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strings"
)

//go:embed *.cu *.cuh
var files embed.FS

// Program is one unit of compilation.
type Program struct {
	Name    string   // unique; "flash_forward_128"
	File    string   // "flash_forward.cu"
	Defines []string // "HEAD_DIM=128"
	// Archs lists the architectures of the program; nil: all.
	Archs []string
	// Entries lists kernels with exceptions.
	Entries []Entry
}

// Entry is a kernel that the program must have, with its exceptions.
type Entry struct {
	Name string
	// Local is the local memory that a thread may use, in bytes, and Why the reason. Without it, a kernel fails its
	// test if it spills or indexes an array in registers.
	Local int
	Why   string
}

// Archs lists the architectures for which CI compiles every kernel: A100, H100 and H200, B200. The letter enables
// instructions of one architecture only, such as wgmma. CI compiles the shapes for little shared memory for a GPU with
// little shared memory instead.
var Archs = []string{"sm_80", "sm_90a", "sm_100a"}

// Arch returns the architecture of a GPU. capability is 10 times its compute capability.
func Arch(capability int) string {
	if capability >= 90 {
		return fmt.Sprintf("sm_%da", capability)
	}
	return fmt.Sprintf("sm_%d", capability)
}

// Options returns the compiler's options for an architecture. They include line numbers, which profilers and the
// sanitizer show and which cost nothing at run time.
func (p Program) Options(arch string) []string {
	o := []string{"--gpu-architecture=" + arch, "--std=c++17", "-lineinfo", "--ptxas-options=-v"}
	for _, d := range p.Defines {
		o = append(o, "-D"+d)
	}
	return o
}

// Programs returns the catalogue, the lists of all topics.
func Programs() []Program { return slices.Concat(topics...) }

// Find returns the program of that name.
func Find(name string) (Program, error) {
	all := Programs()
	i := slices.IndexFunc(all, func(p Program) bool { return p.Name == name })
	if i < 0 {
		return Program{}, fmt.Errorf("there is no kernel program %q", name)
	}
	return all[i], nil
}

var include = regexp.MustCompile(`(?m)^\s*#\s*include\s+"([^"]+)"`)

// Source returns the text of the program's file, and of every header that it includes, directly or indirectly, by name.
func (p Program) Source() (code []byte, headers map[string][]byte, err error) {
	if code, err = files.ReadFile(p.File); err != nil {
		return nil, nil, fmt.Errorf("kernel program %s: %w", p.Name, err)
	}
	headers = map[string][]byte{}
	for queue := [][]byte{code}; len(queue) > 0; queue = queue[1:] {
		for _, m := range include.FindAllSubmatch(queue[0], -1) {
			name := string(m[1])
			if headers[name] != nil {
				continue
			}
			if name != path.Base(name) || !strings.HasSuffix(name, ".cuh") {
				return nil, nil, fmt.Errorf("kernel program %s: includes %q; a header is a .cuh file beside it", p.Name,
					name)
			}
			text, err := files.ReadFile(name)
			if err != nil {
				return nil, nil, fmt.Errorf("kernel program %s: includes %s: %w", p.Name, name, err)
			}
			headers[name] = text
			queue = append(queue, text)
		}
	}
	return code, headers, nil
}

// fused holds the kernels between cuDNN and the accumulators.
var fused = []Program{{Name: "fused", File: "fused.cu"}}

// gemm holds the matrix products that cuBLASLt does not support.
var gemm = []Program{{Name: "gemm_simple", File: "gemm_simple.cu"}}

// ops holds the operations of the model and the optimizer, except matrix products and attention.
var ops = []Program{
	{Name: "ops_conv", File: "ops_conv.cu"},
	{Name: "ops_copy", File: "ops_copy.cu"},
	{Name: "ops_draw", File: "ops_draw.cu"},
	{Name: "ops_embed", File: "ops_embed.cu"},
	{Name: "ops_experts", File: "ops_experts.cu"},
	{Name: "ops_loss", File: "ops_loss.cu"},
	{Name: "ops_norm", File: "ops_norm.cu"},
	{Name: "ops_optim", File: "ops_optim.cu"},
	{Name: "ops_rope", File: "ops_rope.cu"},
	{Name: "ops_glu", File: "ops_glu.cu"},
	{Name: "ops_group", File: "ops_group.cu"},
	{Name: "ops_scaled", File: "ops_scaled.cu", Archs: []string{"sm_90a", "sm_100a"}}, // E4M3 since sm_89
}

// topics lists all programs.
var topics = [][]Program{gemm, fused, ops, delta, flash, hopper, hopperGroup}
