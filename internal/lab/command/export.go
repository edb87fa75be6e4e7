package command

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/base/files"
	"github.com/cprun/cprun/internal/base/safetensors"
	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/train"
)

// ExportOptions are the flags of `cprun export`.
type ExportOptions struct {
	To     string
	DType  string // fp32, bf16, fp16, or auto: as in model.from, else fp32
	Step   int64  // of the checkpoint; 0: the newest one
	Merge  bool   // write the model with its adapters added
	Set    []string
	Stdout io.Writer
}

var exportTypes = map[string]safetensors.DType{"fp32": safetensors.F32, "bf16": safetensors.BF16,
	"fp16": safetensors.F16}

// Export writes a Hugging Face directory from a checkpoint.
func Export(ctx context.Context, run string, o ExportOptions) (int, error) {
	if o.To == "" {
		return 0, inputf("--to is missing: cprun export RUN --to DIR")
	}
	if empty, err := files.Empty(o.To); err != nil {
		return 0, inputf("--to: %w", err)
	} else if !empty {
		return 0, inputf("--to: %s is not empty; name another directory, or empty it", terminal.Name(o.To))
	}
	if _, ok := exportTypes[o.DType]; !ok && o.DType != "auto" {
		return 0, inputf("--dtype %q: want fp32, bf16, fp16 or auto", o.DType)
	}
	c, skipped, err := ofStep(ctx, run, o.Step, "a run directory or a checkpoint")
	if err != nil {
		return 0, err
	}
	defer c.Close()
	for _, line := range skipped {
		fmt.Fprintln(o.Stdout, line)
	}
	cfg, initial, err := savedModel(ctx, c, o.Set)
	if err != nil {
		return 0, &InputError{err}
	}
	defer initial.Close()
	lora := cfg.Model.Tuning.LoRA != nil
	if o.Merge && !lora {
		return 0, inputf("--merge: the run has no adapters; leave it out")
	}
	dtype := cmp.Or(exportTypes[o.DType], hf.ElementType(cfg.Model.DType), safetensors.F32)
	read := initial.Saved(ctx, c, o.Merge)
	if lora && !o.Merge {
		return 0, o.adapter(cfg, c, read)
	}
	brought, without := sourcesOf(cfg).Companions()
	copied, err := hf.Export(o.To, hf.Model{
		Config: exported(cfg), From: cfg.Model.From, Companions: brought, DType: dtype, Tensors: cfg.Model.Tensors(),
		Bytes: ofBytes(cfg), EOS: cfg.Data.EOSTokenID,
		Read: read,
	}, hf.ShardLimit)
	if err != nil {
		return 0, moved(cfg, err)
	}
	fmt.Fprintf(o.Stdout, "wrote %s: %s of step %d, %d tensors in %s\n", terminal.Name(o.To), cfg.Model.Architecture,
		c.Manifest.Step, len(cfg.Model.Tensors()), dtype)
	if len(copied) > 0 {
		fmt.Fprintf(o.Stdout, "from %s: %d tensors that training leaves as they are, such as %s\n",
			terminal.Name(cfg.Model.From), len(copied), terminal.Name(copied[0]))
	}
	o.saying(brought, without)
	if ids, err := cfg.Model.SpecialIDs("eos_token_id"); err == nil && len(ids) > 0 && cfg.Data.EOSTokenID >= 0 &&
		!slices.Contains(ids, cfg.Data.EOSTokenID) {
		fmt.Fprintf(o.Stdout, "note: texts of the run ended with token %d, so the export has it as its first eos_token_id; "+
			"the model had %d\n", cfg.Data.EOSTokenID, ids[0])
	}
	if caveat := cfg.Model.Caveat().Msg; caveat != "" {
		fmt.Fprintf(o.Stdout, "note: %s\n", caveat)
	}
	return 0, nil
}

