package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/cprun/cprun/internal/base/readable"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/foresee/plan"
	"github.com/cprun/cprun/internal/launch"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/job"
	"github.com/cprun/cprun/internal/run/train"
)

// EvalOptions are the flags of `cprun eval`.
type EvalOptions struct {
	Options
	Data    string // to evaluate on
	SeqLen  string // tokens of a sample; "": as in the run, else 4096
	Samples int    // 0: all
	Step    int64  // of the checkpoint of a run; 0: the newest
	Set     []string
	JSON    bool

	LogProbs string // .jsonl whose tokens get log-probabilities, in place of Data
}

type evaluation struct {
	Model string `json:"model"`
	Step  int64  `json:"step"` // of the checkpoint; 0: a Hugging Face directory
	Data  string `json:"data"`
	train.Evaluation
	Perplexity train.Float `json:"perplexity"`
}

// Eval computes the loss of a run's checkpoint, or of a Hugging Face directory, over data.
func Eval(ctx context.Context, path string, o EvalOptions) (int, error) {
	ranks, err := o.spawns()
	if err != nil {
		return 0, err
	}
	if err := o.checkLogProbs(); err != nil {
		return 0, err
	}
	if o.Data == "" {
		return 0, inputf("--data is missing: cprun eval RUN --data PATH")
	}
	e := evaluation{Model: path, Data: o.Data}
	task := job.Train{Version: o.Version, Machine: o.machine}
	cfg, note, err := o.prepare(ctx, path, ranks, &e, &task)
	if err != nil {
		return 0, err
	}
	task.Config = string(cfg.YAML())
	task.LogProbs = o.LogProbs != ""
	var report any = &e.Evaluation
	if task.LogProbs {
		report = nil
	}
	res, err := o.report(ctx, job.RoleEval, ranks, note, task, report)
	if err != nil || res.ExitCode != launch.ExitDone || task.LogProbs {
		return res.ExitCode, err
	}
	e.Perplexity = train.Float(math.Exp(float64(e.Loss)))
	return 0, o.write(&e)
}

// checkLogProbs makes --logprobs the data, and refuses flags without effect.
func (o *EvalOptions) checkLogProbs() error {
	switch {
	case o.LogProbs == "":
		return nil
	case o.Data != "" || o.Samples != 0 || o.SeqLen != "" || o.JSON:
		return inputf("--logprobs prints a line of JSON for each record of its file; remove --data, --samples, " +
			"--seq-len and --json")
	}
	name := strings.TrimSuffix(strings.TrimSuffix(o.LogProbs, ".gz"), ".zst")
	if !slices.Contains([]string{".jsonl", ".parquet", ".arrow"}, filepath.Ext(name)) {
		return inputf("--logprobs %s: want records, such as a .jsonl with input_ids or messages in each line",
			terminal.Name(o.LogProbs))
	}
	o.Data = o.LogProbs
	return nil
}

// sizeRecords adds the keys for log-probabilities. Samples have at least the rows of the longest record.
func (o *EvalOptions) sizeRecords(ctx context.Context, name, base string, set []string) (sized []string, longest int,
	err error) {
	set = append(set, "data.pack_documents=true", "data.overlong=drop", "parallel.data=1")
	cfg, err := config.Parse(name, []byte(base), config.Options{Set: slices.Concat(set, o.Set)})
	if err != nil {
		return nil, 0, o.once(err)
	}
	longest, total, err := train.RecordTokens(ctx, cfg)
	if err != nil {
		return nil, 0, inputf("--logprobs: %w", err)
	}
	if total == 0 {
		return nil, 0, inputf("--logprobs %s: no records", terminal.Name(cfg.Data.Path[0].Path))
	}
	return append(set, fmt.Sprintf("data.seq_len=%d", max(longest, min(4096, total)))), longest, nil
}

