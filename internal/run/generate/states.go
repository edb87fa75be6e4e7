package generate

import (
	"errors"

	"github.com/cprun/cprun/attention/delta"
	"github.com/cprun/cprun/internal/model"
	"github.com/cprun/cprun/internal/model/device"
	"github.com/cprun/cprun/internal/model/hf"
	"github.com/cprun/cprun/partition"
	"github.com/cprun/cprun/tensor"
)

// states implements model.Recurrence with the state of the tokens read so far.
type states struct {
	dev    *device.Device
	arena  *tensor.Arena
	rows   int    // of the pass
	state  []View // by layer, [1, heads, dim, dimV]; the zero View of attention
	before []View // by layer, [1, width-1, 1, n]: the last rows that the convolution read
}

func newStates(cfg *hf.Config, dev *device.Device) (*states, error) {
	s := &states{dev: dev}
	for _, l := range cfg.Layers() {
		d := l.Mixer.Delta
		for list, shape := range map[*[]View][4]int{
			&s.state:  {1, d.Heads, d.Dim, d.DimV},
			&s.before: {1, max(d.Conv-1, 0), 1, d.Channels()},
		} {
			v, err := dev.Vector("states", tensor.F32, shape[0]*shape[1]*shape[2]*shape[3])
			if err != nil {
				return nil, err
			}
			dev.Ops.Zero(v)
			*list = append(*list, tensor.Dense(v.Memory(), tensor.F32, 0, shape))
		}
	}
	return s, nil
}

// Segments returns the rows of the pass, which continue the tokens before.
func (s *states) Segments() []partition.Range { return []partition.Range{{Lo: 0, Hi: s.rows}} }

// States returns 1: the rows begin with the state after the tokens before.
func (*states) States() int { return 1 }

// Halo sets before to the last rows of the passes before, and keeps those of this one.
func (s *states) Halo(layer int, before, x View) error {
	kept, ops := s.before[layer], s.dev.Ops
	ops.Copy(before, kept)
	n, rows := x.Len(tensor.Seq), kept.Len(tensor.Seq)
	stay := max(rows-n, 0)
	ops.Copy(kept.Slice(tensor.Seq, 0, stay), before.Slice(tensor.Seq, rows-stay, rows))
	ops.Copy(kept.Slice(tensor.Seq, stay, rows), x.Slice(tensor.Seq, n-(rows-stay), n))
	return nil
}

// Recur sets a.O, and the state to that after the rows.
func (s *states) Recur(layer int, a delta.Args, beside func()) error {
	defer s.arena.Release(s.arena.Mark())
	state := s.state[layer]
	shape := state.Shape()
	s.dev.Ops.Copy(a.State, state)
	a.Entered = []int{0}
	a.Maps = s.arena.Alloc(tensor.F32, shape[0], shape[1], shape[2], shape[2]+shape[3])
	beside()
	return errors.Join(s.dev.Delta.Forward(a), s.dev.Delta.Summarize(a), s.dev.Delta.Compose(state, a.Maps, state))
}

var errBackward = errors.New("a model that reads has no backward pass")

// HaloBackward returns an error, since generation does not train.
func (*states) HaloBackward(int, View, View) error { return errBackward }

// RecurBackward returns an error, since generation does not train.
func (*states) RecurBackward(int, delta.Args, func()) error { return errBackward }

var _ model.Recurrence = (*states)(nil)