// sourcesOf returns the files of a run that an export copies.
func sourcesOf(cfg *config.Config) hf.Sources {
	s := hf.Sources{Model: cfg.Model.From, Tokenizer: cfg.Data.Tokenizer, Template: cfg.Data.ChatTemplate}
	if s.Tokenizer == config.Bytes {
		s.Tokenizer = ""
	} else if s.Tokenizer == "" && s.Model != "" { // it may be in another form
		s.Tokenizer = filepath.Join(s.Model, "tokenizer.json")
	}
	return s
}

// saying prints the files that an export copied.
func (o *ExportOptions) saying(brought []hf.Companion, without error) {
	byDir := map[string][]string{}
	for _, c := range brought {
		dir, name := filepath.Dir(c.Path), filepath.Base(c.Path)
		if top, ok := strings.CutSuffix(c.Path, "/"+c.Name); ok { // also from a directory inside
			dir, name = top, c.Name
		}
		byDir[dir] = append(byDir[dir], name)
	}
	for _, dir := range slices.Sorted(maps.Keys(byDir)) {
		fmt.Fprintf(o.Stdout, "from %s: %s\n", terminal.Name(dir), strings.Join(byDir[dir], ", "))
	}
	if without != nil {
		fmt.Fprintf(o.Stdout, "note: the export lacks files of the tokenizer or generation_config.json: %v; copy them "+
			"there, or name the new place of the model: --set model.from=DIR\n", without)
	}
}

// adapter writes the adapter of a run.
func (o *ExportOptions) adapter(cfg *config.Config, c *checkpoint.Checkpoint,
	read func(hf.Tensor, int64, []float32) error) error {
	if w := cfg.Model.Wrapper; w != "" && !cfg.Model.Family().Whole {
		return inputf("peft names the layers of a %s in another way, and would ignore the adapter of its text model; add "+
			"--merge, which writes the whole model", w)
	}
	dtype, list := cmp.Or(exportTypes[o.DType], safetensors.F32), append(cfg.Model.Adapters(), cfg.Model.Kept()...)
	sources := sourcesOf(cfg)
	sources.Model = ""
	brought, without := sources.Companions()
	m := hf.Model{Config: &cfg.Model.Config, DType: dtype, From: cfg.Model.From, Tensors: list, Read: read,
		Companions: brought, EOS: -1}
	var changed []string
	if m.From != "" {
		var err error
		if changed, err = exported(cfg).Changed(m.From); err != nil {
			return moved(cfg, err)
		}
		m.Changed = len(changed) > 0
	}
	if err := hf.ExportAdapter(o.To, m); err != nil {
		return err
	}
	fmt.Fprintf(o.Stdout, "wrote %s: adapter of step %d, %d tensors in %s, for %s; --merge writes the whole model\n",
		terminal.Name(o.To), c.Manifest.Step, len(list), dtype, cmp.Or(terminal.Name(cfg.Model.From), "random weights"))
	if filepath.IsAbs(hf.HubName(m.From)) {
		fmt.Fprintf(o.Stdout, "note: adapter_config.json names the base by its path on this machine; before you share the "+
			"adapter, set base_model_name_or_path there to its Hub id\n")
	}
	if m.Changed {
		fmt.Fprintf(o.Stdout, "the run changed %s of the base; %s holds them: load the base with "+
			"config=AutoConfig.from_pretrained(%q)\n", strings.Join(changed, ", "),
			terminal.Name(filepath.Join(o.To, "config.json")), o.To)
	}
	if w := cfg.Model.Wrapper; w != "" && !cfg.Model.Nested() {
		fmt.Fprintf(o.Stdout, "note: load the base with AutoModelForCausalLM: peft ignores the adapter in a %s with images; "+
			"--merge serves both\n", w)
	}
	if n := cfg.Model.VocabSize; cfg.Model.FileVocab > 0 {
		fmt.Fprintf(o.Stdout, "note: before peft loads it, resize the base: model.resize_token_embeddings(%d)\n", n)
	}
	o.saying(brought, without)
	return nil
}

