package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/train"
	"github.com/cprun/cprun/internal/text/data"
)

type origin struct {
	dir      string
	notes    []string // for the user
	reseeded bool     // data.seed comes from the checkpoint
}

func (o *TrainOptions) namedCheckpoint(ctx context.Context, r *ready) (*origin, error) {
	if o.Resume == "auto" || o.Resume == "never" {
		return nil, nil
	}
	c, reasons, err := checkpoint.Find(ctx, o.Resume)
	if none(err) {
		err = fmt.Errorf("%w; write auto, never, or the path of a checkpoint or run", err)
	}
	if err != nil {
		return nil, inputf("--resume %s: %w%s", terminal.Name(o.Resume), err, because(reasons))
	}
	defer c.Close()
	from, err := begin(c, reasons, r)
	if err != nil {
		return nil, inputf("--resume: %w", err)
	}
	return from, nil
}

// ownCheckpoint returns the newest complete checkpoint of the locked run directory, or nil.
func (o *TrainOptions) ownCheckpoint(ctx context.Context, dir *os.Root, r *ready) (*origin, error) {
	if o.Resume == "never" {
		if len(steps(filepath.Dir(dir.Name()))) > 0 {
			return nil, inputf("--resume never: %s has checkpoints of an earlier run, which this one would "+
				"overwrite; name another --run-dir, or drop --resume to continue from them", terminal.Name(dir.Name()))
		}
		return nil, nil
	}
	c, reasons, err := checkpoint.LatestIn(ctx, dir)
	if errors.Is(err, checkpoint.ErrNone) {
		return nil, nil
	}
	if err != nil {
		return nil, inputf("%w%s; to start over, name another --run-dir", err, because(reasons))
	}
	defer c.Close()
	from, err := begin(c, reasons, r)
	if err != nil {
		return nil, inputf("--run-dir: %w", err)
	}
	if asked, err := filepath.Abs(o.Resume); o.Resume != "auto" && err == nil &&
		!strings.HasPrefix(from.dir+"/", asked+"/") {
		from.notes = append(from.notes, fmt.Sprintf("--resume %s ignored: the run continues from its own newest "+
			"checkpoint, %s; to start from the other, name another --run-dir",
			terminal.Name(o.Resume), terminal.Name(filepath.Base(from.dir))))
	}
	return from, nil
}

// steps lists the checkpoints in a run directory, complete or not.
func steps(runDir string) (names []string) {
	entries, _ := os.ReadDir(checkpointsOf(runDir)) // locking it reports an unreadable directory
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "step-") {
			names = append(names, e.Name())
		}
	}
	return names
}

const checkpointsName = "checkpoints"

func checkpointsOf(runDir string) string { return filepath.Join(runDir, checkpointsName) }

func begin(c *checkpoint.Checkpoint, passedOver []string, r *ready) (*origin, error) {
	cfg := r.cfg
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, err
	}
	from := &origin{dir: dir, notes: allSkipped(passedOver)}
	// Without a data.seed in the config, the run keeps the checkpoint's order of samples.
	if seed, ok := c.Manifest.Seeds["data"]; ok && seed >= 0 && seed != cfg.Data.Seed && !cfg.Given("data.seed") {
		cfg.Data.Seed, from.reseeded = seed, true
	}
	if err := cfg.ResumeAt(c.Manifest.Step, c.Manifest.Samples); err != nil {
		return nil, err
	}
	notes, err := compare(c, cfg, r.files)
	if err != nil {
		return nil, err
	}
	from.notes = append(from.notes, notes...)
	return from, c.Fits(train.CheckpointParams(model.Layout(&cfg.Model.Config)))
}

// allSkipped returns a line for each checkpoint that was skipped for a reason.
func allSkipped(reasons []string) (lines []string) {
	for _, r := range reasons {
		lines = append(lines, "checkpoint skipped: "+r)
	}
	return lines
}

var (
	// freeKeys do not change the model's results; dataKeys select the tokens of each sample.
	freeKeys = []string{"model.from", "model.initializer_range", "model.max_position_embeddings"}
	loraKeys = []string{"lora.r", "lora.alpha", "lora.alpha_pattern", "lora.rslora"} // Fits compares the others
	dataKeys = []string{"data.path", "data.format", "data.tokenizer", "data.chat_template", "data.train_on",
		"data.seq_len", "data.shuffle", "data.pack_documents", "data.overlong", "data.eos_token_id", "data.seed",
		"train.global_batch_size"}
)

