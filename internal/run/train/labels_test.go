package train_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cprun/cprun/internal/model/metrics"
	"github.com/cprun/cprun/internal/run/train"
)

// labelled writes a config with one sample of 13 tokens in two documents with labels.
func labelled(t *testing.T, labels []string) string {
	t.Helper()
	ids := strings.Fields("3 1 4 15 9 2 6 5 3 5 8 9 7")
	line := func(from, to int) string {
		return fmt.Sprintf(`{"input_ids":[%s],"labels":[%s]}`, strings.Join(ids[from:to], ","),
			strings.Join(labels[from:to], ","))
	}
	path := writeFile(t, "a.jsonl", line(0, 7)+"\n"+line(7, 13)+"\n")
	return fmt.Sprintf(`
model: {vocab_size: 20, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2}
data: {path: %s, seq_len: 13, shuffle: false}
train: {steps: 3}
optimizer: {lr: 1.0e-2}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, path)
}

// The loss is the mean over the labelled tokens: the losses of runs with one label each sum to it. Layouts and ranks
// have no effect on it, also in later steps, which depend on the gradients, with documents packed or one a sample.
func TestLabelsSayWhatIsLearned(t *testing.T) {
	t.Parallel()
	ids := strings.Fields("3 1 4 15 9 2 6 5 3 5 8 9 7")
	none := func() []string { return strings.Fields(strings.Repeat("-100 ", len(ids))) }
	mask := none()
	for _, at := range []int{2, 3, 6, 7, 9, 12} {
		mask[at] = ids[at]
	}
	mask[9] = "11" // not the token itself
	sum, n := 0.0, 0
	for at := range mask {
		if mask[at] == "-100" || at == 7 { // begins a document
			continue
		}
		one := none()
		one[at] = mask[at]
		sum += float64(curve(t, labelled(t, one), 1, "data.pack_documents=true", "train.steps=1")[0].Loss)
		n++
	}
	var want []metrics.Step
	for m, set := range [][]string{{"data.pack_documents=true"}, {"data.pack_documents=true", "data.seq_len=40"},
		{"train.global_batch_size=2"}, {"train.global_batch_size=2", "train.micro_batch_size=2", "data.seq_len=40"}} {
		for i, r := range []struct {
			ranks  int
			layout string
		}{{1, "auto"}, {2, "zigzag"}, {3, "striped"}, {4, "contiguous"}, {3, "auto"}} {
			if testing.Short() && i > 0 && (i+m)%2 == 0 {
				continue // two of the layouts for each, in turn
			}
			got := curve(t, labelled(t, mask), r.ranks, append(set, "parallel.layout="+r.layout)...)
			if loss := float64(got[0].Loss); !(math.Abs(loss-sum/float64(n)) <= 2e-6) || got[0].Tokens != 13 {
				t.Errorf("%s, %d ranks, %s: loss %v, want %v, the mean of %d places; %d tokens", set, r.ranks, r.layout,
					loss, sum/float64(n), n, got[0].Tokens)
			}
			if want == nil {
				want = got
			}
			closeTo(t, fmt.Sprint(set, r), got, want, 2e-5)
		}
	}
}

// Data without targets is refused, also for validation.
func TestDataWithoutTargetsAreRefused(t *testing.T) {
	none := labelled(t, strings.Fields(strings.Repeat("-100 ", 13)))
	_, err := train.Check(load(t, none, 2))
	if err == nil || !strings.Contains(err.Error(), "data.path") || !strings.Contains(err.Error(), "target") {
		t.Errorf("Check = %v, want a fault of data.path", err)
	}
	if _, err := runLocal(t, load(t, none, 2), 2, train.Options{}); err == nil {
		t.Error("a run began")
	}
	// The first sample has no target, the second has one.
	path := writeFile(t, "val.jsonl",
		`{"input_ids":[1,2,3],"loss_mask":[0,0,0]}`+"\n"+`{"input_ids":[1,2,3],"loss_mask":[0,0,1]}`)
	for samples, want := range map[int]string{1: "data.validation.path", 2: "", 0: ""} {
		cfg := load(t, tiny, 1, "data={seq_len: 3, tokenizer: bytes}",
			fmt.Sprintf("data.validation={path: %s, every: 1, samples: %d}", path, samples))
		_, err := train.Check(cfg)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d samples of validation: %v, want %q", samples, err, want)
		}
	}
}

// sparse writes a config with samples of 4 tokens: "a" and "b" are samples with targets, "-" is one without.
func sparse(t *testing.T, samples string) string {
	t.Helper()
	text := ""
	for _, s := range samples {
		text += map[rune]string{
			'a': `{"input_ids":[3,1,4,15],"loss_mask":[1,1,1,1]}`,
			'b': `{"input_ids":[9,2,6,5],"loss_mask":[1,1,1,1]}`,
			'-': `{"input_ids":[3,5,8,9],"loss_mask":[0,0,0,0]}`,
		}[s] + "\n"
	}
	path := writeFile(t, "a.jsonl", text+`{"input_ids":[1]}`)
	return fmt.Sprintf(`
model: {vocab_size: 20, hidden_size: 16, intermediate_size: 24, num_hidden_layers: 1, num_attention_heads: 2, head_dim: 64}
data: {path: %s, seq_len: 4, shuffle: false, pack_documents: true}
train: {steps: %d}
optimizer: {lr: 1.0e-2, weight_decay: 0.5}
lr_schedule: {name: constant}
checkpoint: {async: false}
log: {tensorboard: false}
`, path, len(samples))
}

// withLoss drops steps without a loss.
func withLoss(steps []metrics.Step) (kept []metrics.Step) {
	for _, s := range steps {
		if s.Loss.Known() {
			kept = append(kept, s)
		}
	}
	return kept
}

// A batch without targets has no effect: the other steps equal those of a run without it, on any ranks, with a host
// that runs ahead, and after a checkpoint. Adam's moments neither decay nor count it.
func TestBatchesWithoutTargetsAreSkipped(t *testing.T) {
	t.Parallel()
	want := curve(t, sparse(t, "abab"), 1)
	for _, c := range []struct {
		ranks, ahead int
		cuts         []int
	}{{1, 0, nil}, {3, 2, nil}, {2, 0, []int{1, 4}}} {
		yaml, dir := sparse(t, "-a--bab"), t.TempDir()
		var s []metrics.Step
		var notices []string
		for i, cut := range append(c.cuts, 7) {
			cfg := load(t, yaml, c.ranks, fmt.Sprintf("train.steps=%d", cut),
				"memory.offload="+map[int]string{1: "off", 2: "off", 3: "optimizer"}[c.ranks])
			out := mustRunAhead(t, cfg, c.ranks, train.Options{RunDir: dir, RunID: fmt.Sprint(i), Resume: i > 0},
				c.ahead)
			s, notices = append(s, out.steps...), append(notices, out.notices...)
		}
		closeTo(t, fmt.Sprint(c), withLoss(s), want, 2e-5)
		if len(s) != 7 || s[0].Loss.Known() || s[0].TokensPerSecond != 0 || s[6].Tokens != 28 {
			t.Errorf("%v: steps %+v", c, s)
		}
		text := strings.Join(notices, "\n")
		if strings.Count(text, " steps so far") != 2 || !strings.Contains(text, "step 1: ") ||
			!strings.Contains(text, "2 of 3 steps") || !strings.HasPrefix(notices[len(notices)-1], "3 of 7 steps ") {
			t.Errorf("%v: notices %q, want of the first, of the second, and of all at the end", c, notices)
		}
	}
}

// A mixture resumes at the right sample, and draws the same samples on any ranks.
func TestMixturesGoOn(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"a.txt": strings.Repeat("to be or not to be, ", 20),
		"b.txt": strings.Repeat("0123456789 ", 30)} {
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
	want := curve(t, yaml, 1)
	run := t.TempDir()
	first := mustRun(t, load(t, yaml, 2, "train.steps=4"), 2, train.Options{RunDir: run}).steps
	rest := mustRun(t, load(t, yaml, 2), 2, train.Options{RunDir: run, Resume: true}).steps
	closeTo(t, "in two parts", append(first, rest...), want, 2e-5)
}
