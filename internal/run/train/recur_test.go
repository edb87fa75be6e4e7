package train_test

import (
	"fmt"
	"testing"

	"github.com/cprun/cprun/internal/run/train"
)

// hybrid has two layers with a recurrent state around one with attention. A head forgets slowly at first.
var hybrid = []string{`model={architecture: qwen3_5_text, vocab_size: 257, hidden_size: 32, intermediate_size: 48,
 num_hidden_layers: 3, layer_types: [linear_attention, full_attention, linear_attention], num_attention_heads: 4,
 num_key_value_heads: 2, head_dim: 16, linear_num_key_heads: 2, linear_num_value_heads: 4, linear_key_head_dim: 16,
 linear_value_head_dim: 16}`, "data.seq_len=61"}

// Recurrent layers train alike on any number of ranks, in any layout without a stride, with and without documents, also
// if ranks have segments of one row.
func TestRecurrentLayersTrainAlike(t *testing.T) {
	t.Parallel()
	for i, mode := range [][]string{
		{"train.micro_batch_size=2", "train.global_batch_size=2"},
		{"data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2"},
		{conversations(t), "data.seq_len=24", "train.global_batch_size=2"},
	} {
		mode = append(append([]string{}, hybrid...), mode...)
		want := curve(t, tiny, 1, mode...)
		for j, with := range [][]string{
			{"parallel.layout=contiguous"},
			{"parallel.layout=zigzag", "memory.recompute=full", "memory.shard=parameters"},
			{"parallel.layout=document", "parallel.algorithm=allgather", "memory.recompute=selective"},
			{"parallel.layout=document-zigzag", "parallel.algorithm=allgather"},
			{"parallel.layout=zigzag", "parallel.algorithm=ulysses", "memory.offload=activations"},
		} {
			for k, ranks := range []int{2, 3, 4, 8} {
				switch {
				case i == 0 && j > 1 && j < 4, j == 4 && ranks%2 > 0, j == 4 && ranks > 4:
					continue // layouts of documents; heads that the ranks divide
				case testing.Short() && (i+j+k)%4 > 0:
					continue // one number of ranks for each, in turn
				}
				got := curve(t, tiny, ranks, append(with, mode...)...)
				closeTo(t, fmt.Sprintf("%d, %d ranks, %v", i, ranks, with), got, want, 2e-5)
			}
		}
	}
}

// A checkpoint of recurrent layers continues on another number of ranks.
func TestRecurrentLayersGoOn(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	whole := curve(t, tiny, 1, hybrid...)
	mustRun(t, load(t, tiny, 3, append(hybrid, "train.steps=2")...), 3, train.Options{RunDir: dir, RunID: "a"})
	rest := mustRun(t, load(t, tiny, 2, hybrid...), 2, train.Options{RunDir: dir, RunID: "b", Resume: true}).steps
	closeTo(t, "after a checkpoint", rest, whole[2:], 2e-5)
}
