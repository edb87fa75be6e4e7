package train_test

import (
	"encoding/json"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

// lessons writes documents of different lengths, each a sample without packing.
func lessons(t *testing.T, n int) string {
	t.Helper()
	var b strings.Builder
	for i := range n {
		more := (5 * i) % 7
		fmt.Fprintf(&b, `{"input_ids": [%d, 7, 9%s], "loss_mask": [0, 0, 1%s]}`+"\n", 65+i, strings.Repeat(", 80, 90", more),
			strings.Repeat(", 1, 0", more))
	}
	return writeFile(t, "lessons.jsonl", b.String())
}

// checked loads a config and counts its data, as the launcher does.
func checked(t *testing.T, ranks int, set ...string) *config.Config {
	t.Helper()
	cfg := load(t, tiny, ranks, append([]string{"optimizer.lr=0", "log.every=1"}, set...)...)
	if _, err := train.Check(cfg); err != nil {
		t.Fatal(err)
	}
	return cfg
}

// The last step of the last epoch takes the samples that are left, on any shape of ranks. With a learning rate of 0 its
// loss and gradient are those of a run that has these samples as a whole batch.
func TestEpochsEndWithTheirLastSample(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		samples, epochs, batch int
		set                    string
		shapes                 []string
	}{
		{3, 3, 8, "data.pack_documents=false", []string{"1", "2 parallel.data=2", "4 parallel.data=4",
			"4 parallel.data=2 train.micro_batch_size=4 memory.shard=parameters"}},
		{5, 2, 8, "data.pack_documents=true", []string{"1 train.micro_batch_size=8", "2 parallel.data=2 memory.shard=gradients",
			"4 parallel.data=4 train.micro_batch_size=2 memory.shard=parameters"}},
		{3, 1, 8, "data.pack_documents=false", []string{"4 parallel.data=4 train.micro_batch_size=2"}},
	} {
		seqLen := 32
		if c.set == "data.pack_documents=true" {
			seqLen = 24
		}
		data := fmt.Sprintf("data={path: %s, seq_len: %d}", lessons(t, c.samples), seqLen)
		run := func(shape string, set ...string) []metrics.Step {
			var ranks int
			words := strings.Fields(shape)
			fmt.Sscan(words[0], &ranks)
			cfg := checked(t, ranks, append(append([]string{data, c.set}, set...), words[1:]...)...)
			steps := mustRunAhead(t, cfg, ranks, train.Options{NoSave: true}, 1).steps
			if len(steps) != cfg.Train.Steps {
				t.Errorf("%v, %s: %d steps, and the config has %d", c, shape, len(steps), cfg.Train.Steps)
			}
			return steps
		}
		alone := run("1", fmt.Sprintf("train={epochs: %d, global_batch_size: 1}", c.epochs))
		all := len(alone)
		rest := all % c.batch
		if rest == 0 || rest == c.batch {
			t.Fatalf("%v: %d samples leave no rest", c, all)
		}
		// The rest as whole batches of its size: their last one has the same samples.
		if all%rest != 0 {
			t.Fatalf("%v: %d is no divisor of %d", c, rest, all)
		}
		same := run("1", fmt.Sprintf("train={epochs: %d, global_batch_size: %d}", c.epochs, rest))
		for _, shape := range c.shapes {
			got := run(shape, fmt.Sprintf("train={epochs: %d, global_batch_size: %d}", c.epochs, c.batch))
			if want := (all + c.batch - 1) / c.batch; len(got) != want {
				t.Fatalf("%v, %s: %d steps, want %d", c, shape, len(got), want)
			}
			last := got[len(got)-1]
			if math.Abs(float64(last.Epoch)-float64(c.epochs)) > 1e-9 {
				t.Errorf("%v, %s: ends at epoch %v", c, shape, last.Epoch)
			}
			if last.Tokens != alone[all-1].Tokens {
				t.Errorf("%v, %s: %d tokens, want %d", c, shape, last.Tokens, alone[all-1].Tokens)
			}
			closeTo(t, fmt.Sprint(c, shape), []metrics.Step{last}, same[len(same)-1:], 1e-6)
		}
	}
}

// The epoch of a step is that of its samples, also if the batch has changed, and a run whose epochs are over trains
// nothing more.
func TestEpochsAfterAResumeWithAnotherBatch(t *testing.T) {
	t.Parallel()
	files := "data={path: " + lessons(t, 10) + ", seq_len: 32, pack_documents: false}"
	dir := t.TempDir()
	step, samples := int64(0), int64(0)
	run := func(want string, set ...string) {
		t.Helper()
		cfg := checked(t, 2, append([]string{files, "parallel.data=2", "checkpoint.every=1"}, set...)...)
		if err := cfg.ResumeAt(step, samples); err != nil {
			t.Fatal(err)
		}
		var got []string
		id, err := train.Identify(cfg, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range mustRun(t, cfg, 2, train.Options{RunDir: dir, Resume: true, Data: id}).steps {
			got = append(got, fmt.Sprintf("%d/%d:%.1f", s.Step, cfg.Train.Steps, float64(s.Epoch)))
			step, samples = s.Step, int64(math.Round(10*float64(s.Epoch)))
		}
		if g := strings.Join(got, " "); g != want {
			t.Errorf("%v: steps %q, want %q", set, g, want)
		}
	}
	run("1/2:0.4 2/2:0.8", "train={steps: 2, global_batch_size: 4}")
	run("3/4:1.2 4/4:1.6", "train={steps: 4, global_batch_size: 4}")
	run("5/6:1.8 6/6:2.0", "train={epochs: 2, global_batch_size: 2}")
	run("", "train={epochs: 2, global_batch_size: 4}")
	run("7/8:2.8 8/8:3.0", "train={epochs: 3, global_batch_size: 8}")
	run("9/9:3.2", "train={samples: 32, global_batch_size: 8}")
	run("", "train={samples: 20, global_batch_size: 8}")
	run("", "train={samples: 32, steps: 50, global_batch_size: 8}") // whichever comes first
	run("10/10:3.6", "train={samples: 90, steps: 10, global_batch_size: 4}")
	c, _, err := checkpoint.Latest(t.Context(), filepath.Join(dir, "checkpoints"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var id data.Identity
	if err := json.Unmarshal(c.Manifest.Extra[train.DataState], &id); err != nil || len(id.First) != 1 {
		t.Errorf("the checkpoint's record of the data: %+v, %v", id, err)
	}
}
