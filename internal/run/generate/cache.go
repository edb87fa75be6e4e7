package generate

import (
	"errors"

	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// cache is attention that remembers: new queries see the keys of all that was read before, and their own.
type cache struct {
	cfg  *hf.Config
	dev  *device.Device
	k, v []View // of each layer, [1, room, KV heads, head dim], rotated
	read int    // rows that are filled in every layer
	room int
}

func newCache(cfg *hf.Config, dev *device.Device, room int) (*cache, error) {
	c := &cache{cfg: cfg, dev: dev, room: room}
	for range cfg.NumHiddenLayers {
		for _, list := range []*[]View{&c.k, &c.v} {
			v, err := dev.Vector("keys and values", tensor.F32, room*cfg.NumKeyValueHeads*cfg.HeadDim)
			if err != nil {
				return nil, err
			}
			*list = append(*list, tensor.Dense(v.Memory(), tensor.F32, 0, [4]int{1, room, cfg.NumKeyValueHeads, cfg.HeadDim}))
		}
	}
	return c, nil
}

// Forward keeps k and v behind those that there are, and sets out to the attention of q over all of
// them, as far as the layer's window lets it see.
func (c *cache) Forward(layer int, out attention.Partial, q, k, v View) error {
	rows := q.Len(tensor.Seq)
	seen := c.read + rows
	c.dev.Ops.Copy(c.k[layer].Slice(tensor.Seq, c.read, seen), k)
	c.dev.Ops.Copy(c.v[layer].Slice(tensor.Seq, c.read, seen), v)
	// More keys than queries: the mask is aligned at the end of both.
	mask, err := partition.NewMask(true, c.cfg.Window(layer), rows, seen, nil)
	if err != nil {
		return err
	}
	shape := partition.Shape{SeqQ: rows, SeqKV: seen, Size: 1, Layout: partition.Contiguous{}, Mask: mask}
	pass, err := c.dev.Kernel.Forward(out.O, out, q, attention.Softmax{Scale: c.cfg.SoftmaxScale()})
	if err != nil {
		return err
	}
	err = pass.Block(attention.Block{
		K: c.k[layer].Slice(tensor.Seq, 0, seen), V: c.v[layer].Slice(tensor.Seq, 0, seen),
		Tiles: partition.Plan(shape, 0, 0), First: true, Last: true,
	})
	if err != nil {
		return err
	}
	return pass.End()
}

// Backward returns an error: what writes does not learn.
func (c *cache) Backward(int, attention.Grads, View, View, View, View, attention.Partial) error {
	return errors.New("attention over a cache has no backward pass")
}

var _ model.Attention = (*cache)(nil)