func (o *EvalOptions) prepare(
	ctx context.Context, path string, ranks int, e *evaluation, task *job.Train,
) (cfg *config.Config, notes []string, err error) {
	for _, s := range o.Set {
		if key, _, _ := strings.Cut(s, "="); key == "data.path" || strings.HasPrefix(key, "data.validation") {
			return nil, nil, inputf("--set %s: eval sets it; use --data, --logprobs and --samples", terminal.Name(s))
		}
	}
	name, base, set, err := o.base(ctx, path, e, task, &notes)
	if err != nil {
		return nil, nil, err
	}
	linears := "bf16"
	given, err := config.Parse(name, []byte(base), config.Options{Set: o.Set, NoFiles: true})
	if err == nil && given.Model.Tuning.LoRA != nil && given.Model.Tuning.LoRA.Base == "fp8" { // bf16 may not fit
		linears = "fp8"
	}
	set = append(set,
		"data.path="+o.Data, "data.validation={every: 1}", "data.validation.path="+o.Data,
		fmt.Sprintf("data.validation.samples=%d", o.Samples), "data.shuffle=false",
		"train.micro_batch_size=1", "train.global_batch_size=1", "parallel.context=auto", "parallel.data=auto",
		"parallel.ulysses_degree=auto", "parallel.layout=auto", "parallel.transport=auto", "attention.sm_margin=0",
		"attention.backend=auto", "precision={compute: auto, linears: "+linears+"}",
		"memory={recompute: auto, loss_chunk: auto, shard: auto}")
	if o.SeqLen != "" {
		set = append(set, "data.seq_len="+o.SeqLen)
	}
	longest := 0
	if o.LogProbs != "" {
		if set, longest, err = o.sizeRecords(ctx, name, base, set); err != nil {
			return nil, nil, err
		}
	}
	set = append(set, o.Set...)
	d, err := o.decider(o.machine)
	if err != nil {
		return nil, nil, err
	}
	opts := config.Options{Set: set, Ranks: ranks, Hosts: o.machine.Hosts, Device: o.machine.Device(), Decide: d.Decide}
	if cfg, err = config.Parse(name, []byte(base), opts); err != nil {
		return nil, nil, o.once(err)
	}
	if cfg.Train.MicroBatchSize != 1 {
		return nil, nil, inputf("train.micro_batch_size %d: eval takes samples one by one; remove the key",
			cfg.Train.MicroBatchSize)
	}
	if o.LogProbs != "" && cfg.Parallel.Data > 1 {
		return nil, nil, inputf("--logprobs needs parallel.data: 1; remove the key")
	}
	if cfg.Data.SeqLen < longest {
		return nil, nil, inputf("data.seq_len %d: the longest record needs %d; remove the key", cfg.Data.SeqLen, longest)
	}
	known := len(cfg.Warnings)
	found, err := train.Check(cfg)
	if err != nil {
		return nil, nil, o.once(err)
	}
	if found != nil && len(found.Ignored) > 0 {
		notes = append(notes, "data: "+unread(found.Ignored))
	}
	for _, w := range cfg.Warnings[known:] {
		notes = append(notes, w.Msg)
	}
	choice, err := choose(cfg, o.machine)
	if err != nil {
		return nil, nil, err
	}
	if _, err := plan.Fit(cfg, ranks, o.machine, nil); err != nil {
		return nil, nil, &InputError{err}
	}
	m, err := plan.EvalMemoryOf(cfg, ranks, o.machine)
	if err == nil {
		err = m.Check()
	}
	if err != nil {
		return nil, nil, &InputError{err}
	}
	return cfg, append(notes, choice.notes...), nil
}

