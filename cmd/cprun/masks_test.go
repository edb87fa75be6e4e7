package main

import (
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/base/near"
	"github.com/cprun/cprun/internal/base/safetensors"
)

// Every kind of mask gives the same result with processes as with goroutines, and the report names it.
func TestAttentionOfMasks(t *testing.T) {
	t.Parallel()
	for name, mask := range map[string]string{
		"slices_overlap": "slices: 6", "documents_of_samples_keys": "causal, window (8, -1), documents of each " +
			"sample, their lengths in keys",
		"top_left_of_fewer_keys": "causal from the top left",
	} {
		in := "../../internal/run/attend/testdata/masks/" + name + ".safetensors"
		out := filepath.Join(t.TempDir(), "result.safetensors")
		stdout, _ := must(t, "attention", "--in", in, "--out", out, "--nproc", "3", "--json")
		var report struct{ Mask string }
		if decode(t, stdout, &report); report.Mask != mask {
			t.Errorf("%s: the report's mask is %q", name, report.Mask)
		}
		for _, tensor := range []string{"out", "lse", "dq", "dk", "dv"} {
			if err := near.Each(read(t, out, tensor), read(t, in, tensor), near.Infinities,
				func(int) float64 { return 1e-5 }); err != nil {
				t.Errorf("%s: %s: %v", name, tensor, err)
			}
		}
	}
}

// A malformed mask ends with status 2 and the name of its key.
func TestAttentionRefusesMasks(t *testing.T) {
	t.Parallel()
	x := make([]float32, 16)
	for key, value := range map[string]string{
		"causal": "bottom", "window": "1;2", "docs": "[[4,4]]", "docs_kv": "[8]", "slices": `[[0,8,0,9,"full"]]`,
	} {
		in := filepath.Join(t.TempDir(), "case.safetensors")
		var entries []safetensors.Entry
		for _, name := range []string{"q", "k", "v"} {
			entries = append(entries, safetensors.Floats(name, safetensors.F32, []int{2, 8, 1, 1}, x))
		}
		if err := safetensors.WriteFile(in, map[string]string{key: value}, entries); err != nil {
			t.Fatal(err)
		}
		invalid(t, []string{"attention", "--in", in, "--out", in + ".out"}, `metadata "`+key+`"`)
	}
}
