//go:build cuda

package train_test

import (
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// Every case gives the same curve on GPUs as on the CPU, up to rounding: in float32 with the reference attention, and
// in bfloat16 with the backend of a run.
func TestCasesOnGPUs(t *testing.T) {
	m := here(t)
	ranks := slices.Max(ranksOf(m))
	for _, c := range gpuCases {
		if ranks < c.ranks {
			t.Logf("%s: needs %d GPUs", c.name, c.ranks)
			continue
		}
		set := append([]string{"model.head_dim=64", "optimizer.lr=1.0e-3"}, c.set...)
		e := expectOf(curve(t, tiny, ranks, set...))
		for _, v := range []struct {
			name, compute string
			set           []string
		}{
			{"fp32", "fp32", []string{"attention.backend=reference"}},
			{"fp32 flash", "fp32", []string{"attention.backend=flash"}},
			{"bf16", "bf16", []string{"attention.backend=" + c.backend()}},
		} {
			t.Run(c.name+"/"+v.name, func(t *testing.T) {
				cfg := loadGPU(t, m, tiny, ranks, append(append(slices.Clone(set), v.set...),
					"precision.compute="+v.compute)...)
				follows(t, cfg.Parallel.Backend, runGPU(t, m, cfg, ranks, train.Options{}).steps, e, v.compute)
			})
		}
	}
}

// A batch without targets has no effect on a GPU; the host runs ahead there.
func TestBatchesWithoutTargetsAreSkippedOnGPUs(t *testing.T) {
	m := here(t)
	e := expectOf(curve(t, sparse(t, "abab"), 1))
	for _, ranks := range ranksOf(m) {
		for _, compute := range []string{"fp32", "bf16"} {
			cfg := loadGPU(t, m, sparse(t, "-a--bab"), ranks, "precision.compute="+compute)
			steps := runGPU(t, m, cfg, ranks, train.Options{}).steps
			if len(steps) != 7 {
				t.Fatalf("%d ranks, %s: %d steps", ranks, compute, len(steps))
			}
			follows(t, cfg.Parallel.Backend, withLoss(steps), e, compute)
		}
	}
}

// In E4M3 another last bit gives another code, so GPUs follow the CPU only as closely as in bfloat16.
func TestLinearsInE4M3OnGPUs(t *testing.T) {
	m := here(t)
	for _, ranks := range ranksOf(m) {
		for _, more := range []string{"memory.recompute=selective", "lora={r: 4, dropout: 0.1}"} {
			set := []string{"model.head_dim=64", "model.intermediate_size=32", "optimizer.lr=1.0e-3",
				"precision.linears=fp8", more}
			e := expectOf(curve(t, tiny, ranks, set...))
			for _, compute := range []string{"fp32", "bf16"} {
				cfg := loadGPU(t, m, tiny, ranks, append(slices.Clone(set), "precision.compute="+compute)...)
				follows(t, cfg.Parallel.Backend, runGPU(t, m, cfg, ranks, train.Options{}).steps, e, "bf16")
			}
		}
	}
}
