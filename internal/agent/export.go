package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

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
	cfg, err := checkpointConfig(c)
	if err != nil {
		return 0, err
	}
	params := model.Layout(&cfg.Model.Config)
	err = hf.Export(o.To, hf.Model{
		Config: &cfg.Model.Config, DType: dtype, Tensors: train.Tensors(params),
		Read: func(t hf.Tensor, dst []float32) error { return c.Read(ctx, t.Name, checkpoint.FieldParam, 0, dst) },
	}, hf.ShardLimit)
	if err != nil {
		return 0, err
	}
	fmt.Fprintf(o.Stdout, "wrote %s: %s of step %d, %d tensors in %s\n", o.To, cfg.Model.Architecture, c.Manifest.Step, len(params), o.DType)
	if caveat := cfg.Model.Caveat(); caveat != "" {
		fmt.Fprintf(o.Stdout, "note: %s\n", caveat)
	}
	return 0, nil
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
