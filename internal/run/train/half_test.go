package train_test

import (
	"fmt"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// A CPU follows the curve in 16 bits, on any number of ranks and with all memory options.
func TestParityInHalfPrecision(t *testing.T) {
	t.Parallel()
	for _, v := range []struct {
		fixture, compute string
		ranks            int
		set              string
	}{
		{"tiny-llama", "bf16", 1, "memory.recompute=none"}, {"tiny-llama", "bf16", 2, "memory.recompute=full"},
		{"tiny-llama", "bf16", 4, "memory.recompute=selective"}, {"tiny-llama", "bf16", 2, "memory.shard=gradients"},
		{"tiny-llama", "bf16", 2, "memory.shard=parameters"}, {"tiny-llama", "bf16", 2, "parallel.algorithm=allgather"},
		{"tiny-llama", "bf16", 2, "parallel.algorithm=ulysses"},
		{"tiny-llama", "bf16", 2, "attention.backend=reference"}, {"tiny-llama", "fp16", 2, "memory.shard=optimizer"},
		{"tiny-llama-tied-clip", "bf16", 2, "memory.recompute=none"},
		{"tiny-llama-tied-clip", "fp16", 1, "memory.recompute=none"},
	} {
		e := readExpect(t, v.fixture).begin(6)
		if testing.Short() && v.set == "attention.backend=reference" {
			e = e.begin(1) // it is slow
		}
		got := curve(t, parityYAML(v.fixture, e), v.ranks, "precision.compute="+v.compute, v.set)
		follows(t, fmt.Sprint(v), got, e, v.compute)
	}
}

// In bf16, the bits do not depend on the number of processors, and ranks only change the order of sums.
func TestHalfPrecisionRepeats(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	set := []string{"precision.compute=bf16", "model.architecture=qwen3"}
	want := curve(t, tiny, 1, set...)
	for procs := 1; procs <= 3; procs++ {
		runtime.GOMAXPROCS(procs)
		if got := again(t, tiny, 1, set...); losses(got) != losses(want) {
			t.Errorf("GOMAXPROCS %d:\n%s\nwant\n%s", procs, losses(got), losses(want))
		}
	}
	for _, ranks := range []int{2, 4} {
		for _, more := range []string{"parallel.algorithm=ring", "parallel.algorithm=hierarchical",
			"data.pack_documents=true"} {
			one := want
			if more == "data.pack_documents=true" {
				one = curve(t, tiny, 1, append(set, more)...)
			}
			got := curve(t, tiny, ranks, append(set, more)...)
			closeTo(t, fmt.Sprintf("%d ranks, %s", ranks, more), got, one, within["bf16"].loss)
		}
	}
}

// The ring moves keys and values of 2 bytes, and sums of 4.
func TestWireOfHalfPrecision(t *testing.T) {
	bytes := func(compute string) float64 {
		return float64(curve(t, tiny, 2, "precision.compute="+compute, "train.steps=1")[0].AttentionBytes)
	}
	wide, half := bytes("fp32"), bytes("bf16")
	if !(half < wide && half > wide/2) {
		t.Errorf("a step sends %v bytes in bf16 and %v in fp32", half, wide)
	}
}

// A checkpoint has float32 weights, so a run in bf16 can resume in fp32, and the reverse.
func TestCheckpointsMoveBetweenTypes(t *testing.T) {
	want := curve(t, tiny, 1, "train.steps=8")
	for _, types := range [][2]string{{"bf16", "fp32"}, {"fp32", "bf16"}} {
		first := mustRun(t, load(t, tiny, 2, "precision.compute="+types[0]), 2, train.Options{})
		cfg := load(t, tiny, 1, "precision.compute="+types[1], "train.steps=8")
		second := mustRun(t, cfg, 1, train.Options{From: filepath.Join(first.dir, "checkpoints", "step-00000004")})
		closeTo(t, fmt.Sprint(types), append(first.steps, second.steps...), want, within["bf16"].loss)
	}
}
