//go:build cuda

package train_test

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// A small model of each family follows ten steps of transformers on GPUs.
func TestFamiliesFollowTransformersOnGPUs(t *testing.T) {
	m := here(t)
	for _, name := range families {
		dir := "../families/" + name
		e := readExpect(t, dir)
		for _, ranks := range ranksOf(m) {
			for _, v := range []struct{ compute, backend string }{
				{"fp32", "reference"}, {"fp32", "auto"}, {"bf16", "auto"},
			} {
				t.Run(fmt.Sprintf("%s/%d/%s/%s", name, ranks, v.compute, v.backend), func(t *testing.T) {
					cfg := loadGPU(t, m, parityYAML(dir, e), ranks, "precision.compute="+v.compute,
						"attention.backend="+v.backend)
					follows(t, cfg.Parallel.Backend, runGPU(t, m, cfg, ranks, train.Options{}).steps, e, v.compute)
				})
			}
		}
	}
}
