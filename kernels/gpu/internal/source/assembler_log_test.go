package source

import (
	"slices"
	"testing"
)

const assembled = `flash.cu(12): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the wgmma pipeline in the function 'b'
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a' for 'sm_90a'
ptxas info    : Function properties for a
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 4096 bytes smem
ptxas info    : Compile time = 1.2 ms
ptxas info    : Compiling entry function 'b' for 'sm_90a'
ptxas info    : Function properties for b
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
ptxas info    : Function properties for callee
    24 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
`

func TestParseUsage(t *testing.T) {
	want := []usage{{"a", 40, 0, 0, 4096}, {"b", 255, 40, 24, 0}}
	if got := parseUsage(assembled); !slices.Equal(got, want) {
		t.Errorf("ParseUsage = %+v, want %+v", got, want)
	}
}

func TestWarnings(t *testing.T) {
	if got := warnings(assembled); len(got) != 2 {
		t.Errorf("Warnings = %q, want the first two lines", got)
	}
}
