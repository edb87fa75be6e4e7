//go:build cuda

package source

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/cuda/nvrtc"
)

// littleShared is an architecture with SmallShared, and the oldest.
const littleShared = "sm_86"

// archs are those that a program is compiled for here: one with little shared memory for the shapes that
// no other gets (TestFlashSmallShapes).
func archs(p Program) (list []string) {
	if smallOnly(p) {
		return []string{littleShared}
	}
	for _, arch := range Archs {
		if p.For(arch) {
			list = append(list, arch)
		}
	}
	return list
}

// smallOnly reports whether a program is of shapes alone that come after another for the same head dims.
func smallOnly(p Program) bool {
	small := false
	for i, s := range FlashShapes {
		if !slices.ContainsFunc([]Program{s.Forward(), s.Backward(), s.DQ()}, func(q Program) bool { return q.Name == p.Name }) {
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

// Every program compiles for every architecture that it is for, without a warning, without
// spills, and without wgmma instructions that the assembler had to serialise. -v lists
// what each kernel takes. With -short, programs take turns with the architectures, one each.
func TestEveryKernelCompiles(t *testing.T) {
	compiler, err := nvrtc.Open("../../.cuda/lib") // where scripts/cuda-sdk puts it
	if err != nil {
		t.Fatal(err)
	}
	for i, p := range Programs() {
		list := archs(p)
		if testing.Short() {
			list = list[i%len(list):][:1]
		}
		for _, arch := range list {
			t.Run(p.Name+"/"+arch, func(t *testing.T) {
				t.Parallel()
				code, headers, err := p.Source()
				if err != nil {
					t.Fatal(err)
				}
				_, log, err := compiler.Compile(p.File, code, headers, p.Options(arch))
				if err != nil {
					t.Fatal(err)
				}
				for _, w := range nvrtc.Warnings(log) {
					t.Error(w)
				}
				for _, fault := range faults(p, nvrtc.ParseUsage(log)) {
					t.Error(fault)
				}
				for _, u := range nvrtc.ParseUsage(log) {
					t.Logf("%-40s %3d registers %6d bytes shared", u.Kernel, u.Registers, u.Shared)
				}
			})
		}
	}
}

// faults are what is wrong with the kernels that were compiled.
func faults(p Program, all []nvrtc.Usage) (list []string) {
	if len(all) == 0 {
		list = append(list, "the log tells of no kernel")
	}
	for _, e := range p.Entries {
		if !slices.ContainsFunc(all, func(u nvrtc.Usage) bool { return u.Kernel == e.Name }) {
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
			list = append(list, fmt.Sprintf("%s has %d bytes of local memory a thread, with %d bytes spilled; %d are allowed", u.Kernel, u.Stack, u.Spilled, allowed))
		}
	}
	return list
}

func TestFaults(t *testing.T) {
	p := Program{Entries: []Entry{{Name: "a", Local: 16, Why: "test"}, {Name: "gone"}}}
	got := faults(p, []nvrtc.Usage{{Kernel: "a", Stack: 16, Spilled: 4}, {Kernel: "b", Spilled: 8}, {Kernel: "c", Stack: 8}, {Kernel: "d", Stack: 0}})
	if len(got) != 3 {
		t.Errorf("faults %q, want those of gone, b and c", got)
	}
}