// once drops the second report of a fault in the data: data.path and data.validation.path name the same files. It names
// the flag that named them.
func (o *EvalOptions) once(err error) error {
	if faults, ok := errors.AsType[config.Errors](err); ok {
		twice := func(f config.Fault) bool { return f.Key == "data.validation.path" }
		flag := "--data"
		if o.LogProbs != "" {
			flag = "--logprobs"
		}
		left := slices.DeleteFunc(slices.Clone(faults), twice)
		for i := range left {
			if left[i].File == "--set data.path="+o.Data {
				left[i].File, left[i].Key = flag, ""
			}
		}
		if len(left) > 0 {
			err = left
		}
	}
	return &InputError{err}
}

// base returns the config to start from, its name in errors, and keys to set in it. A run has its checkpoint's config,
// a Hugging Face directory an empty one.
func (o *EvalOptions) base(
	ctx context.Context, path string, e *evaluation, task *job.Train, notes *[]string,
) (name, text string, set []string, err error) {
	name, text = path, "{}"
	model, err := modelOf(path, o.Step)
	if err != nil {
		return "", "", nil, err
	}
	if model != "" {
		set = []string{"model.from=" + model}
	} else {
		c, skipped, err := ofStep(ctx, path, o.Step, orModel)
		if err != nil {
			return "", "", nil, err
		}
		defer c.Close()
		*notes = append(*notes, skipped...)
		if task.From, err = filepath.Abs(c.Dir); err != nil {
			return "", "", nil, err
		}
		name, text, e.Step = filepath.Join(c.Dir, "manifest.json"), c.Manifest.Config, c.Manifest.Step
		if cfg, err := checkpointConfig(c); err == nil && cfg.Model.From != "" {
			if _, err := os.Stat(cfg.Model.From); err != nil { // all keys of the model are in the config
				set = []string{"model.from=null"}
			}
			from := func(s string) bool { return strings.HasPrefix(s, "model.from=") }
			if len(set) > 0 && slices.ContainsFunc(cfg.Model.Tensors(), cfg.Model.Frozen) && !slices.ContainsFunc(o.Set, from) {
				return "", "", nil, inputf("%s: its frozen weights are in model.from %s: %w", path,
					terminal.Name(cfg.Model.From), moved(cfg, fs.ErrNotExist))
			}
		}
	}
	return name, text, set, nil
}

// modelOf returns the Hugging Face directory of a path or a Hub id; "": it names a run, as any does with a step.
func modelOf(path string, step int64) (dir string, err error) {
	if step != 0 {
		return "", nil
	}
	for _, name := range []string{"config.json", "adapter_config.json"} { // to refuse an adapter by name
		if _, err := os.Stat(filepath.Join(path, name)); err == nil {
			return path, nil
		}
	}
	if dir, err = hf.Locate(path); err != nil {
		err = inputf("%s: %w", terminal.Name(path), err)
	}
	return dir, err
}

// orModel names the paths of a command that also reads a Hugging Face directory.
const orModel = "a run directory, a checkpoint, or a Hugging Face directory with config.json"

func (o *EvalOptions) write(e *evaluation) error {
	if o.JSON {
		return printJSON(o.Stdout, e)
	}
	what := terminal.Name(e.Model)
	if e.Step > 0 {
		what = fmt.Sprintf("%s, step %d", terminal.Name(e.Model), e.Step)
	}
	fmt.Fprintf(o.Stdout, "%s: loss %.4f, perplexity %.4g\n"+
		"over %s target tokens in %s samples of %s tokens, in %.1f s\n\n",
		what, float64(e.Loss), float64(e.Perplexity), readable.Count(e.Targets), readable.Count(e.Samples),
		readable.Count(int64(e.SeqLen)), e.Seconds)
	w := tabwriter.NewWriter(o.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "positions\ttokens\tloss\tperplexity\t")
	for _, b := range e.Buckets {
		if b.Targets == 0 {
			continue
		}
		fmt.Fprintf(w, "%d to %d\t%s\t%.4f\t%.4g\t\n", b.From, b.To-1, readable.Count(b.Targets), float64(b.Loss),
			math.Exp(float64(b.Loss)))
	}
	return w.Flush()
}
