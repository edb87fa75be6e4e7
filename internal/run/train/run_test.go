package train_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

// tiny is a config with documents of a few bytes, in three files.
var tiny = fmt.Sprintf(`
model: {vocab_size: 257, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: true}
data: {path: %s/*.txt, seq_len: 37, eos_token_id: 256}
train: {steps: 4}
optimizer: {lr: 1.0e-2}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, absolute("testdata/tiny"))

func closeTo(t *testing.T, what string, got, want []metrics.Step, tol float64) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%s: %d steps, want %d", what, len(got), len(want))
	}
	for i := range want {
		if d := math.Abs(float64(got[i].Loss - want[i].Loss)); !(d <= tol) {
			t.Errorf("%s: loss of step %d = %v, want %v", what, i+1, got[i].Loss, want[i].Loss)
		}
		if d := math.Abs(float64(got[i].GradNorm-want[i].GradNorm)) / float64(want[i].GradNorm); !(d <= 10*tol) {
			t.Errorf("%s: gradient norm of step %d = %v, want %v", what, i+1, got[i].GradNorm, want[i].GradNorm)
		}
	}
}

// With packed documents, windows, uneven spans and ranks without tokens, the number of ranks and the layout have no
// effect.
func TestRanksLeaveNoTrace(t *testing.T) {
	t.Parallel()
	for m, mode := range [][]string{
		{"data.pack_documents=true"},
		{"data.pack_documents=true", "train.micro_batch_size=2", "train.global_batch_size=2"},
		{"data.pack_documents=true", "model.sliding_window=5"},
		{"model.sliding_window=4", "model.layer_types=[sliding_attention, full_attention]"},
		{"model.sliding_window=4"},
		{"data.seq_len=3"}, // fewer tokens than ranks
		{"model.architecture=qwen3", "data.pack_documents=true"},
	} {
		want := curve(t, tiny, 1, mode...)
		for _, ranks := range fewer(5, 4, 2) {
			for i, layout := range []string{"auto", "zigzag", "striped", "contiguous", "window"} {
				if testing.Short() && ((i+m+ranks)%2 == 0 || (i+m)%5 > 2) {
					continue // three layouts on one number of ranks for each, in turn
				}
				got := curve(t, tiny, ranks, append(mode, "parallel.layout="+layout)...)
				closeTo(t, fmt.Sprintf("%v, %d ranks, %s", mode, ranks, layout), got, want, 2e-5)
			}
		}
	}
}

// textFile writes a validation text.
func textFile(t *testing.T) string {
	t.Helper()
	return writeFile(t, "val.txt", strings.Repeat("the slings and arrows of outrageous fortune. ", 6))
}

// data.validation.samples counts samples, and selects the same ones for any grouping of ranks; 0 means all.
func TestValidationIsTheSameOnAnyRanks(t *testing.T) {
	t.Parallel()
	val := textFile(t)
	for _, samples := range []int{3, 0} {
		set := []string{fmt.Sprintf("data.validation={path: %s, every: 2, samples: %d}", val, samples),
			"train.global_batch_size=4"}
		var want []float64
		for _, r := range []struct {
			ranks int
			set   []string
		}{
			{1, []string{"parallel.data=1"}}, {3, []string{"parallel.data=1"}}, {2, []string{"parallel.data=2"}},
			{4, []string{"parallel.data=2", "train.micro_batch_size=2"}}, {4, []string{"parallel.data=4"}},
		} {
			var got []float64
			for _, s := range curve(t, tiny, r.ranks, append(set, r.set...)...) {
				if s.ValLoss != nil {
					got = append(got, float64(*s.ValLoss))
				}
			}
			if len(got) != 2 {
				t.Fatalf("%d ranks: %d validations in 4 steps, want 2", r.ranks, len(got))
			}
			if want == nil {
				want = got
			}
			for i := range got {
				if !(math.Abs(got[i]-want[i]) <= 1e-5) {
					t.Errorf("%d samples, %d ranks, %v: validation %d = %v, want %v", samples, r.ranks, r.set, i,
						got[i], want[i])
				}
			}
		}
	}
}

// metrics.jsonl contains the validation before the first step, and the epochs.
func TestMetricsBeginAtStep0(t *testing.T) {
	cfg := load(t, tiny, 2, fmt.Sprintf("data.validation={path: %s, every: 2}", textFile(t)))
	dir := mustRun(t, cfg, 2, train.Options{}).dir
	text, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(string(text)) {
		var s metrics.Step
		if err := json.Unmarshal([]byte(line), &s); err != nil {
			t.Fatal(err)
		}
		if since := time.Since(time.Time(s.Time)); since < 0 || since > time.Hour {
			t.Errorf("step %d is of %v", s.Step, time.Time(s.Time))
		}
		got = append(got, fmt.Sprintf("%d %t %.3f %t", s.Step, s.Loss.Known(), float64(s.Epoch), s.ValLoss != nil))
	}
	// 78 bytes of text make two samples of 37 tokens.
	if want := []string{"0 false 0.000 true", "1 true 0.500 false", "2 true 1.000 true", "3 true 1.500 false",
		"4 true 2.000 true"}; !slices.Equal(got, want) {
		t.Errorf("step, loss, epoch, validation: %q, want %q", got, want)
	}
}

// stopAfter stops the run after a step.
func stopAfter(step int64, o *train.Options) {
	stop := make(chan struct{})
	o.Stop = stop
	o.Report = func(r train.Report) {
		if r.Kind == train.Advanced && r.Step == step {
			close(stop)
		}
	}
}

func TestStopAndResumeRepeatBitForBit(t *testing.T) {
	t.Parallel()
	for i, set := range []string{"memory.shard=none", "memory.shard=optimizer", "memory.shard=gradients",
		"memory.shard=parameters", "precision.compute=bf16"} {
		for _, ranks := range []int{1, 3} {
			if testing.Short() && (ranks == 1) != (i%4 == 0) {
				continue // one rank has nothing to shard
			}
			set := []string{set, "train.steps=9", "checkpoint.async=true"}
			cfg, want := load(t, tiny, ranks, set...), curve(t, tiny, ranks, set...)
			o := train.Options{RunDir: t.TempDir(), RunID: "a"}
			stopAfter(4, &o)
			first := mustRun(t, cfg, ranks, o)
			if !first.stopped || len(first.steps) == 9 {
				t.Fatalf("%s, %d ranks: stopped %t after %d steps", set, ranks, first.stopped, len(first.steps))
			}
			second := mustRun(t, cfg, ranks, train.Options{RunDir: o.RunDir, RunID: "b", Resume: true})
			if got := losses(append(first.steps, second.steps...)); got != losses(want) {
				t.Errorf("%s, %d ranks: stopped and gone on\n%s\nwant\n%s", set, ranks, got, losses(want))
			}
		}
	}
}

// A checkpoint of sharded state resumes unsharded, and on other ranks, up to rounding.
func TestCheckpointMovesBetweenLayouts(t *testing.T) {
	dir := t.TempDir()
	want := curve(t, tiny, 1, "train.steps=8")
	cfg := load(t, tiny, 4, "memory.shard=optimizer")
	mustRun(t, cfg, 4, train.Options{RunDir: dir, RunID: "a"})
	cfg = load(t, tiny, 3, "train.steps=8", "parallel.layout=striped")
	got := mustRun(t, cfg, 3, train.Options{RunDir: dir, RunID: "b", Resume: true}).steps
	closeTo(t, "4 sharded ranks, then 3", got, want[4:], 5e-5)
}

// Without a checkpoint, the message does not refer to one.
func TestDivergenceWithoutACheckpoint(t *testing.T) {
	cfg := load(t, tiny, 1, "optimizer.lr=1.0e+38", "optimizer.grad_clip=0", "train.steps=20")
	_, err := runLocal(t, cfg, 1, train.Options{})
	if err == nil || !strings.Contains(err.Error(), "no checkpoint") {
		t.Errorf("training with a learning rate of 1e38 ended with %v", err)
	}
}

func TestDivergenceStopsBeforeACheckpoint(t *testing.T) {
	cfg := load(t, tiny, 2, "optimizer.lr=1.0e+38", "optimizer.grad_clip=0", "train.steps=20", "checkpoint.every=1")
	dir := t.TempDir()
	out, err := runLocal(t, cfg, 2, train.Options{RunDir: dir})
	if err == nil || !strings.Contains(err.Error(), "diverged") {
		t.Fatalf("training with a learning rate of 1e30 ended with %v after %d steps", err, len(out.steps))
	}
	c, _, err := checkpoint.Latest(t.Context(), filepath.Join(dir, "checkpoints"))
	if errors.Is(err, checkpoint.ErrNone) {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	n := int64(0)
	for _, p := range c.Manifest.Params {
		size := int64(1)
		for _, d := range p.Shape {
			size *= int64(d)
		}
		data := make([]float32, size)
		if err := c.Read(t.Context(), p.Name, checkpoint.FieldParam, 0, data); err != nil {
			t.Fatal(err)
		}
		for _, x := range data {
			if x-x != 0 {
				t.Fatalf("the checkpoint of step %d holds %v in %s", c.Manifest.Step, x, p.Name)
			}
		}
		n += size
	}
	if n == 0 {
		t.Error("the checkpoint holds nothing")
	}
}

// Documents of one token have no targets: such a step has no loss, and the run continues.
func TestStepsWithoutTargetsHaveNoLoss(t *testing.T) {
	path := writeFile(t, "ends.txt",
		strings.Repeat("a", 37)+"to be or not to be, that is the question: whether 'tis nobler")
	steps := curve(t, tiny, 2,
		"data={path: "+path+", pack_documents: true, eos_token_id: 97, shuffle: false, validation: {path: "+path+", every: 2, samples: 1}}", "train.steps=2")
	if len(steps) != 2 || steps[0].Loss.Known() || steps[0].GradNorm != 0 || !(steps[1].Loss > 0) {
		t.Errorf("steps %+v, want one without a loss and one with", steps)
	}
	if val := steps[1].ValLoss; val == nil || val.Known() {
		t.Errorf("validation loss %v, want none", val)
	}
}

func TestCheckFindsWhatIsWrongWithTheFiles(t *testing.T) {
	for _, c := range []struct {
		set  string
		want string
	}{
		{"data.seq_len=5000", "data.path"},
		{"model.vocab_size=257", ""},
	} {
		_, err := train.Check(load(t, tiny, 1, c.set))
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("Check with %s = %v, want %q", c.set, err, c.want)
		}
	}
	// Weights of another shape.
	e := readExpect(t, "tiny-llama")
	cfg := load(t, parityYAML("tiny-llama", e), 1, "model.intermediate_size=64")
	if _, err := train.Check(cfg); err == nil || !strings.Contains(err.Error(), "mlp.gate_proj") {
		t.Errorf("Check of weights that do not fit = %v", err)
	}
}

// All faults of a config's files are reported at once, with the line of the key.
func TestCheckNamesEveryPlace(t *testing.T) {
	cfg := load(t, tiny, 1)
	cfg.Data.SeqLen = 1 << 20
	cfg.Data.Validation = config.Validation{Path: cfg.Data.Path, Every: 1, Samples: 1}
	var faults config.Errors
	if _, err := train.Check(cfg); !errors.As(err, &faults) || len(faults) != 2 {
		t.Fatalf("Check = %v, want two faults", err)
	}
	for _, f := range faults {
		if f.Line == 0 || f.File == "" || !strings.HasPrefix(f.Key, "data.") {
			t.Errorf("a fault without its place: %+v", f)
		}
	}
}
