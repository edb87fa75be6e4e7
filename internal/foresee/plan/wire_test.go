package plan

import (
	"testing"

	"github.com/cprun/cprun/internal/model"
)

// Gradients in bf16 between ranks halve their bytes and shorten their time.
func TestGradWire(t *testing.T) {
	const ranks = 8
	for _, shard := range []string{"optimizer", "gradients", "parameters"} {
		full, cfg, _ := on(t, "gpu=h200", ranks, "memory.shard="+shard)
		half, _, _ := on(t, "gpu=h200", ranks, "memory.shard="+shard, "precision.grad_wire=bf16")
		want := 2 * model.NewLayout(&cfg.Model.Config, ranks).Size() * (ranks - 1) / ranks
		if got := full.Communication.Gradients - half.Communication.Gradients; got != want {
			t.Errorf("shard %s: bf16 saves %d bytes, want %d", shard, got, want)
		}
		if got, all := half.Estimate.Parts.Gradients, full.Estimate.Parts.Gradients; got >= all {
			t.Errorf("shard %s: gradients take %g s in bf16 and %g s in float32", shard, got, all)
		}
	}
}
