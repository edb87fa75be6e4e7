package train_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/run/train"
)

// With every sharding, and any distance that the host runs ahead, the curve is equal up to the order of sums.
func TestShardingLeavesNoTrace(t *testing.T) {
	for m, mode := range [][]string{
		{},
		{"train.global_batch_size=4"}, // accumulation
		{"train.global_batch_size=4", "parallel.data=2"},
		{"data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2"},
		{"model.tie_word_embeddings=false", "model.num_hidden_layers=5", "train.global_batch_size=2"},
		{"model.num_hidden_layers=1", "model.architecture=qwen3"},
	} {
		want := mustRun(t, load(t, tiny(t), 1, append([]string{}, withoutData(mode)...)...), 1, train.Options{}).steps
		for _, ranks := range fewer(4, 2) {
			for i, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
				cfg := load(t, tiny(t), ranks, append(mode, "memory.shard="+shard)...)
				what := fmt.Sprintf("%v, %d ranks, shard %s", mode, ranks, shard)
				got := mustRun(t, cfg, ranks, train.Options{}).steps
				closeTo(t, what, got, want, 5e-5)
				if testing.Short() && i != m%3 {
					continue // each sharding runs again in two modes
				}
				if ranks == 4 && losses(mustRun(t, cfg, ranks, train.Options{}).steps) != losses(got) {
					t.Errorf("%s: a second run has other bits", what)
				}
			}
		}
	}
}

// With gradients in bf16 between ranks the curve stays close to that of float32, and differs; a second run has the same
// bits. On one rank nothing changes.
func TestGradWire(t *testing.T) {
	const half = "precision.grad_wire=bf16"
	for _, mode := range [][]string{{}, {"train.global_batch_size=4"}, {"train.global_batch_size=4", "parallel.data=2"}} {
		for _, shard := range []string{"optimizer", "gradients", "parameters"} {
			for _, ranks := range []int{2, 4} {
				set := append(slices.Clone(mode), "memory.shard="+shard)
				want := mustRun(t, load(t, tiny(t), ranks, set...), ranks, train.Options{}).steps
				cfg := load(t, tiny(t), ranks, append(set, half)...)
				got := mustRun(t, cfg, ranks, train.Options{}).steps
				what := fmt.Sprintf("%v, %d ranks, shard %s", mode, ranks, shard)
				closeTo(t, what, got, want, 5e-3)
				if losses(got) == losses(want) {
					t.Errorf("%s: bf16 has the bits of float32", what)
				}
				if losses(mustRun(t, cfg, ranks, train.Options{}).steps) != losses(got) {
					t.Errorf("%s: a second run has other bits", what)
				}
			}
		}
	}
	want := mustRun(t, load(t, tiny(t), 1), 1, train.Options{}).steps
	if got := mustRun(t, load(t, tiny(t), 1, half), 1, train.Options{}).steps; losses(got) != losses(want) {
		t.Errorf("one rank:\n%s\nwant\n%s", losses(got), losses(want))
	}
}

// Separate float32 master weights, as with weights of another type, change no bit in training or through a checkpoint.
func TestMastersLeaveNoTrace(t *testing.T) {
	apart := func(d *device.Device) { d.Masters = true }
	for _, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
		for _, ranks := range []int{1, 3} {
			cfg := load(t, tiny(t), ranks, "memory.shard="+shard, "train.steps=6", "train.global_batch_size=2",
				"model.architecture=qwen3")
			want := mustRun(t, cfg, ranks, train.Options{}).steps
			half := load(t, tiny(t), ranks, "memory.shard="+shard, "train.steps=3", "train.global_batch_size=2",
				"model.architecture=qwen3")
			first, err := runOn(t, half, ranks, train.Options{}, apart)
			if err != nil {
				t.Fatal(err)
			}
			second, err := runOn(t, cfg, ranks, train.Options{From: first.dir + "/checkpoints/step-00000003"}, apart)
			if err != nil {
				t.Fatal(err)
			}
			if got := losses(append(first.steps, second.steps...)); got != losses(want) {
				t.Errorf("%d ranks, shard %s:\n%s\nwant\n%s", ranks, shard, got, losses(want))
			}
		}
	}
}