// ofStep opens the checkpoint of a step of a run; 0: the newest. skipped has lines on damaged newer ones. If there is
// none, the error says to name one of kinds.
func ofStep(ctx context.Context, run string, step int64, kinds string) (c *checkpoint.Checkpoint, skipped []string,
	err error) {
	path, reasons := run, []string(nil)
	if step > 0 {
		path, err = checkpoint.OfStep(run, step)
	}
	if err == nil {
		c, reasons, err = checkpoint.Find(ctx, path)
	}
	if err != nil {
		if name := terminal.Name(run); !strings.Contains(err.Error(), name) {
			err = fmt.Errorf("%s: %w", name, err)
		}
		if err = inputf("%w%s", err, because(reasons)); none(err) {
			err = inputf("%w; name %s", err, kinds)
		}
		return nil, nil, err
	}
	return c, allSkipped(reasons), nil
}

// none reports whether an error means that there is no checkpoint.
func none(err error) bool {
	return errors.Is(err, checkpoint.ErrNone) || errors.Is(err, fs.ErrNotExist)
}

// ofBytes reports whether a model was trained on the bytes of text.
func ofBytes(cfg *config.Config) bool {
	tokens := func(f config.File) bool { return filepath.Ext(f.Path) == ".bin" }
	return cfg.Data.Tokenizer == config.Bytes && cfg.Model.VocabSize >= 256 &&
		!slices.ContainsFunc(cfg.Data.Path, tokens)
}

// exported returns the config of the trained and merged model, with the positions and the EOS of the run.
func exported(cfg *config.Config) *hf.Config {
	const eos = "eos_token_id"
	c := cfg.Model.Config
	c.Tuning = hf.Tuning{}
	if c.MaxPositionEmbedding == 0 {
		c.MaxPositionEmbedding = c.Positions(cfg.Data.SeqLen)
	}
	had, err := c.SpecialIDs(eos)
	if id := cfg.Data.EOSTokenID; id >= 0 && err == nil && !slices.Contains(had, id) {
		ids := map[string]json.RawMessage{}
		maps.Copy(ids, c.TokenIDs)
		if ids[eos], _ = json.Marshal(append([]int{id}, had...)); len(had) == 0 {
			ids[eos] = strconv.AppendInt(nil, int64(id), 10)
		}
		c.TokenIDs = ids
	}
	return &c
}

// savedModel opens the model of a checkpoint: its config, changed by --set, and the weights that training began from.
func savedModel(ctx context.Context, c *checkpoint.Checkpoint, set []string) (*config.Config, *train.Initial, error) {
	cfg, err := checkpointConfig(c, set...)
	if err == nil {
		err = c.Fits(train.CheckpointParams(model.Layout(&cfg.Model.Config)))
	}
	if err != nil {
		return nil, nil, err
	}
	initial, err := train.NewInitial(cfg, true)
	if err != nil {
		return nil, nil, moved(cfg, err)
	}
	if err := initial.Matches(ctx, c); err != nil {
		return nil, nil, errors.Join(err, initial.Close())
	}
	return cfg, initial, nil
}

// moved adds the fix to an error if model.from is gone.
func moved(cfg *config.Config, err error) error {
	if _, gone := os.Stat(cfg.Model.From); cfg.Model.From != "" && errors.Is(gone, fs.ErrNotExist) {
		return fmt.Errorf("%w; if the model was moved, name its new place: --set model.from=DIR", err)
	}
	return err
}

// checkpointConfig returns the config of a checkpoint, changed by --set. It does not look for the data.
func checkpointConfig(c *checkpoint.Checkpoint, set ...string) (*config.Config, error) {
	for _, s := range set {
		if key, _, _ := strings.Cut(s, "="); key != "model.from" && key != "data.tokenizer" && key != "data.chat_template" {
			return nil, fmt.Errorf("--set %s: the model of a checkpoint is fixed; only model.from, data.tokenizer and "+
				"data.chat_template may have moved", terminal.Name(s))
		}
	}
	cfg, err := config.Parse(filepath.Join(c.Dir, "manifest.json"), []byte(c.Manifest.Config),
		config.Options{NoFiles: true, Set: set})
	if err != nil {
		return nil, fmt.Errorf("config in %s: %w", c.Dir, err)
	}
	return cfg, nil
}