// compare compares a config and its files with the checkpoint's. A different model is an error; different data and a
// jump of the learning rate are notes.
func compare(c *checkpoint.Checkpoint, cfg *config.Config, files *data.Identity) (notes []string, err error) {
	was, err := checkpointConfig(c)
	if err != nil { // another version of cprun wrote it; Fits compares the weights' shapes
		note := fmt.Sprintf("cannot compare the config with the checkpoint's: %v", err)
		return []string{note}, nil
	}
	changed, same, err := changedData(c, was, cfg, files)
	if err != nil {
		return nil, err
	}
	var faults, moved, paced []string
	for _, d := range cfg.Differences(was) {
		line := fmt.Sprintf("%s is %s in the checkpoint and %s here", d.Key, d.Old, d.New)
		switch {
		case slices.Contains(same, d.Key):
		case slices.Contains(dataKeys, d.Key):
			moved = append(moved, line)
		case d.Key == "train.steps" || d.Key == "optimizer.lr" || strings.HasPrefix(d.Key, "lr_schedule."):
			paced = append(paced, fmt.Sprintf("%s %s -> %s", d.Key, d.Old, d.New))
		case slices.Contains(loraKeys, d.Key):
			faults = append(faults, line)
		case strings.HasPrefix(d.Key, "model.") && !slices.Contains(freeKeys, d.Key) &&
			!alike(d.Key, &was.Model.Config, &cfg.Model.Config):
			faults = append(faults, line)
		}
	}
	if len(faults) > 0 {
		return nil, fmt.Errorf("%s: the checkpoint is of another model; use its config, start over in another "+
			"--run-dir, or load only its weights: cprun export, then model.from\n  %s", c.Dir,
			strings.Join(faults, "\n  "))
	}
	if moved = append(moved, changed...); len(moved) > 0 {
		order := ""
		if len(changed) > 0 {
			order = ", in its order: samples may repeat, and others may not come before the next epoch"
		}
		notes = append(notes, fmt.Sprintf("warning: other data than the checkpoint's: %s; resuming at sample %d of "+
			"the current data%s", strings.Join(moved, ", "), c.Manifest.Samples, order))
	}
	before, err := rate(was, c.Manifest.Step)
	if err != nil {
		return nil, err
	}
	now, err := rate(cfg, c.Manifest.Step)
	if before != now && err == nil {
		notes = append(notes, fmt.Sprintf("the learning rate of step %d is %s, not %s as in the checkpoint's run: %s",
			c.Manifest.Step+1, now, before, strings.Join(paced, ", ")))
	}
	return notes, err
}

// changedData compares the data with what the checkpoint has recorded of its data. It describes the changes, and lists
// the keys with paths to equal data. A checkpoint of an older version has no record; then the keys decide.
func changedData(c *checkpoint.Checkpoint, was, cfg *config.Config, now *data.Identity) (changes, same []string,
	err error) {
	text, ok := c.Manifest.Extra[train.DataState]
	if !ok || now == nil {
		return nil, nil, nil
	}
	var id data.Identity
	if err := json.Unmarshal(text, &id); err != nil {
		return nil, nil, fmt.Errorf("%s: record of the data: %w", c.Dir, err)
	}
	if changes, err = now.Changes(&id); err != nil {
		return nil, nil, err
	}
	if slices.Equal(was.Data.Path.Weights(), cfg.Data.Path.Weights()) {
		same = append(same, "data.path")
	}
	coders := []string{"data.tokenizer", "data.chat_template"}
	if id.Encoder == now.Encoder {
		same = append(same, coders...)
	} else if !slices.ContainsFunc(cfg.Differences(was), func(d config.Difference) bool {
		return slices.Contains(coders, d.Key)
	}) {
		changes = append(changes, "the files of the tokenizer or of the chat template have changed")
	}
	return changes, same, nil
}

// rate returns the learning rate after a number of steps, to three digits.
func rate(cfg *config.Config, steps int64) (string, error) {
	schedule, err := train.Schedule(cfg)
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%.3g", schedule(int(steps))), nil
}

// alike reports whether different values of a key have the same effect, such as two spellings of windows or RoPE.
func alike(key string, a, b *hf.Config) bool {
	switch {
	case key == "model.layer_types" || key == "model.sliding_window":
		return slices.EqualFunc(a.Layers(), b.Layers(), func(a, b hf.Layer) bool {
			return a.Mixer.Window == b.Mixer.Window && a.Mixer.Recurs() == b.Mixer.Recurs()
		})
	case strings.HasPrefix(key, "model.rope_"):
		ra, rb := model.NewRope(a), model.NewRope(b)
		return reflect.DeepEqual(ra, rb)
	}
	return false
}

func because(reasons []string) string {
	if len(reasons) == 0 {
		return ""
	}
	return " (" + strings.Join(reasons, "; ") + ")"
}
