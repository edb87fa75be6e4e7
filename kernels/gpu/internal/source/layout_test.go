//go:build cuda

package source

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/base/cuda/nvrtc"
)

// TestParamsAreLaidOutAsInC compiles each file with structs, followed by checks of their layout.
func TestParamsAreLaidOutAsInC(t *testing.T) {
	compiler, err := nvrtc.Open("../../../../.cuda/lib") // where scripts/cuda-sdk puts it
	if err != nil {
		t.Fatal(err)
	}
	done := map[string]bool{}
	for _, p := range params {
		if done[p.file] {
			continue
		}
		done[p.file] = true
		t.Run(p.file, func(t *testing.T) {
			t.Parallel()
			if err := compileLayout(compiler, p.file, layoutChecks(p.file)); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestLayoutChecksSeeFaults checks that a wrong check does not compile, and that the error names it.
func TestLayoutChecksSeeFaults(t *testing.T) {
	compiler, err := nvrtc.Open("../../../../.cuda/lib")
	if err != nil {
		t.Fatal(err)
	}
	checks := layoutChecks("flash.cuh")
	for _, fault := range [][2]string{
		{"OFFSET(FlashParams, seq_q) == 332", "OFFSET(FlashParams, seq_q) == 336"},
		{"sizeof(FlashParams) == 768", "sizeof(FlashParams) == 764"},
		{"Same<Element<decltype(FlashParams::unit)>::Type, float>", "Same<Element<decltype(FlashParams::unit)>::Type, int>"},
		{"Pointer<Element<decltype(FlashParams::tiles)>::Type>", "Pointer<Element<decltype(FlashParams::few)>::Type>"},
	} {
		if !strings.Contains(checks, fault[0]) {
			t.Fatalf("there is no check %s", fault[0])
		}
		err := compileLayout(compiler, "flash.cuh", strings.ReplaceAll(checks, fault[0], fault[1]))
		var refused *nvrtc.Error
		if !errors.As(err, &refused) || !strings.Contains(refused.Log, fault[1]) {
			t.Errorf("with %s the compiler says %v", fault[1], err)
		}
	}
}

// noKernels turns kernels into unused functions, so that the compiler need not generate their code.
const noKernels = `
#undef __global__
#undef __launch_bounds__
#undef __grid_constant__
#undef __cluster_dims__
#define __global__ inline __device__
#define __launch_bounds__(...)
#define __grid_constant__
#define __cluster_dims__(...)
`

// compileLayout compiles a file with the constants of one of its programs, followed by checks.
func compileLayout(compiler *nvrtc.Compiler, file, checks string) error {
	p := Program{Name: file, File: file, Defines: FlashShapes[0].Forward().Defines}
	if strings.HasSuffix(file, ".cu") {
		for _, q := range Programs() {
			if q.File == file {
				p = q
			}
		}
	}
	code, headers, err := p.Source()
	if err != nil {
		return err
	}
	_, _, err = compiler.Compile(
		file,
		slices.Concat([]byte(noKernels), code, []byte(checks)),
		headers,
		p.Options(Archs[0]),
	)
	return err
}
