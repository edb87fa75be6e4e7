package train

import (
	"context"
	"errors"
	"fmt"

	"github.com/cprun/cprun/internal/checkpoint"
	"github.com/cprun/cprun/internal/hf"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/tensor"
)

// The fields of a checkpoint beside the weights, under PyTorch's names.
const (
	fieldM = "exp_avg"
	fieldV = "exp_avg_sq"
)

// initialise sets weights that no checkpoint gives: from a Hugging Face directory, or at
// random from the seed, in either case the same on every rank.
func (t *Trainer) initialise() error {
	from := t.cfg.Model.From
	if from == "" {
		model.InitAll(t.state.params, t.state.weights, t.cfg.Train.Seed)
		return nil
	}
	w, err := hf.OpenWeights(from)
	if err != nil {
		return err
	}
	defer w.Close()
	want := Tensors(t.state.params)
	if err := w.Check(want); err != nil {
		return err
	}
	for i, p := range t.state.params {
		if err := w.Read(want[i], tensor.Data[float32](p.View(t.state.weights)), 0); err != nil {
			return err
		}
	}
	return nil
}

// Tensors is a layout as Hugging Face directories name it.
func Tensors(params []model.Param) []hf.Tensor {
	out := make([]hf.Tensor, len(params))
	for i, p := range params {
		out[i] = hf.Tensor{Name: p.Name, Shape: p.Shape}
	}
	return out
}

// CheckpointParams is a layout as checkpoints name it.
func CheckpointParams(params []model.Param) []checkpoint.Param {
	out := make([]checkpoint.Param, len(params))
	for i, p := range params {
		out[i] = checkpoint.Param{Name: p.Name, Shape: p.Shape, Offset: p.Offset}
	}
	return out
}

// restore goes on from a checkpoint. The weights are read whole on every rank, the moments
// where they are kept.
func (t *Trainer) restore(ctx context.Context, dir string) error {
	c, err := checkpoint.Open(dir)
	if err != nil {
		return err
	}
	defer c.Close()
	params := CheckpointParams(t.state.params)
	all := checkpoint.Range{Hi: int64(t.state.weights.Size())}
	if err := c.Load(ctx, params, all, checkpoint.Field{Name: checkpoint.FieldParam, Data: tensor.Data[float32](t.state.weights)}); err != nil {
		return err
	}
	own := checkpoint.Range{Lo: int64(t.state.lo), Hi: int64(t.state.hi)}
	err = c.Load(ctx, params, own,
		checkpoint.Field{Name: fieldM, Data: tensor.Data[float32](t.state.m)},
		checkpoint.Field{Name: fieldV, Data: tensor.Data[float32](t.state.v)})
	if err != nil {
		return err
	}
	t.step, t.consumed, t.tokens = int(c.Manifest.Step), c.Manifest.Samples, c.Manifest.Tokens
	return nil
}

// find names the checkpoint to go on from: the newest whole one of the run itself, or the
// one that the user named. Rank 0 looks, since finding reads every shard.
func (t *Trainer) find(ctx context.Context, o Options) (string, error) {
	group := blobs{t.mesh.saves}
	var name []byte
	var failed error
	if group.Rank() == 0 {
		name, failed = o.newest(ctx)
		if failed != nil {
			name = append([]byte{'!'}, failed.Error()...)
		} else {
			name = append([]byte{'='}, name...)
		}
	}
	name, err := group.Broadcast(ctx, name)
	if err != nil {
		return "", err
	}
	if failed != nil {
		return "", failed
	}
	if name[0] == '!' {
		return "", fmt.Errorf("rank 0: %s", name[1:])
	}
	return string(name[1:]), nil
}

func (o *Options) newest(ctx context.Context) ([]byte, error) {
	if o.Resume {
		c, reasons, err := checkpoint.Latest(ctx, o.checkpoints())
		for _, r := range reasons {
			o.notice("checkpoint passed over: " + r)
		}
		if err == nil {
			defer c.Close()
			return []byte(c.Dir), nil
		}
		if !errors.Is(err, checkpoint.ErrNone) {
			return nil, err
		}
	}
	return []byte(o.From), nil
}

// snapshot is this rank's part of the state: an equal share of the flat space, whatever is
// sharded.
func (t *Trainer) snapshot(o *Options) checkpoint.Snapshot {
	size := t.mesh.world.Size()
	n := t.state.weights.Size()
	lo, hi := ownRange(n, t.mesh.world.Rank(), size)
	m := part(t.state.m, lo-t.state.lo, hi-t.state.lo)
	v := part(t.state.v, lo-t.state.lo, hi-t.state.lo)
	p := t.cfg.Parallel
	return checkpoint.Snapshot{
		Meta: checkpoint.Meta{
			Step: int64(t.step), Samples: t.consumed, Tokens: t.tokens,
			World:  checkpoint.World{Size: size, Context: p.Context, Data: p.Data, Algorithm: p.Algorithm, Layout: p.Layout},
			Config: o.ConfigYAML, CPRunVersion: o.Version,
			Seeds: map[string]int64{"train": t.cfg.Train.Seed, "data": t.cfg.Data.Seed},
		},
		Params: CheckpointParams(t.state.params),
		Range:  checkpoint.Range{Lo: int64(lo), Hi: int64(hi)},
		Fields: []checkpoint.Field{
			{Name: checkpoint.FieldParam, Data: tensor.Data[float32](part(t.state.weights, lo, hi))},
			{Name: fieldM, Data: tensor.Data[float32](m)},
			{Name: fieldV, Data: tensor.Data[float32](v)},
		},
	}
}
