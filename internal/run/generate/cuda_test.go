//go:build cuda

package generate

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/machine"
	"github.com/cprun/cprun/tensor"
)

// A GPU gives the logits of the CPU for pieces of one token, a few tokens, and more than one pass.
func TestReadingOnAGPU(t *testing.T) {
	m, gpus, err := machine.Find()
	if err != nil || len(gpus) == 0 {
		t.Fatalf("no GPU is seen: the tag cuda tests GPUs (%v)", err)
	}
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 2))
		cfg, backend := randomModel(r), "reference"
		if seed%2 == 0 {
			cfg.HeadDim, backend = 64, "flash"
		}
		t.Run(fmt.Sprintf("seed %d %s", seed, backend), func(t *testing.T) {
			n := pieceRows + 20
			weights, ids := randomWeights(cfg, r), make([]int32, n)
			for i := range ids {
				ids[i] = int32(r.IntN(cfg.VocabSize))
			}
			dev, err := device.CUDA(device.CUDAOptions{Backend: backend, Compute: tensor.F32, Machine: m,
				HeadDim: cfg.HeadDim})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := dev.Close(); err != nil {
					t.Error(err)
				}
			}()
			gpu, err := New(t.Context(), cfg, &dev, n, reading(weights))
			if err != nil {
				t.Fatal(err)
			}
			cpu := loaded(t, cfg, weights, n)
			for lo, sizes := 0, []int{pieceRows + 10, 1, 3, 1, 5}; len(sizes) > 0; sizes = sizes[1:] {
				piece := ids[lo : lo+sizes[0]]
				lo += len(piece)
				got, err := gpu.Read(t.Context(), piece)
				if err != nil {
					t.Fatal(err)
				}
				want, err := cpu.Read(t.Context(), piece)
				if err != nil {
					t.Fatal(err)
				}
				scale := 1.0
				for _, x := range want {
					scale = max(scale, math.Abs(float64(x)))
				}
				for i := range want {
					if !(math.Abs(float64(got[i]-want[i])) <= 1e-4*scale) {
						t.Fatalf("after %d tokens logit %d is %v, on the CPU %v", lo, i, got[i], want[i])
					}
				}
			}
		})
	}
}
