//go:build cuda

package train_test

import (
	"testing"

	"github.com/cprun/cprun/internal/train"
)

// Layers of each kind by an algorithm of their own, on two GPUs, or on two ranks that share one: the curve is that of the CPU and
// of one algorithm for all layers, up to rounding, and what is sent lies between.
func TestKindsOnGPUs(t *testing.T) {
	m := here(t)
	yaml := kindsYAML(t)
	var e expect
	for _, s := range mustRun(t, load(t, yaml, kindsRanks), kindsRanks, train.Options{}).steps {
		e.Loss, e.GradNorm = append(e.Loss, float64(s.Loss)), append(e.GradNorm, float64(s.GradNorm))
	}
	for _, x := range kindsCases {
		t.Run(x.String(), func(t *testing.T) {
			cfg := loadGPU(t, m, yaml, kindsRanks, x.set()...)
			mixed := runGPU(t, m, cfg, kindsRanks, train.Options{Kinds: x.kinds()}).steps
			follows(t, "apart, and the CPU in float32", mixed, e, "bf16")
			together := runGPU(t, m, cfg, kindsRanks, train.Options{}).steps
			closeTo(t, "apart, and all by "+x.full, mixed, together, 1e-2)
			for i := range mixed {
				t.Logf("step %d: loss %.5f apart, %.5f together; gradient norm %.4f, %.4f; attention sends %.0f bytes, %.0f", i+1, float64(mixed[i].Loss), float64(together[i].Loss),
					float64(mixed[i].GradNorm), float64(together[i].GradNorm), float64(mixed[i].AttentionBytes), float64(together[i].AttentionBytes))
				if x.sends && mixed[i].AttentionBytes == together[i].AttentionBytes {
					t.Errorf("step %d: %v bytes of attention are sent, as by %s alone", i+1, mixed[i].AttentionBytes, x.full)
				}
			}
		})
	}
}
