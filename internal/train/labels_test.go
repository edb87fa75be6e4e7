package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/metrics"
	"github.com/cprun/cprun/internal/train"
)

// labelled is a config over one sample of 12 places in two documents, with these labels.
func labelled(t *testing.T, labels []string) string {
	t.Helper()
	ids := strings.Fields("3 1 4 15 9 2 6 5 3 5 8 9 7")
	line := func(from, to int) string {
		return fmt.Sprintf(`{"input_ids":[%s],"labels":[%s]}`, strings.Join(ids[from:to], ","), strings.Join(labels[from:to], ","))
	}
	path := filepath.Join(t.TempDir(), "a.jsonl")
	if err := os.WriteFile(path, []byte(line(0, 7)+"\n"+line(7, 13)+"\n"), 0o666); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`
model: {vocab_size: 20, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}
data: {path: %s, seq_len: 12, shuffle: false}
train: {steps: 3}
optimizer: {lr: 1.0e-2}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, path)
}

// The loss is the mean over the places that a label asks for: that of each, taken alone in a run of its
// own, adds up to it. Layouts and ranks leave no trace, in the steps after the first (which
// follow from the gradients) neither, with documents packed or not.
func TestLabelsSayWhatIsLearned(t *testing.T) {
	ids := strings.Fields("3 1 4 15 9 2 6 5 3 5 8 9 7")
	none := func() []string { return strings.Fields(strings.Repeat("-100 ", len(ids))) }
	mask := none()
	for _, at := range []int{2, 3, 6, 7, 9, 12} {
		mask[at] = ids[at]
	}
	mask[9] = "11" // another token than the one that is there
	for _, pack := range []string{"data.pack_documents=false", "data.pack_documents=true"} {
		sum, n := 0.0, 0
		for at := range mask {
			if mask[at] == "-100" || pack == "data.pack_documents=true" && at == 7 { // begins a document
				continue
			}
			one := none()
			one[at] = mask[at]
			cfg := load(t, labelled(t, one), 1, pack, "train.steps=1")
			sum += float64(mustRun(t, cfg, 1, train.Options{}).steps[0].Loss)
			n++
		}
		var want []metrics.Step
		for _, r := range []struct {
			ranks  int
			layout string
		}{{1, "auto"}, {2, "zigzag"}, {3, "striped"}, {4, "contiguous"}, {3, "auto"}} {
			cfg := load(t, labelled(t, mask), r.ranks, pack, "parallel.layout="+r.layout)
			got := mustRun(t, cfg, r.ranks, train.Options{}).steps
			if loss := float64(got[0].Loss); !(math.Abs(loss-sum/float64(n)) <= 2e-6) {
				t.Errorf("%s, %d ranks, %s: loss %v, want %v, the mean of %d places", pack, r.ranks, r.layout, loss, sum/float64(n), n)
			}
			if want == nil {
				want = got
			}
			closeTo(t, fmt.Sprint(pack, r), got, want, 2e-5)
		}
	}
}

// A step in which nothing is asked for changes nothing but by decay, and its loss is none.
func TestLabelsMayAskForNothing(t *testing.T) {
	none := strings.Fields(strings.Repeat("-100 ", 13))
	for _, s := range mustRun(t, load(t, labelled(t, none), 2), 2, train.Options{}).steps {
		if !math.IsNaN(float64(s.Loss)) || float64(s.GradNorm) != 0 {
			t.Errorf("step %d: loss %v, gradient norm %v", s.Step, s.Loss, s.GradNorm)
		}
	}
}

// A mixture goes on where it stopped, and draws the same on any ranks.
func TestMixturesGoOn(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.txt": strings.Repeat("to be or not to be, ", 20), "b.txt": strings.Repeat("0123456789 ", 30)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	yaml := fmt.Sprintf(`
model: {vocab_size: 256, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 2}
data: {path: [{path: %[1]s/a.txt, weight: 2}, %[1]s/b.txt], seq_len: 16}
train: {steps: 8, global_batch_size: 2}
optimizer: {lr: 1.0e-2}
lr_schedule: {name: constant}
checkpoint: {every: 4, async: false}
log: {tensorboard: false}
`, dir)
	want := mustRun(t, load(t, yaml, 1), 1, train.Options{}).steps
	run := t.TempDir()
	first := mustRun(t, load(t, yaml, 2, "train.steps=4"), 2, train.Options{RunDir: run}).steps
	rest := mustRun(t, load(t, yaml, 2), 2, train.Options{RunDir: run, Resume: true}).steps
	closeTo(t, "in two parts", append(first, rest...), want, 2e-5)
}
