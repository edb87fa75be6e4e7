package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"strconv"
	"strings"

	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/internal/config"
	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/safetensors"
	"github.com/cprun/cprun/internal/train"
)

// ExportOptions are the flags of `cprun export`.
type ExportOptions struct {
	To     string
	DType  string // fp32, bf16, fp16
	Stdout io.Writer
}

var exportTypes = map[string]safetensors.DType{"fp32": safetensors.F32, "bf16": safetensors.BF16, "fp16": safetensors.F16}

// Export writes a Hugging Face directory from a checkpoint.
func Export(ctx context.Context, run string, o ExportOptions) (int, error) {
	if o.To == "" {
		return 0, inputf("--to is missing: cprun export RUN --to DIR")
	}
	if left, err := os.ReadDir(o.To); len(left) > 0 {
		return 0, inputf("--to: %s has files in it; name another directory, or empty it", o.To)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, inputf("--to: %w", err)
	}
	dtype, ok := exportTypes[o.DType]
	if !ok {
		return 0, inputf("--dtype %q: want fp32, bf16 or fp16", o.DType)
	}
	c, reasons, err := checkpoint.Find(ctx, run)
	if err != nil {
		return 0, inputf("%s: %w%s", run, err, because(reasons))
	}
	defer c.Close()
	for _, r := range reasons {
		fmt.Fprintln(o.Stdout, passed(r))
	}
	cfg, err := checkpointConfig(c)
	if err != nil {
		return 0, err
	}
	params := model.Layout(&cfg.Model.Config)
	brought, without := companions(cfg)
	err = hf.Export(o.To, hf.Model{
		Config: exported(cfg), From: cfg.Model.From, Companions: brought, DType: dtype, Tensors: train.Tensors(params),
		Read: func(t hf.Tensor, dst []float32) error { return c.Read(ctx, t.Name, checkpoint.FieldParam, 0, dst) },
	}, hf.ShardLimit)
	if err != nil {
		return 0, err
	}
	fmt.Fprintf(o.Stdout, "wrote %s: %s of step %d, %d tensors in %s\n", o.To, cfg.Model.Architecture, c.Manifest.Step, len(params), o.DType)
	if len(brought) > 0 {
		fmt.Fprintf(o.Stdout, "from %s: %s\n", cfg.Model.From, strings.Join(brought, ", "))
	}
	if without != nil {
		fmt.Fprintf(o.Stdout, "note: the export is without the tokenizer and generation_config.json, or some of their files: %v; copy them there from the model that training began with\n", without)
	}
	if caveat := cfg.Model.Caveat(); caveat != "" {
		fmt.Fprintf(o.Stdout, "note: %s\n", caveat)
	}
	return 0, nil
}

// companions are the files of the model that training began with which the export has too, and
// why some are missing.
func companions(cfg *config.Config) ([]string, error) {
	if cfg.Model.From == "" {
		return nil, nil
	}
	return hf.Companions(cfg.Model.From)
}

// exported is the shape of the trained model, with what its config.json should say and the run's
// config says elsewhere, if at all.
func exported(cfg *config.Config) *hf.Config {
	const eos = "eos_token_id"
	c := cfg.Model.Config
	if c.MaxPositionEmbedding == 0 {
		c.MaxPositionEmbedding = c.Positions(cfg.Data.SeqLen)
	}
	if raw := c.TokenIDs[eos]; cfg.Data.EOSTokenID >= 0 && (raw == nil || string(raw) == "null") {
		ids := map[string]json.RawMessage{}
		maps.Copy(ids, c.TokenIDs)
		ids[eos] = strconv.AppendInt(nil, int64(cfg.Data.EOSTokenID), 10)
		c.TokenIDs = ids
	}
	return &c
}

// checkpointConfig is the config that a checkpoint was trained with. Its data need not be
// there any more.
func checkpointConfig(c *checkpoint.Checkpoint) (*config.Config, error) {
	f, err := os.CreateTemp("", "cprun-export-*.yaml")
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(c.Manifest.Config)
	if closed := f.Close(); err == nil {
		err = closed
	}
	if err != nil {
		return nil, err
	}
	cfg, err := config.Load(f.Name(), config.Options{NoFiles: true})
	if err != nil {
		return nil, fmt.Errorf("config in %s: %w", c.Dir, err)
	}
	return cfg, nil
}
