package train_test

import (
	"fmt"
	"path/filepath"
	"testing"

	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

// validations returns the bits of the validation losses.
func validations(steps []metrics.Step) (out []string) {
	for _, s := range steps {
		if s.ValLoss != nil {
			out = append(out, fmt.Sprintf("%d:%x", s.Step, float64(*s.ValLoss)))
		}
	}
	return out
}

// Sharded weights change no bit: not of losses, norms and validations, nor after a checkpoint of any sharding.
func TestShardedParametersRepeatTheBits(t *testing.T) {
	t.Parallel()
	val := "data.validation={path: " + textFile(t) + ", every: 2, samples: 3}"
	for m, mode := range [][]string{
		{"train.global_batch_size=2"},
		{"train.global_batch_size=4", "precision.compute=bf16", "memory.recompute=full"},
		{"model.tie_word_embeddings=false", "model.num_hidden_layers=1", "train.global_batch_size=2"},
		{"model.tie_word_embeddings=false", "model.num_hidden_layers=4", "train.global_batch_size=2"},
		{"model.num_hidden_layers=3", "data.pack_documents=true", "train.micro_batch_size=2",
			"train.global_batch_size=2", "precision.compute=bf16"},
	} {
		for _, ranks := range fewer(2, 4, 3, 1) {
			if testing.Short() && (m+ranks/2)%2 == 0 {
				continue
			}
			set := append([]string{val, "checkpoint.every=2"}, mode...)
			run := func(shard string, o train.Options) outcome {
				return mustRunAhead(t, load(t, tiny, ranks, append(set, "memory.shard="+shard)...), ranks, o, 1)
			}
			want, got := run("gradients", train.Options{}), run("parameters", train.Options{})
			what := fmt.Sprintf("%v, %d ranks", mode, ranks)
			if losses(got.steps) != losses(want.steps) ||
				fmt.Sprint(validations(got.steps)) != fmt.Sprint(validations(want.steps)) {
				t.Errorf("%s: sharded parameters\n%s %v\nwant\n%s %v", what, losses(got.steps), validations(got.steps),
					losses(want.steps), validations(want.steps))
			}
			for i, to := range []string{"gradients", "parameters"} {
				if testing.Short() && i != m%2 {
					continue
				}
				from := []outcome{got, want}[i].dir
				o := train.Options{From: filepath.Join(from, "checkpoints", "step-00000002"), NoSave: true}
				if end := run(to, o).steps; losses(end) != losses(want.steps[2:]) {
					t.Errorf("%s: resumed with %s\n%s\nwant\n%s", what, to, losses(end), losses(want.steps[2:]))
				}
			}
		}
	}
}

// Data groups with fewer samples of a validation or an evaluation than others take part in all gathers.
func TestUnevenGroupsGather(t *testing.T) {
	t.Parallel()
	for i, samples := range []int{1, 2, 3, 5} {
		for _, micro := range []int{1, 2} {
			if testing.Short() && (i+micro)%2 == 0 {
				continue // micro batches of one or two for each, in turn
			}
			set := []string{fmt.Sprintf("data.validation={path: %s, every: 2, samples: %d}", textFile(t), samples),
				"parallel.data=2", "train.global_batch_size=4", fmt.Sprintf("train.micro_batch_size=%d", micro),
				"data.pack_documents=true", "model.tie_word_embeddings=false"}
			cfg := func(shard string) []string { return append(set, "memory.shard="+shard) }
			want := curve(t, tiny, 4, cfg("gradients")...)
			got := mustRun(t, load(t, tiny, 4, cfg("parameters")...), 4, train.Options{})
			if fmt.Sprint(validations(got.steps)) != fmt.Sprint(validations(want)) || losses(got.steps) != losses(want) {
				t.Errorf("%d samples: %s %v, want %s %v", samples, losses(got.steps), validations(got.steps),
					losses(want), validations(want))
			}
			from := filepath.Join(got.dir, "checkpoints", "step-00000004")
			e := evaluate(t, load(t, tiny, 4, cfg("parameters")...), 4, from)
			if w := evaluate(t, load(t, tiny, 4, cfg("none")...), 4, from); fmt.Sprint(e) != fmt.Sprint(w) {
				t.Errorf("%d samples: evaluation %+v, unsharded %+v", samples, e, w)
			}
		}
	}
}
