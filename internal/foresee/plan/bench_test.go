package plan

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/machine"
)

// What `cprun plan` computes, after the choice of a backend.
func BenchmarkMake(b *testing.B) {
	for _, seq := range []string{"1M", "16G"} {
		for _, algorithm := range []string{"ring", "allgather"} {
			for _, ranks := range []int{8, 64, 256, 1024} {
				b.Run(fmt.Sprintf("%s/%s/ranks=%d", seq, algorithm, ranks), func(b *testing.B) {
					set := []string{"data.seq_len=" + seq, "parallel.algorithm=" + algorithm, "parallel.layout=zigzag"}
					m := machine.Machine{Arch: 90, GPUs: ranks, Memory: 140 << 30}
					for b.Loop() {
						cfg, err := config.Load("../../../examples/bench/llama-3.2-3b-32k.yaml",
							config.Options{Ranks: ranks, Device: "cuda", Set: set, NoFiles: true})
						if err != nil {
							b.Fatal(err)
						}
						if _, err := Make(cfg, ranks, Options{Machine: m}); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}
