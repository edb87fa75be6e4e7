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
	t.Parallel()
	for m, mode := range [][]string{
		{},
		{"train.global_batch_size=4"}, // accumulation
		{"train.global_batch_size=4", "parallel.data=2"},
		{"data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2"},
		{"model.tie_word_embeddings=false", "model.num_hidden_layers=5", "train.global_batch_size=2"},
		{"model.num_hidden_layers=1", "model.architecture=qwen3"},
	} {
		want := curve(t, tiny, 1, withoutData(mode)...)
		for _, ranks := range []int{4, 2} {
			for i, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
				if testing.Short() && (i+m+ranks/2)%2 == 0 {
					continue // 4 ranks or 2 for each, in turn
				}
				set := append(mode, "memory.shard="+shard)
				what := fmt.Sprintf("%v, %d ranks, shard %s", mode, ranks, shard)
				got := curve(t, tiny, ranks, set...)
				closeTo(t, what, got, want, 5e-5)
				if testing.Short() && i != m {
					continue // each sharding runs again in one mode
				}
				if losses(again(t, tiny, ranks, set...)) != losses(got) {
					t.Errorf("%s: a second run has other bits", what)
				}
			}
		}
	}
}

// With gradients in bf16 between ranks the curve stays close to that of float32, and differs; a second run has the same
// bits. On one rank nothing changes.
func TestGradWire(t *testing.T) {
	t.Parallel()
	const half = "precision.grad_wire=bf16"
	for m, mode := range [][]string{{}, {"train.global_batch_size=4"}, {"train.global_batch_size=4", "parallel.data=2"}} {
		for i, shard := range []string{"optimizer", "gradients", "parameters"} {
			for _, ranks := range []int{2, 4} {
				if testing.Short() && (i+m+ranks/2)%2 == 0 {
					continue // 2 ranks or 4 for each, in turn
				}
				set := append(slices.Clone(mode), "memory.shard="+shard)
				want := curve(t, tiny, ranks, set...)
				set = append(set, half)
				got := curve(t, tiny, ranks, set...)
				what := fmt.Sprintf("%v, %d ranks, shard %s", mode, ranks, shard)
				closeTo(t, what, got, want, 5e-3)
				if losses(got) == losses(want) {
					t.Errorf("%s: bf16 has the bits of float32", what)
				}
				if testing.Short() && i != m {
					continue // each sharding runs again in one mode
				}
				if losses(again(t, tiny, ranks, set...)) != losses(got) {
					t.Errorf("%s: a second run has other bits", what)
				}
			}
		}
	}
	want := curve(t, tiny, 1)
	if got := curve(t, tiny, 1, half); losses(got) != losses(want) {
		t.Errorf("one rank:\n%s\nwant\n%s", losses(got), losses(want))
	}
}

// Separate float32 master weights, as with weights of another type, change no bit in training or through a checkpoint.
func TestMastersLeaveNoTrace(t *testing.T) {
	t.Parallel()
	apart := func(d *device.Device) { d.Masters = true }
	for _, shard := range []string{"none", "optimizer", "gradients", "parameters"} {
		for _, ranks := range []int{1, 3} {
			if testing.Short() && ranks == 1 && shard != "none" {
				continue // one rank has nothing to shard
			}
			set := []string{"memory.shard=" + shard, "train.global_batch_size=2", "model.architecture=qwen3"}
			run := func(steps int, o train.Options) outcome {
				cfg := load(t, tiny, ranks, append(set, fmt.Sprintf("train.steps=%d", steps))...)
				out, err := runOn(t, cfg, ranks, o, apart)
				if err != nil {
					t.Fatal(err)
				}
				return out
			}
			want := curve(t, tiny, ranks, append(set, "train.steps=4")...)
			first := run(2, train.Options{})
			second := run(4, train.Options{From: first.dir + "/checkpoints/step-00000002", NoSave: true})
			if got := losses(append(first.steps, second.steps...)); got != losses(want) {
				t.Errorf("%d ranks, shard %s:\n%s\nwant\n%s", ranks, shard, got, losses(want))
			}
		}
	}
}

// withoutData returns a mode for one rank.
func withoutData(mode []string) []string {
	return slices.DeleteFunc(slices.Clone(mode), func(s string) bool { return s == "parallel.data=2" })
}

// A checkpoint resumes with any sharding and number of ranks; on the same ranks, with the same bits.
func TestCheckpointsMoveBetweenShardings(t *testing.T) {
	t.Parallel()
	shards := []string{"none", "optimizer", "gradients", "parameters"}
	whole := curve(t, tiny, 1, "train.steps=8")
	for i, from := range shards {
		cfg := load(t, tiny, 4, "memory.shard="+from)
		first := mustRun(t, cfg, 4, train.Options{})
		for j, to := range shards {
			for _, ranks := range []int{1, 3} {
				if testing.Short() && (ranks == 1) != ((i+j)%4 == 0) {
					continue // each sharding moves to one rank once, and from one
				}
				cfg := load(t, tiny, ranks, "train.steps=8", "memory.shard="+to)
				got := mustRun(t, cfg, ranks, train.Options{From: first.dir + "/checkpoints/step-00000004", NoSave: true}).steps
				closeTo(t, fmt.Sprintf("4 ranks with shard %s, then %d with %s", from, ranks, to), got, whole[4:], 5e-5)
			}
		}
	}
}

// With a host that runs ahead, the steps have the same bits, and checkpoints, validations and stops come at the same
// steps; a stop is at most one step late.
func TestRunningAheadLeavesNoTrace(t *testing.T) {
	t.Parallel()
	set := []string{"train.steps=9", "checkpoint.every=4", "checkpoint.keep=0", "checkpoint.async=true",
		"memory.shard=gradients", "train.global_batch_size=2"}
	val := "data.validation={path: " + textFile(t) + ", every: 3, samples: 2}"
	for _, ranks := range []int{1, 3} {
		cfg := load(t, tiny, ranks, append(set, val)...)
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
	cfg, want := load(t, tiny, 2, "train.steps=40"), curve(t, tiny, 2, "train.steps=40")
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