// withoutData returns a mode for one rank.
func withoutData(mode []string) []string {
	var out []string
	for _, s := range mode {
		if s != "parallel.data=2" {
			out = append(out, s)
		}
	}
	return out
}

// A checkpoint resumes with any sharding and number of ranks; on the same ranks, with the same bits.
func TestCheckpointsMoveBetweenShardings(t *testing.T) {
	shards := []string{"none", "optimizer", "gradients", "parameters"}
	whole := mustRun(t, load(t, tiny(t), 1, "train.steps=8"), 1, train.Options{}).steps
	for _, from := range shards {
		cfg := load(t, tiny(t), 4, "memory.shard="+from)
		first := mustRun(t, cfg, 4, train.Options{})
		for _, to := range shards {
			for _, ranks := range []int{1, 3} {
				cfg := load(t, tiny(t), ranks, "train.steps=8", "memory.shard="+to)
				got := mustRun(t, cfg, ranks, train.Options{From: first.dir + "/checkpoints/step-00000004"}).steps
				closeTo(t, fmt.Sprintf("4 ranks with shard %s, then %d with %s", from, ranks, to), got, whole[4:], 5e-5)
			}
		}
	}
}

// With a host that runs ahead, the steps have the same bits, and checkpoints, validations and stops come at the same
// steps; a stop is at most one step late.
func TestRunningAheadLeavesNoTrace(t *testing.T) {
	set := []string{"train.steps=9", "checkpoint.every=4", "checkpoint.keep=0", "checkpoint.async=true",
		"memory.shard=gradients", "train.global_batch_size=2"}
	val := "data.validation={path: " + textFile(t) + ", every: 3, samples: 2}"
	for _, ranks := range []int{1, 3} {
		cfg := load(t, tiny(t), ranks, append(set, val)...)
		want := mustRun(t, cfg, ranks, train.Options{})
		for _, ahead := range []int{1, 2} {
			got := mustRunAhead(t, cfg, ranks, train.Options{}, ahead)
			if losses(got.steps) != losses(want.steps) {
				t.Errorf("%d ranks, %d ahead:\n%s\nwant\n%s", ranks, ahead, losses(got.steps), losses(want.steps))
			}
			for i, s := range got.steps {
				if w := want.steps[i].ValLoss; (w == nil) != (s.ValLoss == nil) || w != nil && *w != *s.ValLoss {
					t.Errorf("%d ranks, %d ahead: validation of step %d differs", ranks, ahead, i+1)
				}
				if s.Tokens != want.steps[i].Tokens {
					t.Errorf("%d ranks, %d ahead: %d tokens after step %d, want %d", ranks, ahead, s.Tokens, i+1,
						want.steps[i].Tokens)
				}
			}
		}
	}
	cfg := load(t, tiny(t), 2, "train.steps=40")
	want := mustRun(t, cfg, 2, train.Options{}).steps
	o := train.Options{RunDir: t.TempDir(), RunID: "a"}
	stopAfter(5, &o)
	first := mustRunAhead(t, cfg, 2, o, 1)
	if n := len(first.steps); !first.stopped || n < 6 || n > 8 {
		t.Fatalf("asked to stop after 5 steps, it stopped (%t) after %d", first.stopped, n)
	}
	second := mustRunAhead(t, cfg, 2, train.Options{RunDir: o.RunDir, RunID: "b", Resume: true}, 1)
	if got := losses(append(first.steps, second.steps...)); got != losses(want) {
		t.Errorf("stopped and gone on\n%s\nwant\n%s", got, losses(want))
	}
}
