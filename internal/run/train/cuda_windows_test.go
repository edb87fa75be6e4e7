//go:build cuda

package train_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// Full and windowed layers on two GPUs, or on two ranks with one GPU, give the CPU's curve with each backend and
// algorithm.
func TestWindowsOnGPUs(t *testing.T) {
	const ranks = 2
	m := here(t)
	text := strings.Repeat("the slings and arrows of outrageous fortune, or to take arms against a sea of troubles. ",
		40)
	yaml := fmt.Sprintf(`
model: {vocab_size: 257, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 64,
  sliding_window: 40, layer_types: [full_attention, sliding_attention, sliding_attention, full_attention]}
data: {path: %s, seq_len: 256, eos_token_id: 256}
train: {steps: 5}
optimizer: {lr: 1.0e-3}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, writeFile(t, "text.txt", text))
	e := expectOf(curve(t, yaml, ranks))
	for _, backend := range []string{"flash", "fused"} {
		for _, algorithm := range []string{"ring", "allgather", "ulysses"} {
			t.Run(backend+"/"+algorithm, func(t *testing.T) {
				cfg := loadGPU(t, m, yaml, ranks, "precision.compute=bf16", "attention.backend="+backend,
					"parallel.algorithm="+algorithm)
				follows(t, "the CPU in float32", runGPU(t, m, cfg, ranks, train.Options{}).steps, e, "bf16")
			})
		}
	}
}
