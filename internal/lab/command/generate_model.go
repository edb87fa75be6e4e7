package command

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/cprun/cprun/internal/base/terminal"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/checkpoint"
	"github.com/cprun/cprun/internal/model/config"
	"github.com/cprun/cprun/internal/model/data"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/internal/run/train"
)

// A source is a model that can generate, before its weights are read.
type source struct {
	what      string // its name in errors
	cfg       *hf.Config
	positions int    // that it was made for
	tokenizer string // bytes, or the path of a tokenizer.json
	begin     int    // the token that an empty prompt stands for; -1: none
	ends      []int  // the tokens that end a text, with own
	own       []int  // the model itself
	read      func(ctx context.Context, p model.Param, dst []float32) error
	from      io.Closer
	notes     []string
}

func (w *source) close() { w.from.Close() }

// openSource opens the checkpoint of a run, or a Hugging Face directory, and finds every fault of what it
// says of itself.
func openSource(ctx context.Context, path string, o *GenerateOptions) (w *source, err error) {
	if isModel(path, o.Step) {
		w, err = sourceOfModel(path)
	} else {
		w, err = sourceOfRun(ctx, path, o.Step)
	}
	if err != nil {
		return nil, err
	}
	if err := w.findTokenizer(o.Tokenizer); err != nil {
		w.close()
		return nil, err
	}
	return w, nil
}

// findTokenizer finds the tokenizer and the tokens that begin and end a text.
func (w *source) findTokenizer(given string) error {
	whose := "its"
	if given != "" {
		w.tokenizer, whose = tokenizerFile(given), "the"
	}
	if w.tokenizer == "" {
		return inputf("%s: it is not known which tokenizer made its tokens; name it: --tokenizer, a tokenizer.json "+
			"or its directory, or bytes", w.what)
	}
	if w.tokenizer != data.Bytes {
		if _, err := os.Stat(w.tokenizer); err != nil {
			return inputf("%s: %s tokenizer %s is not there; copy it there, or name one: --tokenizer", w.what, whose,
				terminal.Name(w.tokenizer))
		}
	}
	if w.tokenizer == data.Bytes { // a model's end-of-text token is no byte
		w.own = slices.DeleteFunc(w.own, func(id int) bool { return id < 256 })
	}
	w.ends = append(w.ends, w.own...)
	begins, err := w.cfg.SpecialIDs("bos_token_id")
	if err != nil {
		return inputf("%s: %w", w.what, err)
	}
	w.begin = -1
	if all := append(begins, w.ends...); len(all) > 0 && all[0] < w.cfg.VocabSize { // texts follow the end of another
		w.begin = all[0]
	}
	return nil
}

// sourceOfModel opens a Hugging Face directory.
func sourceOfModel(path string) (*source, error) {
	cfg, err := hf.ReadConfig(path)
	if err != nil {
		return nil, &InputError{err}
	}
	weights, err := hf.OpenWeights(path)
	if err != nil {
		return nil, &InputError{err}
	}
	w := &source{what: terminal.Name(path), cfg: cfg, positions: cfg.MaxPositionEmbedding,
		tokenizer: filepath.Join(path, "tokenizer.json"), from: weights}
	if err = weights.Check(cfg.Family(), cfg.Tensors()); err == nil {
		w.own, err = hf.Ends(path)
	}
	if err != nil {
		w.close()
		return nil, &InputError{err}
	}
	if caveat := cfg.Caveat(); caveat != "" {
		w.notes = append(w.notes, caveat)
	}
	w.read = func(_ context.Context, p model.Param, dst []float32) error {
		return weights.Read(hf.Tensor{Name: p.Name, Shape: p.Shape}, dst, 0)
	}
	return w, nil
}

// sourceOfRun opens a run's checkpoint.
func sourceOfRun(ctx context.Context, path string, step int64) (*source, error) {
	c, reasons, err := checkpointOf(ctx, path, step)
	if err != nil {
		return nil, err
	}
	w, err := sourceOf(c)
	if err != nil {
		c.Close()
		return nil, &InputError{err}
	}
	for _, r := range reasons {
		w.notes = append(w.notes, passed(r))
	}
	return w, nil
}

// sourceOf returns the source of an open checkpoint.
func sourceOf(c *checkpoint.Checkpoint) (*source, error) {
	cfg, err := checkpointConfig(c)
	if err != nil {
		return nil, err
	}
	if err := c.Fits(train.CheckpointParams(model.Layout(&cfg.Model.Config))); err != nil {
		return nil, err
	}
	w := &source{what: terminal.Name(c.Dir), cfg: exported(cfg), tokenizer: tokenizerOf(cfg), from: c}
	w.positions = w.cfg.MaxPositionEmbedding
	if id := cfg.Data.EOSTokenID; id >= 0 {
		w.ends = append(w.ends, id)
	}
	if w.own, err = w.cfg.SpecialIDs("eos_token_id"); err != nil {
		return nil, err
	}
	if ends, err := hf.Ends(cfg.Model.From); err == nil && cfg.Model.From != "" { // it may be gone
		w.own = append(w.own, ends...)
	}
	w.read = func(ctx context.Context, p model.Param, dst []float32) error {
		return c.Read(ctx, p.Name, checkpoint.FieldParam, 0, dst)
	}
	return w, nil
}

// tokenizerOf returns the tokenizer of a run's text; "" if it was trained on tokens that another program made.
func tokenizerOf(cfg *config.Config) string {
	if cfg.Data.Tokenizer == config.Bytes && cfg.Model.From == "" && !ofBytes(cfg) {
		return ""
	}
	return cfg.Data.Tokenizer
}
