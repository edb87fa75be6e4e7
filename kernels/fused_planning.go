//go:build cuda

package kernels

import (
	"github.com/cprun/cprun/attention"
	"github.com/cprun/cprun/partition"
)

// Planning has cuDNN build plans; see attention.Planner.
func (f *Fused) Planning() attention.Kernel { return fusedPlanning{f: f} }

// fusedPlanning builds the plans of what it is asked for.
type fusedPlanning struct {
	attention.Idle
	f *Fused
}

// Forward builds the plans of a call of Fused.Forward.
func (p fusedPlanning) Forward(_ attention.Partial, q, k, v View, tiles []partition.Tile, s attention.Softmax) error {
	return p.f.planAll(&fusedCall{q: q, k: k, v: v, scale: s.Scale}, tiles)
}

// Backward builds the plans of a call of Fused.Backward.
func (p fusedPlanning) Backward(acc attention.Grads, do, q, k, v View, s attention.Saved, tiles []partition.Tile, x attention.Softmax) error {
	return p.f.planAll(&fusedCall{q: q, k: k, v: v, do: do, saved: s, dk: acc.DK, dv: acc.DV, scale: x.Scale, backward: true}, tiles)
}

func (f *Fused) planAll(c *fusedCall, tiles []partition.Tile) error {
	for _, g := range f.grouped(c, tiles) {
		if err := f.plans(c, g); err != nil {
			return err
		}
	}
	return nil
}

var _ attention.Planner = (*Fused)(nil)
